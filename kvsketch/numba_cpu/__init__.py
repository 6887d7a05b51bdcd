"""The CPU engine: the same operations in Numba."""
