"""Stands for vLLM: the names that its tests of a server import. Tests that use the classes themselves do not apply."""
