"""Walsh-Hadamard transform: a block of threads to each block of numbers, with a barrier after each round."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numba import cuda

from kvsketch._dispatch import namespace
from kvsketch.numba_cuda._launch import launch_blocks
from kvsketch.numba_cuda.arithmetic import READ, WRITE
from kvsketch.rotation import hadamard_block


def hadamard_transform(x: Any) -> Any:
    xp = namespace(x)
    block = hadamard_block(x.shape[-1])
    rows = x.reshape(x.size // block, block)
    work = xp.empty(rows.shape, dtype=xp.float32)
    y = xp.empty(rows.shape, dtype=x.dtype)
    launch_blocks(_transform(str(x.dtype)), len(rows), rows, work, y, np.float32(1 / math.sqrt(block)))
    return y.reshape(x.shape)


@cache
def _transform(dtype: str) -> Any:
    """The kernel for numbers of `dtype`."""
    read, write = READ[dtype], WRITE[dtype]

    @cuda.jit
    def transform(x, work, y, scale):
        """Transform each row of `x` (rows, power of two) to `y`; the rounds are done in `work`, of float32."""
        row, thread, threads = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
        size = x.shape[1]
        for i in range(thread, size, threads):
            work[row, i] = read(x[row, i])
        cuda.syncthreads()
        half = 1
        while half < size:
            for pair in range(thread, size // 2, threads):
                i = pair // half * (2 * half) + pair % half
                first, second = work[row, i], work[row, i + half]
                work[row, i] = first + second
                work[row, i + half] = first - second
            cuda.syncthreads()
            half *= 2
        for i in range(thread, size, threads):
            y[row, i] = write(work[row, i] * scale)

    return transform
