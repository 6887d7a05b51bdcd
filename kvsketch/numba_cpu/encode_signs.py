"""Signs of projections, the parts that sketching is made of: a token a lane, LANES tokens at a time.

Numbers of LANES tokens lie transposed: a vector for each channel, or for each row of the sketch.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvsketch.numba_cpu._tiers import TIER, VECTOR_BYTES
from kvsketch.numba_cpu.emit import (
    F32,
    I32,
    I64,
    LANES,
    VECTORS,
    emit_absolute,
    emit_call,
    emit_constant,
    emit_load,
    emit_shuffle,
    emit_splat,
    emit_store,
)
from kvsketch.numba_cpu.encode_groups import HALF_MAX, emit_count, emit_load_numbers, emit_to_halves
from kvsketch.numba_cpu.simd import floats, operation

#: Rows of a sketch in a unit, which are projected at a time.
UNIT_ROWS = 16
#: Whether projections are found by fused multiply-adds, in other roundings than the reference's.
FUSED = TIER != "generic"
#: Rows whose sums fit into registers.
_REGISTER_ROWS = 16 if TIER == "avx512-vnni" else 8


def make_transpose(dtype: str) -> Any:
    """``transpose(x, pitch, target)``: LANES numbers of LANES rows of `dtype`, as LANES vectors of float32."""

    def emit(b: ir.IRBuilder, x: Any, pitch: Any, target: Any) -> None:
        vectors = [emit_load_numbers(b, b.add(x, b.mul(pitch, I64(t))), 0, dtype) for t in range(LANES)]
        step = 1
        while step < LANES:
            for i in range(LANES):
                if i & step:
                    continue
                first, second = vectors[i], vectors[i + step]
                low = [lane if not lane & step else LANES + lane - step for lane in range(LANES)]
                high = [lane + step if not lane & step else LANES + lane for lane in range(LANES)]
                vectors[i], vectors[i + step] = (emit_shuffle(b, first, second, order) for order in (low, high))
            step *= 2
        for i, vector in enumerate(vectors):
            emit_store(b, target, VECTOR_BYTES * i, vector)

    @intrinsic
    def transpose(_context: Any, x: Any, pitch: Any, target: Any) -> Any:
        return operation(types.void(types.intp, types.intp, types.intp), emit)

    return transpose


@intrinsic
def write_norms(_context: Any, squares: Any, target: Any) -> Any:
    """Store square roots as float16, at most 65504; how many were above that."""

    def emit(b: ir.IRBuilder, squares: Any, target: Any) -> Any:
        norms = emit_call(b, f"llvm.sqrt.v{LANES}f32", squares.type, [squares])
        high = emit_constant(norms.type, HALF_MAX)
        above = b.fcmp_ordered(">", norms, high)
        emit_store(b, target, 0, emit_to_halves(b, b.select(above, high, norms)))
        return emit_count(b, above)

    return operation(types.int64(floats, types.intp), emit)


@intrinsic
def close_to_zero(_context: Any, squares: Any, bound: Any) -> Any:
    """`bound` times the norms: a projection that is not larger may have either sign; see the caller's proof.

    Infinite, so that no projection is, where `squares` says little about the size of a key.
    """

    def emit(b: ir.IRBuilder, squares: Any, bound: Any) -> Any:
        kind = squares.type
        norms = emit_call(b, f"llvm.sqrt.v{LANES}f32", kind, [squares])
        low, high = emit_constant(kind, 2.0**-100), emit_constant(kind, 2.0**100)
        known = b.and_(b.fcmp_ordered(">=", squares, low), b.fcmp_ordered("<=", squares, high))
        return b.select(known, b.fmul(norms, emit_splat(b, bound, LANES)), emit_constant(kind, float("inf")))

    return operation(floats(floats, types.float32), emit)


def _emit_close(b: ir.IRBuilder, y: Any, limit: Any) -> Any:
    return b.fcmp_unordered("<=", emit_absolute(b, y), limit)


@intrinsic
def any_close(_context: Any, row: Any, limit: Any) -> Any:
    """Whether a number of the vector at `row` is within `limit` of 0, or NaN."""

    def emit(b: ir.IRBuilder, row: Any, limit: Any) -> Any:
        mask = b.bitcast(_emit_close(b, emit_load(b, row, 0, VECTORS["float32"]), limit), ir.IntType(LANES))
        return b.icmp_unsigned("!=", mask, ir.IntType(LANES)(0))

    return operation(types.boolean(types.intp, floats), emit)


@intrinsic
def pack_signs(_context: Any, rows: Any, limit: Any, index: Any, unit: Any) -> Any:
    """Signs of UNIT_ROWS vectors, those of tokens ``LANES * index`` and on of a unit, into the unit's 64 bytes.

    Whether one of the numbers is within `limit` of 0, or NaN.
    """
    wide = VECTORS["int32"]

    def emit(b: ir.IRBuilder, rows: Any, limit: Any, index: Any, unit: Any) -> Any:
        none = emit_constant(VECTORS["float32"], 0.0)
        lanes = ir.VectorType(ir.IntType(1), LANES)
        close: Any = ir.Constant(lanes, [0] * LANES)
        # Token 8*plane + i: bit `plane` of byte 8*i + r, four rows r in a 32-bit word.
        words: list[Any] = [emit_constant(wide, 0)] * 2
        for row in range(UNIT_ROWS):
            y = emit_load(b, rows, VECTOR_BYTES * row, VECTORS["float32"])
            shift = 8 * (row % 4) + 4 * (row // 8)
            bits = ir.Constant(wide, [_signed(1 << (shift + lane // 8)) for lane in range(LANES)])
            sign = b.select(b.fcmp_ordered(">=", y, none), bits, emit_constant(wide, 0))
            words[row // 4 % 2] = b.or_(words[row // 4 % 2], sign)
            close = b.or_(close, _emit_close(b, y, limit))
        folded = min(LANES, 8)
        parts = []
        for first in range(0, LANES, folded):
            order = [first + i + LANES * half for i in range(folded) for half in range(2)]
            parts.append(emit_shuffle(b, words[0], words[1], order))
        joined = parts[0] if len(parts) == 1 else b.or_(*parts)
        # So many planes a vector has, and the others of its tokens lie that much higher or 4 bytes further.
        planes = max(LANES // 8, 1)
        token = b.mul(index, I64(LANES))
        count = b.trunc(b.lshr(token, I64(3)), I32)
        shift = emit_splat(b, count, joined.type.count)
        mask = emit_constant(joined.type, 0x11111111 * ((1 << planes) - 1))
        start = b.add(unit, b.mul(b.and_(token, I64(7)), I64(8)))
        old = emit_load(b, start, 0, joined.type)
        kept = b.and_(old, b.not_(b.shl(mask, shift)))
        emit_store(b, start, 0, b.or_(kept, b.shl(joined, shift)))
        return b.icmp_unsigned("!=", b.bitcast(close, ir.IntType(LANES)), ir.IntType(LANES)(0))

    return operation(types.boolean(types.intp, floats, types.intp, types.intp), emit)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def _emit_project(
    b: ir.IRBuilder, x: Any, channels: Any, count: Any, table: Any, first: int, rows: int, fused: bool
) -> list[Any]:
    """Sums over the `count` channels of a list, in its order, of numbers `x` times `rows` columns of the table."""
    kind = VECTORS["float32"]
    start, loop, end = b.block, b.append_basic_block("channels"), b.append_basic_block("projected")
    b.cbranch(b.icmp_signed(">", count, I64(0)), loop, end)
    b.position_at_end(loop)
    index = b.phi(I64)
    index.add_incoming(I64(0), start)
    sums = [b.phi(kind) for _ in range(rows)]
    channel = emit_load(b, b.add(channels, b.mul(index, I64(8))), 0, I64)
    numbers = emit_load(b, b.add(x, b.mul(channel, I64(VECTOR_BYTES))), 0, kind)
    weights = b.add(table, b.mul(channel, I64(4 * UNIT_ROWS)))
    results = []
    for row, total in enumerate(sums):
        total.add_incoming(emit_constant(kind, 0.0), start)
        weight = emit_splat(b, emit_load(b, weights, 4 * (first + row), F32), LANES)
        if fused:
            result = emit_call(b, f"llvm.fma.v{LANES}f32", kind, [numbers, weight, total])
        else:
            result = b.fadd(total, b.fmul(numbers, weight))
        total.add_incoming(result, loop)
        results.append(result)
    following = b.add(index, I64(1))
    index.add_incoming(following, loop)
    b.cbranch(b.icmp_signed("<", following, count), loop, end)
    b.position_at_end(end)
    found = []
    for result in results:
        x = b.phi(kind)
        x.add_incoming(emit_constant(kind, 0.0), start)
        x.add_incoming(result, loop)
        found.append(x)
    return found


@intrinsic
def project_unit(_context: Any, x: Any, channels: Any, count: Any, table: Any, target: Any) -> Any:
    """UNIT_ROWS projections of `x`: the sums over the `count` channels of a list, times the rows of `table`.

    Multiply-adds are fused where the machine has them; else the sums are the reference's.
    """

    def emit(b: ir.IRBuilder, x: Any, channels: Any, count: Any, table: Any, target: Any) -> None:
        for first in range(0, UNIT_ROWS, _REGISTER_ROWS):
            found = _emit_project(b, x, channels, count, table, first, _REGISTER_ROWS, FUSED)
            for row, y in enumerate(found):
                emit_store(b, target, VECTOR_BYTES * (first + row), y)

    return operation(types.void(*(types.intp,) * 5), emit)


@intrinsic
def project_row(_context: Any, x: Any, channels: Any, count: Any, table: Any, target: Any) -> Any:
    """One projection as the reference sums it: rounded products, in the order of the list."""

    def emit(b: ir.IRBuilder, x: Any, channels: Any, count: Any, table: Any, target: Any) -> None:
        emit_store(b, target, 0, _emit_project(b, x, channels, count, table, 0, 1, False)[0])

    return operation(types.void(*(types.intp,) * 5), emit)


def make_butterfly(levels: int, gathers: bool, scatters: bool) -> Any:
    """``run(source, sources, factors, target, targets, first, step)``: a Hadamard transform of 2**levels vectors.

    It takes the vectors ``first + step * i``. With `gathers` each comes from where `sources` (byte offsets) says, times
    the number that `factors` holds for it; with `scatters` it goes to where `targets` says.
    """

    def emit(b: ir.IRBuilder, *arguments: Any) -> None:
        source, sources, factors, target, targets, first, step = arguments
        indices = [b.add(first, b.mul(step, I64(i))) for i in range(1 << levels)]

        def place(start: Any, table: Any, used: bool, i: Any) -> Any:
            if used:
                return b.add(start, emit_load(b, b.add(table, b.mul(i, I64(8))), 0, I64))
            return b.add(start, b.mul(i, I64(VECTOR_BYTES)))

        vectors = []
        for i in indices:
            x = emit_load(b, place(source, sources, gathers, i), 0, VECTORS["float32"])
            if gathers:
                factor = emit_load(b, b.add(factors, b.mul(i, I64(4))), 0, F32)
                x = b.fmul(x, emit_splat(b, factor, LANES))
            vectors.append(x)
        half = 1
        while half < len(vectors):
            for i in range(len(vectors)):
                if not i & half:
                    x, y = vectors[i], vectors[i + half]
                    vectors[i], vectors[i + half] = b.fadd(x, y), b.fsub(x, y)
            half *= 2
        for i, x in zip(indices, vectors, strict=True):
            emit_store(b, place(target, targets, scatters, i), 0, x)

    @intrinsic
    def run(
        _context: Any, source: Any, sources: Any, factors: Any, target: Any, targets: Any, first: Any, step: Any
    ) -> Any:
        return operation(types.void(*(types.intp,) * 7), emit)

    return run
