"""What quantizers and sketches store, computed again from the specification, one group and one channel at a time.

Nothing here calls the library: a change in all of its engines at once shows as a difference. Every step is a float32
operation of its own, as the specification has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

F4 = np.float32
HALF_MAX = F4(65504)
FLOAT_MAX = np.finfo(F4).max


class Stored(NamedTuple):
    """Codes uint8 (..., n, d), the float16 scales and zeros of their groups, and how many of these were saturated."""

    codes: Any
    scale: Any
    zero: Any
    saturated: int

    def recovered(self, group: int, axis: str) -> Any:
        """``code * scale + zero``, each operation in float32: (..., n, d)."""
        along = -2 if axis == "tokens" else -1
        members = np.arange(self.codes.shape[along]) // group
        with np.errstate(all="ignore"):
            scale, zero = (x.astype(F4).take(members, axis=along) for x in (self.scale, self.zero))
            return self.codes.astype(F4) * scale + zero


class Rules(NamedTuple):
    """The two rules that twins break: the quotient of two float32 arrays, and where a sign is +1."""

    divide: Callable[[Any, Any], Any] = np.divide
    is_positive: Callable[[Any], Any] = lambda x: x >= 0


def quantize(x: Any, *, bits: int, group: int, axis: str, rules: Rules) -> Stored:
    """KIVI's rule on x (..., n, d)."""
    numbers = np.asarray(x).astype(F4)
    if axis == "tokens":
        numbers = numbers.swapaxes(-1, -2)
    # From here on groups run along the last axis.
    parts = [_quantize_groups(numbers[..., i : i + group], bits, rules) for i in range(0, numbers.shape[-1], group)]
    codes = np.concatenate([part.codes for part in parts], axis=-1)
    scale, zero = (np.stack([getattr(part, name) for part in parts], axis=-1) for name in ("scale", "zero"))
    if axis == "tokens":
        codes, scale, zero = (a.swapaxes(-1, -2) for a in (codes, scale, zero))
    return Stored(codes, scale, zero, sum(part.saturated for part in parts))


def _quantize_groups(x: Any, bits: int, rules: Rules) -> Stored:
    """One group in each row of x (..., g)."""
    top = F4(2**bits - 1)
    shape = x.shape[:-1]
    codes = np.zeros(x.shape, dtype=np.uint8)
    scale, zero = np.zeros(shape, dtype=np.float16), np.zeros(shape, dtype=np.float16)
    saturated = 0
    with np.errstate(all="ignore"):
        for index in np.ndindex(*shape):
            numbers = x[index]
            if np.isnan(numbers).any():
                zero[index] = np.nan
                continue
            lo, hi = (min(max(F4(edge), -FLOAT_MAX), FLOAT_MAX) for edge in (min(numbers), max(numbers)))
            step = F4(F4(hi - lo) / top)
            saturated += int(step > HALF_MAX) + int(abs(lo) > HALF_MAX)
            # -0.0 is stored as 0.0.
            scale[index] = np.float16(min(step, HALF_MAX)) + np.float16(0)
            zero[index] = np.float16(min(max(lo, -HALF_MAX), HALF_MAX)) + np.float16(0)
            if scale[index] > 0:
                distance = np.minimum(np.maximum(numbers, -HALF_MAX), HALF_MAX) - F4(zero[index])
                steps = rules.divide(distance, F4(scale[index]))
                codes[index] = np.minimum(np.maximum(np.round(steps), F4(0)), top)
    return Stored(codes, scale, zero, saturated)


def sketch(k: Any, matrix: Any, rules: Rules) -> tuple[Any, Any, int]:
    """QJL's signs, booleans (..., m), and float16 norms (...) of keys k (..., d), and how many norms were saturated.

    Sums run over the channels in order, each product rounded before it is added.
    """
    numbers = np.asarray(k).astype(F4)
    with np.errstate(all="ignore"):
        sums = np.add.accumulate(numbers[..., None, :] * matrix, axis=-1, dtype=F4)[..., -1]
        norms = np.sqrt(np.add.accumulate(numbers * numbers, axis=-1, dtype=F4)[..., -1])
        stored = np.where(norms > HALF_MAX, HALF_MAX, norms).astype(np.float16)
    return rules.is_positive(sums), stored, int((norms > HALF_MAX).sum())


def outlier_channels(k: Any, outliers: int, page: int) -> Any:
    """The `outliers` channels of largest norm of each page of k (b, h, n, d), increasing: (b, h, pages, outliers)."""
    b, h, n, d = k.shape
    numbers = np.asarray(k).astype(F4)
    chosen = np.empty((b, h, -(-n // page), outliers), dtype=np.int64)
    for row, head, index in np.ndindex(*chosen.shape[:3]):
        part = numbers[row, head, index * page : (index + 1) * page]
        with np.errstate(all="ignore"):
            squares = np.add.accumulate(part * part, axis=0, dtype=F4)[-1]
        # NaN counts as infinite, ties go to the lowest channel.
        squares = np.where(np.isnan(squares), np.inf, squares)
        chosen[row, head, index] = sorted(sorted(range(d), key=lambda c: (-squares[c], c))[:outliers])
    return chosen


def unpack(packed: Any, count: int, bits: int) -> Any:
    """Codes (..., count) of little-endian bit streams, read bit by bit."""
    stream = np.unpackbits(packed, axis=-1, bitorder="little")[..., : count * bits]
    digits = stream.reshape(*packed.shape[:-1], count, bits).astype(np.int64)
    return (digits << np.arange(bits)).sum(axis=-1)
