"""float16 in Numba code, which has no such type on the CPU: a half travels as its uint16 bit pattern.

Both conversions round and underflow exactly as NumPy does (round half to even, subnormal numbers kept, values that
round beyond 65504 become infinite) and NaN stays NaN, of an unspecified payload. They compile to one instruction where
the machine has it, vectorised in loops, and to exact integer arithmetic elsewhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic


@intrinsic
def _extend(_context: Any, bits: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


@intrinsic
def _truncate(_context: Any, x: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), generate


@njit
def native_half_to_float(bits):  # type: ignore[no-untyped-def]
    return _extend(np.uint16(bits))


@njit
def native_float_to_half(x):  # type: ignore[no-untyped-def]
    return _truncate(np.float32(x))


@njit
def portable_half_to_float(bits):  # type: ignore[no-untyped-def]
    # Exponent and mantissa, moved to float32's places, are the number times 2^-112: subnormal numbers need no branch.
    half = np.uint32(bits)
    magnitude = np.uint32((half & np.uint32(0x7FFF)) << np.uint32(13))
    scaled = np.uint32(np.float32(magnitude.view(np.float32) * np.float32(2.0**112)).view(np.uint32))
    if (half & np.uint32(0x7C00)) == np.uint32(0x7C00):
        scaled = np.uint32(scaled | np.uint32(0x7F800000))
    return np.uint32(scaled | np.uint32((half & np.uint32(0x8000)) << np.uint32(16))).view(np.float32)


@njit
def portable_float_to_half(x):  # type: ignore[no-untyped-def]
    bits = np.float32(x).view(np.uint32)
    sign = np.uint32((bits >> np.uint32(16)) & np.uint32(0x8000))
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    # Normal: rebias the exponent from 127 to 15 and round to even by adding just under half a unit, or half if odd.
    odd = np.uint32((magnitude >> np.uint32(13)) & np.uint32(1))
    half = np.uint32(np.uint32(magnitude - np.uint32(112 << 23) + np.uint32(0xFFF) + odd) >> np.uint32(13))
    if magnitude < np.uint32(113 << 23):
        # Subnormal: adding 0.5 leaves units of 2^-24 in the last place, rounded to even by the addition itself.
        shifted = np.float32(magnitude.view(np.float32) + np.float32(0.5)).view(np.uint32)
        half = np.uint32(shifted - np.uint32(126 << 23))
    if magnitude >= np.uint32(143 << 23):
        half = np.uint32(0x7E00) if magnitude > np.uint32(0x7F800000) else np.uint32(0x7C00)
    return np.uint16(half | sign)


def _has_conversion_instructions() -> bool:
    """Whether the compilation target converts halves itself (else LLVM calls a routine that Numba does not link)."""
    triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    return triple.startswith(("aarch64", "arm64")) or "+f16c" in features.split(",")


if _has_conversion_instructions():
    half_to_float, float_to_half = native_half_to_float, native_float_to_half
else:
    half_to_float, float_to_half = portable_half_to_float, portable_float_to_half
