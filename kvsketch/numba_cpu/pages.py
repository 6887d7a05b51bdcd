"""Page records encoded and decoded in Numba, the same bytes as the reference's.

Encoding is that of :mod:`kvsketch.numba_cpu.encode`. To be decoded, a record is a contiguous uint8 array whose fields a
:class:`kvsketch.layout.SideSpec` says; its codes go through a tile: float32, blocks of 32 lanes by units of 8
contraction rows, ``8*lane + row`` in a unit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvsketch.layout import KIND_EXACT, KIND_SKETCH, SideLayout, unit_rows
from kvsketch.numba_cpu import qjl
from kvsketch.numba_cpu._compile import kernel, kernel_part, writable
from kvsketch.numba_cpu.encode import encode_side
from kvsketch.numba_cpu.float16 import half_to_float
from kvsketch.reference import pages as reference

#: Floats in a tile for each unit of 8 contraction rows by 32 lanes.
UNIT = 256


def select_channels(k: Any, side: SideLayout) -> Any:
    return reference.select(k, side, qjl.select_outlier_channels)


def encode_keys(k: Any, side: SideLayout, *, channels: Any, out: Any) -> int:
    return encode_side(k, side, out, channels)


def encode_values(v: Any, side: SideLayout, *, out: Any) -> int:
    return encode_side(v, side, out)


#: Contraction rows of a unit of codes of so many bits.
_unit_depth = kernel_part()(unit_rows)


@kernel_part()
def _unpack_codes(record, offset, units, bits, tile):  # type: ignore[no-untyped-def]
    """Codes of `units` consecutive units as floats; a 1- or 3-bit unit fills two of the tile's."""
    mask, planes = np.uint8((1 << bits) - 1), max(8 // bits, 1)
    halves = _unit_depth(bits) // 8
    for unit in range(units):
        start = offset + unit * 32 * halves * bits
        for half in range(halves):
            for lane in range(32):
                plane, i = lane // 8, lane % 8
                target = (halves * unit + half) * UNIT + 8 * lane
                if halves == 1:
                    source, shift = start + 64 * (plane // planes) + 8 * i, np.uint8(bits * (plane % planes))
                    for r in range(8):
                        tile[target + r] = np.float32((record[source + r] >> shift) & mask)
                else:
                    source, shift = start + 64 * (bits - 1) + 8 * i, np.uint8(plane + 4 * half)
                    for r in range(8):
                        tile[target + r] = np.float32((record[source + r] >> shift) & np.uint8(1))
                    if bits == 3:
                        source, shift = start + 64 * half + 8 * i, np.uint8(2 * plane)
                        for r in range(8):
                            low = np.float32((record[source + r] >> shift) & np.uint8(3))
                            tile[target + r] = np.float32(4) * tile[target + r] + low


@kernel_part()
def _read_halves(record, offset, count, out):  # type: ignore[no-untyped-def]
    """`count` float16 numbers at byte `offset` of a record, as float32."""
    for i in range(count):
        low, high = np.uint16(record[offset + 2 * i]), np.uint16(record[offset + 2 * i + 1])
        out[i] = half_to_float(np.uint16(low | (high << np.uint16(8))))


@kernel_part()
def _decode_int_keys(record, spec, tile, numbers, out):  # type: ignore[no-untyped-def]
    """One page of keys float32 (p, d)."""
    depth = _unit_depth(spec.bits)
    size = spec.rows // depth * 4 * depth * spec.bits
    for part in range(spec.groups):
        _read_halves(record, spec.scale + 2 * part * spec.rows, spec.rows, numbers[0])
        _read_halves(record, spec.zero + 2 * part * spec.rows, spec.rows, numbers[1])
        for block in range(part * spec.group // 32, (part + 1) * spec.group // 32):
            _unpack_codes(record, spec.codes + block * size, spec.rows // depth, spec.bits, tile)
            for lane in range(32):
                for c in range(spec.width):
                    code = tile[c // 8 * UNIT + 8 * lane + c % 8]
                    out[32 * block + lane, c] = code * numbers[0, c] + numbers[1, c]


@kernel_part()
def _decode_by_token(record, spec, tile, numbers, out):  # type: ignore[no-untyped-def]
    """One page of values float32 (p, dv), or of other numbers whose groups are channels of one token."""
    depth = _unit_depth(spec.bits)
    size = spec.tokens // depth * 4 * depth * spec.bits
    for c in range(spec.width):
        part = c // spec.group
        if c % spec.group == 0:
            _read_halves(record, spec.scale + 2 * part * spec.tokens, spec.tokens, numbers[0])
            _read_halves(record, spec.zero + 2 * part * spec.tokens, spec.tokens, numbers[1])
        if c % 32 == 0:
            _unpack_codes(record, spec.codes + c // 32 * size, spec.tokens // depth, spec.bits, tile)
        for t in range(spec.tokens):
            out[t, c] = tile[t // 8 * UNIT + 8 * (c % 32) + t % 8] * numbers[0, t] + numbers[1, t]


@kernel()
def _decode_ints(records, spec, by_token):  # type: ignore[no-untyped-def]
    """records uint8 (N, side bytes) to float32 (N, p, width)."""
    out = np.empty((records.shape[0], spec.tokens, spec.width), np.float32)
    rows = max(spec.rows, spec.tokens)
    tile, numbers = np.empty(rows // 8 * UNIT, np.float32), np.empty((2, rows), np.float32)
    for page in range(records.shape[0]):
        if by_token:
            _decode_by_token(records[page], spec, tile, numbers, out[page])
        else:
            _decode_int_keys(records[page], spec, tile, numbers, out[page])
    return out


def _decode_ints_of(records: Any, side: SideLayout) -> Any:
    lead = records.shape[:-2]
    flat = writable(np.ascontiguousarray(records)).reshape(-1, side.nbytes)
    pages = _decode_ints(flat, side.spec, side.by_token)
    return pages.reshape(*lead, records.shape[-2] * side.tokens, side.width)


def decode_keys(records: Any, side: SideLayout) -> Any:
    if side.spec.kind in (KIND_EXACT, KIND_SKETCH):
        return reference.decode_keys(records, side)
    return _decode_ints_of(records, side)


def decode_values(records: Any, side: SideLayout) -> Any:
    if side.spec.kind == KIND_EXACT:
        return reference.decode_values(records, side)
    return _decode_ints_of(records, side)
