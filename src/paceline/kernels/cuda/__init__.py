"""Kernels for CUDA devices, compiled by Triton when they are first used. Imports triton and torch only.

A token gets the same numbers in every batch: every sum is taken in an order that depends on the shape of
the weights and on the token's own place in its text, and on nothing else. So a pass over many drafted tokens says, bit
for bit, what passes over one token at a time say.
"""
