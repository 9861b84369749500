"""The driver of a run, and what a run writes down."""
