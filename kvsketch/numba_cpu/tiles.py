"""Scores and weighted values of one page or one run of exact tokens, in Numba.

A tile is decoded once and multiplied for all queries of its key/value head. Codes are multiplied as they are: a page's
scales are folded into the query's coefficients (keys) or into the softmax weights (values), its zeros add one number a
page or a group.

Arrays that these functions share, float32, with Q the queries (group ratio, s) of a key/value head; they are passed one
by one because a compiled function counts references to each array of a tuple whenever it takes one out:
tile, decoded numbers (see :mod:`kvsketch.numba_cpu.pages`); scale and zero (rows,), those of a page; folded (Q, rows),
coefficients or weights times the scales; constants (Q,), what the zeros add; sums (Q, 32), sums over signs; scores
(Q, tokens) in units of log2, then weights; mix (Q, 8*channels), weighted values, 8 partial sums a channel; base
(Q, groups), what the zeros of integer values add; plain (Q, channels), weighted exact values.
"""

from __future__ import annotations

import numpy as np

from kvsketch.numba_cpu._compile import kernel_part
from kvsketch.numba_cpu.float16 import half_to_float
from kvsketch.numba_cpu.lanes import (
    load,
    load_float,
    load_rows,
    load_word,
    multiply_add,
    splat,
    store,
    store_lane_sums,
)
from kvsketch.numba_cpu.pages import FLOAT16, FLOAT32, UNIT, read_halves, unit_depth, unpack_codes

#: Rows of a sketch that are unpacked at a time, a whole number of units: the tile stays in the nearest cache.
SIGN_ROWS = 128


@kernel_part()
def _multiply_tile(tile, units, coefficients, first, constants, scores, target):  # type: ignore[no-untyped-def]
    """scores[i, target + lane] = constants[i] + sum over rows of tile[lane, row] * coefficients[i, first + row].

    For one block of 32 lanes. Queries go two at a time, so that a number is loaded once for both.
    """
    queries, pitch = coefficients.shape
    width, even = scores.shape[1], queries // 2 * 2
    for plane in range(4):
        for i in range(0, even, 2):
            total, other = splat(np.float32(0)), splat(np.float32(0))
            for unit in range(units):
                numbers, row = load(tile, unit * UNIT + 64 * plane), i * pitch + first + 8 * unit
                total = multiply_add(numbers, load_rows(coefficients, row), total)
                other = multiply_add(numbers, load_rows(coefficients, row + pitch), other)
            store_lane_sums(scores, i * width + target + 8 * plane, total, constants[i])
            store_lane_sums(scores, (i + 1) * width + target + 8 * plane, other, constants[i + 1])
        for i in range(even, queries):
            total = splat(np.float32(0))
            for unit in range(units):
                numbers, row = load(tile, unit * UNIT + 64 * plane), i * pitch + first + 8 * unit
                total = multiply_add(numbers, load_rows(coefficients, row), total)
            store_lane_sums(scores, i * width + target + 8 * plane, total, constants[i])


@kernel_part()
def _add_tile(tile, units, weights, first, lane, end, mix):  # type: ignore[no-untyped-def]
    """mix[i] += tile * weights[i, first:] for the lanes from `lane` to `end`, eight at a time.

    The 8 rows of a lane stay apart, to be summed at the very end. Queries go two at a time.
    """
    queries, pitch = weights.shape
    width, even = mix.shape[1], queries // 2 * 2
    for channel in range(lane, end, 8):
        start, target = channel // 32 * units * UNIT + 8 * (channel % 32), 8 * channel
        for i in range(0, even, 2):
            total, other = load(mix, i * width + target), load(mix, (i + 1) * width + target)
            for unit in range(units):
                numbers, row = load(tile, start + unit * UNIT), i * pitch + first + 8 * unit
                total = multiply_add(numbers, load_rows(weights, row), total)
                other = multiply_add(numbers, load_rows(weights, row + pitch), other)
            store(mix, i * width + target, total)
            store(mix, (i + 1) * width + target, other)
        for i in range(even, queries):
            total = load(mix, i * width + target)
            for unit in range(units):
                row = i * pitch + first + 8 * unit
                total = multiply_add(load(tile, start + unit * UNIT), load_rows(weights, row), total)
            store(mix, i * width + target, total)


@kernel_part()
def number_bytes(spec):  # type: ignore[no-untyped-def]
    """Bytes of one exact token of a side."""
    return spec.width * (4 if spec.dtype == FLOAT32 else 2)


@kernel_part()
def _as_floats(numbers, spec):  # type: ignore[no-untyped-def]
    """The bytes of exact tokens as float32 (tokens, width)."""
    floats = np.empty((numbers.size // number_bytes(spec), spec.width), np.float32)
    for t in range(floats.shape[0]):
        start = t * number_bytes(spec)
        if spec.dtype == FLOAT32:
            for c in range(spec.width):
                floats[t, c] = load_float(numbers, start + 4 * c)
        elif spec.dtype == FLOAT16:
            for c in range(spec.width):
                floats[t, c] = half_to_float(load_word(numbers, start + 2 * c))
        else:
            for c in range(spec.width):
                word = np.uint32(load_word(numbers, start + 2 * c))
                floats[t, c] = np.uint32(word << np.uint32(16)).view(np.float32)
    return floats


@kernel_part(fastmath={"reassoc", "contract", "nsz"})
def score_exact(numbers, spec, q, scores, target):  # type: ignore[no-untyped-def]
    """Scores of exact keys, given as bytes."""
    floats = _as_floats(numbers, spec)
    for t in range(floats.shape[0]):
        for i in range(q.shape[0]):
            total = np.float32(0)
            for c in range(floats.shape[1]):
                total += q[i, c] * floats[t, c]
            scores[i, target + t] = total


@kernel_part()
def score_ints(records, start, spec, q, tile, scale, zero, folded, constants, scores, target):  # type: ignore[no-untyped-def]
    """Scores of the page whose key side is at byte `start`: sum_c (q_c s_c) code_c + sum_c q_c z_c."""
    depth = unit_depth(spec.bits)
    units, size = spec.rows // depth, spec.rows * 4 * spec.bits
    for part in range(spec.groups):
        read_halves(records, start + spec.scale + 2 * part * spec.rows, spec.rows, scale)
        read_halves(records, start + spec.zero + 2 * part * spec.rows, spec.rows, zero)
        _fold(q, 0, spec.rows, scale, zero, folded, constants)
        for block in range(part * spec.group // 32, (part + 1) * spec.group // 32):
            unpack_codes(records, start + spec.codes + block * size, units, spec.bits, tile, 0)
            _multiply_tile(tile, spec.rows // 8, folded, 0, constants, scores, target + 32 * block)


@kernel_part(fastmath={"reassoc", "contract", "nsz"})
def _fold(numbers, first, count, scale, zero, folded, constants):  # type: ignore[no-untyped-def]
    """folded[i] = numbers[i, first:] * scale and constants[i] = <numbers[i, first:], zero>."""
    for i in range(numbers.shape[0]):
        constant = np.float32(0)
        for c in range(count):
            number = numbers[i, first + c]
            folded[i, c] = number * scale[c]
            constant += number * zero[c]
        constants[i] = constant


@kernel_part()
def score_sketch(
    records,
    start,
    spec,
    q,
    sketch,
    table,
    outlier_table,
    factor,
    outlier_factor,
    tile,
    norms,
    folded,
    constants,
    sums,
    scores,
    target,
):  # type: ignore[no-untyped-def]
    """Scores of the page of sketched keys at byte `start`: estimates of <q, k>, summed over both parts of a split."""
    scores[:, target : target + 32] = 0
    m = table.shape[1]
    for i in range(q.shape[0]):
        for r in range(m):
            folded[i, r] = sketch[i, r]
    _add_outlier_channels(records, start, spec, q, np.float32(-1), table, folded)
    _add_sign_scores(
        records, start + spec.codes, start + spec.norms, m, factor, tile, norms, folded, constants, sums, scores, target
    )
    if spec.outliers > 0:
        m = outlier_table.shape[1]
        folded[:, :m] = 0
        _add_outlier_channels(records, start, spec, q, np.float32(1), outlier_table, folded)
        _add_sign_scores(
            records,
            start + spec.outlier_codes,
            start + spec.outlier_norms,
            m,
            outlier_factor,
            tile,
            norms,
            folded,
            constants,
            sums,
            scores,
            target,
        )


@kernel_part()
def _add_outlier_channels(records, start, spec, q, sign, table, folded):  # type: ignore[no-untyped-def]
    """Add to `folded` sign * S q of the page's outlier channels alone; `table` is S transposed."""
    for j in range(spec.outliers):
        c = _channel(records, start, spec, j)
        for i in range(q.shape[0]):
            number = sign * q[i, c]
            for r in range(table.shape[1]):
                folded[i, r] += table[c, r] * number


@kernel_part()
def _add_sign_scores(records, codes, at, m, factor, tile, norms, folded, constants, sums, scores, target):  # type: ignore[no-untyped-def]
    """Add factor * |k| * sum_r S q_r * sign_r to the scores of 32 tokens; `folded` holds S q.

    The signs are at byte `codes`, the norms at byte `at`. The tile holds the signs as 0 and 1.
    """
    read_halves(records, at, 32, norms)
    for first in range(0, m, SIGN_ROWS):
        rows = min(SIGN_ROWS, m - first)
        unpack_codes(records, codes + 4 * first, rows // 16, 1, tile, 0)
        _half_sums(folded, first, rows, constants)
        _multiply_tile(tile, rows // 8, folded, first, constants, sums, 0)
        for i in range(constants.size):
            for lane in range(32):
                scores[i, target + lane] += np.float32(2) * factor * norms[lane] * sums[i, lane]


@kernel_part(fastmath={"reassoc", "nsz"})
def _half_sums(folded, first, count, constants):  # type: ignore[no-untyped-def]
    """constants[i] = -1/2 the sum of folded[i, first:]: 2*bit - 1 is the sign of a bit."""
    for i in range(constants.size):
        total = np.float32(0)
        for r in range(first, first + count):
            total += folded[i, r]
        constants[i] = np.float32(-0.5) * total


@kernel_part()
def _channel(records, start, spec, j):  # type: ignore[no-untyped-def]
    """Outlier channel j of the page at byte `start`."""
    if spec.channel_bytes == 1:
        return np.intp(records[start + spec.channels + j])
    return np.intp(load_word(records, start + spec.channels + 2 * j))


@kernel_part(fastmath={"reassoc", "contract", "nsz"})
def mix_exact(numbers, spec, weights, first, plain):  # type: ignore[no-untyped-def]
    """Add exact values, given as bytes, with the weights from `first` on."""
    floats = _as_floats(numbers, spec)
    for t in range(floats.shape[0]):
        for i in range(weights.shape[0]):
            weight = weights[i, first + t]
            for c in range(floats.shape[1]):
                plain[i, c] += weight * floats[t, c]


@kernel_part()
def mix_ints(records, start, spec, tile, scale, zero, folded, constants, weights, first, mix, base):  # type: ignore[no-untyped-def]
    """Add a page's values: sum_t (p_t s_t) code_t to `mix`, sum_t p_t z_t to `base`."""
    depth = unit_depth(spec.bits)
    units, size = spec.tokens // 8, spec.tokens * 4 * spec.bits
    for block in range((spec.width + 31) // 32):
        offset = start + spec.codes + block * size
        unpack_codes(records, offset, spec.tokens // depth, spec.bits, tile, block * units * UNIT)
    for part in range(spec.groups):
        read_halves(records, start + spec.scale + 2 * part * spec.tokens, spec.tokens, scale)
        read_halves(records, start + spec.zero + 2 * part * spec.tokens, spec.tokens, zero)
        _fold(weights, first, spec.tokens, scale, zero, folded, constants)
        for i in range(constants.size):
            base[i, part] += constants[i]
        end = min((part + 1) * spec.group, spec.width)
        _add_tile(tile, units, folded, 0, part * spec.group, end, mix)
