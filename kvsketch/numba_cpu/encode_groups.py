"""Integers of groups of numbers, a group a lane: scale and zero from the extremes, codes without a division each.

A code is round-half-even of RN(d / s), where d = RN(x - zero) and s > 0 is the group's float16 scale
(:mod:`kvsketch.kivi`). Where the machine has fused multiply-adds it is found as round-half-even of

    q = fma(d, r, RN(d r')),   r = RN(1/s),   r' = RN(r (1 - s r)),

and is the same. Let u = 2^-24. Codes change where a quotient crosses h = k + 1/2 with k < 255: h has at most 9
significant bits and s has 11, so h s is a float32. It is enough that q and RN(d / s) are both below, at or above h
where d is below, at or above h s.

- 1 - s r is a float32, of size about u at most, so r + r' = (1 + e)/s with |e| < 2^-46; rounding d r' adds less than
  2^-47 of the quotient: q = RN((1 + e') d/s) with |e'| < 2^-45.
- At d = h s: (1 + e') h rounds to h, being much less than half a place away.
- Elsewhere d and h s differ by a place of h s or, just below a power of two, by half a one: d/s = h (1 +- g) with
  g >= 1/M > u, M < 2^24 the integer significand of h s, or there g >= u. Write h = 2^f t, 1 <= t < 2; half a place of
  h is u/t of h. If t > 1, then t >= 1 + 2^-8 and g - u/t >= u - u/t > 2^-33. If t = 1, then M is a multiple of 2^13:
  above h, g - u >= 1/(2^24 - 2^13) - u > 2^-36; below, half a place is u/2 and g >= u. So d/s is further from h than
  half a place by more than |e'|, and rounds to its own side with and without e'.

Underflow does no harm: s >= 2^-24, and where d r' is not normal, d/s is near no h. Numbers are cut off at 65504, which
the difference may be instead, rounding being monotone; so may codes be cut off at the largest, by d <= s (2^bits - 1),
which is exact. Negative quotients, among them those of numbers below -65504, give 0 when codes are packed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvsketch.numba_cpu._tiers import HAS_FLOAT16, TIER
from kvsketch.numba_cpu.emit import (
    F32,
    I16,
    I32,
    I64,
    LANES,
    VECTORS,
    emit_absolute,
    emit_bfloats,
    emit_call,
    emit_constant,
    emit_halves,
    emit_load,
    emit_round,
    emit_shuffle,
    emit_splat,
    emit_store,
)
from kvsketch.numba_cpu.simd import floats, operation

HALF_MAX = 65504.0
FLOAT_MAX = float(np.finfo(np.float32).max)
#: float32 or int32 numbers that are loaded at a time, by dtype: bytes of each.
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
#: What packing needs of each group, in float32: parameters follow one another, each for all groups.
PARAMETERS = 4
#: Whether quotients are found by fused multiply-adds; else by division.
_FUSED = TIER != "generic"


def emit_load_numbers(b: ir.IRBuilder, address: Any, offset: int, dtype: str) -> Any:
    """LANES numbers of `dtype` as float32."""
    if dtype == "float32":
        return emit_load(b, address, offset, VECTORS["float32"])
    if dtype == "float16":
        return emit_halves(b, emit_load(b, address, offset, ir.VectorType(I16, LANES)))
    return emit_bfloats(b, b.add(address, I64(offset)))


def emit_to_halves(b: ir.IRBuilder, x: Any) -> Any:
    """float32 as float16 bit patterns, rounded to even; finite numbers that do not overflow, or NaN."""
    half = ir.VectorType(I16, x.type.count)
    if HAS_FLOAT16:
        return b.bitcast(b.fptrunc(x, ir.VectorType(ir.HalfType(), x.type.count)), half)
    wide = ir.VectorType(I32, x.type.count)

    def of(number: int) -> Any:
        return emit_constant(wide, number)

    bits = b.bitcast(x, wide)
    sign = b.and_(b.lshr(bits, of(16)), of(0x8000))
    magnitude = b.and_(bits, of(0x7FFFFFFF))
    # Normal: the exponent rebased from 127 to 15, and just under half a unit added, or half if the last bit is odd.
    odd = b.and_(b.lshr(magnitude, of(13)), of(1))
    normal = b.lshr(b.add(b.add(magnitude, of(0xFFF - (112 << 23))), odd), of(13))
    # Subnormal: adding 0.5 leaves units of 2^-24 in the last place, rounded to even by the addition itself.
    shifted = b.fadd(b.bitcast(magnitude, x.type), emit_constant(x.type, 0.5))
    small = b.sub(b.bitcast(shifted, wide), of(126 << 23))
    number = b.select(b.icmp_unsigned("<", magnitude, of(113 << 23)), small, normal)
    quiet = b.or_(b.and_(b.lshr(magnitude, of(13)), of(0x3FF)), of(0x7E00))
    number = b.select(b.fcmp_unordered("uno", x, x), quiet, number)
    return b.trunc(b.or_(number, sign), half)


def _emit_clip(b: ir.IRBuilder, x: Any, limit: float) -> Any:
    """x between -limit and limit; NaN stays."""
    high, low = emit_constant(x.type, limit), emit_constant(x.type, -limit)
    x = b.select(b.fcmp_ordered(">", x, high), high, x)
    return b.select(b.fcmp_ordered("<", x, low), low, x)


def emit_count(b: ir.IRBuilder, mask: Any) -> Any:
    """How many of the lanes are true, int64."""
    bits = ir.IntType(mask.type.count)
    wide = b.zext(b.bitcast(mask, bits), I64)
    return emit_call(b, "llvm.ctpop.i64", I64, [wide])


def emit_write_groups(
    b: ir.IRBuilder, parameters: Any, count: int, scales: Any, zeros: Any, lo: Any, hi: Any, nan: Any, bits: int
) -> Any:
    """Store scale and zero of LANES groups as float16, their parameters for packing, and count saturations.

    `lo` and `hi` are the extremes, `nan` is NaN where a group holds a NaN; parameters of one kind lie `count` apart.
    """
    kind = lo.type
    none, levels = emit_constant(kind, 0.0), emit_constant(kind, float(2**bits - 1))
    high = emit_constant(kind, HALF_MAX)
    bad = b.fcmp_unordered("uno", nan, nan)
    lo, hi = _emit_clip(b, lo, FLOAT_MAX), _emit_clip(b, hi, FLOAT_MAX)
    step = b.select(bad, none, b.fdiv(b.fsub(hi, lo), levels))
    lo = b.select(bad, emit_constant(kind, float("nan")), lo)
    above = b.fcmp_ordered(">", step, high)
    beyond = b.fcmp_ordered(">", emit_absolute(b, lo), high)
    saturated = b.add(emit_count(b, above), emit_count(b, beyond))
    # Adding zero turns -0.0 into +0.0, so that equal groups have equal bytes.
    scale, zero = (
        b.fadd(emit_halves(b, emit_to_halves(b, x)), none)
        for x in (b.select(above, high, step), _emit_clip(b, lo, HALF_MAX))
    )
    emit_store(b, scales, 0, emit_to_halves(b, scale))
    emit_store(b, zeros, 0, emit_to_halves(b, zero))
    one = emit_constant(kind, 1.0)
    some = b.fcmp_ordered(">", scale, none)
    if _FUSED:
        inverse = b.select(some, b.fdiv(one, scale), none)
        left = emit_call(b, f"llvm.fma.v{kind.count}f32", kind, [b.fneg(scale), inverse, one])
        factors = [inverse, b.fmul(left, inverse)]
    else:
        factors = [b.select(some, scale, one), none]
    # Numbers are cut off at 65504 before their codes are computed; differences then at the rounded difference.
    top, room = b.fmul(scale, levels), b.fsub(high, zero)
    top = b.select(b.fcmp_ordered("<", room, top), room, top)
    for i, x in enumerate((zero, *factors, top)):
        emit_store(b, parameters, 4 * count * i, x)
    return saturated


def emit_codes(b: ir.IRBuilder, x: Any, parameters: list[Any]) -> Any:
    """Codes of numbers as int32, not above the largest; negative ones and those of NaN stand for 0.

    `parameters` are the four that :func:`emit_write_groups` stored.
    """
    zero, factor, rest, top = parameters
    distance = b.fsub(x, zero)
    distance = b.select(b.fcmp_ordered("<", distance, top), distance, top)
    if _FUSED:
        small = b.fmul(distance, rest)
        steps = emit_call(b, f"llvm.fma.v{x.type.count}f32", x.type, [distance, factor, small])
    else:
        none = emit_constant(x.type, 0.0)
        steps = b.fdiv(b.select(b.fcmp_ordered(">", distance, none), distance, none), factor)
    return emit_round(b, steps)


# -- operations of Numba code -----------------------------------------------------------------------------------------


def make_load_numbers(dtype: str) -> Any:
    """``load(address)``: LANES numbers of `dtype` as float32."""

    @intrinsic
    def load(_context: Any, address: Any) -> Any:
        return operation(floats(types.intp), lambda b, a: emit_load_numbers(b, a, 0, dtype))

    return load


@intrinsic
def mark_nan(_context: Any, marks: Any, x: Any, y: Any) -> Any:
    """`marks`, with NaN in the lanes where `x` or `y` is NaN."""

    def emit(b: ir.IRBuilder, marks: Any, x: Any, y: Any) -> Any:
        return b.select(b.fcmp_unordered("uno", x, y), emit_constant(marks.type, float("nan")), marks)

    return operation(floats(floats, floats, floats), emit)


@intrinsic
def any_nan(_context: Any, x: Any) -> Any:
    """Whether a lane is NaN."""

    def emit(b: ir.IRBuilder, x: Any) -> Any:
        mask = b.bitcast(b.fcmp_unordered("uno", x, x), ir.IntType(LANES))
        return b.icmp_unsigned("!=", mask, ir.IntType(LANES)(0))

    return operation(types.boolean(floats), emit)


def make_write_groups(bits: int, count: int) -> Any:
    """``write(parameters, scales, zeros, lo, hi, nan)``: :func:`emit_write_groups` as an operation."""

    @intrinsic
    def write(_context: Any, parameters: Any, scales: Any, zeros: Any, lo: Any, hi: Any, nan: Any) -> Any:
        def emit(b: ir.IRBuilder, parameters: Any, scales: Any, zeros: Any, lo: Any, hi: Any, nan: Any) -> Any:
            return emit_write_groups(b, parameters, count, scales, zeros, lo, hi, nan, bits)

        return operation(types.int64(types.intp, types.intp, types.intp, floats, floats, floats), emit)

    return write


def emit_load_parameters(b: ir.IRBuilder, address: Any, count: int, first: int) -> list[Any]:
    """Parameters of the groups `first` and on, a group a lane."""
    return [emit_load(b, address, 4 * (count * i + first), VECTORS["float32"]) for i in range(PARAMETERS)]


def emit_spread_parameters(b: ir.IRBuilder, addresses: list[Any], count: int, index: int) -> list[Any]:
    """Parameters of group `index` at each of the addresses, each in an equal share of the lanes."""
    share = LANES // len(addresses)
    spread = []
    for i in range(PARAMETERS):
        parts = [emit_splat(b, emit_load(b, a, 4 * (count * i + index), F32), share) for a in addresses]
        x = parts[0]
        for part in parts[1:]:
            joined = x.type.count + share
            indices = [*range(x.type.count), *range(x.type.count, joined)]
            if part.type.count != x.type.count:
                raise ValueError("at most two shares")
            x = b.shuffle_vector(x, part, ir.Constant(ir.VectorType(I32, joined), indices))
        spread.append(x)
    return spread


def make_reduce_rows(largest: bool) -> Any:
    """``reduce(address)``: the least or largest number of each of LANES rows of LANES float32, a row a lane."""

    def combine(b: ir.IRBuilder, x: Any, y: Any) -> Any:
        return b.select(b.fcmp_ordered(">" if largest else "<", x, y), x, y)

    def halve(b: ir.IRBuilder, x: Any, y: Any, level: int) -> Any:
        """Two vectors' rows combined into half as many numbers each: within 16 bytes twice, then 16 bytes at a time."""
        if level < 2:
            # Level 0 leaves x, y, x, y in 16 bytes, level 1 the pair of x, then that of y.
            words = [(0, 0), (1, 0), (0, 1), (1, 1)] if level == 0 else [(0, 0), (0, 1), (1, 0), (1, 1)]
            first = [lane + word + LANES * source for lane in range(0, LANES, 4) for source, word in words]
            return combine(b, emit_shuffle(b, x, y, first), emit_shuffle(b, x, y, [i + 2 for i in first]))
        first = [i + LANES * source for source in range(2) for i in range(LANES) if i // 4 % 2 == 0]
        return combine(b, emit_shuffle(b, x, y, first), emit_shuffle(b, x, y, [i + 4 for i in first]))

    def emit(b: ir.IRBuilder, address: Any) -> Any:
        vectors = [emit_load(b, address, 4 * LANES * i, VECTORS["float32"]) for i in range(LANES)]
        level = 0
        while len(vectors) > 1:
            vectors = [halve(b, vectors[i], vectors[i + 1], level) for i in range(0, len(vectors), 2)]
            level += 1
        return vectors[0]

    @intrinsic
    def reduce(_context: Any, address: Any) -> Any:
        return operation(floats(types.intp), emit)

    return reduce
