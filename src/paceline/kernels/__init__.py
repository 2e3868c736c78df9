"""Kernels for CPUs, compiled by numba on the user's machine (`warm_up`). Imports numba and numpy only: memory is told
by address."""
