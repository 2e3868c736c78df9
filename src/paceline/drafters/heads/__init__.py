"""Trained heads that draft from the target's hidden states, and their files."""
