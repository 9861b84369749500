"""Parts that any system can use: arrays in, arrays out."""
