"""Bit packing: a thread makes each byte, and each code."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import cuda

from kvsketch._dispatch import namespace
from kvsketch.numba_cuda._launch import BITS_ONLY, launch


def pack_signs(x: Any) -> Any:
    xp = namespace(x)
    rows, n = _rows(x.astype(xp.float32) if str(x.dtype) in BITS_ONLY else x)
    packed = xp.empty((len(rows), -(-n // 8)), dtype=xp.uint8)
    launch(_pack_signs, packed.size, rows, packed)
    return packed.reshape(*x.shape[:-1], packed.shape[-1])


def unpack_signs(packed: Any, m: int) -> Any:
    xp = namespace(packed)
    rows, _ = _rows(packed)
    signs = xp.empty((len(rows), m), dtype=xp.int8)
    launch(_unpack_signs, signs.size, rows, signs)
    return signs.reshape(*packed.shape[:-1], m)


def pack_codes(codes: Any, bits: int) -> Any:
    rows, n = _rows(codes)
    packed = namespace(codes).empty((len(rows), -(-n * bits // 8)), dtype=np.uint8)
    launch(_pack_codes, packed.size, rows, bits, packed)
    return packed.reshape(*codes.shape[:-1], packed.shape[-1])


def unpack_codes(packed: Any, n: int, bits: int) -> Any:
    rows, _ = _rows(packed)
    codes = namespace(packed).empty((len(rows), n), dtype=np.uint8)
    launch(_unpack_codes, codes.size, rows, bits, codes)
    return codes.reshape(*packed.shape[:-1], n)


def _rows(x: Any) -> tuple[Any, int]:
    """`x` (..., n) as (rows, n), and n."""
    *lead, n = x.shape
    return x.reshape(math.prod(lead), n), n


@cuda.jit
def _pack_signs(x, packed):
    """Bytes `packed` (rows, ceil(m/8)) of the signs of `x` (rows, m)."""
    row, byte = divmod(cuda.grid(1), packed.shape[1])
    if row < packed.shape[0]:
        value = 0
        for bit in range(8):
            i = 8 * byte + bit
            if i < x.shape[1] and x[row, i] >= 0:
                value |= 1 << bit
        packed[row, byte] = value


@cuda.jit
def _unpack_signs(packed, signs):
    """Signs (rows, m) of `packed` (rows, ceil(m/8))."""
    row, i = divmod(cuda.grid(1), signs.shape[1])
    if row < signs.shape[0]:
        signs[row, i] = 2 * stream_code(packed, row, i, 1) - 1


@cuda.jit
def _pack_codes(codes, bits, packed):
    """Bytes `packed` (rows, ceil(n bits / 8)) of `codes` (rows, n): bit i of the stream is bit i % 8 of byte i // 8."""
    row, byte = divmod(cuda.grid(1), packed.shape[1])
    if row < packed.shape[0]:
        value = 0
        for bit in range(8):
            j, shift = divmod(8 * byte + bit, bits)
            if j < codes.shape[1]:
                value |= ((np.int64(codes[row, j]) >> shift) & 1) << bit
        packed[row, byte] = value


@cuda.jit
def _unpack_codes(packed, bits, codes):
    """Codes (rows, n) of `packed` (rows, ceil(n bits / 8))."""
    row, j = divmod(cuda.grid(1), codes.shape[1])
    if row < codes.shape[0]:
        codes[row, j] = stream_code(packed, row, j, bits)


@cuda.jit(device=True)
def stream_code(packed, row, j, bits):
    """Code j of a row of `packed` (rows, ceil(n bits / 8)), an integer."""
    byte, shift = divmod(j * bits, 8)
    code = np.int64(packed[row, byte]) >> shift
    if shift + bits > 8:
        code |= np.int64(packed[row, byte + 1]) << (8 - shift)
    return code & ((1 << bits) - 1)
