"""Kernels of the Llama-like forward pass, compiled by numba for CPUs and by Triton for CUDA."""
