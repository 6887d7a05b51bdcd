"""Groups of numbers as codes, a scale and a zero: a thread to each group, by the rule of :mod:`kvsketch.kivi`."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cuda

from kvsketch._dispatch import namespace
from kvsketch.numba_cuda._launch import launch
from kvsketch.numba_cuda.arithmetic import (
    INFINITY,
    LARGEST_FLOAT,
    LARGEST_HALF,
    READ,
    nearest,
    read_half,
    write_half,
)


def quantize_lines(x: Any, bits: int, group: int, codes: Any, scale: Any, zero: Any) -> int:
    """Quantize groups of `group` along the last axis of `x`, and count saturated scales and zeros.

    `x` and `codes` are (rows, lines, members), `scale` and `zero` (rows, lines, groups) of float16; all may be strided,
    neighbouring threads take neighbouring lines.
    """
    xp = namespace(x)
    saturated = xp.zeros(1, dtype=xp.int64)
    launch(_quantize(str(x.dtype)), scale.size, x, bits, group, codes, scale, zero, saturated)
    return int(saturated[0])


@cache
def _quantize(dtype: str) -> Any:
    """The kernel for numbers of `dtype`."""
    read = READ[dtype]

    @cuda.jit
    def quantize(x, bits, group, codes, scale, zero, saturated):
        rows, lines, groups = scale.shape
        index, line = divmod(cuda.grid(1), lines)
        row, part = divmod(index, groups)
        if row >= rows:
            return
        first, last = part * group, min(x.shape[2], (part + 1) * group)
        low, high, missing = INFINITY, -INFINITY, False
        for i in range(first, last):
            number = read(x[row, line, i])
            missing = missing or number != number
            low, high = min(low, number), max(high, number)
        low, high = clamped(low, LARGEST_FLOAT), clamped(high, LARGEST_FLOAT)
        levels = np.float32((1 << bits) - 1)
        step = np.float32(0) if missing else (high - low) / levels
        beyond = int(step > LARGEST_HALF) + int(not missing and abs(low) > LARGEST_HALF)
        if beyond:
            cuda.atomic.add(saturated, 0, beyond)
        step_bits = write_half(min(step, LARGEST_HALF))
        low_bits = write_half(np.float32(np.nan) if missing else clamped(low, LARGEST_HALF))
        scale[row, line, part], zero[row, line, part] = step_bits, without_sign(low_bits)
        step, low = read_half(step_bits), read_half(low_bits)
        for i in range(first, last):
            code = np.float32(0)
            if step > 0:
                distance = clamped(read(x[row, line, i]), LARGEST_HALF) - low
                code = min(max(nearest(distance / step), np.float32(0)), levels)
            codes[row, line, i] = np.uint8(code)

    return quantize


@cuda.jit(device=True)
def clamped(x, limit):
    """`x` between -limit and limit."""
    return min(max(x, -limit), limit)


@cuda.jit(device=True)
def without_sign(bits):
    """Bits of a float16, those of +0 for -0: equal groups have equal bytes."""
    return np.uint16(0) if bits == 0x8000 else np.uint16(bits)
