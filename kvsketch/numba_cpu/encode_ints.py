"""Pages of integers, encoded: extremes of groups, then codes, straight from the numbers into the record.

Kernels work on addresses; pitches and steps are in bytes. Channels that do not fill a vector are copied to a scratch
tile first, filled up with what gives code 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvsketch.layout import SideSpec, unit_bytes, unit_rows
from kvsketch.numba_cpu._compile import inner
from kvsketch.numba_cpu.emit import LANES
from kvsketch.numba_cpu.encode_groups import (
    ITEM_BYTES,
    PARAMETERS,
    any_nan,
    make_load_numbers,
    make_reduce_rows,
    make_write_groups,
    mark_nan,
)
from kvsketch.numba_cpu.encode_units import block_channels, make_pack_keys, make_pack_values
from kvsketch.numba_cpu.integers import CODES, GROUP, GROUPS, ROWS, SCALE, TOKENS, WIDTH, ZERO
from kvsketch.numba_cpu.simd import (
    clear_bytes,
    copy_bytes,
    load_floats,
    load_long,
    maximum,
    minimum,
    prefetch,
    splat,
    store_float,
    store_floats,
    store_long,
    store_word,
)

#: Most tokens of a group of keys.
_MOST_TOKENS = 128
#: Bytes of a tile of numbers: of keys, a group by a block of channels, of values, 32 tokens by 32 channels.
_TILE = 4 * max(_MOST_TOKENS * 16, 32 * 32)
#: Bytes of the parameters of 32 groups.
_GROUPS = 4 * 32 * PARAMETERS


def int_scratch(spec: SideSpec) -> int:
    """Bytes that a kernel works in."""
    return _TILE + 2048 + 12 * LANES * LANES + max(_GROUPS * spec.groups, 4 * PARAMETERS * (spec.rows + 16))


def make_encode_keys(bits: int, dtype: str) -> Any:
    """A kernel that encodes `count` pages of keys `x` and adds what saturated to the int64 at `found`."""
    load, size, block = make_load_numbers(dtype), ITEM_BYTES[dtype], block_channels(bits)
    write_groups, pack = make_write_groups(bits, block), make_pack_keys(bits, dtype)
    depth, unit = unit_rows(bits), unit_bytes(bits)
    vectors = block // LANES

    @inner
    def write_stats(x, pitch, tokens, ahead, parameters, scales, zeros):  # type: ignore[no-untyped-def]
        saturated = 0
        for v in range(vectors):
            a = x + size * LANES * v
            lo, lo_2 = load(a), load(a + pitch)
            hi, hi_2 = lo, lo_2
            nan = mark_nan(splat(np.float32(0)), lo, lo_2)
            prefetch(a + ahead)
            prefetch(a + ahead + pitch)
            for t in range(2, tokens, 2):
                first, second = load(a + t * pitch), load(a + (t + 1) * pitch)
                prefetch(a + ahead + t * pitch)
                prefetch(a + ahead + (t + 1) * pitch)
                lo, lo_2 = minimum(first, lo), minimum(second, lo_2)
                hi, hi_2 = maximum(first, hi), maximum(second, hi_2)
                nan = mark_nan(nan, first, second)
            saturated += write_groups(
                parameters + 4 * LANES * v, scales + 2 * LANES * v, zeros + 2 * LANES * v,
                minimum(lo, lo_2), maximum(hi, hi_2), nan,
            )  # fmt: skip
        return saturated

    @inner
    def copy_tail(x, pitch, tokens, count, tile):  # type: ignore[no-untyped-def]
        """`count` channels of the tokens, filled up to a block with zeros: groups of code 0, scale 0 and zero 0."""
        for t in range(tokens):
            row = tile + size * block * t
            copy_bytes(x + t * pitch, size * count, row)
            clear_bytes(row + size * count, size * (block - count))

    def encode(x, pitch, page_step, out, out_step, count, spec, _extra, _given, scratch, found):  # type: ignore[no-untyped-def]
        width, group, rows = load_long(spec + WIDTH), load_long(spec + GROUP), load_long(spec + ROWS)
        parts, block_bytes = load_long(spec + GROUPS), rows // depth * unit
        spilled_scales, spilled_zeros, spilled = scratch, scratch + 64, scratch + 128
        tile = spilled + 1024
        parameters = tile + _TILE
        saturated = 0
        for page in range(count):
            for part in range(parts):
                numbers, record = x + page * page_step + part * group * pitch, out + page * out_step
                halves = record + 2 * part * rows
                # All groups come first: what each waits for overlaps with the next one's work.
                for first in range(0, rows, block):
                    source, step = numbers + size * first, pitch
                    if first + block > width:
                        copy_tail(source, pitch, group, width - first, tile)
                        source, step = tile, size * block
                    scales = halves + load_long(spec + SCALE) + 2 * first
                    zeros = halves + load_long(spec + ZERO) + 2 * first
                    at = parameters + 4 * PARAMETERS * first
                    if first + block <= rows:
                        saturated += write_stats(source, step, group, group * pitch, at, scales, zeros)
                    else:
                        saturated += write_stats(source, step, group, 0, at, spilled_scales, spilled_zeros)
                        copy_bytes(spilled_scales, 2 * (rows - first), scales)
                        copy_bytes(spilled_zeros, 2 * (rows - first), zeros)
                for t in range(0, group, 32):
                    codes = record + load_long(spec + CODES) + (part * group + t) // 32 * block_bytes
                    for first in range(0, rows, block):
                        source, step = numbers + t * pitch + size * first, pitch
                        if first + block > width:
                            source, step = tile + t * size * block, size * block
                        target = codes + first // depth * unit
                        at = parameters + 4 * PARAMETERS * first
                        if first + block <= rows:
                            pack(source, step, at, target)
                        else:
                            pack(source, step, at, spilled)
                            copy_bytes(spilled, (rows - first) // depth * unit, target)
        store_long(found, load_long(found) + saturated)

    return encode


def make_encode_values(bits: int, dtype: str, shared: bool) -> Any:
    """A kernel that encodes `count` pages of values `x` and adds what saturated to the int64 at `found`.

    `shared`: the channels of a block of 32 are all in one group.
    """
    load, size = make_load_numbers(dtype), ITEM_BYTES[dtype]
    write_groups, pack = make_write_groups(bits, 32), make_pack_values(bits, dtype, shared)
    least, largest = make_reduce_rows(False), make_reduce_rows(True)
    depth, unit = unit_rows(bits), unit_bytes(bits)
    infinity, none, not_a_number = np.float32(np.inf), np.float32(0), np.float32(np.nan)
    half_infinity = 0xFC00 if dtype == "float16" else 0xFF80
    wide = dtype == "float32"

    @inner
    def widen(x, pitch, count, tile):  # type: ignore[no-untyped-def]
        """`count` channels of 32 tokens, repeated until they fill a vector."""
        for t in range(32):
            for i in range(0, LANES, count):
                copy_bytes(x + t * pitch, size * min(count, LANES - i), tile + size * (LANES * t + i))

    @inner
    def write_stats(x, pitch, count, ahead, parameters, scales, zeros, lows, highs, marks):  # type: ignore[no-untyped-def]
        """A group of `count` channels of 32 tokens."""
        saturated = 0
        for first in range(0, 32, LANES):
            every_mark = splat(none)
            for t in range(LANES):
                a = x + (first + t) * pitch
                lo = load(a)
                prefetch(a + ahead)
                hi, mark = lo, mark_nan(splat(none), lo, lo)
                for c in range(LANES, count, LANES):
                    numbers = load(a + size * min(c, count - LANES))
                    prefetch(a + ahead + size * c)
                    lo, hi = minimum(numbers, lo), maximum(numbers, hi)
                    mark = mark_nan(mark, numbers, numbers)
                store_floats(lows + 4 * LANES * t, lo)
                store_floats(highs + 4 * LANES * t, hi)
                store_floats(marks + 4 * LANES * t, mark)
                every_mark = every_mark + mark
            nan = splat(none)
            if any_nan(every_mark):
                for t in range(LANES):
                    marked = any_nan(load_floats(marks + 4 * LANES * t))
                    store_float(marks + 4 * t, not_a_number if marked else none)
                nan = load_floats(marks)
            saturated += write_groups(
                parameters + 4 * first, scales + 2 * first, zeros + 2 * first, least(lows), largest(highs), nan
            )
        return saturated

    @inner
    def copy_tail(x, pitch, count, tile):  # type: ignore[no-untyped-def]
        """`count` channels of 32 tokens, filled up to 32 with minus infinity: code 0 in any group."""
        for t in range(32):
            row = tile + 32 * size * t
            copy_bytes(x + t * pitch, size * count, row)
            for i in range(count, 32):
                if wide:
                    store_float(row + 4 * i, -infinity)
                else:
                    store_word(row + 2 * i, half_infinity)

    def encode(x, pitch, page_step, out, out_step, count, spec, _extra, _given, scratch, found):  # type: ignore[no-untyped-def]
        width, group, groups = load_long(spec + WIDTH), load_long(spec + GROUP), load_long(spec + GROUPS)
        tokens = load_long(spec + TOKENS)
        lows, highs, marks = scratch, scratch + 4 * LANES * LANES, scratch + 8 * LANES * LANES
        tile = scratch + 12 * LANES * LANES
        parameters = tile + _TILE
        saturated = 0
        for page in range(count):
            record = out + page * out_step
            for t in range(0, tokens, 32):
                source = x + page * page_step + t * pitch
                for part in range(groups):
                    numbers, step, channels = source + size * group * part, pitch, min(group, width - group * part)
                    ahead = 32 * pitch
                    if channels < LANES:
                        widen(numbers, step, channels, tile)
                        numbers, step, channels, ahead = tile, size * LANES, LANES, 0
                    at = record + 2 * (part * tokens + t)
                    saturated += write_stats(
                        numbers, step, channels, ahead, parameters + _GROUPS * part,
                        at + load_long(spec + SCALE), at + load_long(spec + ZERO), lows, highs, marks,
                    )  # fmt: skip
                for channel in range(0, width, 32):
                    block, step = source + size * channel, pitch
                    if channel + 32 > width:
                        copy_tail(block, pitch, width - channel, tile)
                        block, step = tile, 32 * size
                    g0, g1 = min(channel // group, groups - 1), min((channel + 8) // group, groups - 1)
                    g2, g3 = min((channel + 16) // group, groups - 1), min((channel + 24) // group, groups - 1)
                    codes = record + load_long(spec + CODES) + (channel // 32 * tokens + t) // depth * unit
                    for row in range(0, 32, depth):
                        at = parameters + 4 * row
                        pack(
                            block + row * step, step,
                            (at + _GROUPS * g0, at + _GROUPS * g1, at + _GROUPS * g2, at + _GROUPS * g3),
                            codes + row // depth * unit,
                        )  # fmt: skip
        store_long(found, load_long(found) + saturated)

    return encode
