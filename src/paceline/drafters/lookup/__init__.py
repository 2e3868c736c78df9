"""Drafters that copy or count tokens. They run no model."""
