"""Writing LLVM for vectors: what the operations of kernels are built from.

A vector holds :data:`kvsketch.numba_cpu._tiers.VECTOR_BYTES` bytes: float32 or int32 (:data:`LANES` of them), int16 or
uint8. Most of this is target-independent; where a tier has an instruction that LLVM would not find, it is named.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from kvsketch.numba_cpu._tiers import HAS_FLOAT16, IS_X86, TIER, VECTOR_BYTES

#: float32 or int32 numbers in a vector.
LANES = VECTOR_BYTES // 4

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32 = ir.FloatType()
VECTORS = {
    "float32": ir.VectorType(F32, LANES),
    "int32": ir.VectorType(I32, LANES),
    "int16": ir.VectorType(I16, 2 * LANES),
    "uint8": ir.VectorType(I8, 4 * LANES),
}


def emit_call(b: ir.IRBuilder, name: str, result: ir.Type, arguments: list[Any]) -> Any:
    function = ir.FunctionType(result, [a.type for a in arguments])
    return b.call(cgutils.get_or_insert_function(b.module, function, name), arguments)


def emit_constant(kind: ir.VectorType, value: Any) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)


def emit_shuffle(b: ir.IRBuilder, x: Any, y: Any, indices: list[int]) -> Any:
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(indices)), indices))


def emit_splat(b: ir.IRBuilder, x: Any, count: int) -> Any:
    empty = ir.Constant(ir.VectorType(x.type, count), ir.Undefined)
    return emit_shuffle(b, b.insert_element(empty, x, I32(0)), empty, [0] * count)


def emit_pointer(b: ir.IRBuilder, address: Any, offset: int, kind: ir.Type) -> Any:
    """A pointer to a `kind` at `offset` bytes from an address."""
    start = b.inttoptr(address, I8.as_pointer())
    return b.bitcast(b.gep(start, [I64(offset)]), kind.as_pointer())


def emit_load(b: ir.IRBuilder, address: Any, offset: int, kind: ir.Type) -> Any:
    loaded = b.load(emit_pointer(b, address, offset, kind))
    loaded.align = 1
    return loaded


def emit_store(b: ir.IRBuilder, address: Any, offset: int, value: Any) -> None:
    stored = b.store(value, emit_pointer(b, address, offset, value.type))
    stored.align = 1


def emit_repeat(b: ir.IRBuilder, address: Any, offset: int, element: str) -> Any:
    """The 8 bytes at an address, repeated, as a vector of `element`."""
    word = emit_load(b, address, offset, I64)
    return b.bitcast(emit_splat(b, word, VECTOR_BYTES // 8), VECTORS[element])


def emit_prefetch(b: ir.IRBuilder, address: Any, offset: int) -> None:
    """Ask for the 64-byte line at an address to be brought to the second-level cache; harmless wherever it points."""
    pointer = emit_pointer(b, address, offset, I8)
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32])
    b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0"), [pointer, I32(0), I32(2), I32(1)])


def emit_multiply_add(b: ir.IRBuilder, x: Any, y: Any, z: Any) -> Any:
    return emit_call(b, f"llvm.fmuladd.v{x.type.count}f32", x.type, [x, y, z])


def emit_dot_shorts(b: ir.IRBuilder, total: Any, x: Any, y: Any) -> Any:
    """Add to each int32 of `total` the products of two neighbouring int16 of `x` and `y`."""
    if TIER == "avx512-vnni":
        kind = ir.VectorType(I32, LANES)
        return emit_call(b, "llvm.x86.avx512.vpdpwssd.512", kind, [total, x, y])
    if IS_X86:
        # LLVM knows the instruction, but rewrites its operands into something slower before it looks for it.
        name = "llvm.x86.avx2.pmadd.wd" if TIER == "avx2" else "llvm.x86.sse2.pmadd.wd"
        return b.add(total, emit_call(b, name, total.type, [x, y]))
    even, odd = (list(range(first, 2 * LANES, 2)) for first in (0, 1))
    wide = VECTORS["int32"]
    products = [
        b.mul(b.sext(emit_shuffle(b, x, x, part), wide), b.sext(emit_shuffle(b, y, y, part), wide))
        for part in (even, odd)
    ]
    return b.add(total, b.add(*products))


def emit_dot_bytes(b: ir.IRBuilder, total: Any, x: Any, y: Any) -> Any:
    """Add to each int32 of `total` the products of four neighbouring uint8 of `x` and int8 of `y`."""
    if TIER == "avx512-vnni":
        return emit_call(b, "llvm.x86.avx512.vpdpbusd.512", total.type, [total, x, y])
    x, y = (b.bitcast(v, VECTORS["int16"]) for v in (x, y))
    eight = emit_constant(x.type, 8)
    low = emit_dot_shorts(b, total, b.and_(x, emit_constant(x.type, 255)), b.ashr(b.shl(y, eight), eight))
    return emit_dot_shorts(b, low, b.lshr(x, eight), b.ashr(y, eight))


def emit_pairs(b: ir.IRBuilder, x: Any, y: Any) -> Any:
    """The products of two neighbouring uint8 of `x` and int8 of `y`, which must fit int16, as int16; of AVX2 alone."""
    return emit_call(b, "llvm.x86.avx2.pmadd.ub.sw", VECTORS["int16"], [x, y])


def emit_sum_bytes(b: ir.IRBuilder, total: Any, x: Any) -> Any:
    """Add to each int32 of `total` four neighbouring uint8 of `x`."""
    if TIER == "avx512-vnni":
        return emit_dot_bytes(b, total, x, emit_constant(x.type, 1))
    if TIER == "avx2":
        pairs = emit_pairs(b, x, emit_constant(x.type, 1))
        return emit_dot_shorts(b, total, pairs, emit_constant(pairs.type, 1))
    x = b.bitcast(x, VECTORS["int32"])
    low = emit_constant(x.type, 0x00FF00FF)
    pairs = b.add(b.and_(x, low), b.and_(b.lshr(x, emit_constant(x.type, 8)), low))
    both = b.add(pairs, b.lshr(pairs, emit_constant(x.type, 16)))
    return b.add(total, b.and_(both, emit_constant(x.type, 0xFFFF)))


def emit_halves(b: ir.IRBuilder, bits: Any) -> Any:
    """float16 bit patterns, LANES int16, as float32."""
    if HAS_FLOAT16:
        return b.fpext(b.bitcast(bits, ir.VectorType(ir.HalfType(), LANES)), VECTORS["float32"])
    # Exponent and mantissa moved to float32's places are the number times 2^-112: subnormal numbers need no branch.
    wide = VECTORS["int32"]
    word = b.zext(bits, wide)
    magnitude = b.shl(b.and_(word, emit_constant(wide, 0x7FFF)), emit_constant(wide, 13))
    scaled = b.fmul(b.bitcast(magnitude, VECTORS["float32"]), emit_constant(VECTORS["float32"], 2.0**112))
    number = b.bitcast(scaled, wide)
    exponent = b.and_(word, emit_constant(wide, 0x7C00))
    special = b.icmp_unsigned("==", exponent, emit_constant(wide, 0x7C00))
    number = b.select(special, b.or_(number, emit_constant(wide, 0x7F800000)), number)
    sign = b.shl(b.and_(word, emit_constant(wide, 0x8000)), emit_constant(wide, 16))
    return b.bitcast(b.or_(number, sign), VECTORS["float32"])


def emit_bfloats(b: ir.IRBuilder, address: Any) -> Any:
    wide = b.zext(emit_load(b, address, 0, ir.VectorType(I16, LANES)), VECTORS["int32"])
    return b.bitcast(b.shl(wide, emit_constant(wide.type, 16)), VECTORS["float32"])


def emit_absolute(b: ir.IRBuilder, x: Any) -> Any:
    return emit_call(b, f"llvm.fabs.v{x.type.count}f32", x.type, [x])


def emit_maximum(b: ir.IRBuilder, x: Any, y: Any) -> Any:
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def emit_minimum(b: ir.IRBuilder, x: Any, y: Any) -> Any:
    return b.select(b.fcmp_ordered("<", x, y), x, y)


def emit_round(b: ir.IRBuilder, x: Any) -> Any:
    """float32 below 2^22 in size to the nearest int32, ties to even."""
    if TIER == "avx512-vnni":
        mask, mode = ir.IntType(16)(0xFFFF), I32(4)
        undefined = emit_constant(VECTORS["int32"], 0)
        name = "llvm.x86.avx512.mask.cvtps2dq.512"
        return emit_call(b, name, VECTORS["int32"], [x, undefined, mask, mode])
    if TIER == "avx2":
        return emit_call(b, "llvm.x86.avx.cvt.ps2dq.256", VECTORS["int32"], [x])
    # Added to 1.5 * 2^23, the number's whole part is what the sum's low bits hold.
    magic = emit_constant(x.type, 1.5 * 2.0**23)
    return b.sub(b.bitcast(b.fadd(x, magic), VECTORS["int32"]), b.bitcast(magic, VECTORS["int32"]))


def emit_reduce(b: ir.IRBuilder, x: Any, combine: Callable[[ir.IRBuilder, Any, Any], Any]) -> Any:
    """All numbers of a vector combined into one, halves first."""
    while x.type.count > 1:
        half = x.type.count // 2
        low = emit_shuffle(b, x, x, list(range(half)))
        x = combine(b, low, emit_shuffle(b, x, x, list(range(half, 2 * half))))
    return b.extract_element(x, I32(0))


def emit_reduce_each(b: ir.IRBuilder, vectors: list[Any], combine: Callable[[ir.IRBuilder, Any, Any], Any]) -> Any:
    """Each of up to four vectors combined into one number, as a vector of four."""
    if len(vectors) == 1:
        return emit_splat(b, emit_reduce(b, vectors[0], combine), 4)

    def pairs(x: Any, y: Any | None) -> Any:
        """Neighbours of `x` combined, then those of `y`."""
        size = x.type.count * (1 if y is None else 2)
        even, odd = (emit_shuffle(b, x, x if y is None else y, list(range(first, size, 2))) for first in (0, 1))
        return combine(b, even, odd)

    w, x, y, z = (*vectors, *[vectors[-1]] * (4 - len(vectors)))
    result = pairs(pairs(w, x), pairs(y, z))
    while result.type.count > 4:
        result = pairs(result, None)
    return result
