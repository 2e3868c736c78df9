"""Stands for a package of vLLM."""
