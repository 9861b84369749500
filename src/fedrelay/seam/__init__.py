"""What algorithms, methods, federations and engines say to each other: frozen values; nothing here trains."""
