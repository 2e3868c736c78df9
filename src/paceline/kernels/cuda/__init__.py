"""Kernels for CUDA devices, compiled by Triton when they are first used. Imports triton and torch only.

A token gets the same bits in every batch: the order of every sum depends on the shape of the weights and on the
position of the token only. So a forward pass over many drafted tokens gives the same bits as one pass per token.
"""
