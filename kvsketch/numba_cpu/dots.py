"""The innermost loops: integer dot products of packed codes with coefficients, for several queries at once.

A unit of codes is 32 lanes by 8 contraction rows (16 for 1 and 3 bits; docs/layout.md). In 64 of its bytes, byte
``8*i + r`` holds codes of row r, so that an int32 covers four rows of one lane and a dot product of neighbouring
numbers contracts over rows. What numbers codes are multiplied as: :mod:`kvsketch.numba_cpu.unit_codes`. Lanes are
tokens for keys and channels for values.

int16 coefficients take the even and the odd rows in turn: those of 8 rows are stored as rows 0 2 4 6 1 3 5 7, 16
bytes. int8 coefficients take all rows at once and are stored in order, 8 bytes.

Weights of values are never negative. Their int16 coefficients are stored less 32768, so that all 16 bits count, and
the sums start from 32768 times those of the codes, which are the same for all queries.

Sums are tuples of int32 vectors, plane by plane of 8 lanes and in a plane query by query; where products are summed in
int16 first, there are as many vectors of those. A vector shorter than 64 bytes covers a part of a plane's lanes; parts
are summed one after the other.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvsketch.layout import unit_bytes, unit_rows
from kvsketch.numba_cpu._compile import inner
from kvsketch.numba_cpu._tiers import TIER, VECTOR_BYTES
from kvsketch.numba_cpu.emit import (
    F32,
    I64,
    LANES,
    VECTORS,
    emit_constant,
    emit_dot_bytes,
    emit_dot_shorts,
    emit_load,
    emit_multiply_add,
    emit_pairs,
    emit_prefetch,
    emit_repeat,
    emit_shuffle,
    emit_splat,
    emit_store,
    emit_sum_bytes,
)
from kvsketch.numba_cpu.simd import ints, operation, shorts
from kvsketch.numba_cpu.unit_codes import (
    PLANES,
    are_alone,
    bias_of,
    byte_codes,
    plane_weight,
    short_codes,
    sums_bytes_in_shorts,
    units_in_shorts,
)

#: Parts that 64 bytes of codes are taken in.
PARTS = 64 // VECTOR_BYTES
#: Queries that share a load of codes, as many as there are registers for.
QUERIES = 4 if TIER == "avx512-vnni" else 2
#: Bytes that the sums of the codes of 32 channels take.
KEPT = 64 * PLANES
#: Bytes of the coefficients of 8 rows.
COEFFICIENT_BYTES = {"int16": 16, "int8": 8}


def _sums(queries: int, in_shorts: bool = False) -> types.UniTuple:
    return types.UniTuple(shorts if in_shorts else ints, PLANES * queries)


def _zero_sums(queries: int, in_shorts: bool = False) -> Any:
    vector = VECTORS["int16" if in_shorts else "int32"]

    @intrinsic
    def zero_sums(_context: Any) -> Any:
        array = ir.ArrayType(vector, PLANES * queries)
        zeros = ir.Constant(array, [emit_constant(vector, 0)] * array.count)
        return operation(_sums(queries, in_shorts)(), lambda b: zeros)

    return zero_sums


def _add_unit(bits: int, coefficients: str, queries: int, shared: bool) -> Any:
    """An operation that adds one unit's products to sums; `shared`: all planes have the same coefficients.

    Meanwhile the bytes `ahead` of the unit are asked for.
    """
    in_shorts = sums_bytes_in_shorts(bits, coefficients)
    kind, size = _sums(queries, in_shorts), COEFFICIENT_BYTES[coefficients]
    element = "int16" if coefficients == "int16" else "uint8"

    def load_codes(b: ir.IRBuilder, unit: Any) -> Any:
        """For each 8 rows and plane: vectors to be multiplied with as many of coefficients."""
        if coefficients == "int16":
            return short_codes(b, unit, 0, bits)
        alone = are_alone(bits, coefficients)
        return [[(codes,) for codes in planes] for planes in byte_codes(b, unit, 0, bits, alone=alone)]

    def add_products(b: ir.IRBuilder, total: Any, codes: Any, numbers: Any) -> Any:
        if coefficients == "int16":
            return emit_dot_shorts(b, total, codes, numbers)
        return b.add(total, emit_pairs(b, codes, numbers)) if in_shorts else emit_dot_bytes(b, total, codes, numbers)

    @intrinsic
    def add_unit(_context: Any, sums: Any, unit: Any, ahead: Any, numbers: Any, pitch: Any) -> Any:
        def emit(b: ir.IRBuilder, sums: Any, unit: Any, ahead: Any, numbers: Any, pitch: Any) -> Any:
            for line in range(0, unit_bytes(bits), 64):
                emit_prefetch(b, b.add(unit, ahead), line)
            totals = [b.extract_value(sums, i) for i in range(PLANES * queries)]
            bases = [b.extract_value(numbers, p) for p in range(1 if shared else PLANES)]
            for rows, planes in enumerate(load_codes(b, unit)):
                loaded = {}
                for plane, codes in enumerate(planes):
                    for query in range(queries):
                        base = 0 if shared else plane
                        if (base, query) not in loaded:
                            address = b.add(bases[base], b.mul(pitch, I64(query)))
                            loaded[base, query] = [
                                emit_repeat(b, address, size * rows + 8 * part, element) for part in range(size // 8)
                            ]
                        i = plane * queries + query
                        for x, y in zip(codes, loaded[base, query], strict=True):
                            totals[i] = add_products(b, totals[i], x, y)
            for i, total in enumerate(totals):
                sums = b.insert_value(sums, total, i)
            return sums

        bases = types.UniTuple(types.intp, PLANES)
        return operation(kind(kind, types.intp, types.intp, bases, types.intp), emit)

    return add_unit


def _widen(queries: int) -> Any:
    """An operation that adds to sums what was summed in int16."""
    kind = _sums(queries)

    @intrinsic
    def widen(_context: Any, sums: Any, short_sums: Any) -> Any:
        def emit(b: ir.IRBuilder, sums: Any, short_sums: Any) -> Any:
            one = emit_constant(VECTORS["int16"], 1)
            for i in range(PLANES * queries):
                total = emit_dot_shorts(b, b.extract_value(sums, i), b.extract_value(short_sums, i), one)
                sums = b.insert_value(sums, total, i)
            return sums

        return operation(kind(kind, _sums(queries, True)), emit)

    return widen


def _unit_steps(bits: int, coefficients: str) -> tuple[int, int]:
    """Bytes of a unit of codes and of its coefficients."""
    return unit_bytes(bits), COEFFICIENT_BYTES[coefficients] * unit_rows(bits) // 8


def _make_add_in_shorts(bits: int, coefficients: str, queries: int, shared: bool) -> Any:
    """A function that adds the products of `pages` times `units` units to sums, by way of int16.

    Arguments are as for the blocks below.
    """
    add_unit, (code_step, step) = _add_unit(bits, coefficients, queries, shared), _unit_steps(bits, coefficients)
    most, zero_shorts, widen = units_in_shorts(bits), _zero_sums(queries, True), _widen(queries)

    @inner
    def add_in_shorts(sums, codes, ahead, pages, page_step, units, numbers, pitch):  # type: ignore[no-untyped-def]
        n0, n1, n2, n3 = numbers
        offset, room, short_sums = 0, most, zero_shorts()
        for page in range(pages):
            start, first = codes + page * page_step, 0
            while first < units:
                if room == 0:
                    sums, short_sums, room = widen(sums, short_sums), zero_shorts(), most
                count = min(room, units - first)
                for unit in range(first, first + count):
                    at = (n0 + offset, n1 + offset, n2 + offset, n3 + offset)
                    short_sums = add_unit(short_sums, start + code_step * unit, ahead, at, pitch)
                    offset += step
                first, room = first + count, room - count
        return widen(sums, short_sums)

    return add_in_shorts


def _first_sums(bits: int, queries: int, bias: int) -> tuple[Any, Any]:
    """Two operations: add a unit's codes to sums of four planes, and make of those what each query starts from."""
    four, kind = _sums(1), _sums(queries)

    @intrinsic
    def add_codes(_context: Any, sums: Any, unit: Any) -> Any:
        def emit(b: ir.IRBuilder, sums: Any, unit: Any) -> Any:
            totals = [b.extract_value(sums, plane) for plane in range(PLANES)]
            if bits == 3:  # its codes, where they lie, take nine bits
                one = emit_constant(VECTORS["int16"], 1)
                for planes in short_codes(b, unit, 0, bits):
                    for plane, halves in enumerate(planes):
                        for codes in halves:
                            totals[plane] = emit_dot_shorts(b, totals[plane], codes, one)
            else:
                for planes in byte_codes(b, unit, 0, bits):
                    for plane, codes in enumerate(planes):
                        totals[plane] = emit_sum_bytes(b, totals[plane], codes)
            for plane, total in enumerate(totals):
                sums = b.insert_value(sums, total, plane)
            return sums

        return operation(four(four, types.intp), emit)

    @intrinsic
    def first_sums(_context: Any, sums: Any) -> Any:
        def emit(b: ir.IRBuilder, sums: Any) -> Any:
            result = ir.Constant(ir.ArrayType(VECTORS["int32"], PLANES * queries), ir.Undefined)
            for plane in range(PLANES):
                total = b.extract_value(sums, plane)
                total = b.mul(total, emit_constant(total.type, bias))
                for query in range(queries):
                    result = b.insert_value(result, total, plane * queries + query)
            return result

        return operation(kind(four), emit)

    return add_codes, first_sums


@intrinsic
def _store_codes(_context: Any, sums: Any, target: Any) -> Any:
    """Write sums of codes of four planes."""

    def emit(b: ir.IRBuilder, sums: Any, target: Any) -> None:
        for plane in range(PLANES):
            emit_store(b, target, VECTOR_BYTES * plane, b.extract_value(sums, plane))

    return operation(types.void(_sums(1), types.intp), emit)


@intrinsic
def _load_codes(_context: Any, source: Any) -> Any:
    """Sums of codes of four planes as :func:`_store_codes` wrote them."""

    def emit(b: ir.IRBuilder, source: Any) -> Any:
        sums = ir.Constant(ir.ArrayType(VECTORS["int32"], PLANES), ir.Undefined)
        for plane in range(PLANES):
            loaded = emit_load(b, source, VECTOR_BYTES * plane, VECTORS["int32"])
            sums = b.insert_value(sums, loaded, plane)
        return sums

    return operation(_sums(1)(types.intp), emit)


def _plane_weights(bits: int, coefficients: str, first: int) -> ir.Constant:
    """Weights of a vector that holds lanes of plane `first` in its low half and of the next in its high half."""
    low, high = (plane_weight(bits, plane, coefficients) for plane in (first, first + 1))
    return ir.Constant(VECTORS["float32"], [low] * (LANES // 2) + [high] * (LANES // 2))


def _store_lanes(bits: int, coefficients: str, queries: int) -> Any:
    """An operation that writes a part's sums as ``factor*sum + constant`` to 32 lanes a query."""
    kind = _sums(queries)

    @intrinsic
    def store_lanes(_context: Any, sums: Any, factors: Any, constants: Any, target: Any, pitch: Any) -> Any:
        def emit(b: ir.IRBuilder, sums: Any, factors: Any, constants: Any, target: Any, pitch: Any) -> None:
            for query in range(queries):
                factor = emit_splat(b, emit_load(b, factors, 4 * query, F32), LANES)
                constant = emit_splat(b, emit_load(b, constants, 4 * query, F32), LANES)
                address = b.add(target, b.mul(pitch, I64(query)))
                for plane in range(0, PLANES, 2):
                    x, y = (b.extract_value(sums, (plane + i) * queries + query) for i in range(2))
                    even, odd = (emit_shuffle(b, x, y, list(range(i, 2 * LANES, 2))) for i in range(2))
                    numbers = b.sitofp(b.add(even, odd), VECTORS["float32"])
                    weights = b.fmul(factor, _plane_weights(bits, coefficients, plane))
                    numbers = emit_multiply_add(b, numbers, weights, constant)
                    for half in range(2):
                        lanes = list(range(half * LANES // 2, (half + 1) * LANES // 2))
                        emit_store(b, address, 32 * (plane + half), emit_shuffle(b, numbers, numbers, lanes))

        return operation(types.void(kind, types.intp, types.intp, types.intp, types.intp), emit)

    return store_lanes


def _add_to_mix(bits: int, coefficients: str, queries: int) -> Any:
    """An operation that adds a part's sums times a query's factor to two running numbers a lane."""
    kind = _sums(queries)

    @intrinsic
    def add_to_mix(_context: Any, sums: Any, factors: Any, target: Any, pitch: Any) -> Any:
        def emit(b: ir.IRBuilder, sums: Any, factors: Any, target: Any, pitch: Any) -> None:
            for query in range(queries):
                address = b.add(target, b.mul(pitch, I64(query)))
                factor = emit_splat(b, emit_load(b, factors, 4 * query, F32), LANES)
                for plane in range(PLANES):
                    weight = emit_constant(VECTORS["float32"], plane_weight(bits, plane, coefficients))
                    numbers = b.sitofp(b.extract_value(sums, plane * queries + query), VECTORS["float32"])
                    before = emit_load(b, address, 64 * plane, VECTORS["float32"])
                    after = emit_multiply_add(b, numbers, b.fmul(factor, weight), before)
                    emit_store(b, address, 64 * plane, after)

        return operation(types.void(kind, types.intp, types.intp, types.intp), emit)

    return add_to_mix


def make_score_block(bits: int, coefficients: str, queries: int) -> Any:
    """A function that scores 32 tokens (lanes) for `queries` queries."""
    zero_sums, store_lanes = _zero_sums(queries), _store_lanes(bits, coefficients, queries)
    if sums_bytes_in_shorts(bits, coefficients):
        add_in_shorts = _make_add_in_shorts(bits, coefficients, queries, True)

        @inner
        def score_in_shorts(codes, ahead, units, numbers, pitch, factors, constants, target, target_pitch):  # type: ignore[no-untyped-def]
            for part in range(PARTS):
                start, at = codes + VECTOR_BYTES * part, (numbers, numbers, numbers, numbers)
                sums = add_in_shorts(zero_sums(), start, ahead, 1, 0, units, at, pitch)
                store_lanes(sums, factors, constants, target + VECTOR_BYTES // 2 * part, target_pitch)

        return score_in_shorts

    add_unit, (code_step, step) = _add_unit(bits, coefficients, queries, True), _unit_steps(bits, coefficients)

    @inner
    def score_block(codes, ahead, units, numbers, pitch, factors, constants, target, target_pitch):  # type: ignore[no-untyped-def]
        for part in range(PARTS):
            sums, start = zero_sums(), codes + VECTOR_BYTES * part
            for unit in range(units):
                at = numbers + step * unit
                sums = add_unit(sums, start + code_step * unit, ahead, (at, at, at, at), pitch)
            store_lanes(sums, factors, constants, target + VECTOR_BYTES // 2 * part, target_pitch)

    return score_block


def make_mix_block(bits: int, coefficients: str, queries: int, shared: bool) -> Any:
    """A function that adds 32 channels (lanes) of some pages' values to the mixes of `queries` queries.

    Numbers are those of each plane of 8 channels, the same for all where `shared`; factors those of the queries. Sums
    of the codes are kept for the next queries, in :data:`KEPT` bytes that the first ones fill.
    """
    bias = bias_of(coefficients, signed=False)
    zero_sums, add_to_mix = _zero_sums(queries), _add_to_mix(bits, coefficients, queries)
    if sums_bytes_in_shorts(bits, coefficients):
        add_in_shorts = _make_add_in_shorts(bits, coefficients, queries, shared)

        @inner
        def mix_in_shorts(
            codes, ahead, pages, page_step, units, numbers, pitch, factors, target, target_pitch, _kept, _is_first
        ):  # type: ignore[no-untyped-def]  # fmt: skip
            for part in range(PARTS):
                start = codes + VECTOR_BYTES * part
                sums = add_in_shorts(zero_sums(), start, ahead, pages, page_step, units, numbers, pitch)
                add_to_mix(sums, factors, target + VECTOR_BYTES * part, target_pitch)

        return mix_in_shorts

    zero_codes, (add_codes, first_sums) = _zero_sums(1), _first_sums(bits, queries, bias)
    add_unit, (code_step, step) = _add_unit(bits, coefficients, queries, shared), _unit_steps(bits, coefficients)

    @inner
    def mix_block(
        codes, ahead, pages, page_step, units, numbers, pitch, factors, target, target_pitch, kept, is_first
    ):  # type: ignore[no-untyped-def]  # fmt: skip
        n0, n1, n2, n3 = numbers
        for part in range(PARTS):
            sums = zero_sums()
            if bias > 0:
                place = kept + PLANES * VECTOR_BYTES * part
                if is_first:
                    code_sums = zero_codes()
                    for page in range(pages):
                        start = codes + page * page_step + VECTOR_BYTES * part
                        for unit in range(units):
                            code_sums = add_codes(code_sums, start + code_step * unit)
                    _store_codes(code_sums, place)
                else:
                    code_sums = _load_codes(place)
                sums = first_sums(code_sums)
            offset = 0
            for page in range(pages):
                start = codes + page * page_step + VECTOR_BYTES * part
                for unit in range(units):
                    at = (n0 + offset, n1 + offset, n2 + offset, n3 + offset)
                    sums = add_unit(sums, start + code_step * unit, ahead, at, pitch)
                    offset += step
            add_to_mix(sums, factors, target + VECTOR_BYTES * part, target_pitch)

    return mix_block
