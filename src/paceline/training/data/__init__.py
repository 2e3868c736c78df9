"""Training texts: written by the target, or read from files; stored as shards of token ids."""
