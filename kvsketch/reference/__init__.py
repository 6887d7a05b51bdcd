"""The specification: every operation in plain array calls that NumPy and CuPy both run."""
