"""Stands for a module of vLLM."""


class VLLMValidationError(ValueError):
    """Not raised here."""
