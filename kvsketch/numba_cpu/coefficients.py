"""Queries as integers: what is folded into the codes of a page of keys, rounded once.

A coefficient is a number times a float16 scale of the page. With `limit` the largest integer allowed, all coefficients
of a query on a page are multiplied by ``limit/largest`` and rounded: an error of at most half of ``largest/limit``
each. Codes count from their midpoint, exactly, so that such an error is multiplied by at most half the range of the
codes.

Some queries are taken at a time; numbers of a query follow one another, and counts are multiples of 32.
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
    I64,
    LANES,
    VECTORS,
    emit_call,
    emit_constant,
    emit_dot_shorts,
    emit_halves,
    emit_load,
    emit_maximum,
    emit_multiply_add,
    emit_prefetch,
    emit_reduce_each,
    emit_round,
    emit_shuffle,
    emit_splat,
    emit_store,
)
from kvsketch.numba_cpu.simd import floats, ints, operation

#: Below this, the largest coefficient counts as zero: its inverse would not be finite.
SMALLEST = 1e-30


def padded(count: int) -> int:
    """Numbers in a row of coefficients."""
    return (count + 31) // 32 * 32


def extract_all(b: ir.IRBuilder, vectors: Any) -> list[Any]:
    return [b.extract_value(vectors, i) for i in range(vectors.type.count)]


def collect(b: ir.IRBuilder, kind: ir.Type, vectors: list[Any]) -> Any:
    result = ir.Constant(ir.ArrayType(kind, len(vectors)), ir.Undefined)
    for i, vector in enumerate(vectors):
        result = b.insert_value(result, vector, i)
    return result


def _starts(queries: int) -> Any:
    """An operation that gives what :func:`_measure` starts from."""
    kind = types.UniTuple(floats, 2 * queries)

    @intrinsic
    def start(_context: Any) -> Any:
        zero = emit_constant(VECTORS["float32"], 0.0)
        return operation(kind(), lambda b: ir.Constant(ir.ArrayType(zero.type, 2 * queries), [zero] * 2 * queries))

    return start


def _measure(queries: int, midpoint: float) -> Any:
    """An operation on two vectors of numbers of each query: the largest products so far, and sums of number*zero.

    The zero is that of a code at the midpoint.
    """
    kind = types.UniTuple(floats, 2 * queries)

    @intrinsic
    def measure(_context: Any, state: Any, numbers: Any, pitch: Any, scales: Any, zeros: Any, ahead: Any) -> Any:
        def emit(b: ir.IRBuilder, state: Any, numbers: Any, pitch: Any, scales: Any, zeros: Any, ahead: Any) -> Any:
            emit_prefetch(b, b.add(scales, ahead), 0)
            emit_prefetch(b, b.add(zeros, ahead), 0)
            halves, vectors = ir.VectorType(I16, LANES), extract_all(b, state)
            for part in range(2):
                scale = emit_halves(b, emit_load(b, scales, 2 * LANES * part, halves))
                zero = emit_halves(b, emit_load(b, zeros, 2 * LANES * part, halves))
                zero = emit_multiply_add(b, scale, emit_constant(scale.type, midpoint), zero)
                for query in range(queries):
                    start = b.add(numbers, b.mul(pitch, I64(query)))
                    x = emit_load(b, start, 4 * LANES * part, VECTORS["float32"])
                    size = emit_call(b, f"llvm.fabs.v{LANES}f32", scale.type, [b.fmul(x, scale)])
                    vectors[query] = emit_maximum(b, size, vectors[query])
                    vectors[queries + query] = emit_multiply_add(b, x, zero, vectors[queries + query])
            return collect(b, VECTORS["float32"], vectors)

        return operation(kind(kind, *(types.intp,) * 5), emit)

    return measure


def _settle(queries: int) -> Any:
    """An operation that writes each query's factor of a coefficient, its inverse, and the sum of number*zero.

    Four numbers each, 16 bytes apart.
    """
    kind = types.UniTuple(floats, 2 * queries)

    @intrinsic
    def settle(_context: Any, state: Any, limit: Any, target: Any) -> Any:
        def emit(b: ir.IRBuilder, state: Any, limit: Any, target: Any) -> None:
            vectors = extract_all(b, state)
            top = emit_reduce_each(b, vectors[:queries], emit_maximum)
            limits, none = emit_splat(b, limit, 4), emit_constant(top.type, 0.0)
            enough = b.fcmp_ordered(">", top, emit_constant(top.type, SMALLEST))
            emit_store(b, target, 0, b.select(enough, b.fdiv(top, limits), none))
            emit_store(b, target, 16, b.select(enough, b.fdiv(limits, top), none))
            emit_store(b, target, 32, emit_reduce_each(b, vectors[queries:], ir.IRBuilder.fadd))

        return operation(types.void(kind, types.float32, types.intp), emit)

    return settle


def _load_inverses(queries: int) -> Any:
    """An operation that gives what :func:`_round_products` needs: inverse factors, and sums of zero."""
    kind = types.Tuple((types.UniTuple(floats, queries), types.UniTuple(ints, queries)))

    @intrinsic
    def load_inverses(_context: Any, target: Any) -> Any:
        def emit(b: ir.IRBuilder, target: Any) -> Any:
            inverses = [emit_splat(b, emit_load(b, target, 16 + 4 * i, F32), LANES) for i in range(queries)]
            zeros = [emit_constant(VECTORS["int32"], 0)] * queries
            pair = (collect(b, VECTORS["float32"], inverses), collect(b, VECTORS["int32"], zeros))
            result = ir.Constant(ir.LiteralStructType([x.type for x in pair]), ir.Undefined)
            return b.insert_value(b.insert_value(result, pair[0], 0), pair[1], 1)

        return operation(kind(types.intp), emit)

    return load_inverses


def _round_products(queries: int, coefficients: str) -> Any:
    """An operation on two vectors of numbers of each query: stores coefficients, gives their sums so far."""
    sums, inverse = types.UniTuple(ints, queries), types.UniTuple(floats, queries)

    @intrinsic
    def round_products(
        _context: Any, totals: Any, inverses: Any, numbers: Any, pitch: Any, scales: Any, target: Any, target_pitch: Any
    ) -> Any:
        def emit(
            b: ir.IRBuilder, totals: Any, inverses: Any, numbers: Any, pitch: Any, scales: Any, target: Any, row: Any
        ) -> Any:
            halves, results = ir.VectorType(I16, LANES), extract_all(b, totals)
            both = [emit_halves(b, emit_load(b, scales, 2 * LANES * i, halves)) for i in range(2)]
            for query, factor in enumerate(extract_all(b, inverses)):
                start = b.add(numbers, b.mul(pitch, I64(query)))
                rounded = []
                for i, scale in enumerate(both):
                    x = emit_load(b, start, 4 * LANES * i, VECTORS["float32"])
                    rounded.append(emit_round(b, b.fmul(b.fmul(x, scale), factor)))
                address = b.add(target, b.mul(row, I64(query)))
                results[query] = emit_coefficients(b, coefficients, address, rounded, results[query])
            return collect(b, VECTORS["int32"], results)

        return operation(sums(sums, inverse, *(types.intp,) * 5), emit)

    return round_products


def emit_coefficients(b: ir.IRBuilder, coefficients: str, address: Any, rounded: list[Any], total: Any) -> Any:
    """Store two vectors of int32 as coefficients (kvsketch.numba_cpu.dots) and add them to int32 sums."""
    if coefficients == "int16":
        shorts = VECTORS["int16"]
        order = [8 * unit + row for unit in range(2 * LANES // 8) for row in (0, 2, 4, 6, 1, 3, 5, 7)]
        low, high = (b.bitcast(x, shorts) for x in rounded)
        packed = emit_shuffle(b, low, high, [2 * i for i in order])
        emit_store(b, address, 0, packed)
        return emit_dot_shorts(b, total, packed, emit_constant(shorts, 1))
    low, high = (b.bitcast(x, VECTORS["uint8"]) for x in rounded)
    emit_store(b, address, 0, emit_shuffle(b, low, high, [4 * i for i in range(2 * LANES)]))
    return b.add(total, b.add(*rounded))


def _settle_constants(queries: int, midpoint: float) -> Any:
    """An operation that takes what the midpoint adds to rounded coefficients off the sums of number*zero."""
    kind = types.UniTuple(ints, queries)

    @intrinsic
    def settle_constants(_context: Any, totals: Any, target: Any) -> Any:
        def emit(b: ir.IRBuilder, totals: Any, target: Any) -> None:
            four = ir.VectorType(F32, 4)
            total = b.sitofp(emit_reduce_each(b, extract_all(b, totals), ir.IRBuilder.add), four)
            factor = b.fmul(emit_load(b, target, 0, four), emit_constant(four, -midpoint))
            emit_store(b, target, 32, emit_multiply_add(b, total, factor, emit_load(b, target, 32, four)))

        return operation(types.void(kind, types.intp), emit)

    return settle_constants


def make_measure(queries: int, midpoint: float) -> Any:
    """A function that finds what the products number*scale of `queries` queries, `count` each, are divided by.

    ``results`` gets four numbers each of: the factor of a coefficient; its inverse; sum(number*zero), the zero being
    that of a code at the midpoint.
    """
    start, measure_step, settle = _starts(queries), _measure(queries, midpoint), _settle(queries)

    @inner
    def measure(numbers, pitch, scales, zeros, ahead, count, limit, results):  # type: ignore[no-untyped-def]
        state = start()
        for i in range(0, count, 2 * LANES):
            state = measure_step(state, numbers + 4 * i, pitch, scales + 2 * i, zeros + 2 * i, ahead)
        settle(state, np.float32(limit), results)

    return measure


def make_fold(queries: int, coefficients: str, midpoint: float) -> Any:
    """A function that turns number*scale of `queries` queries into coefficients, after :func:`make_measure`'s.

    The last four of ``results`` become what is to be added to factor*sum(coefficient*code) to make it
    sum(number*(scale*code + zero)).
    """
    load_inverses, round_products = _load_inverses(queries), _round_products(queries, coefficients)
    settle_constants, size = _settle_constants(queries, midpoint), COEFFICIENT_BYTES[coefficients] // 8

    @inner
    def fold(numbers, pitch, scales, count, target, target_pitch, results):  # type: ignore[no-untyped-def]
        inverses, totals = load_inverses(results)
        for i in range(0, count, 2 * LANES):
            totals = round_products(
                totals, inverses, numbers + 4 * i, pitch, scales + 2 * i, target + size * i, target_pitch
            )
        settle_constants(totals, results)

    return fold
