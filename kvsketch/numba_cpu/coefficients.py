"""Queries and softmax weights as integers: what is folded into packed codes, rounded once.

A coefficient is a number times a float16 scale: of a query's channel and a page of keys, or of a token's weight and a
group of values. With `limit` the largest integer allowed, all coefficients of a query on a tile of pages are multiplied
by ``limit/largest``, `largest` being the largest of its numbers times the largest scale that they meet there, and
rounded: an error of at most half of ``largest/limit`` each. Numbers that would make this coarse for all others are
left out (:mod:`kvsketch.numba_cpu.large`). Codes count from their midpoint, exactly, so that such an
error is multiplied by at most half the range of the codes. Where no number is negative (weights), 16 bits hold
coefficients up to 65535, stored less :func:`kvsketch.numba_cpu.unit_codes.bias_of`.

Some queries are taken at a time; numbers of a query follow one another, and counts are multiples of 32. Scales and
zeros lie in runs of `count` float16 numbers, one for each of `pages` pages that start `step` bytes apart.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvsketch.numba_cpu._compile import inner
from kvsketch.numba_cpu.dots import COEFFICIENT_BYTES
from kvsketch.numba_cpu.emit import (
    F32,
    I16,
    I32,
    I64,
    LANES,
    VECTORS,
    emit_absolute,
    emit_constant,
    emit_dot_shorts,
    emit_halves,
    emit_load,
    emit_maximum,
    emit_multiply_add,
    emit_prefetch,
    emit_reduce_each,
    emit_shuffle,
    emit_splat,
    emit_store,
)
from kvsketch.numba_cpu.large import make_split
from kvsketch.numba_cpu.simd import (
    floats,
    ints,
    load_float,
    load_floats,
    load_halves,
    max_all,
    maximum,
    operation,
    splat,
    store_floats,
)
from kvsketch.numba_cpu.unit_codes import bias_of

#: Added to a float32 below 2^22 in size, this rounds it to a whole number, ties to even.
MAGIC = 1.5 * 2.0**23
MAGIC_BITS = 0x4B400000
#: Below this, the largest coefficient counts as zero: its inverse would not be finite.
SMALLEST = 1e-30


def padded(count: int) -> int:
    """Numbers in a row of coefficients."""
    return (count + 31) // 32 * 32


#: The same for kernels.
padded_rows = inner(padded)


def extract_all(b: ir.IRBuilder, vectors: Any) -> list[Any]:
    return [b.extract_value(vectors, i) for i in range(vectors.type.count)]


def collect(b: ir.IRBuilder, kind: ir.Type, vectors: list[Any]) -> Any:
    result = ir.Constant(ir.ArrayType(kind, len(vectors)), ir.Undefined)
    for i, vector in enumerate(vectors):
        result = b.insert_value(result, vector, i)
    return result


def emit_coefficients(b: ir.IRBuilder, coefficients: str, address: Any, rounded: list[Any], total: Any) -> Any:
    """Store two vectors of whole numbers as coefficients (kvsketch.numba_cpu.dots) and add them to int32 sums.

    They are given as float32 that are :data:`MAGIC` larger: the lowest bits of those hold them.
    """
    rounded = [b.bitcast(x, VECTORS["int32"]) for x in rounded]
    if coefficients == "int16":
        shorts = VECTORS["int16"]
        order = [8 * unit + row for unit in range(2 * LANES // 8) for row in (0, 2, 4, 6, 1, 3, 5, 7)]
        low, high = (b.bitcast(x, shorts) for x in rounded)
        packed = emit_shuffle(b, low, high, [2 * i for i in order])
        emit_store(b, address, 0, packed)
        return emit_dot_shorts(b, total, packed, emit_constant(shorts, 1))
    low, high = (b.bitcast(x, VECTORS["uint8"]) for x in rounded)
    emit_store(b, address, 0, emit_shuffle(b, low, high, [4 * i for i in range(2 * LANES)]))
    both = b.add(b.add(*rounded), emit_constant(total.type, -2 * MAGIC_BITS % 2**32))
    return b.add(total, both)


@inner
def largest_of_groups(scales, groups, pages, step, tokens, target):  # type: ignore[no-untyped-def]
    """The largest scale of each token of values, float32, from the address of the first group's on; and that of all."""
    highest = splat(np.float32(0))
    for page in range(pages):
        for i in range(0, tokens, LANES):
            at = scales + page * step + 2 * i
            top = load_halves(at)
            for group in range(1, groups):
                top = maximum(load_halves(at + 2 * tokens * group), top)
            store_floats(target + 4 * (page * tokens + i), top)
            highest = maximum(top, highest)
    return max_all(highest)


@inner
def largest_of_pages(scales, pages, step, count, target):  # type: ignore[no-untyped-def]
    """The largest scale of each channel of keys, float32."""
    for i in range(0, count, LANES):
        top = load_halves(scales + 2 * i)
        for page in range(1, pages):
            top = maximum(load_halves(scales + page * step + 2 * i), top)
        store_floats(target + 4 * i, top)


def _start_tops(queries: int) -> Any:
    kind = types.UniTuple(floats, queries)

    @intrinsic
    def start_tops(_context: Any) -> Any:
        zero = emit_constant(VECTORS["float32"], 0.0)
        return operation(kind(), lambda b: ir.Constant(ir.ArrayType(zero.type, queries), [zero] * queries))

    return start_tops


def _measure_tops(queries: int, signed: bool) -> Any:
    """An operation on a vector of numbers of each query: the largest products with `scales` so far."""
    kind = types.UniTuple(floats, queries)

    @intrinsic
    def measure_tops(_context: Any, tops: Any, numbers: Any, pitch: Any, scales: Any) -> Any:
        def emit(b: ir.IRBuilder, tops: Any, numbers: Any, pitch: Any, scales: Any) -> Any:
            scale, vectors = emit_load(b, scales, 0, VECTORS["float32"]), extract_all(b, tops)
            for query in range(queries):
                x = emit_load(b, b.add(numbers, b.mul(pitch, I64(query))), 0, VECTORS["float32"])
                size = b.fmul(x, scale)
                if signed:
                    size = emit_absolute(b, size)
                vectors[query] = emit_maximum(b, size, vectors[query])
            return collect(b, VECTORS["float32"], vectors)

        return operation(kind(kind, types.intp, types.intp, types.intp), emit)

    return measure_tops


def _settle_tops(queries: int) -> Any:
    """An operation that writes each query's factor of a coefficient and its inverse, and its top, four numbers each."""
    kind = types.UniTuple(floats, queries)

    @intrinsic
    def settle_tops(_context: Any, tops: Any, limit: Any, target: Any, tops_target: Any) -> Any:
        def emit(b: ir.IRBuilder, tops: Any, limit: Any, target: Any, tops_target: Any) -> None:
            top = emit_reduce_each(b, extract_all(b, tops), emit_maximum)
            limits, none = emit_splat(b, limit, 4), emit_constant(top.type, 0.0)
            enough = b.fcmp_ordered(">", top, emit_constant(top.type, SMALLEST))
            emit_store(b, tops_target, 0, top)
            emit_store(b, target, 0, b.select(enough, b.fdiv(top, limits), none))
            emit_store(b, target, 16, b.select(enough, b.fdiv(limits, top), none))

        return operation(types.void(kind, types.float32, types.intp, types.intp), emit)

    return settle_tops


def _start_group(queries: int) -> Any:
    """An operation that gives what :func:`_round_numbers` starts from: sums of coefficients and of number*zero."""
    kind = types.Tuple((types.UniTuple(ints, queries), types.UniTuple(floats, queries)))

    @intrinsic
    def start_group(_context: Any) -> Any:
        def emit(b: ir.IRBuilder) -> Any:
            integers = collect(b, VECTORS["int32"], [emit_constant(VECTORS["int32"], 0)] * queries)
            numbers = collect(b, VECTORS["float32"], [emit_constant(VECTORS["float32"], 0.0)] * queries)
            return _pair(b, integers, numbers)

        return operation(kind(), emit)

    return start_group


def _pair(b: ir.IRBuilder, x: Any, y: Any) -> Any:
    result = ir.Constant(ir.LiteralStructType([x.type, y.type]), ir.Undefined)
    return b.insert_value(b.insert_value(result, x, 0), y, 1)


def _round_numbers(queries: int, coefficients: str, midpoint: float, bias: int) -> Any:
    """An operation on two vectors of numbers of each query and the same times their inverse factors.

    Stores the coefficients of a group; gives their sums, and the sums of number*zero, so far.
    """
    integers, reals = types.UniTuple(ints, queries), types.UniTuple(floats, queries)

    @intrinsic
    def round_numbers(
        _context: Any, totals: Any, sums: Any, numbers: Any, pitch: Any, scaled: Any, scaled_pitch: Any, scales: Any,
        zeros: Any, ahead: Any, target: Any, target_pitch: Any,
    ) -> Any:  # fmt: skip
        def emit(
            b: ir.IRBuilder, totals: Any, sums: Any, numbers: Any, pitch: Any, scaled: Any, scaled_pitch: Any,
            scales: Any, zeros: Any, ahead: Any, target: Any, row: Any,
        ) -> Any:  # fmt: skip
            emit_prefetch(b, b.add(scales, ahead), 0)
            emit_prefetch(b, b.add(zeros, ahead), 0)
            halves, kind = ir.VectorType(I16, LANES), VECTORS["float32"]
            scale = [emit_halves(b, emit_load(b, scales, 2 * LANES * i, halves)) for i in range(2)]
            zero = [emit_halves(b, emit_load(b, zeros, 2 * LANES * i, halves)) for i in range(2)]
            middle, shift = emit_constant(kind, midpoint), emit_constant(kind, MAGIC - bias)
            zero = [emit_multiply_add(b, x, middle, z) for x, z in zip(scale, zero, strict=True)]
            results, constants = extract_all(b, totals), extract_all(b, sums)
            for query in range(queries):
                number, large = (
                    b.add(start, b.mul(step, I64(query))) for start, step in ((numbers, pitch), (scaled, scaled_pitch))
                )
                rounded = []
                for i in range(2):
                    x = emit_load(b, number, 4 * LANES * i, kind)
                    constants[query] = emit_multiply_add(b, x, zero[i], constants[query])
                    x = emit_load(b, large, 4 * LANES * i, kind)
                    rounded.append(emit_multiply_add(b, x, scale[i], shift))
                address = b.add(target, b.mul(row, I64(query)))
                results[query] = emit_coefficients(b, coefficients, address, rounded, results[query])
            return _pair(b, collect(b, VECTORS["int32"], results), collect(b, kind, constants))

        result = types.Tuple((integers, reals))
        return operation(result(integers, reals, *(types.intp,) * 9), emit)

    return round_numbers


def _settle_group(queries: int, midpoint: float) -> Any:
    """An operation that writes four numbers: what is to be added to factor*sum(coefficient*code).

    `bias` is what all coefficients together are stored less by.
    """
    integers, numbers = types.UniTuple(ints, queries), types.UniTuple(floats, queries)

    @intrinsic
    def settle_group(_context: Any, totals: Any, sums: Any, bias: Any, factors: Any, target: Any) -> Any:
        def emit(b: ir.IRBuilder, totals: Any, sums: Any, bias: Any, factors: Any, target: Any) -> None:
            four = ir.VectorType(F32, 4)
            total = emit_reduce_each(b, extract_all(b, totals), ir.IRBuilder.add)
            total = b.sitofp(b.add(total, emit_splat(b, b.trunc(bias, I32), 4)), four)
            factor = b.fmul(emit_load(b, factors, 0, four), emit_constant(four, -midpoint))
            constant = emit_reduce_each(b, extract_all(b, sums), ir.IRBuilder.fadd)
            emit_store(b, target, 0, emit_multiply_add(b, total, factor, constant))

        return operation(types.void(integers, numbers, types.intp, types.intp, types.intp), emit)

    return settle_group


def make_scale(queries: int, *, signed: bool, share: int = 0) -> Any:
    """A function that multiplies `count` numbers of each query by the inverse of its factor, which it finds.

    ``results`` gets four factors and four inverses. With `share` (:mod:`kvsketch.numba_cpu.large`), numbers whose
    products are far above the others' and above `floor` become 0 and are listed in `rows`. Returns the number of rows.
    """
    start_tops, measure_tops, settle_tops = _start_tops(queries), _measure_tops(queries, signed), _settle_tops(queries)
    find_large, split = make_split(share)

    @inner
    def scale(numbers, pitch, scales, count, limit, floor, target, target_pitch, results, rows):  # type: ignore[no-untyped-def]
        tops = start_tops()
        for i in range(0, count, LANES):
            tops = measure_tops(tops, numbers + 4 * i, pitch, scales + 4 * i)
        settle_tops(tops, np.float32(limit), results, rows)
        any_large = False
        if share > 0:
            for query in range(queries):
                any_large |= load_float(rows + 4 * query) > floor
            if any_large:
                any_large = find_large(queries, numbers, pitch, scales, count, limit, floor, results, rows)
        for query in range(queries):
            factor = splat(load_float(results + 16 + 4 * query))
            source, out = numbers + pitch * query, target + target_pitch * query
            for i in range(0, count, LANES):
                store_floats(out + 4 * i, load_floats(source + 4 * i) * factor)
        if any_large:
            return split(queries, numbers, pitch, scales, count, target, target_pitch, rows)
        return 0

    return scale


def make_fold(queries: int, coefficients: str, midpoint: float, *, signed: bool) -> Any:
    """A function that turns number*scale into coefficients, after :func:`make_scale`'s.

    ``constants`` gets four numbers: what is to be added to factor*sum(coefficient*code) to make it
    sum(number*(scale*code + zero)).
    """
    bias, size = bias_of(coefficients, signed), COEFFICIENT_BYTES[coefficients] // 8
    start_group, round_numbers = _start_group(queries), _round_numbers(queries, coefficients, midpoint, bias)
    settle_group = _settle_group(queries, midpoint)

    @inner
    def fold(
        numbers, pitch, scaled, scaled_pitch, scales, zeros, ahead, pages, step, count, target, row, factors, constants
    ):  # type: ignore[no-untyped-def]  # fmt: skip
        totals, sums = start_group()
        for page in range(pages):
            for i in range(0, count, 2 * LANES):
                at, offset = page * step + 2 * i, page * count + i
                totals, sums = round_numbers(
                    totals, sums, numbers + 4 * offset, pitch, scaled + 4 * offset, scaled_pitch,
                    scales + at, zeros + at, ahead, target + size * offset, row,
                )  # fmt: skip
        settle_group(totals, sums, bias * pages * count, factors, constants)

    return fold
