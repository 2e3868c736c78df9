"""Drafters that run a language model: a smaller one, or a part of the target."""
