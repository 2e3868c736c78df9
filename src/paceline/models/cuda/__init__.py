"""Forward passes by the Triton kernels."""
