"""A federation on one machine, with a virtual clock."""
