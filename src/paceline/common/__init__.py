"""Modules that every other package can import: errors, limits, names, options, text formats, progress."""
