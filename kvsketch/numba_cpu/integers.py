"""Scores and weighted values of pages of integers: one pass over the bytes, for all queries of a head.

Kernels work on addresses (:func:`kvsketch.numba_cpu._compile.compile_address`); pitches and steps are in bytes. Queries
are taken :data:`kvsketch.numba_cpu.dots.QUERIES` at a time.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvsketch.layout import SideSpec, unit_bytes, unit_rows
from kvsketch.numba_cpu._compile import inner
from kvsketch.numba_cpu.coefficients import (
    largest_of_groups,
    largest_of_pages,
    make_fold,
    make_scale,
    padded,
    padded_rows,
)
from kvsketch.numba_cpu.dots import COEFFICIENT_BYTES, KEPT, QUERIES, make_mix_block, make_score_block
from kvsketch.numba_cpu.large import (
    KEY_SHARE,
    VALUE_SHARE,
    large_bytes,
    locate_rows,
    make_mix_rows,
    make_score_rows,
)
from kvsketch.numba_cpu.simd import load_float, load_long, load_word, stay_apart, store_float, store_word
from kvsketch.numba_cpu.unit_codes import make_limit

#: Most tokens that a kernel is given at a time; a whole number of pages of any size.
TILE = 256
#: Pages that are asked for ahead of their use.
AHEAD = 8
#: Bytes of what :func:`kvsketch.numba_cpu.coefficients.make_scale` finds.
FACTORS = 64
#: Where in them a mix kernel keeps the largest scale of a tile.
HIGHEST = 32
#: A query's products with scales are fine while the largest, times the range of codes and the root of the channels, is
#: below this: 16-bit coefficients then put a score, in units of log2, wrong by about 5e-5.
FINE = np.float32(32)
#: A token's weight is fine while it is below this; the largest of all tokens so far is 1.
HEAVY = 0.9

#: Where a kernel finds the fields of a side, in bytes from an int64 array of them.
TOKENS, WIDTH, GROUP, GROUPS, ROWS, CODES, SCALE, ZERO = (
    8 * SideSpec._fields.index(name)
    for name in ("tokens", "width", "group", "groups", "rows", "codes", "scale", "zero")
)


def shares_groups(spec: SideSpec) -> bool:
    """Whether the channels of each block of 32 of values are all in one group."""
    return spec.group % 32 == 0 or spec.groups == 1


def score_scratch(spec: SideSpec) -> int:
    """Bytes that a score kernel works in."""
    pages = TILE // spec.tokens
    wide = padded(spec.rows)
    return FACTORS + large_bytes(KEY_SHARE) + 4 * wide * (1 + QUERIES) + pages * (16 + wide * (4 + 2 * QUERIES))


def mix_scratch(spec: SideSpec) -> int:
    """Bytes that a mix kernel works in."""
    kept = KEPT * ((spec.width + 31) // 32)
    head = FACTORS + large_bytes(VALUE_SHARE)
    return head + 4 * TILE * (1 + QUERIES) + kept + spec.groups * (16 + 2 * QUERIES * TILE)


@inner
def copy_padded(source, count, target, wide):  # type: ignore[no-untyped-def]
    """Copy `count` 16-bit numbers and fill up with zeros to `wide`."""
    for i in range(count):
        store_word(target + 2 * i, load_word(source + 2 * i))
    for i in range(count, wide):
        store_word(target + 2 * i, 0)


@inner
def of_planes(block, group, groups, start, pitch):  # type: ignore[no-untyped-def]
    """Where what belongs to the groups of a block's four planes of 8 channels starts."""
    g0, g1 = min(32 * block // group, groups - 1), min((32 * block + 8) // group, groups - 1)
    g2, g3 = min((32 * block + 16) // group, groups - 1), min((32 * block + 24) // group, groups - 1)
    return start + pitch * g0, start + pitch * g1, start + pitch * g2, start + pitch * g3


def for_query_counts(make: Any) -> Any:
    """``run(queries, pitches, *arguments)`` made of ``make(count)`` for the counts up to :data:`QUERIES`.

    Each is called as ``(*starts, *arguments)`` where the starts move on by the pitches, one block of queries after the
    other; ``run`` takes pairs of a start and a pitch.
    """
    one, two, three, four = (make(count if count <= QUERIES else 1) for count in (1, 2, 3, 4))

    @inner
    def run(queries, first, first_pitch, second, second_pitch, arguments):  # type: ignore[no-untyped-def]
        i = 0
        while i < queries:
            left = min(queries - i, QUERIES)
            a, b = first + first_pitch * i, second + second_pitch * i
            if left == 4:
                four(i, a, first_pitch, b, second_pitch, *arguments)
            elif left == 3:
                three(i, a, first_pitch, b, second_pitch, *arguments)
            elif left == 2:
                two(i, a, first_pitch, b, second_pitch, *arguments)
            else:
                one(i, a, first_pitch, b, second_pitch, *arguments)
            i += left

    return run


def make_score(bits: int, coefficients: str) -> Any:
    """A kernel that scores `count` pages of keys, from the address of the first one's key side on.

    Coefficients of all pages come first: what one waits for overlaps with the next one's work.
    """
    limit, midpoint = make_limit(bits, coefficients, signed=True), (2**bits - 1) / 2
    size, block_bytes, depth = COEFFICIENT_BYTES[coefficients] // 8, unit_bytes(bits), unit_rows(bits)
    large_size, steps = large_bytes(KEY_SHARE), 2**bits - 1
    score_rows = make_score_rows(bits)

    @inner
    def score_large(queries, large, found, scales, scale_step, page, step, count, part, spec, scores, pitch):  # type: ignore[no-untyped-def]
        """Add the share of the channels that the sums leave out."""
        stay_apart()
        rows, blocks = load_long(spec + ROWS), load_long(spec + GROUP) // 32
        locate_rows(large, found, padded_rows(rows), 0, depth, block_bytes)
        block_step = rows // depth * block_bytes
        for index in range(count):
            codes = page + index * step + load_long(spec + CODES) + part * blocks * block_step
            target = scores + 4 * (index * load_long(spec + TOKENS) + 32 * part * blocks)
            for block in range(blocks):
                score_rows(
                    codes + block * block_step, scales + index * scale_step, large, found, queries,
                    target + 128 * block, pitch,
                )  # fmt: skip

    def make(queries: int) -> Any:
        scale = make_scale(queries, signed=True, share=KEY_SHARE)
        fold = make_fold(queries, coefficients, midpoint, signed=True)
        score_block = make_score_block(bits, coefficients, queries)

        @inner
        def score_part(first, q, q_pitch, scores, pitch, page, step, count, part, spec, scratch, floor):  # type: ignore[no-untyped-def]
            rows, blocks = load_long(spec + ROWS), load_long(spec + GROUP) // 32
            wide, units, most = padded_rows(rows), rows // depth, limit(rows)
            row, ahead = size * wide, AHEAD * step if first == 0 else 0
            constants, largest = scratch + FACTORS, scratch + FACTORS + 16 * count
            scaled = largest + 4 * wide
            large = scaled + 4 * wide * QUERIES
            numbers = large + large_size
            scales, scale_step = page + load_long(spec + SCALE) + 2 * part * rows, step
            zeros = page + load_long(spec + ZERO) + 2 * part * rows
            if wide != rows:
                padding = numbers + 2 * QUERIES * wide * count
                for index in range(count):
                    copy_padded(scales + index * step, rows, padding + 4 * wide * index, wide)
                    copy_padded(zeros + index * step, rows, padding + 4 * wide * index + 2 * wide, wide)
                scales, zeros, scale_step = padding, padding + 2 * wide, 4 * wide
            if first == 0:
                largest_of_pages(scales, count, scale_step, wide, largest)
            found = scale(q, q_pitch, largest, wide, most, floor, scaled, 4 * wide, scratch, large)
            for index in range(count):
                at = index * scale_step
                fold(
                    q, q_pitch, scaled, 4 * wide, scales + at, zeros + at, ahead, 1, 0, wide,
                    numbers + row * queries * index, row, scratch, constants + 16 * index,
                )  # fmt: skip
            for index in range(count):
                codes = page + index * step + load_long(spec + CODES) + part * blocks * units * block_bytes
                target = scores + 4 * (index * load_long(spec + TOKENS) + 32 * part * blocks)
                at = numbers + row * queries * index
                for block in range(blocks):
                    score_block(
                        codes + block * units * block_bytes, ahead, units, at, row, scratch, constants + 16 * index,
                        target + 128 * block, pitch,
                    )  # fmt: skip
            if found > 0:
                score_large(queries, large, found, scales, scale_step, page, step, count, part, spec, scores, pitch)

        return score_part

    score_parts = for_query_counts(make)

    def score(page, step, count, spec, q, q_pitch, queries, scores, pitch, scratch, extra):  # type: ignore[no-untyped-def]
        floor = FINE / (load_float(extra) * np.float32(steps * math.sqrt(load_long(spec + ROWS))))
        for part in range(load_long(spec + GROUPS)):
            score_parts(queries, q, q_pitch, scores, pitch, (page, step, count, part, spec, scratch, floor))

    return score


def make_mix(bits: int, coefficients: str, shared: bool) -> Any:
    """A kernel that adds `count` pages of values, from the address of the first one's value side on.

    `shared`: the channels of a block of 32 are all in one group.
    """
    limit, midpoint = make_limit(bits, coefficients, signed=False), (2**bits - 1) / 2
    size, block_bytes, depth = COEFFICIENT_BYTES[coefficients] // 8, unit_bytes(bits), unit_rows(bits)
    large_size = large_bytes(VALUE_SHARE)
    mix_rows = make_mix_rows(bits, shared)

    @inner
    def mix_large(queries, large, found, page, step, spec, target, pitch):  # type: ignore[no-untyped-def]
        """Add the share of the tokens that the sums leave out."""
        stay_apart()
        tokens, group, groups = load_long(spec + TOKENS), load_long(spec + GROUP), load_long(spec + GROUPS)
        locate_rows(large, found, tokens, step, depth, block_bytes)
        codes, block_step = page + load_long(spec + CODES), tokens // depth * block_bytes
        for block in range((load_long(spec + WIDTH) + 31) // 32):
            scales = of_planes(block, group, groups, page + load_long(spec + SCALE), 2 * tokens)
            mix_rows(codes + block * block_step, scales, large, found, queries, target + 256 * block, pitch)

    def make(queries: int) -> Any:
        scale = make_scale(queries, signed=False, share=VALUE_SHARE)
        fold = make_fold(queries, coefficients, midpoint, signed=False)
        mix_block = make_mix_block(bits, coefficients, queries, shared)

        @inner
        def mix_part(first, weights, weight_pitch, target, pitch, page, step, count, spec, base, scratch):  # type: ignore[no-untyped-def]
            tokens, group, groups = load_long(spec + TOKENS), load_long(spec + GROUP), load_long(spec + GROUPS)
            total, units = count * tokens, tokens // depth
            row, ahead = size * total, count * step if first == 0 else 0
            scales, zeros = page + load_long(spec + SCALE), page + load_long(spec + ZERO)
            # What the first queries leave for the next lies where the number of queries does not matter.
            large, highest = scratch + FACTORS, scratch + HIGHEST
            largest = large + large_size
            kept = largest + 4 * total
            scaled = kept + KEPT * ((load_long(spec + WIDTH) + 31) // 32)
            constants = scaled + 4 * total * queries
            numbers = constants + 16 * groups
            if first == 0:
                store_float(highest, largest_of_groups(scales, groups, count, step, tokens, largest))
            found = scale(
                weights, weight_pitch, largest, total, limit(total), np.float32(HEAVY) * load_float(highest),
                scaled, 4 * total, scratch, large,
            )  # fmt: skip
            for part in range(groups):
                fold(
                    weights, weight_pitch, scaled, 4 * total, scales + 2 * part * tokens, zeros + 2 * part * tokens,
                    ahead, count, step, tokens, numbers + row * queries * part, row, scratch, constants + 16 * part,
                )  # fmt: skip
                for i in range(queries):
                    at = base + 4 * ((first + i) * groups + part)
                    store_float(at, load_float(at) + load_float(constants + 16 * part + 4 * i))
            for block in range((load_long(spec + WIDTH) + 31) // 32):
                codes = page + load_long(spec + CODES) + block * units * block_bytes
                at = of_planes(block, group, groups, numbers, row * queries)
                mix_block(
                    codes, ahead, count, step, units, at, row, scratch, target + 256 * block, pitch,
                    kept + KEPT * block, first == 0,
                )  # fmt: skip
            if found > 0:
                mix_large(queries, large, found, page, step, spec, target, pitch)

        return mix_part

    mix_parts = for_query_counts(make)

    def mix(page, step, count, spec, weights, weight_pitch, queries, target, pitch, base, scratch):  # type: ignore[no-untyped-def]
        mix_parts(queries, weights, weight_pitch, target, pitch, (page, step, count, spec, base, scratch))

    return mix
