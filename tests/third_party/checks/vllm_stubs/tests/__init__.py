"""Stands for vLLM's package of tests."""
