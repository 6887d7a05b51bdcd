"""The CUDA engine: hand-written kernels in ``.cu`` files beside the functions that launch them, for CuPy arrays.

Kernels are compiled by NVRTC when they are first used. :mod:`kvsketch.cuda_raw._compile` says how.
"""
