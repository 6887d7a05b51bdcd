"""Pages of sign sketches, encoded: projections found fast, and again exactly where their sign could depend on rounding.

The sign of a sketch is that of the reference's float32 sum of products, channel by channel. Let u = 2^-24, g_n =
n u / (1 - n u), k a key of d channels, s a row of S, and R the largest norm of the rows. The reference's sum is within

    g_d sum_c |k_c s_c| <= g_d R |k|

of the true <k, s> (each product takes part in at most d roundings). What is computed here is close to it as well:

- fused multiply-adds, in any order: within g_d R |k|, by the same argument;
- a Hadamard projection, as 3 or 6 transforms T of 2^L numbers by L levels of additions, before each a multiplication by
  +-2^(-L/2), rounded: a level, and each of the two roundings of that factor, changes the vector by at most u times its
  norm, and T is orthogonal, so with N = (L + 2) times the number of transforms the vector is off by at most
  ((1 + u)^N - 1) |k| <= g_N |k| in norm, hence in every entry. The matrix that S was rounded from is not kept; the rows
  of S, over sqrt(d), are within D of those of the transforms' product, which is measured in float64 when the tables are
  made, so that the entry times sqrt(d) is within (D + g_N) sqrt(d) |k| of <k, s>.

A computed entry that is further from 0 than the sum of both bounds has the reference's sign. |k| is bounded by the
square root of the float32 sum of squares, whose relative error is below g_(d+1); :data:`SLACK` is for that, for the
roundings of the bound itself and for the float64 measurements. Underflow, at most 2^-149 in each of some d (N + 2)
operations, is covered by it too where the squares are at least 2^-100; overflow is impossible where they are at most
2^100. Elsewhere (tiny, huge and zero keys, infinities and NaN) all rows are summed as the reference does.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from kvsketch.layout import SideLayout, SideSpec
from kvsketch.numba_cpu._compile import inner
from kvsketch.numba_cpu._tiers import VECTOR_BYTES
from kvsketch.numba_cpu.emit import LANES
from kvsketch.numba_cpu.encode_groups import ITEM_BYTES
from kvsketch.numba_cpu.encode_hadamard import hadamard_tables, make_transform
from kvsketch.numba_cpu.encode_signs import (
    FUSED,
    UNIT_ROWS,
    any_close,
    close_to_zero,
    make_transpose,
    pack_signs,
    project_row,
    project_unit,
    write_norms,
)
from kvsketch.numba_cpu.integers import CODES, TOKENS, WIDTH
from kvsketch.numba_cpu.simd import (
    clear_bytes,
    copy_bytes,
    load_float,
    load_floats,
    load_long,
    prefetch,
    splat,
    store_byte,
    store_float,
    store_floats,
    store_long,
    store_word,
)
from kvsketch.numba_cpu.sketches import (
    CHANNEL_BYTES,
    CHANNELS,
    NORMS,
    OUTLIER_CODES,
    OUTLIER_M,
    OUTLIER_NORMS,
    OUTLIERS,
    M,
)
from kvsketch.reference.pages import projections
from kvsketch.rotation import Projection

#: What the bounds are made larger by.
SLACK = 1.01
#: Addresses in an int64 array that a kernel needs beside the keys: of the packed rows of both projections, of the
#: tables of the transform, of the two float32 bounds (of the projection in use, and of the outliers').
TABLE, OUTLIER_TABLE, TRANSFORM, BOUNDS = range(0, 32, 8)
_ROUNDING = 2.0**-24


def sketch_scratch(spec: SideSpec) -> int:
    """Bytes that a kernel works in."""
    rows = max(spec.m, spec.outlier_m) + max(UNIT_ROWS, spec.width)
    vectors = 3 * (spec.width + LANES) + rows
    return VECTOR_BYTES * vectors + 3 * 8 * (spec.width + LANES)


def rounding_bound(count: int) -> float:
    """g_n: how much n roundings change a product, relatively."""
    return count * _ROUNDING / (1 - count * _ROUNDING)


def sum_bound(projection: Projection) -> float:
    """How far a float32 sum of products, in any order and fused or not, is from the true one, over the key's norm."""
    rows = np.linalg.norm(projection.matrix.astype(np.float64), axis=1)
    return rounding_bound(projection.d) * float(rows.max())


@lru_cache(maxsize=64)
def sketch_tables(side: SideLayout) -> tuple[Any, Any, bool]:
    """The addresses that a kernel needs, int64; what they are of; whether keys are transformed."""
    main, outlier = projections(side)
    transform = hadamard_tables(main)
    if transform is None:
        bound = 2 * sum_bound(main) if FUSED else 0.0
    else:
        # The transform gives <k, s> / sqrt(d).
        bound = sum_bound(main) / np.sqrt(main.d) + transform.bound
    outlier_bound = 2 * sum_bound(outlier) if FUSED and outlier is not None else 0.0
    bounds = np.array([SLACK * bound, SLACK * outlier_bound], np.float32)
    kept = [_pack_rows(main), bounds[:0] if outlier is None else _pack_rows(outlier)]
    kept += [bounds[:0] if transform is None else transform.numbers, bounds]
    addresses = np.array([x.ctypes.data for x in kept], np.int64)
    return addresses, (kept, transform), transform is not None


def _pack_rows(projection: Projection) -> Any:
    """S as float32 (units, d, UNIT_ROWS), rows beyond m zero."""
    units = -(-projection.m // UNIT_ROWS)
    rows = np.zeros((units * UNIT_ROWS, projection.d), np.float32)
    rows[: projection.m] = projection.matrix
    return np.ascontiguousarray(rows.reshape(units, UNIT_ROWS, projection.d).swapaxes(1, 2))


@inner
def _sum_squares(x, channels, count):  # type: ignore[no-untyped-def]
    squares = splat(np.float32(0))
    for i in range(count):
        numbers = load_floats(x + VECTOR_BYTES * load_long(channels + 8 * i))
        squares = squares + numbers * numbers
    return squares


def make_encode_sketch(dtype: str, levels: int, both: bool) -> Any:
    """A kernel that encodes `count` pages of keys and adds the norms that saturated to the int64 at `found`.

    Keys are transformed if `levels` > 0: blocks of 2**levels channels, two of them in turns if `both`.
    """
    size, transpose = ITEM_BYTES[dtype], make_transpose(dtype)
    transform = make_transform(levels, both)
    infinity = np.float32(np.inf)

    @inner
    def write_signs(x, channels, count, y, rows, table, width, bound, squares, index, codes):  # type: ignore[no-untyped-def]
        """Signs of projections `y`, (rows) vectors, into units; those that could be wrong are found exactly before."""
        limit = close_to_zero(squares, bound)
        units = (rows + UNIT_ROWS - 1) // UNIT_ROWS
        for row in range(rows, units * UNIT_ROWS):
            store_floats(y + VECTOR_BYTES * row, splat(-infinity))
        for unit in range(units):
            at = y + VECTOR_BYTES * UNIT_ROWS * unit
            if pack_signs(at, limit, index, codes + 64 * unit):
                weights = table + 4 * UNIT_ROWS * width * unit
                for row in range(min(UNIT_ROWS, rows - UNIT_ROWS * unit)):
                    if any_close(at + VECTOR_BYTES * row, limit):
                        project_row(x, channels, count, weights + 4 * row, at + VECTOR_BYTES * row)
                pack_signs(at, limit, index, codes + 64 * unit)

    @inner
    def project(x, channels, count, y, rows, table, width):  # type: ignore[no-untyped-def]
        for unit in range((rows + UNIT_ROWS - 1) // UNIT_ROWS):
            weights = table + 4 * UNIT_ROWS * width * unit
            project_unit(x, channels, count, weights, y + VECTOR_BYTES * UNIT_ROWS * unit)

    @inner
    def split_channels(x, width, outliers, given, squares, inner, outer):  # type: ignore[no-untyped-def]
        """Lists of the channels that stay and of the outliers, ascending; the latter `given` or of largest `squares`.

        A NaN counts as largest, ties go to the lowest channel.
        """
        if given != 0:
            copy_bytes(given, 8 * outliers, outer)
        else:
            for c in range(width):
                square = load_float(squares + 4 * c)
                store_float(squares + 4 * c, square if square == square else infinity)
            for i in range(outliers):
                best, chosen = np.float32(-1), 0
                for c in range(width):
                    square = load_float(squares + 4 * c)
                    if square > best:
                        best, chosen = square, c
                store_float(squares + 4 * chosen, np.float32(-1))
                # Sorted by insertion.
                j = i
                while j > 0 and load_long(outer + 8 * (j - 1)) > chosen:
                    store_long(outer + 8 * j, load_long(outer + 8 * (j - 1)))
                    j -= 1
                store_long(outer + 8 * j, chosen)
        j = 0
        for c in range(width):
            if j < outliers and load_long(outer + 8 * j) == c:
                j += 1
            else:
                store_long(inner + 8 * (c - j), c)

    @inner
    def transpose_all(x, pitch, width, tile, target):  # type: ignore[no-untyped-def]
        """LANES tokens as (width) vectors; `tile` is used where a token has less than a vector of channels."""
        if width < LANES:
            for i in range(LANES):
                copy_bytes(x + i * pitch, size * width, tile + size * LANES * i)
            transpose(tile, size * LANES, target)
        else:
            for c in range(0, width, LANES):
                first = min(c, width - LANES)
                transpose(x + size * first, pitch, target + VECTOR_BYTES * first)

    @inner
    def sum_channels(x, pitch, tokens, width, tile, squares):  # type: ignore[no-untyped-def]
        """Add the squares of a page's keys to those of each channel, token by token."""
        for t in range(0, tokens, LANES):
            transpose_all(x + t * pitch, pitch, width, tile + VECTOR_BYTES * (width + LANES), tile)
            for c in range(width):
                total = load_float(squares + 4 * c)
                for i in range(LANES):
                    number = load_float(tile + VECTOR_BYTES * c + 4 * i)
                    total += number * number
                store_float(squares + 4 * c, total)

    def encode(x, pitch, page_step, out, out_step, count, spec, extra, given, scratch, found):  # type: ignore[no-untyped-def]
        width, tokens, outliers = load_long(spec + WIDTH), load_long(spec + TOKENS), load_long(spec + OUTLIERS)
        rows, outlier_rows = load_long(spec + M), load_long(spec + OUTLIER_M)
        table, outlier_table = load_long(extra + TABLE), load_long(extra + OUTLIER_TABLE)
        bound, outlier_bound = load_float(load_long(extra + BOUNDS)), load_float(load_long(extra + BOUNDS) + 4)
        step = VECTOR_BYTES * (width + LANES)
        numbers, kept, work = scratch, scratch + step, scratch + 2 * step
        y = work + step
        inner = y + VECTOR_BYTES * (max(rows, outlier_rows) + max(UNIT_ROWS, width))
        outer = inner + 8 * (width + LANES)
        squares = outer + 8 * (width + LANES)
        units = (rows + UNIT_ROWS - 1) // UNIT_ROWS
        outlier_units = (outlier_rows + UNIT_ROWS - 1) // UNIT_ROWS
        saturated = 0
        for c in range(width):
            store_long(inner + 8 * c, c)
        for page in range(count):
            keys, record = x + page * page_step, out + page * out_step
            if outliers > 0:
                if given == 0:
                    clear_bytes(squares, 4 * width)
                    sum_channels(keys, pitch, tokens, width, numbers, squares)
                split_channels(keys, width, outliers, given, squares, inner, outer)
                for i in range(outliers):
                    at = record + load_long(spec + CHANNELS) + i * load_long(spec + CHANNEL_BYTES)
                    if load_long(spec + CHANNEL_BYTES) == 1:
                        store_byte(at, load_long(outer + 8 * i))
                    else:
                        store_word(at, load_long(outer + 8 * i))
            for t in range(0, tokens, LANES):
                transpose_all(keys + t * pitch, pitch, width, kept, numbers)
                for i in range(LANES):
                    for c in range(0, size * width, 64):
                        prefetch(keys + page_step + (t + i) * pitch + c)
                index = t % 32 // LANES
                sum_of_squares = _sum_squares(numbers, inner, width - outliers)
                saturated += write_norms(sum_of_squares, record + load_long(spec + NORMS) + 2 * t)
                if levels > 0:
                    source = numbers
                    if outliers > 0:
                        copy_bytes(numbers, VECTOR_BYTES * width, kept)
                        for i in range(outliers):
                            store_floats(kept + VECTOR_BYTES * load_long(outer + 8 * i), splat(np.float32(0)))
                        source = kept
                    transform(source, width, load_long(extra + TRANSFORM), rows, work, y)
                else:
                    project(numbers, inner, width - outliers, y, rows, table, width)
                write_signs(
                    numbers, inner, width - outliers, y, rows, table, width, bound, sum_of_squares, index,
                    record + load_long(spec + CODES) + t // 32 * units * 64,
                )  # fmt: skip
                if outliers > 0:
                    sum_of_squares = _sum_squares(numbers, outer, outliers)
                    saturated += write_norms(sum_of_squares, record + load_long(spec + OUTLIER_NORMS) + 2 * t)
                    project(numbers, outer, outliers, y, outlier_rows, outlier_table, width)
                    write_signs(
                        numbers, outer, outliers, y, outlier_rows, outlier_table, width, outlier_bound, sum_of_squares,
                        index, record + load_long(spec + OUTLIER_CODES) + t // 32 * outlier_units * 64,
                    )  # fmt: skip
        store_long(found, load_long(found) + saturated)

    return encode
