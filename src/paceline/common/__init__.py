"""What every room may import: errors, limits, names, config files, progress."""
