"""Finds the fastest drafter, gamma and tree for a target."""
