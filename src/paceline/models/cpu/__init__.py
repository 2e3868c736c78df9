"""Forward passes by the CPU kernels."""
