"""Codes in the units of a page (docs/layout.md): a thread packs each byte, and finds each code."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from kvsketch.layout import LANES, VECTOR_BYTES, unit_bytes, unit_rows
from kvsketch.numba_cuda._launch import launch


def pack_units(codes: Any, bits: int, records: Any, offset: int) -> None:
    """Write codes uint8 (P, lanes, rows) to the code field at byte `offset` of `records` (P, side bytes)."""
    pages, lanes, rows = codes.shape
    units = -(-rows // unit_rows(bits))
    field_bytes = -(-lanes // LANES) * units * unit_bytes(bits)
    launch(_pack_units, pages * field_bytes, codes, bits, units, field_bytes, records, offset)


@cuda.jit(device=True)
def rows_of_unit(bits):
    """:func:`kvsketch.layout.unit_rows`."""
    return 16 if bits == 1 or bits == 3 else 8


@cuda.jit
def _pack_units(codes, bits, units, field_bytes, records, offset):
    """Fields of `field_bytes` of `records` (P, side bytes), `units` units to a block of 32 lanes."""
    page, byte = divmod(cuda.grid(1), field_bytes)
    if page < records.shape[0]:
        rows = rows_of_unit(bits)
        unit, at = divmod(byte, LANES * rows * bits // 8)
        vector, at = divmod(at, VECTOR_BYTES)
        lane, row = unit // units * LANES + at // 8, unit % units * rows + at % 8
        value = 0
        for block in range(4):
            if bits == 1 or (bits == 3 and vector == 2):
                # A bit of rows 0..7, and four bits higher one of rows 8..15: the only or the highest of a code.
                value |= (code_or_zero(codes, page, lane + 8 * block, row) >> (bits - 1)) << block
                value |= (code_or_zero(codes, page, lane + 8 * block, row + 8) >> (bits - 1)) << (block + 4)
            elif bits == 3:
                value |= (code_or_zero(codes, page, lane + 8 * block, row + 8 * vector) & 3) << (2 * block)
            elif block // (8 // bits) == vector:
                value |= code_or_zero(codes, page, lane + 8 * block, row) << (bits * (block % (8 // bits)))
        records[page, offset + byte] = value


@cuda.jit(device=True)
def code_or_zero(codes, page, lane, row):
    """A code of (P, lanes, rows), 0 beyond the last lane and row."""
    if lane < codes.shape[1] and row < codes.shape[2]:
        return np.int64(codes[page, lane, row])
    return 0


@cuda.jit(device=True)
def unit_code(records, page, offset, bits, rows, lane, row):
    """The code at (lane, row) of the code field at byte `offset` of a page, which has `rows` rows."""
    per_unit = rows_of_unit(bits)
    unit = lane // LANES * ((rows + per_unit - 1) // per_unit) + row // per_unit
    start = offset + unit * (LANES * per_unit * bits // 8)
    block, high = lane % LANES // 8, row % per_unit // 8
    at = 8 * (lane % 8) + row % 8
    if bits == 1:
        return (np.int64(records[page, start + at]) >> (block + 4 * high)) & 1
    if bits == 3:
        low = (np.int64(records[page, start + VECTOR_BYTES * high + at]) >> (2 * block)) & 3
        top = (np.int64(records[page, start + 2 * VECTOR_BYTES + at]) >> (block + 4 * high)) & 1
        return low | (top << 2)
    planes = 8 // bits
    byte = np.int64(records[page, start + VECTOR_BYTES * (block // planes) + at])
    return (byte >> (bits * (block % planes))) & ((1 << bits) - 1)
