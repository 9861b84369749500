"""How a visit is trained: a loop that defines it, lanes that are fast, and what both share."""
