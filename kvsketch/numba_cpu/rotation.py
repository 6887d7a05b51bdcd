"""Walsh-Hadamard transform in Numba."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvsketch.numba_cpu._compile import kernel
from kvsketch.rotation import hadamard_block


def hadamard_transform(x: Any) -> Any:
    block = hadamard_block(x.shape[-1])
    y = np.array(x, dtype=np.float32, order="C")
    _transform_blocks(y.reshape(-1, block), np.float32(1 / math.sqrt(block)))
    return y.astype(x.dtype, copy=False)


@kernel()
def _transform_blocks(y: np.ndarray, scale: np.float32) -> None:
    """Transform each row of `y` (rows, power of two) in place: butterflies in the order of the reference."""
    block = y.shape[1]
    for row in range(y.shape[0]):
        half = 1
        while half < block:
            for start in range(0, block, 2 * half):
                for i in range(start, start + half):
                    first, second = y[row, i], y[row, i + half]
                    y[row, i], y[row, i + half] = first + second, first - second
            half *= 2
        for i in range(block):
            y[row, i] *= scale
