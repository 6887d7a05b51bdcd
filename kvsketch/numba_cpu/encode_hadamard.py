"""Hadamard projections of keys as fast transforms: the rounds that they were drawn as, found again."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from kvsketch.numba_cpu._compile import inner
from kvsketch.numba_cpu._tiers import TIER, VECTOR_BYTES
from kvsketch.numba_cpu.encode_signs import make_butterfly
from kvsketch.rotation import Projection

#: Levels of a transform that are done in registers at a time.
_MOST_LEVELS = 4 if TIER == "avx512-vnni" else 3 if TIER == "avx2" else 2
_ROUNDS = 3
#: Transforms further from the projection's rows than this are not used: a row would too often be summed again.
_FAR = 1e-5


class Tables(NamedTuple):
    """A Hadamard projection as transforms.

    `numbers` int64: for each block of d rows and each transform, d byte offsets of where numbers come from and, as
    pairs of float32, d factors; then d byte offsets of where the block's results go. `bound` is how far a result is
    from <k, s>/sqrt(d), over the key's norm.
    """

    numbers: Any
    levels: int
    both: bool
    bound: float


def transform_shape(d: int) -> tuple[int, bool]:
    """Levels of the transforms of d channels, and whether there are two in each round."""
    return d.bit_length() - 1, d & (d - 1) != 0


def _draw_rounds(rng: np.random.Generator, d: int) -> tuple[list[tuple[Any, Any, int]], Any]:
    """The draws of a block of a projection: (order, signs, first row) of each transform, and the last order."""
    levels, both = transform_shape(d)
    size = 1 << levels
    transforms = []
    for _ in range(_ROUNDS):
        order = rng.permutation(d)
        for start in (0, d - size) if both else (0,):
            transforms.append((order, rng.choice((-1.0, 1.0), size=(d, 1))[:, 0], start))
            order = np.arange(d)
    return transforms, rng.permutation(d)


def _rows_of(transforms: list[tuple[Any, Any, int]], last: Any, d: int) -> Any:
    """The rows (d, d) that the transforms make, times sqrt(d), in float64."""
    rows, size = np.eye(d), 1 << transform_shape(d)[0]
    for order, signs, start in transforms:
        rows = rows[order] * signs[:, None]
        part = rows[start : start + size]
        half = 1
        while half < size:
            pairs = part.reshape(size // (2 * half), 2, half, d)
            part = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1).reshape(size, d)
            half *= 2
        rows[start : start + size] = part / math.sqrt(size)
    return rows[last] * math.sqrt(d)


def hadamard_tables(projection: Projection) -> Tables | None:
    """The tables of a projection; None if it is no Hadamard one, or not the one that its seed gives."""
    d, m = projection.d, projection.m
    if projection.kind != "hadamard" or d == 1:
        return None
    levels, both = transform_shape(d)
    size = 1 << levels
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(projection.seed, spawn_key=(projection.stream,))))
    numbers, distance = [], 0.0
    for first in range(0, m, d):
        transforms, last = _draw_rounds(rng, d)
        count = min(d, m - first)
        rows = _rows_of(transforms, last, d)[:count] - projection.matrix[first : first + count]
        distance = max(distance, float(np.linalg.norm(rows, axis=1).max()) / math.sqrt(d))
        for order, signs, start in transforms:
            factors = signs.astype(np.float32)
            factors[start : start + size] *= np.float32(1 / math.sqrt(size))
            pairs = np.zeros(d + d % 2, np.float32)
            pairs[:d] = factors
            numbers += [order * VECTOR_BYTES, pairs.view(np.int64)]
        targets = np.empty(d, np.int64)
        targets[last] = np.arange(d)
        numbers.append(targets * VECTOR_BYTES)
    roundings = (levels + 2) * _ROUNDS * (2 if both else 1)
    bound = distance + roundings * 2.0**-24 / (1 - roundings * 2.0**-24)
    if distance > _FAR:
        return None
    return Tables(np.concatenate(numbers).astype(np.int64), levels, both, bound)


def make_transform(levels: int, both: bool) -> Any:
    """``run(source, d, tables, rows, work, target)``: projections of the vectors at `source`, (d) of them.

    `target` gets whole blocks of d vectors; `work` is room for d more.
    """
    if levels == 0:

        @inner
        def nothing(source, d, tables, rows, work, target):  # type: ignore[no-untyped-def]
            pass

        return nothing
    size, count = 1 << levels, _ROUNDS * (2 if both else 1)
    passes = -(-levels // _MOST_LEVELS)
    opening = levels - (passes - 1) * _MOST_LEVELS
    copy, scatter = make_butterfly(0, True, False), make_butterfly(0, False, True)
    open_part = make_butterfly(opening, True, False)
    middle, close_out = make_butterfly(_MOST_LEVELS, False, False), make_butterfly(_MOST_LEVELS, False, True)

    @inner
    def one(source, d, start, orders, factors, target):  # type: ignore[no-untyped-def]
        """A transform but the last."""
        for i in range(start):
            copy(source, orders, factors, target, 0, i, 1)
        for i in range(start + size, d):
            copy(source, orders, factors, target, 0, i, 1)
        step = size >> opening
        for i in range(step):
            open_part(source, orders, factors, target, 0, start + i, step)
        while step > 1:
            inner = step >> _MOST_LEVELS
            for i in range(0, size, step):
                for j in range(inner):
                    middle(target, 0, 0, target, 0, start + i + j, inner)
            step = inner

    @inner
    def last(source, d, start, orders, factors, work, target, targets):  # type: ignore[no-untyped-def]
        """The last transform of a block: its results go where they belong, which may be where `source` is."""
        for i in range(start):
            copy(source, orders, factors, work, 0, i, 1)
        step = size >> opening
        for i in range(step):
            open_part(source, orders, factors, work, 0, start + i, step)
        while step > 1 << _MOST_LEVELS:
            inner = step >> _MOST_LEVELS
            for i in range(0, size, step):
                for j in range(inner):
                    middle(work, 0, 0, work, 0, start + i + j, inner)
            step = inner
        if step > 1:
            for i in range(0, size, step):
                close_out(work, 0, 0, target, targets, start + i, 1)
            scattered = start
        else:
            scattered = d
        for i in range(scattered):
            scatter(work, 0, 0, target, targets, i, 1)

    @inner
    def run(source, d, tables, rows, work, target):  # type: ignore[no-untyped-def]
        spread = 8 * d + 8 * ((d + 1) // 2)
        at = tables
        for _block in range((rows + d - 1) // d):
            # To and fro between the work space and where the results will be.
            numbers, following = source, work if count % 2 == 1 else target
            for index in range(count - 1):
                start = d - size if both and index % 2 == 1 else 0
                one(numbers, d, start, at, at + 8 * d, following)
                numbers, following = following, target if following == work else work
                at += spread
            last(numbers, d, d - size, at, at + 8 * d, following, target, at + spread)
            at += spread + 8 * d
            target += VECTOR_BYTES * d

    return run
