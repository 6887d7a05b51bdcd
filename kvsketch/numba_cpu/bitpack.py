"""Bit packing in Numba."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvsketch.numba_cpu._compile import kernel


def pack_signs(x: Any) -> Any:
    with np.errstate(invalid="ignore"):
        return pack_codes((x >= 0).view(np.uint8), 1)


def unpack_signs(packed: Any, m: int) -> Any:
    return unpack_codes(packed, m, 1).view(np.int8) * np.int8(2) - np.int8(1)


def pack_codes(codes: Any, bits: int) -> Any:
    *lead, n = codes.shape
    packed = np.zeros((*lead, -(-n * bits // 8)), dtype=np.uint8)
    if packed.size:
        _pack_rows(np.array(codes, order="C").reshape(-1, n), bits, packed.reshape(-1, packed.shape[-1]))
    return packed


def unpack_codes(packed: Any, n: int, bits: int) -> Any:
    *lead, nbytes = packed.shape
    codes = np.empty((*lead, n), dtype=np.uint8)
    if codes.size:
        _unpack_rows(np.array(packed, order="C").reshape(-1, nbytes), bits, codes.reshape(-1, n))
    return codes


@kernel()
def _pack_rows(codes: np.ndarray, bits: int, packed: np.ndarray) -> None:
    """Fill `packed` (rows, ceil(n bits / 8)), zeros before, from `codes` (rows, n)."""
    for row in range(codes.shape[0]):
        for j in range(codes.shape[1]):
            byte, shift = divmod(j * bits, 8)
            code = np.uint32(codes[row, j]) << shift
            packed[row, byte] |= np.uint8(code & 255)
            if shift + bits > 8:
                packed[row, byte + 1] |= np.uint8(code >> 8)


@kernel()
def _unpack_rows(packed: np.ndarray, bits: int, codes: np.ndarray) -> None:
    """Fill `codes` (rows, n) from `packed` (rows, ceil(n bits / 8))."""
    mask = (1 << bits) - 1
    for row in range(codes.shape[0]):
        for j in range(codes.shape[1]):
            byte, shift = divmod(j * bits, 8)
            code = np.uint32(packed[row, byte]) >> shift
            if shift + bits > 8:
                code |= np.uint32(packed[row, byte + 1]) << (8 - shift)
            codes[row, j] = np.uint8(code & mask)
