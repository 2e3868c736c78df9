"""From a name, a folder or a file to weights."""
