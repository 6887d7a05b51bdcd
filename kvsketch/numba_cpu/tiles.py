"""Scores and weighted values of one page or one run of exact tokens, in Numba.

A tile is decoded once and multiplied for all queries of its key/value head. Codes are multiplied as they are: a page's
scales are folded into the query's coefficients (keys) or into the softmax weights (values), its zeros add one number a
page or a group.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from kvsketch.numba_cpu.float16 import half_to_float
from kvsketch.numba_cpu.lanes import load, load_rows, multiply_add, splat, store, store_lane_sums
from kvsketch.numba_cpu.pages import FLOAT16, FLOAT32, UNIT, read_halves, unpack_codes


class Work(NamedTuple):
    """What one part of the work reads and writes; Q is the queries of its key/value head, (group ratio, s)."""

    tile: Any  #: decoded numbers, see :mod:`kvsketch.numba_cpu.pages`
    buffers: Any  #: (3, rows) rows of numbers
    scores: Any  #: (Q, tokens) scores in units of log2, then weights
    state: Any  #: (Q, 2) running maximum and sum
    mix: Any  #: (Q, 8*lanes) weighted values, 8 partial sums a channel
    base: Any  #: (Q, value groups) what the zeros of integer values add


@njit(cache=True, nogil=True)
def _multiply_tile(tile, start, units, coefficients, row, scores, target):  # type: ignore[no-untyped-def]
    """scores[target + lane] = sum over rows of tile[lane, row] * coefficients[row], for one block of 32 lanes."""
    for plane in range(4):
        total = splat(np.float32(0))
        for unit in range(units):
            numbers = load(tile, start + unit * UNIT + 64 * plane)
            total = multiply_add(numbers, load_rows(coefficients, row + 8 * unit), total)
        store_lane_sums(scores, target + 8 * plane, total)


@njit(cache=True, nogil=True)
def _add_tile(tile, start, units, weights, row, mix, target):  # type: ignore[no-untyped-def]
    """mix += tile * weights for one run of 8 lanes; the 8 rows of a lane are summed at the very end."""
    total = load(mix, target)
    for unit in range(units):
        total = multiply_add(load(tile, start + unit * UNIT), load_rows(weights, row + 8 * unit), total)
    store(mix, target, total)


@njit(cache=True, nogil=True)
def _as_floats(numbers, dtype):  # type: ignore[no-untyped-def]
    """The bytes of float32, float16 or bfloat16 numbers as float32."""
    if dtype == FLOAT32:
        return numbers.view(np.float32)
    words = numbers.view(np.uint16)
    floats = np.empty(words.size, np.float32)
    for i in range(words.size):
        if dtype == FLOAT16:
            floats[i] = half_to_float(words[i])
        else:
            floats[i] = np.uint32(np.uint32(words[i]) << np.uint32(16)).view(np.float32)
    return floats


@njit(cache=True, nogil=True)
def _fill_keys(numbers, width, tile):  # type: ignore[no-untyped-def]
    """A tile of up to 32 exact keys: lanes are tokens, rows channels; what is missing is 0."""
    tile[: (width + 7) // 8 * UNIT] = 0
    for t in range(numbers.size // width):
        for c in range(width):
            tile[c // 8 * UNIT + 8 * t + c % 8] = numbers[t * width + c]


@njit(cache=True, nogil=True)
def _fill_values(numbers, width, tile):  # type: ignore[no-untyped-def]
    """A tile of up to 32 exact values: lanes are channels (blocks of 32), rows tokens; what is missing is 0."""
    tile[: (width + 31) // 32 * 4 * UNIT] = 0
    for t in range(numbers.size // width):
        for c in range(width):
            tile[(c // 32 * 4 + t // 8) * UNIT + 8 * (c % 32) + t % 8] = numbers[t * width + c]


@njit(cache=True, nogil=True)
def number_bytes(spec):  # type: ignore[no-untyped-def]
    """Bytes of one exact token of a side."""
    return spec.width * (4 if spec.dtype == FLOAT32 else 2)


@njit(cache=True, nogil=True)
def score_exact(numbers, spec, q, work, target):  # type: ignore[no-untyped-def]
    """Scores of exact keys, given as bytes."""
    chunk = 32 * number_bytes(spec)
    for first in range(0, numbers.size, chunk):
        _fill_keys(_as_floats(numbers[first : first + chunk], spec.dtype), spec.width, work.tile)
        for i in range(q.shape[0]):
            here = target + first // chunk * 32
            _multiply_tile(work.tile, 0, (spec.width + 7) // 8, q[i], 0, work.scores[i], here)


@njit(cache=True, nogil=True)
def score_ints(record, spec, q, work, target):  # type: ignore[no-untyped-def]
    """Scores of a page: sum_c (q_c s_c) code_c + sum_c q_c z_c."""
    depth = 16 if spec.bits == 1 or spec.bits == 3 else 8
    size = spec.rows // depth * 4 * depth * spec.bits
    tile, scores = work.tile, work.scores
    scale, zero, folded = work.buffers[0], work.buffers[1], work.buffers[2]
    for part in range(spec.groups):
        read_halves(record, spec.scale + 2 * part * spec.rows, spec.rows, scale)
        read_halves(record, spec.zero + 2 * part * spec.rows, spec.rows, zero)
        blocks = spec.group // 32
        first = part * blocks
        for block in range(blocks):
            start = block * spec.rows // 8 * UNIT
            offset = spec.codes + (first + block) * size
            unpack_codes(record, offset, spec.rows // depth, spec.bits, tile, start)
        for i in range(q.shape[0]):
            constant = np.float32(0)
            for c in range(spec.rows):
                folded[c] = q[i, c] * scale[c]
                constant += q[i, c] * zero[c]
            for block in range(blocks):
                here = target + 32 * (first + block)
                _multiply_tile(tile, block * spec.rows // 8 * UNIT, spec.rows // 8, folded, 0, scores[i], here)
                for lane in range(here, here + 32):
                    scores[i, lane] += constant


@njit(cache=True, nogil=True)
def score_sketch(record, spec, q, sketch, queries, work, target):  # type: ignore[no-untyped-def]
    """Scores of a page of sketched keys: the estimates of <q, k>, of both parts when outlier channels are split."""
    folded = work.buffers[2]
    m = queries.table.shape[1]
    read_halves(record, spec.norms, 32, work.buffers[0])
    unpack_codes(record, spec.codes, m // 16, 1, work.tile, 0)
    for i in range(q.shape[0]):
        work.scores[i, target : target + 32] = 0
        folded[:m] = sketch[i]
        for j in range(spec.outliers):
            c = _channel(record, spec, j)
            for r in range(m):
                folded[r] -= queries.table[c, r] * q[i, c]
        _add_sign_scores(m, queries.factor, work, i, target)
    if spec.outliers == 0:
        return
    m = queries.outlier_table.shape[1]
    read_halves(record, spec.outlier_norms, 32, work.buffers[0])
    unpack_codes(record, spec.outlier_codes, m // 16, 1, work.tile, 0)
    for i in range(q.shape[0]):
        folded[:m] = 0
        for j in range(spec.outliers):
            c = _channel(record, spec, j)
            for r in range(m):
                folded[r] += queries.outlier_table[c, r] * q[i, c]
        _add_sign_scores(m, queries.outlier_factor, work, i, target)


@njit(cache=True, nogil=True)
def _add_sign_scores(m, factor, work, i, target):  # type: ignore[no-untyped-def]
    """Add factor * |k| * sum_r S q_r * sign_r to query i's scores of 32 tokens.

    The tile holds the signs as 0 and 1, ``work.buffers`` the norms (0) and S q (2).
    """
    norms, lanes, folded = work.buffers[0], work.buffers[1], work.buffers[2]
    total = np.float32(0)
    for r in range(m):
        total += folded[r]
    _multiply_tile(work.tile, 0, m // 8, folded, 0, lanes, 0)
    for lane in range(32):
        work.scores[i, target + lane] += factor * norms[lane] * (np.float32(2) * lanes[lane] - total)


@njit(cache=True, nogil=True)
def _channel(record, spec, j):  # type: ignore[no-untyped-def]
    """Outlier channel j of a page."""
    if spec.channel_bytes == 1:
        return np.intp(record[spec.channels + j])
    return np.intp(record[spec.channels + 2 * j]) + (np.intp(record[spec.channels + 2 * j + 1]) << 8)


@njit(cache=True, nogil=True)
def mix_exact(numbers, spec, work, first):  # type: ignore[no-untyped-def]
    """Add exact values, given as bytes, with the weights of ``work.scores`` from `first` on."""
    chunk = 32 * number_bytes(spec)
    for start in range(0, numbers.size, chunk):
        _fill_values(_as_floats(numbers[start : start + chunk], spec.dtype), spec.width, work.tile)
        for i in range(work.scores.shape[0]):
            for lane in range(0, spec.width, 8):
                begin = lane // 32 * 4 * UNIT + 8 * (lane % 32)
                _add_tile(work.tile, begin, 4, work.scores[i], first + start // chunk * 32, work.mix[i], 8 * lane)


@njit(cache=True, nogil=True)
def mix_ints(record, spec, work, first):  # type: ignore[no-untyped-def]
    """Add a page's values: sum_t (p_t s_t) code_t to ``work.mix``, sum_t p_t z_t to the group's ``work.base``."""
    depth = 16 if spec.bits == 1 or spec.bits == 3 else 8
    size = spec.tokens // depth * 4 * depth * spec.bits
    units = spec.tokens // 8
    tile, weights = work.tile, work.scores
    scale, zero, folded = work.buffers[0], work.buffers[1], work.buffers[2]
    for block in range((spec.width + 31) // 32):
        offset = spec.codes + block * size
        unpack_codes(record, offset, spec.tokens // depth, spec.bits, tile, block * units * UNIT)
    for part in range(spec.groups):
        read_halves(record, spec.scale + 2 * part * spec.tokens, spec.tokens, scale)
        read_halves(record, spec.zero + 2 * part * spec.tokens, spec.tokens, zero)
        last = min((part + 1) * spec.group, spec.width)
        for i in range(weights.shape[0]):
            constant = np.float32(0)
            for t in range(spec.tokens):
                folded[t] = weights[i, first + t] * scale[t]
                constant += weights[i, first + t] * zero[t]
            work.base[i, part] += constant
            for lane in range(part * spec.group, last, 8):
                begin = lane // 32 * units * UNIT + 8 * (lane % 32)
                _add_tile(tile, begin, units, folded, 0, work.mix[i], 8 * lane)
