"""Signs and small codes packed into bytes as little-endian bit streams.

Code j of a row occupies bits j*bits to (j+1)*bits - 1 of the stream, bit i of the stream is bit i % 8 of byte i // 8,
and unused bits of a row's last byte are 0.
"""

from __future__ import annotations

from typing import Any

from kvsketch._checks import check_bits, check_integer
from kvsketch._dispatch import implementation

__all__ = ["pack_codes", "pack_signs", "packed_bytes", "unpack_codes", "unpack_signs"]


def packed_bytes(n: int, bits: int) -> int:
    """Bytes that a row of `n` >= 0 codes of `bits` bits takes: ceil(n bits / 8)."""
    return -(-check_integer("n", n, low=0) * check_bits(bits) // 8)


def pack_signs(x: Any, *, engine: str | None = None) -> Any:
    """Pack the signs of `x` along its last axis, a bit each.

    Parameters
    ----------
    x : real array (..., m)
        Any float or integer dtype.
    engine : str, optional
        Engine to use; the fastest by default.

    Returns
    -------
    uint8 array (..., ceil(m/8))
        A bit is 1 where x >= 0, also for -0.0; it is 0 where x < 0 or NaN.
    """
    run = implementation("bitpack.pack_signs", x, engine=engine)
    if x.dtype.kind not in "fiu" and str(x.dtype) != "bfloat16":
        raise TypeError(f"x has dtype {x.dtype}; pack_signs takes real numbers")
    _check_axes("x", x)
    return run(x)


def unpack_signs(packed: Any, m: int, *, engine: str | None = None) -> Any:
    """Signs +1 and -1, int8 (..., m), of `packed`, uint8 (..., ceil(m/8)); inverse of :func:`pack_signs`."""
    run = implementation("bitpack.unpack_signs", packed, engine=engine)
    m = check_integer("m", m, low=0)
    _check_packed(packed, "m", m, 1)
    return run(packed, m)


def pack_codes(codes: Any, *, bits: int, engine: str | None = None) -> Any:
    """Pack codes along their last axis.

    Parameters
    ----------
    codes : uint8 array (..., n)
        Each below 2^bits; a larger one raises ValueError.
    bits : {1, 2, 3, 4, 8}
    engine : str, optional
        Engine to use; the fastest by default.

    Returns
    -------
    uint8 array (..., ceil(n bits / 8))
    """
    run = implementation("bitpack.pack_codes", codes, engine=engine)
    bits = check_bits(bits)
    _check_bytes("codes", codes)
    if codes.size and bits < 8 and int(codes.max()) >= 1 << bits:
        raise ValueError(f"codes holds {int(codes.max())}, which does not fit bits={bits}; codes go to {2**bits - 1}")
    return run(codes, bits)


def unpack_codes(packed: Any, n: int, *, bits: int, engine: str | None = None) -> Any:
    """Codes, uint8 (..., n), of `packed`, uint8 (..., ceil(n bits / 8)); inverse of :func:`pack_codes`."""
    run = implementation("bitpack.unpack_codes", packed, engine=engine)
    bits, n = check_bits(bits), check_integer("n", n, low=0)
    _check_packed(packed, "n", n, bits)
    return run(packed, n, bits)


def _check_axes(name: str, x: Any) -> None:
    if x.ndim == 0:
        raise ValueError(f"{name} must have at least one axis, got a scalar; reshape it to (1,)")


def _check_bytes(name: str, x: Any) -> None:
    if str(x.dtype) != "uint8":
        raise TypeError(f"{name} has dtype {x.dtype}; it must be uint8")
    _check_axes(name, x)


def _check_packed(packed: Any, count_name: str, count: int, bits: int) -> None:
    _check_bytes("packed", packed)
    expected = packed_bytes(count, bits)
    if packed.shape[-1] != expected:
        raise ValueError(
            f"packed has shape {tuple(packed.shape)}, but {count_name}={count} codes of {bits} bits "
            f"take {expected} bytes on the last axis"
        )
