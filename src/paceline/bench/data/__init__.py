"""Prompts, tasks, samplers, and quality against known answers."""
