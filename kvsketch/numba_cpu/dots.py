"""The innermost loops: integer dot products of packed codes with coefficients, for several queries at once.

A unit of codes is 32 lanes by 8 contraction rows (16 for 1 and 3 bits; docs/layout.md). In 64 of its bytes, byte
``8*i + r`` holds codes of row r, so that an int32 covers four rows of one lane and a dot product of neighbouring
numbers contracts over rows. Codes are multiplied where they lie: a mask leaves a plane's code times a power of two,
which the sums are rid of at the end. Lanes are tokens for keys and channels for values.

int16 coefficients take the even and the odd rows in turn: those of 8 rows are stored as rows 0 2 4 6 1 3 5 7, 16
bytes. int8 coefficients take all rows at once and are stored in order, 8 bytes.

Weights of values are never negative. Their int16 coefficients are stored less 32768, so that all 16 bits count, and
the sums start from 32768 times those of the codes, which are the same for all queries.

Sums are tuples of int32 vectors, plane by plane of 8 lanes and in a plane query by query. A vector shorter than 64
bytes covers a part of a plane's lanes; parts are summed one after the other.
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
    emit_prefetch,
    emit_repeat,
    emit_shuffle,
    emit_splat,
    emit_store,
    emit_sum_bytes,
)
from kvsketch.numba_cpu.simd import ints, operation

#: Planes of 8 lanes in a unit.
PLANES = 4
#: Parts that 64 bytes of codes are taken in.
PARTS = 64 // VECTOR_BYTES
#: Queries that share a load of codes, as many as there are registers for.
QUERIES = 4 if TIER == "avx512-vnni" else 2
#: Largest number that a code is multiplied as, by its bits and coefficients.
LARGEST = {"int16": {1: 8, 2: 192, 3: 448, 4: 240, 8: 255}, "int8": {1: 8, 2: 192, 3: 7, 4: 240, 8: 255}}
#: Bytes that the sums of the codes of 32 channels take.
KEPT = 64 * PLANES
#: Bytes of the coefficients of 8 rows.
COEFFICIENT_BYTES = {"int16": 16, "int8": 8}


def plane_weight(bits: int, plane: int, coefficients: str) -> float:
    """What a plane's sums are multiplied by: one over the power of two that its codes came with."""
    if bits == 1:
        return 1 / (1 << plane)
    if bits == 3:
        return 1 / (1 << 2 * plane) if coefficients == "int16" else 1.0
    return 1 / (1 << bits * (plane % (8 // bits)))


def bias_of(coefficients: str, signed: bool) -> int:
    """What stored coefficients are less by than the numbers they stand for."""
    return 32768 if coefficients == "int16" and not signed else 0


def make_limit(bits: int, coefficients: str, *, signed: bool) -> Any:
    """A function of the number of rows: the largest coefficient with which no sum leaves the range of int32.

    An int32 sums half of the rows, and the two halves of a score are added before they become float32.
    """
    most = (32767 if coefficients == "int16" else 127) + bias_of(coefficients, signed)
    largest = LARGEST[coefficients][bits]

    @inner
    def limit(rows):  # type: ignore[no-untyped-def]
        return min(most, (2**31 - 1) // (largest * max(rows if signed else rows // 2, 1)))

    return limit


def _halves(b: ir.IRBuilder, x: Any) -> tuple[Any, Any]:
    """Even bytes in the low half of each int16 (with the odd ones above them), and odd bytes alone."""
    return x, b.lshr(x, emit_constant(x.type, 8))


def _mask(b: ir.IRBuilder, x: Any, mask: int) -> Any:
    return b.and_(x, emit_constant(x.type, mask))


def _shift(b: ir.IRBuilder, x: Any, left: int) -> Any:
    if left == 0:
        return x
    return b.shl(x, emit_constant(x.type, left)) if left > 0 else b.lshr(x, emit_constant(x.type, -left))


def _short_codes(b: ir.IRBuilder, unit: Any, offset: int, bits: int) -> list[list[tuple[Any, Any]]]:
    """Codes of a unit for int16 coefficients: for each 8 rows and plane, those of the even and of the odd rows."""

    def load(vector: int) -> tuple[Any, Any]:
        return _halves(b, emit_load(b, unit, 64 * vector + offset, VECTORS["int16"]))

    if bits == 1:
        halves = load(0)
        later = tuple(_shift(b, x, -4) for x in halves)
        return [[tuple(_mask(b, x, 1 << p) for x in rows) for p in range(PLANES)] for rows in (halves, later)]  # type: ignore[misc]
    if bits == 3:
        high = load(2)
        result = []
        for rows in range(2):
            low = load(rows)
            planes = []
            for p in range(PLANES):
                codes = [
                    b.or_(_mask(b, x, 3 << 2 * p), _mask(b, _shift(b, y, p + 2 - 4 * rows), 4 << 2 * p))
                    for x, y in zip(low, high, strict=True)
                ]
                planes.append((codes[0], codes[1]))
            result.append(planes)
        return result
    planes = []
    for vector in range(bits // 2):
        even, odd = load(vector)
        for p in range(8 // bits):
            mask = ((1 << bits) - 1) << bits * p
            planes.append((_mask(b, even, mask), odd if bits == 8 else _mask(b, odd, mask)))
    return [planes]


def _byte_codes(b: ir.IRBuilder, unit: Any, offset: int, bits: int) -> list[list[Any]]:
    """Codes of a unit for int8 coefficients: for each 8 rows and plane, a vector of bytes."""

    def load(vector: int) -> Any:
        return emit_load(b, unit, 64 * vector + offset, VECTORS["int16"])

    def mask(x: Any, mask: int) -> Any:
        return b.bitcast(_mask(b, x, 257 * mask), VECTORS["uint8"])

    if bits == 1:
        word = load(0)
        return [[mask(x, 1 << p) for p in range(PLANES)] for x in (word, _shift(b, word, -4))]
    if bits == 3:
        high, result = load(2), []
        for rows in range(2):
            low = load(rows)
            result.append(
                [
                    b.or_(mask(_shift(b, low, -2 * p), 3), mask(_shift(b, high, 2 - p - 4 * rows), 4))
                    for p in range(PLANES)
                ]
            )
        return result
    return [
        [mask(load(vector), ((1 << bits) - 1) << bits * p) for vector in range(bits // 2) for p in range(8 // bits)]
    ]


def _zero_sums(queries: int) -> Any:
    kind = types.UniTuple(ints, PLANES * queries)

    @intrinsic
    def zero_sums(_context: Any) -> Any:
        array = ir.ArrayType(VECTORS["int32"], PLANES * queries)
        return operation(kind(), lambda b: ir.Constant(array, [emit_constant(VECTORS["int32"], 0)] * array.count))

    return zero_sums


def _add_unit(bits: int, coefficients: str, queries: int, shared: bool) -> Any:
    """An operation that adds one unit's products to sums; `shared`: all planes have the same coefficients.

    Meanwhile the bytes `ahead` of the unit are asked for.
    """
    kind = types.UniTuple(ints, PLANES * queries)
    size = COEFFICIENT_BYTES[coefficients]

    @intrinsic
    def add_unit(_context: Any, sums: Any, unit: Any, ahead: Any, numbers: Any, pitch: Any) -> Any:
        def emit(b: ir.IRBuilder, sums: Any, unit: Any, ahead: Any, numbers: Any, pitch: Any) -> Any:
            for line in range(0, unit_bytes(bits), 64):
                emit_prefetch(b, b.add(unit, ahead), line)
            totals = [b.extract_value(sums, i) for i in range(PLANES * queries)]
            bases = [b.extract_value(numbers, p) for p in range(1 if shared else PLANES)]
            rows_of = _short_codes if coefficients == "int16" else _byte_codes
            for rows, planes in enumerate(rows_of(b, unit, 0, bits)):
                loaded = {}
                for plane, codes in enumerate(planes):
                    for query in range(queries):
                        base = 0 if shared else plane
                        if (base, query) not in loaded:
                            address = b.add(bases[base], b.mul(pitch, I64(query)))
                            element = "int16" if coefficients == "int16" else "uint8"
                            loaded[base, query] = [
                                emit_repeat(b, address, size * rows + 8 * part, element) for part in range(size // 8)
                            ]
                        i = plane * queries + query
                        if coefficients == "int16":
                            for x, y in zip(codes, loaded[base, query], strict=True):
                                totals[i] = emit_dot_shorts(b, totals[i], x, y)
                        else:
                            totals[i] = emit_dot_bytes(b, totals[i], codes, loaded[base, query][0])
            for i, total in enumerate(totals):
                sums = b.insert_value(sums, total, i)
            return sums

        bases = types.UniTuple(types.intp, PLANES)
        return operation(kind(kind, types.intp, types.intp, bases, types.intp), emit)

    return add_unit


def _first_sums(bits: int, queries: int, bias: int) -> tuple[Any, Any]:
    """Two operations: add a unit's codes to sums of four planes, and make of those what each query starts from."""
    four, kind = types.UniTuple(ints, PLANES), types.UniTuple(ints, PLANES * queries)

    @intrinsic
    def add_codes(_context: Any, sums: Any, unit: Any) -> Any:
        def emit(b: ir.IRBuilder, sums: Any, unit: Any) -> Any:
            totals = [b.extract_value(sums, plane) for plane in range(PLANES)]
            if bits == 3:  # its codes, where they lie, take nine bits
                one = emit_constant(VECTORS["int16"], 1)
                for planes in _short_codes(b, unit, 0, bits):
                    for plane, halves in enumerate(planes):
                        for codes in halves:
                            totals[plane] = emit_dot_shorts(b, totals[plane], codes, one)
            else:
                for planes in _byte_codes(b, unit, 0, bits):
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

    return operation(types.void(types.UniTuple(ints, PLANES), types.intp), emit)


@intrinsic
def _load_codes(_context: Any, source: Any) -> Any:
    """Sums of codes of four planes as :func:`_store_codes` wrote them."""

    def emit(b: ir.IRBuilder, source: Any) -> Any:
        sums = ir.Constant(ir.ArrayType(VECTORS["int32"], PLANES), ir.Undefined)
        for plane in range(PLANES):
            loaded = emit_load(b, source, VECTOR_BYTES * plane, VECTORS["int32"])
            sums = b.insert_value(sums, loaded, plane)
        return sums

    return operation(types.UniTuple(ints, PLANES)(types.intp), emit)


def _plane_weights(bits: int, coefficients: str, first: int) -> ir.Constant:
    """Weights of a vector that holds lanes of plane `first` in its low half and of the next in its high half."""
    low, high = (plane_weight(bits, plane, coefficients) for plane in (first, first + 1))
    return ir.Constant(VECTORS["float32"], [low] * (LANES // 2) + [high] * (LANES // 2))


def _store_lanes(bits: int, coefficients: str, queries: int) -> Any:
    """An operation that writes a part's sums as ``factor*sum + constant`` to 32 lanes a query."""
    kind = types.UniTuple(ints, PLANES * queries)

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
    kind = types.UniTuple(ints, PLANES * queries)

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


def _unit_steps(bits: int, coefficients: str) -> tuple[int, int]:
    """Bytes of a unit of codes and of its coefficients."""
    return unit_bytes(bits), COEFFICIENT_BYTES[coefficients] * unit_rows(bits) // 8


def make_score_block(bits: int, coefficients: str, queries: int) -> Any:
    """A function that scores 32 tokens (lanes) for `queries` queries."""
    zero_sums, add_unit = _zero_sums(queries), _add_unit(bits, coefficients, queries, True)
    store_lanes = _store_lanes(bits, coefficients, queries)
    code_step, step = _unit_steps(bits, coefficients)

    @inner
    def score_block(codes, ahead, units, numbers, pitch, factors, constants, target, target_pitch):  # type: ignore[no-untyped-def]
        for part in range(PARTS):
            sums = zero_sums()
            start = codes + VECTOR_BYTES * part
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
    zero_sums, zero_codes = _zero_sums(queries), _zero_sums(1)
    add_codes, first_sums = _first_sums(bits, queries, bias)
    add_unit, add_to_mix = _add_unit(bits, coefficients, queries, shared), _add_to_mix(bits, coefficients, queries)
    code_step, step = _unit_steps(bits, coefficients)

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
