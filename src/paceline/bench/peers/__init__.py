"""Other libraries on the same weights."""
