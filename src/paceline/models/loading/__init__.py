"""Load weights from a name, a folder or a file."""
