"""Stands for a module of vLLM."""


class ChatCompletionRequest:
    """Not used by the tests that apply."""
