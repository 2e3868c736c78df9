"""CPU kernels, compiled by numba on the user's machine. They import numba and numpy only."""
