"""What happened, on disk, and what else would have happened."""
