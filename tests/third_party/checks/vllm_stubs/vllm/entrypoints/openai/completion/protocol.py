"""Stands for a module of vLLM."""


class CompletionRequest:
    """Not used by the tests that apply."""
