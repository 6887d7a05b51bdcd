"""Packed codes of a unit as vectors that dot products take, and how large the numbers in them are.

Codes are multiplied where they lie: a mask leaves a plane's code times a power of two, which the sums are rid of at the
end. Where that would make sums too large, codes are shifted down first.

AVX2 has no instruction that adds products of bytes to an int32. It has one that adds two of them to an int16, which
takes the products of several units before it is full: small codes then need half of the instructions that int16
coefficients need.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from kvsketch.layout import unit_rows
from kvsketch.numba_cpu._compile import inner
from kvsketch.numba_cpu._tiers import TIER
from kvsketch.numba_cpu.emit import VECTORS, emit_constant, emit_load

#: Planes of 8 lanes in a unit.
PLANES = 4
#: Largest coefficient of each kind.
MOST = {"int16": 32767, "int8": 127}


def sums_bytes_in_shorts(bits: int, coefficients: str) -> bool:
    """Whether products are summed in int16 before they are in int32; two of 8 bits would not fit."""
    return TIER == "avx2" and coefficients == "int8" and bits < 8


def are_alone(bits: int, coefficients: str) -> bool:
    """Whether codes are multiplied without a power of two."""
    if bits == 3:
        return coefficients == "int8"
    return bits in (2, 4) and sums_bytes_in_shorts(bits, coefficients)


def plane_weight(bits: int, plane: int, coefficients: str) -> float:
    """What a plane's sums are multiplied by: one over the power of two that its codes came with."""
    if are_alone(bits, coefficients):
        return 1.0
    if bits == 1:
        return 1 / (1 << plane)
    if bits == 3:
        return 1 / (1 << 2 * plane)
    return 1 / (1 << bits * (plane % (8 // bits)))


def largest_code(bits: int, coefficients: str) -> int:
    """Largest number that a code is multiplied as."""
    most = 2**bits - 1
    if are_alone(bits, coefficients):
        return most
    return round(most / min(plane_weight(bits, plane, coefficients) for plane in range(PLANES)))


def units_in_shorts(bits: int) -> int:
    """Units whose products with any int8 coefficients an int16 holds: it takes two of each 8 rows."""
    return (2**15 - 1) // (2 * MOST["int8"] * largest_code(bits, "int8") * (unit_rows(bits) // 8))


def bias_of(coefficients: str, signed: bool) -> int:
    """What stored coefficients are less by than the numbers they stand for."""
    return 32768 if coefficients == "int16" and not signed else 0


def make_limit(bits: int, coefficients: str, *, signed: bool) -> Any:
    """A function of the number of rows: the largest coefficient with which no sum leaves the range of int32.

    An int32 sums half of the rows, and the two halves of a score are added before they become float32.
    """
    most = MOST[coefficients] + bias_of(coefficients, signed)
    largest = largest_code(bits, coefficients)

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


def short_codes(b: ir.IRBuilder, unit: Any, offset: int, bits: int) -> list[list[tuple[Any, Any]]]:
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


def byte_codes(b: ir.IRBuilder, unit: Any, offset: int, bits: int, *, alone: bool = False) -> list[list[Any]]:
    """Codes of a unit for int8 coefficients: for each 8 rows and plane, a vector of bytes.

    `alone`: without the power of two that codes of 2 and 4 bits come with; those of 3 bits never have it.
    """

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
    ones, places = (1 << bits) - 1, [bits * p for p in range(8 // bits)]
    words = [load(vector) for vector in range(bits // 2)]
    if alone:
        return [[mask(_shift(b, word, -place), ones) for word in words for place in places]]
    return [[mask(word, ones << place) for word in words for place in places]]
