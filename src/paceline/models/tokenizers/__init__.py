"""Vocabularies, the bytes of each token, and translation between two tokenizers."""
