"""Sign sketches: projections a thread a sign, estimates of scores a thread a score."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cuda

from kvsketch._dispatch import namespace
from kvsketch.numba_cuda._launch import launch
from kvsketch.numba_cuda.arithmetic import WRITE, read_half
from kvsketch.numba_cuda.bitpack import pack_codes, stream_code
from kvsketch.numba_cuda.sketches import chosen_channels, largest_channels, nothing_chosen, project, sketch_rows


def select_outlier_channels(k: Any, outliers: int, page: int) -> Any:
    b, h, n, d = k.shape
    channels = largest_channels(k.reshape(b * h, n, d), outliers, page)
    return channels.reshape(b, h, *channels.shape[1:])


def sketch_keys(k: Any, matrix: Any, channels: Any, outlier_matrix: Any, page: int) -> tuple[Any, ...]:
    b, h, n, d = k.shape
    rows = k.reshape(b * h, n, d)
    if channels is None:
        signs, norms, saturated = _sketch(rows, matrix, nothing_chosen(k, b * h, d), 0, max(n, 1), (b, h, n))
        return signs, norms, None, None, saturated
    chosen = chosen_channels(channels.reshape(b * h, *channels.shape[2:]), d)
    signs, norms, saturated = _sketch(rows, matrix, chosen, 0, page, (b, h, n))
    outlier_signs, outlier_norms, clipped = _sketch(rows, outlier_matrix, chosen, 1, page, (b, h, n))
    return signs, norms, outlier_signs, outlier_norms, saturated + clipped


def _sketch(rows: Any, matrix: Any, chosen: Any, part: int, page: int, lead: tuple[int, ...]) -> tuple[Any, Any, int]:
    """Packed signs, norms and the number of saturated ones of a part of `rows` (b * h, n, d), with axes `lead`."""
    norms = namespace(rows).empty(rows.shape[:2], dtype=np.float16)
    signs, saturated = sketch_rows(rows, matrix, chosen, part, page, norms)
    packed = pack_codes(signs, 1)
    return packed.reshape(*lead, packed.shape[-1]), norms.reshape(lead), saturated


def sketch_scores(q: Any, keys: Any, matrix: Any, constant: float, outlier_matrix: Any, outlier_constant: float) -> Any:
    xp = namespace(q)
    b, hq, s, d = q.shape
    h, n = keys.norms.shape[1:]
    rows = q.reshape(b * h, hq // h * s, d)
    inner = (keys.signs, keys.norms, matrix, constant)
    if keys.channels is None:
        chosen, page, parts = nothing_chosen(q, b * h, d), max(n, 1), [inner]
    else:
        chosen, page = chosen_channels(keys.channels.reshape(b * h, *keys.channels.shape[2:]), d), keys.page
        parts = [inner, (keys.outlier_signs, keys.outlier_norms, outlier_matrix, outlier_constant)]
    sums = xp.zeros((b * h, hq // h * s, n), dtype=xp.float32)
    scores = xp.empty(sums.shape, dtype=q.dtype)
    for part, (signs, norms, part_matrix, part_constant) in enumerate(parts):
        projected = project(rows, part_matrix, chosen, part)
        arrays = signs.reshape(b * h, n, signs.shape[-1]), norms.reshape(b * h, n)
        factor = np.float32(part_constant / part_matrix.shape[0])
        launch(_add_estimates(str(q.dtype)), sums.size, projected, *arrays, factor, page, sums, scores)
    return scores.reshape(b, hq, s, n)


@cache
def _add_estimates(dtype: str) -> Any:
    write = WRITE[dtype]

    @cuda.jit
    def add_estimates(projected, signs, norms, factor, page, sums, scores):
        """A thread to each of `sums` (rows, queries, n): adds a part's estimate, and writes what `scores` are so far.

        `projected` (rows, pages, queries, m) are the queries as each page of `page` tokens sees them.
        """
        rows, queries, n = sums.shape
        index, token = divmod(cuda.grid(1), n)
        row, x = divmod(index, queries)
        if row < rows:
            total = np.float32(0)
            for i in range(projected.shape[3]):
                number = projected[row, token // page, x, i]
                total += number if stream_code(signs[row], token, i, 1) else -number
            estimate = sums[row, x, token] + total * (read_half(norms[row, token]) * factor)
            sums[row, x, token] = estimate
            scores[row, x, token] = write(estimate)

    return add_estimates
