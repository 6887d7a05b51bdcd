"""Online softmax of a tile of scores, in units of log2."""

from __future__ import annotations

import math

import numpy as np

from kvsketch.numba_cpu._compile import inner
from kvsketch.numba_cpu.emit import LANES
from kvsketch.numba_cpu.simd import (
    exp2,
    load_float,
    load_floats,
    max_all,
    maximum,
    multiply_add,
    splat,
    store_float,
    store_floats,
    sum_all,
)

LOG2E = math.log2(math.e)
#: The lowest bias that stays finite in units of log2.
LOWEST_BIAS = np.float32(np.finfo(np.float32).min / 2)


@inner
def cap_scores(scores, count, softcap):  # type: ignore[no-untyped-def]
    """``softcap * tanh(score)`` of `count` scores, in units of log2."""
    for t in range(count):
        store_float(scores + 4 * t, np.float32(softcap * LOG2E) * np.tanh(load_float(scores + 4 * t)))


@inner
def hide_scores(scores, first, last):  # type: ignore[no-untyped-def]
    """Let the scores from `first` to `last` count for nothing."""
    for t in range(first, last):
        store_float(scores + 4 * t, -np.float32(np.inf))


@inner
def fill_floats(start, count, number):  # type: ignore[no-untyped-def]
    """Write `count` times the same number, rounded up to whole vectors."""
    numbers = splat(number)
    for i in range(0, count, LANES):
        store_floats(start + 4 * i, numbers)


@inner
def add_bias(scores, bias, count):  # type: ignore[no-untyped-def]
    """Add a mask's numbers. Only -inf hides: the lowest float32 must not become -inf on its way to log2."""
    for t in range(count):
        added = load_float(bias + 4 * t)
        if added > -np.inf:
            added = max(added, LOWEST_BIAS) * np.float32(LOG2E)
        store_float(scores + 4 * t, load_float(scores + 4 * t) + added)


@inner
def largest_score(scores, count, highest):  # type: ignore[no-untyped-def]
    """The largest of `highest` and `count` scores, a whole number of vectors; 0 where only NaN is not -inf."""
    top = splat(highest)
    for t in range(0, count, LANES):
        top = maximum(load_floats(scores + 4 * t), top)
    highest = max_all(top)
    if highest == -np.inf:
        total = splat(np.float32(0))
        for t in range(0, count, LANES):
            total = total + load_floats(scores + 4 * t)
        if sum_all(total) != -np.inf:
            return np.float32(0)
    return highest


@inner
def weigh_scores(scores, count, highest):  # type: ignore[no-untyped-def]
    """Turn `count` scores into ``2^(score - highest)``; their sum."""
    one, shift, total = splat(np.float32(1)), splat(-highest), splat(np.float32(0))
    for t in range(0, count, LANES):
        weights = exp2(multiply_add(load_floats(scores + 4 * t), one, shift))
        store_floats(scores + 4 * t, weights)
        total = total + weights
    return sum_all(total)


@inner
def scale_floats(start, count, factor):  # type: ignore[no-untyped-def]
    """Multiply `count` numbers, rounded up to whole vectors."""
    factors = splat(factor)
    for i in range(0, count, LANES):
        store_floats(start + 4 * i, load_floats(start + 4 * i) * factors)
