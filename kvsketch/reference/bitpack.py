"""Bit packing in plain array calls."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvsketch._dispatch import namespace


def pack_signs(x: Any) -> Any:
    with np.errstate(invalid="ignore"):
        return _pack_bits(x >= 0)


def unpack_signs(packed: Any, m: int) -> Any:
    xp = namespace(packed)
    return _unpack_bits(packed)[..., :m].astype(xp.int8) * xp.int8(2) - xp.int8(1)


def pack_codes(codes: Any, bits: int) -> Any:
    xp = namespace(codes)
    planes = (codes[..., None] >> xp.arange(bits, dtype=xp.uint8)) & xp.uint8(1)
    return _pack_bits(planes.reshape(*codes.shape[:-1], codes.shape[-1] * bits))


def unpack_codes(packed: Any, n: int, bits: int) -> Any:
    xp = namespace(packed)
    planes = _unpack_bits(packed)[..., : n * bits].reshape(*packed.shape[:-1], n, bits)
    return (planes << xp.arange(bits, dtype=xp.uint8)).sum(axis=-1, dtype=xp.uint8)


def _pack_bits(bits: Any) -> Any:
    """Bytes (..., ceil(n/8)) of bits (..., n), the first bit lowest."""
    xp = namespace(bits)
    *lead, n = bits.shape
    nbytes = -(-n // 8)
    padded = xp.zeros((*lead, nbytes * 8), dtype=xp.uint8)
    padded[..., :n] = bits
    planes = padded.reshape(*lead, nbytes, 8) << xp.arange(8, dtype=xp.uint8)
    return planes.sum(axis=-1, dtype=xp.uint8)


def _unpack_bits(packed: Any) -> Any:
    """Bits (..., 8 nbytes) of bytes (..., nbytes)."""
    xp = namespace(packed)
    planes = (packed[..., None] >> xp.arange(8, dtype=xp.uint8)) & xp.uint8(1)
    return planes.reshape(*packed.shape[:-1], packed.shape[-1] * 8)
