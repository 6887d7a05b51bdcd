"""Numbers too large for the integer sums: which they are, and their share of scores and mixes in float32.

All coefficients of a query on a tile share one step (:mod:`kvsketch.numba_cpu.coefficients`), that of the largest: an
outlier channel of keys, or a token with most of the weight, would round all others coarsely. Such numbers are left out
of the sums (their coefficient is 0), and number*scale*(code - midpoint) is added for each.

With x the products of a query's numbers and the largest scales that they meet, those above a threshold t are left out,
where ``t^2 * (share - how many)`` is what the squares of the others sum to. There are always fewer than `share`, none
where the largest is ordinary, and t is never below a floor, under which rounding does not matter. Which they are is a
matter of a query alone; codes are unpacked once for all queries of a block.

What is left out of a tile is listed in rows: four thresholds, 16 bytes, and then :data:`ROW` bytes a row of codes: its
index (later where its unit, its scale and its codes are), and the queries' numbers, 0 for those that do not leave it
out.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvsketch.layout import VECTOR_BYTES as PLANE_BYTES
from kvsketch.numba_cpu._compile import inner
from kvsketch.numba_cpu._tiers import VECTOR_BYTES
from kvsketch.numba_cpu.dots import PARTS, PLANES, QUERIES
from kvsketch.numba_cpu.emit import (
    F32,
    I16,
    I32,
    I64,
    LANES,
    VECTORS,
    emit_constant,
    emit_halves,
    emit_load,
    emit_multiply_add,
    emit_shuffle,
    emit_splat,
    emit_store,
)
from kvsketch.numba_cpu.simd import (
    above,
    absolute,
    load_float,
    load_floats,
    load_long,
    lowest_bit,
    multiply_add,
    operation,
    splat,
    stay_apart,
    store_float,
    store_long,
    sum_all,
    where_above,
)

#: Bytes before the rows and of a row, and where in a row the fields after the first are.
HEAD, ROW, SCALE, PLACE, NUMBERS = 16, 40, 8, 16, 24
#: Fewer channels of keys and fewer tokens of values than this are left out for a query.
KEY_SHARE, VALUE_SHARE = 30, 4
#: A threshold that would fall by less than this is settled.
SETTLED = 0.9
#: So that what rounding adds to a sum of squares lets no number too many through.
MARGIN = 1.0001


def large_bytes(share: int) -> int:
    """Bytes of the rows of a block of queries."""
    return (HEAD + ROW * QUERIES * share + 63) // 64 * 64


@inner
def _find_threshold(numbers, scales, count, top, floor, share):  # type: ignore[no-untyped-def]
    """What products of one query, of which `top` is the largest, are left out above; `top` itself for none."""
    one, zero = splat(np.float32(1)), splat(np.float32(0))
    threshold = floor
    while True:
        limit, rest, outside = splat(threshold), zero, zero
        for i in range(0, count, LANES):
            x = absolute(load_floats(numbers + 4 * i)) * load_floats(scales + 4 * i)
            kept = where_above(x, limit, zero, x)
            rest = multiply_add(kept, kept, rest)
            outside = outside + where_above(x, limit, one, zero)
        square, left = sum_all(rest), np.float32(share) - sum_all(outside)
        if threshold == floor:
            if left > 0 and square <= left * floor * floor:
                return floor
            threshold = top  # too many are above the floor: come down from above
            continue
        lower = np.float32(MARGIN * math.sqrt(square / left))
        if not lower < np.float32(SETTLED) * threshold:
            return threshold
        if lower <= floor:
            return floor
        threshold = lower


@lru_cache
def make_split(share: int) -> tuple[Any, Any]:
    """Two functions: find what each query leaves out, and take it out of numbers that were multiplied by factors.

    One of each serves all numbers of queries: they are compiled once a kernel.
    """

    @inner
    def find(queries, numbers, pitch, scales, count, limit, floor, results, rows):  # type: ignore[no-untyped-def]
        """Whether anything is left out; tops in `rows` become thresholds, and `results` what follows from them."""
        stay_apart()
        any_large = False
        for query in range(queries):
            top = load_float(rows + 4 * query)
            if floor < top < np.inf:
                threshold = _find_threshold(numbers + pitch * query, scales, count, top, floor, share)
                if threshold < top:
                    any_large = True
                    store_float(rows + 4 * query, threshold)
                    store_float(results + 4 * query, threshold / np.float32(limit))
                    store_float(results + 16 + 4 * query, np.float32(limit) / threshold)
        return any_large

    @inner
    def split(queries, numbers, pitch, scales, count, target, target_pitch, rows):  # type: ignore[no-untyped-def]
        """Numbers above the thresholds become 0 and are listed; how many rows of codes there are."""
        stay_apart()
        found, row = 0, rows + HEAD
        for i in range(0, count, LANES):
            largest, left_out = load_floats(scales + 4 * i), 0
            for query in range(queries):
                product = absolute(load_floats(numbers + pitch * query + 4 * i)) * largest
                left_out |= above(product, splat(load_float(rows + 4 * query)))
            while left_out != 0:
                index = i + lowest_bit(left_out)
                left_out &= left_out - 1
                store_long(row, index)
                for query in range(queries):
                    number = load_float(numbers + pitch * query + 4 * index)
                    product = abs(number) * load_float(scales + 4 * index)
                    if product > load_float(rows + 4 * query):
                        store_float(target + target_pitch * query + 4 * index, np.float32(0))
                    else:
                        number = np.float32(0)
                    store_float(row + NUMBERS + 4 * query, number)
                found, row = found + 1, row + ROW
        return found

    return find, split


@inner
def locate_rows(rows, found, count, step, depth, unit_step):  # type: ignore[no-untyped-def]
    """Replace the indices of rows, `count` a page, by where their units, their scales and the codes in a unit are."""
    for i in range(found):
        row = rows + HEAD + ROW * i
        page, index = load_long(row) // count * step, load_long(row) % count
        store_long(row, page + index // depth * unit_step)
        store_long(row + SCALE, page + 2 * index)
        store_long(row + PLACE, index % depth)


def _row_codes(b: ir.IRBuilder, unit: Any, row: Any, bits: int, offset: int, narrow: bool) -> list[Any]:
    """Codes of one row of a unit: a vector of VECTOR_BYTES/8 int32 (`narrow`) or int64 for each plane of 8 lanes."""
    wide = ir.VectorType(I64, VECTOR_BYTES // 8)
    kind = ir.VectorType(I32, wide.count) if narrow else wide

    def load(address: Any, vector: int, shift: Any) -> Any:
        """Bytes of the row, lowest in each word."""
        words = emit_load(b, address, PLANE_BYTES * vector + offset, wide)
        words = b.lshr(words, emit_splat(b, shift, wide.count))
        return b.trunc(words, kind) if narrow else words

    def take(words: Any, first: int, width: int) -> Any:
        return b.and_(b.lshr(words, emit_constant(kind, first)), emit_constant(kind, (1 << width) - 1))

    shift, later = b.shl(b.and_(row, I64(7)), I64(3)), b.lshr(row, I64(3))
    if bits not in (1, 3):
        per = 8 // bits
        loaded = [load(unit, vector, shift) for vector in range(PLANES // per)]
        return [take(loaded[p // per], bits * (p % per), bits) for p in range(PLANES)]
    bit_shift = b.add(shift, b.shl(later, I64(2)))
    if bits == 1:
        words = load(unit, 0, bit_shift)
        return [take(words, p, 1) for p in range(PLANES)]
    low, high = load(b.add(unit, b.mul(later, I64(PLANE_BYTES))), 0, shift), load(unit, 2, bit_shift)
    two = emit_constant(kind, 2)
    return [b.or_(take(low, 2 * p, 2), b.shl(take(high, p, 1), two)) for p in range(PLANES)]


def _load_scale(b: ir.IRBuilder, address: Any, count: int) -> Any:
    """The float16 number at an address, `count` times float32."""
    scale = emit_halves(b, emit_splat(b, emit_load(b, address, 0, I16), LANES))
    return scale if count == LANES else emit_shuffle(b, scale, scale, list(range(count)))


def _add_rows(
    b: ir.IRBuilder, rows: Any, found: Any, queries: Any, target: Any, pitch: Any, offsets: list[int],
    kind: ir.VectorType, take: Any,
) -> None:  # fmt: skip
    """Add all rows to the vectors of `kind` that each query has at `offsets` from `target`, one a plane.

    ``take(row)`` gives codes less their midpoint, and a scale for each or for all planes. What is compiled is for
    :data:`QUERIES` queries: fewer have the last one's numbers and places again, and write the same there.
    """
    last = b.sub(queries, I64(1))
    order = [b.select(b.icmp_signed("<", I64(i), last), I64(i), last) for i in range(QUERIES)]
    sums = [(b.add(target, b.mul(pitch, query)), offset) for offset in offsets for query in order]
    room = [cgutils.alloca_once(b, kind) for _ in sums]
    for place, (address, offset) in zip(room, sums, strict=True):
        b.store(emit_load(b, address, offset, kind), place)
    with cgutils.for_range(b, found) as loop:
        row = b.add(rows, b.add(b.mul(loop.index, I64(ROW)), I64(HEAD)))
        codes, scales = take(row)
        numbers = [emit_load(b, b.add(row, b.mul(query, I64(4))), NUMBERS, F32) for query in order]
        weights = [[b.fmul(emit_splat(b, x, kind.count), scale) for scale in scales] for x in numbers]
        for plane, x in enumerate(codes):
            for query in range(QUERIES):
                place = room[plane * QUERIES + query]
                b.store(emit_multiply_add(b, x, weights[query][plane % len(scales)], b.load(place)), place)
    for place, (address, offset) in zip(room, sums, strict=True):
        emit_store(b, address, offset, b.load(place))


def make_score_rows(bits: int) -> Any:
    """An operation that adds the share of `found` channels to the scores of 32 tokens (lanes)."""
    midpoint = (2**bits - 1) / 2

    @intrinsic
    def score_rows(
        _context: Any, units: Any, scales: Any, rows: Any, found: Any, queries: Any, target: Any, pitch: Any
    ) -> Any:
        def emit(
            b: ir.IRBuilder, units: Any, scales: Any, rows: Any, found: Any, queries: Any, target: Any, pitch: Any
        ) -> None:
            kind = ir.VectorType(F32, VECTOR_BYTES // 8)
            for part in range(PARTS):

                def take(row: Any, part: int = part) -> tuple[list[Any], list[Any]]:
                    unit = b.add(units, emit_load(b, row, 0, I64))
                    codes = _row_codes(b, unit, emit_load(b, row, PLACE, I64), bits, VECTOR_BYTES * part, True)
                    scale = _load_scale(b, b.add(scales, emit_load(b, row, SCALE, I64)), kind.count)
                    return [b.fadd(b.sitofp(x, kind), emit_constant(kind, -midpoint)) for x in codes], [scale]

                offsets = [4 * (8 * plane + kind.count * part) for plane in range(PLANES)]
                _add_rows(b, rows, found, queries, target, pitch, offsets, kind, take)

        return operation(types.void(*(types.intp,) * 7), emit)

    return score_rows


def make_mix_rows(bits: int, shared: bool) -> Any:
    """An operation that adds the share of `found` tokens to 32 channels (lanes) of mixes: to a lane's first number.

    Scales are those of each plane of 8 channels, the same for all where `shared`.
    """
    midpoint = (2**bits - 1) / 2

    @intrinsic
    def mix_rows(
        _context: Any, units: Any, scales: Any, rows: Any, found: Any, queries: Any, target: Any, pitch: Any
    ) -> Any:
        def emit(
            b: ir.IRBuilder, units: Any, scales: Any, rows: Any, found: Any, queries: Any, target: Any, pitch: Any
        ) -> None:
            kind = VECTORS["float32"]
            # Words of 64 bits whose upper halves are 0 are pairs of a code and 0.
            middle = ir.Constant(kind, [-midpoint, 0.0] * (LANES // 2))
            for part in range(PARTS):

                def take(row: Any, part: int = part) -> tuple[list[Any], list[Any]]:
                    unit, scale = b.add(units, emit_load(b, row, 0, I64)), emit_load(b, row, SCALE, I64)
                    codes = _row_codes(b, unit, emit_load(b, row, PLACE, I64), bits, VECTOR_BYTES * part, False)
                    numbers = [b.fadd(b.sitofp(b.bitcast(x, VECTORS["int32"]), kind), middle) for x in codes]
                    return numbers, [
                        _load_scale(b, b.add(b.extract_value(scales, plane), scale), LANES)
                        for plane in range(1 if shared else PLANES)
                    ]

                offsets = [PLANE_BYTES * plane + VECTOR_BYTES * part for plane in range(PLANES)]
                _add_rows(b, rows, found, queries, target, pitch, offsets, kind, take)

        four = types.UniTuple(types.intp, PLANES)
        return operation(types.void(types.intp, four, *(types.intp,) * 5), emit)

    return mix_rows
