"""Recorded rounds on disk, and what other settings would have given."""
