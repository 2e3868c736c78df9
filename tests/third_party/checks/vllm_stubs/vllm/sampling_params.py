"""Stands for a module of vLLM."""


class SamplingParams:
    """Not used by the tests that apply."""
