"""Kernels of the Llama-like forward pass: by numba for CPUs, by Triton for CUDA. Memory is passed by address."""
