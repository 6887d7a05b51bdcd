"""Scores of pages of sign sketches."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvsketch.layout import SideSpec
from kvsketch.numba_cpu._compile import inner
from kvsketch.numba_cpu.coefficients import make_fold, make_scale, padded, padded_rows
from kvsketch.numba_cpu.dots import COEFFICIENT_BYTES, QUERIES, make_score_block
from kvsketch.numba_cpu.emit import LANES
from kvsketch.numba_cpu.integers import AHEAD, TOKENS, for_query_counts
from kvsketch.numba_cpu.simd import (
    load_byte,
    load_float,
    load_floats,
    load_halves,
    load_long,
    load_word,
    multiply_add,
    splat,
    store_float,
    store_floats,
    store_word,
)
from kvsketch.numba_cpu.softmax import fill_floats
from kvsketch.numba_cpu.unit_codes import make_limit

(CODES, M, NORMS, OUTLIERS, OUTLIER_M, OUTLIER_CODES, OUTLIER_NORMS, CHANNELS, CHANNEL_BYTES) = (
    8 * SideSpec._fields.index(name)
    for name in (
        *("codes", "m", "norms", "outliers", "outlier_m"),
        *("outlier_codes", "outlier_norms", "channels", "channel_bytes"),
    )
)
#: Bytes of the factors, their inverses, the constants and tops of a block of queries, and where the latter are.
RESULTS, CONSTANTS, TOPS = 64, 32, 48
#: What a score kernel needs beside the queries, in bytes from an int64 array: addresses (row by row float32, pitches in
#: bytes) of S q, of S transposed and of that of the outlier channels, and of the estimates' two factors c/m.
SKETCH, SKETCH_PITCH, TABLE, TABLE_PITCH, OUTLIER_TABLE, OUTLIER_PITCH, FACTORS = range(0, 56, 8)


def sketch_scratch(spec: SideSpec, queries: int) -> int:
    """Bytes that a sketch score kernel works in."""
    wide, outlier_wide = padded(spec.m), padded(spec.outlier_m)
    blocks = (queries + QUERIES - 1) // QUERIES
    return max(wide, outlier_wide) * (8 + 4 * queries) + 2 * queries * (wide + outlier_wide) + (
        2 * RESULTS * blocks + 128 * QUERIES)  # fmt: skip


@inner
def _channel(page, spec, j):  # type: ignore[no-untyped-def]
    """Outlier channel j of a page."""
    if load_long(spec + CHANNEL_BYTES) == 1:
        return np.intp(load_byte(page + load_long(spec + CHANNELS) + j))
    return np.intp(load_word(page + load_long(spec + CHANNELS) + 2 * j))


@inner
def _same_channels(page, other, spec):  # type: ignore[no-untyped-def]
    """Whether two pages split off the same channels."""
    same = True
    for j in range(load_long(spec + OUTLIERS)):
        same = same and _channel(page, spec, j) == _channel(other, spec, j)
    return same


@inner
def _add_channels(page, spec, q, sign, table, table_pitch, count, target):  # type: ignore[no-untyped-def]
    """Add sign * S q of a page's outlier channels alone to `count` numbers; `table` is S transposed."""
    for j in range(load_long(spec + OUTLIERS)):
        c = _channel(page, spec, j)
        row, weight = table + table_pitch * c, splat(sign * load_float(q + 4 * c))
        for r in range(0, count, LANES):
            store_floats(
                target + 4 * r, multiply_add(load_floats(row + 4 * r), weight, load_floats(target + 4 * r))
            )  # fmt: skip


@inner
def _write_ones(target, wide):  # type: ignore[no-untyped-def]
    """`wide` scales of 1, then as many zeros of -1/2, then ones in float32."""
    for i in range(wide):
        store_float(target + 4 * (wide + i), np.float32(1))
        store_word(target + 2 * i, 0x3C00)
        store_word(target + 2 * (wide + i), 0xB800)


@inner
def _copy(source, count, target, wide):  # type: ignore[no-untyped-def]
    for i in range(0, count, LANES):
        store_floats(target + 4 * i, load_floats(source + 4 * i))
    fill_floats(target + 4 * count, wide - count, np.float32(0))


@inner
def _weigh_by_norms(norms, sums, queries, scores, pitch, first):  # type: ignore[no-untyped-def]
    """Scores of 32 tokens: their float16 norms times `sums`, added to what is there unless this is the first part."""
    for t in range(0, 32, LANES):
        norm = load_halves(norms + 2 * t)
        for i in range(queries):
            number, target = norm * load_floats(sums + 128 * i + 4 * t), scores + pitch * i + 4 * t
            store_floats(target, number if first else number + load_floats(target))


def make_sketch_score(coefficients: str) -> Any:
    """A kernel that scores `count` pages of sketched keys, from the address of the first one's key side on."""
    limit, size = make_limit(1, coefficients, signed=True), COEFFICIENT_BYTES[coefficients] // 8

    def make_fold_part(queries: int) -> Any:
        # A sign is 2*bit - 1: a code whose scale is 2 and whose zero is -1, or with the midpoint 0.
        scale, fold = make_scale(queries, signed=True), make_fold(queries, coefficients, 0.5, signed=True)

        @inner
        def fold_part(first, sketches, pitch, numbers, number_pitch, ones, wide, most, estimate, results):  # type: ignore[no-untyped-def]
            at = results + RESULTS // QUERIES * first
            scale(sketches, pitch, ones + 4 * wide, wide, most, np.float32(0), sketches, pitch, at, at + TOPS)
            fold(
                sketches, pitch, sketches, pitch, ones, ones + 2 * wide, 0, 1, 0, wide, numbers, number_pitch,
                at, at + CONSTANTS,
            )  # fmt: skip
            for i in range(queries):
                store_float(at + 4 * i, np.float32(2) * estimate * load_float(at + 4 * i))
                store_float(at + CONSTANTS + 4 * i, np.float32(2) * estimate * load_float(at + CONSTANTS + 4 * i))

        return fold_part

    def make_score_part(queries: int) -> Any:
        score_block = make_score_block(1, coefficients, queries)

        @inner
        def score_part(first, numbers, number_pitch, scores, pitch, codes, ahead, units, norms, results, sums, plain):  # type: ignore[no-untyped-def]
            at = results + RESULTS // QUERIES * first
            score_block(codes, ahead if first == 0 else 0, units, numbers, number_pitch, at, at + CONSTANTS, sums, 128)
            _weigh_by_norms(norms, sums, queries, scores, pitch, plain)

        return score_part

    fold_parts, score_parts = for_query_counts(make_fold_part), for_query_counts(make_score_part)

    @inner
    def fold_queries(
        page, spec, q, q_pitch, queries, sketch, sketch_pitch, sign, table, table_pitch, estimate, folded, numbers,
        rows, wide, ones, results,
    ):  # type: ignore[no-untyped-def]  # fmt: skip
        """Coefficients of what is at `sketch` (0: zeros) plus sign * S q of the page's outlier channels."""
        _write_ones(ones, wide)
        for i in range(queries):
            target = folded + 4 * wide * i
            if sketch != 0:
                _copy(sketch + sketch_pitch * i, rows, target, wide)
            else:
                fill_floats(target, wide, np.float32(0))
            _add_channels(page, spec, q + q_pitch * i, sign, table, table_pitch, rows, target)
        fold_parts(
            queries, folded, 4 * wide, numbers, size * wide, (ones, wide, limit(rows), estimate, results)
        )  # fmt: skip

    def score(page, step, count, spec, q, q_pitch, queries, scores, pitch, scratch, extra):  # type: ignore[no-untyped-def]
        outliers, rows = load_long(spec + OUTLIERS), (load_long(spec + M) + 15) // 16 * 16
        outlier_rows = (load_long(spec + OUTLIER_M) + 15) // 16 * 16
        wide, outlier_wide = padded_rows(rows), padded_rows(outlier_rows)
        results = scratch
        outlier_results = results + RESULTS * ((queries + QUERIES - 1) // QUERIES)
        sums = outlier_results + RESULTS * ((queries + QUERIES - 1) // QUERIES)
        numbers = sums + 128 * QUERIES
        outlier_numbers = numbers + size * wide * queries
        ones = outlier_numbers + size * outlier_wide * queries
        folded = ones + 8 * max(wide, outlier_wide)
        folded_for = page
        for index in range(count):
            if index == 0 or (outliers > 0 and not _same_channels(page, folded_for, spec)):
                folded_for = page
                factors = load_long(extra + FACTORS)
                fold_queries(
                    page, spec, q, q_pitch, queries, load_long(extra + SKETCH), load_long(extra + SKETCH_PITCH),
                    np.float32(-1), load_long(extra + TABLE), load_long(extra + TABLE_PITCH), load_float(factors),
                    folded, numbers, rows, wide, ones, results,
                )  # fmt: skip
                if outliers > 0:
                    fold_queries(
                        page, spec, q, q_pitch, queries, 0, 0, np.float32(1), load_long(extra + OUTLIER_TABLE),
                        load_long(extra + OUTLIER_PITCH), load_float(factors + 4), folded, outlier_numbers,
                        outlier_rows, outlier_wide, ones, outlier_results,
                    )  # fmt: skip
            codes, norms = page + load_long(spec + CODES), page + load_long(spec + NORMS)
            score_parts(
                queries, numbers, size * wide, scores, pitch,
                (codes, AHEAD * step, rows // 16, norms, results, sums, True),
            )  # fmt: skip
            if outliers > 0:
                codes, norms = page + load_long(spec + OUTLIER_CODES), page + load_long(spec + OUTLIER_NORMS)
                score_parts(
                    queries, outlier_numbers, size * outlier_wide, scores, pitch,
                    (codes, AHEAD * step, outlier_rows // 16, norms, outlier_results, sums, False),
                )  # fmt: skip
            page += step
            scores += 4 * load_long(spec + TOKENS)

    return score
