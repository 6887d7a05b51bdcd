"""Page records encoded and decoded in Numba, the same bytes as the reference's.

Compiled functions work on one record, a contiguous uint8 array, and find its fields through a
:class:`kvsketch.layout.SideSpec` whose offsets are shifted to where the side lies in the record. Numbers that come out
of a record lie in a tile: float32, blocks of 32 lanes by units of 8 contraction rows, ``8*lane + row`` in a unit.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvsketch.codecs import Exact, SignSketch
from kvsketch.layout import DTYPE_CODES, KIND_EXACT, KIND_SKETCH, SideLayout, unit_rows
from kvsketch.numba_cpu import qjl
from kvsketch.numba_cpu._compile import kernel, kernel_part, writable
from kvsketch.numba_cpu._threads import run_parts
from kvsketch.numba_cpu.float16 import float_to_half, half_to_float
from kvsketch.numba_cpu.kivi import quantize_columns, quantize_rows
from kvsketch.numba_cpu.lanes import (
    add_high_bit,
    load_bytes,
    load_word,
    stay_apart,
    store,
    store_word,
    take_bits,
    take_next,
    to_floats,
)
from kvsketch.reference import pages as reference

FLOAT32, FLOAT16 = DTYPE_CODES["float32"], DTYPE_CODES["float16"]
#: Floats in a tile for each unit of 8 contraction rows by 32 lanes.
UNIT = 256
#: As many pages are encoded in the calling thread: waking others costs more than it saves.
FEW_PAGES = 32


def select_channels(k: Any, side: SideLayout) -> Any:
    return reference.select(k, side, qjl.select_outlier_channels)


#: Contraction rows of a unit of codes of so many bits.
unit_depth = kernel_part()(unit_rows)


@kernel_part()
def unpack_codes(record, offset, units, bits, tile, start):  # type: ignore[no-untyped-def]
    """Codes of `units` consecutive units as floats, from tile[start] on; a 1- or 3-bit unit fills two of the tile's."""
    mask = np.uint8((1 << bits) - 1)
    for unit in range(units):
        if bits == 1 or bits == 3:
            size = 64 * bits
            signs = load_bytes(record, offset + unit * size + size - 64)
            for half in range(2):
                target = start + (2 * unit + half) * UNIT
                for plane in range(4):
                    codes = take_bits(signs, np.uint8(4 * half + plane), np.uint8(1))
                    if bits == 3:
                        low = load_bytes(record, offset + unit * size + 64 * half)
                        codes = add_high_bit(take_bits(low, np.uint8(2 * plane), np.uint8(3)), codes)
                    store(tile, target + 64 * plane, to_floats(codes))
        else:
            planes = 8 // bits
            for vector in range(bits // 2):
                packed = load_bytes(record, offset + unit * 32 * bits + 64 * vector)
                for plane in range(planes):
                    codes = take_bits(packed, np.uint8(bits * plane), mask)
                    store(tile, start + unit * UNIT + 64 * (planes * vector + plane), to_floats(codes))


@kernel_part()
def pack_codes(codes, bits, record, offset):  # type: ignore[no-untyped-def]
    """Units of codes uint8 (lanes, rows), both whole multiples of a unit, block by block of 32 lanes."""
    stay_apart()
    lanes, rows = codes.shape
    depth = unit_depth(bits)
    size = 4 * depth * bits
    for block in range(lanes // 32):
        for unit in range(rows // depth):
            o = offset + (block * (rows // depth) + unit) * size
            record[o : o + size] = 0
            for sub in range(4):
                for i in range(8):
                    lane = codes[32 * block + 8 * sub + i]
                    for r in range(depth):
                        code = lane[unit * depth + r]
                        byte = o + 8 * i + r % 8
                        half = r // 8
                        if bits == 1:
                            record[byte] |= code << np.uint8(sub + 4 * half)
                        elif bits == 3:
                            record[byte + 64 * half] |= (code & np.uint8(3)) << np.uint8(2 * sub)
                            record[byte + 128] |= (code >> np.uint8(2)) << np.uint8(sub + 4 * half)
                        else:
                            planes = 8 // bits
                            record[byte + 64 * (sub // planes)] |= code << np.uint8(bits * (sub % planes))


@kernel_part()
def read_halves(record, offset, count, out):  # type: ignore[no-untyped-def]
    """`count` float16 numbers at byte `offset` of a record, as float32."""
    for i in range(count):
        out[i] = half_to_float(load_word(record, offset + 2 * i))


@kernel_part()
def _write_halves(numbers, record, offset):  # type: ignore[no-untyped-def]
    for i in range(numbers.size):
        store_word(record, offset + 2 * i, float_to_half(numbers[i]))


@kernel_part()
def _encode_int_keys(x, record, spec):  # type: ignore[no-untyped-def]
    """One page: x float32 (p, d) into `record`; number of saturated scales and zeros."""
    stay_apart()
    codes = np.zeros((spec.tokens, spec.rows), np.uint8)
    scale, zero = np.zeros(spec.rows, np.float32), np.zeros(spec.rows, np.float32)
    saturated = 0
    for part in range(spec.groups):
        here = slice(part * spec.group, (part + 1) * spec.group)
        saturated += quantize_columns(x[here], spec.bits, codes[here, : spec.width], scale, zero)
        _write_halves(scale, record, spec.scale + 2 * part * spec.rows)
        _write_halves(zero, record, spec.zero + 2 * part * spec.rows)
    pack_codes(codes, spec.bits, record, spec.codes)
    return saturated


@kernel_part()
def _encode_int_values(x, record, spec):  # type: ignore[no-untyped-def]
    """One page: x float32 (p, dv) into `record`; number of saturated scales and zeros."""
    stay_apart()
    codes = np.zeros(((spec.width + 31) // 32 * 32, spec.tokens), np.uint8)
    scale, zero = np.empty(spec.tokens, np.float32), np.empty(spec.tokens, np.float32)
    saturated = 0
    for part in range(spec.groups):
        first, last = part * spec.group, min((part + 1) * spec.group, spec.width)
        group = np.empty((spec.tokens, last - first), np.float32)
        for t in range(spec.tokens):
            for c in range(first, last):
                group[t, c - first] = x[t, c]
        group_codes = np.empty(group.shape, np.uint8)
        saturated += quantize_rows(group, spec.bits, group_codes, scale, zero)
        for c in range(first, last):
            for t in range(spec.tokens):
                codes[c, t] = group_codes[t, c - first]
        _write_halves(scale, record, spec.scale + 2 * part * spec.tokens)
        _write_halves(zero, record, spec.zero + 2 * part * spec.tokens)
    pack_codes(codes, spec.bits, record, spec.codes)
    return saturated


@kernel_part()
def _encode_page(x, record, spec, is_keys):  # type: ignore[no-untyped-def]
    if is_keys:
        return _encode_int_keys(x, record, spec)
    return _encode_int_values(x, record, spec)


@kernel()
def _encode_ints(counter, total, x, records, spec, is_keys):  # type: ignore[no-untyped-def]
    """Pages of x float32 (N, p, width) into records uint8 (N, side bytes), as many as this thread gets."""
    saturated = 0
    page = take_next(counter)
    while page < total:
        saturated += _encode_page(x[page], records[page], spec, is_keys)
        page = take_next(counter)
    return saturated


@kernel()
def _pack_sign_pages(signs, rows, units):  # type: ignore[no-untyped-def]
    """Packed signs uint8 (N, p, ceil(m/8)) into units uint8 (N, bytes) of pages with `rows` rows."""
    for page in range(signs.shape[0]):
        bits = np.zeros((signs.shape[1], rows), np.uint8)
        for t in range(signs.shape[1]):
            for r in range(min(rows, 8 * signs.shape[2])):
                bits[t, r] = (signs[page, t, r // 8] >> np.uint8(r % 8)) & np.uint8(1)
        pack_codes(bits, 1, units[page], 0)


def _pack_sign_units(signs: Any, m: int, rows: int) -> Any:
    *lead, tokens, count = signs.shape
    units = np.empty((math.prod(lead), tokens * rows // 8), np.uint8)
    _pack_sign_pages(np.ascontiguousarray(signs).reshape(-1, tokens, count), rows, units)
    return units.reshape(*lead, tokens * rows // 8)


def _encode_ints_into(x: Any, side: SideLayout, out: Any) -> int:
    pages = writable(np.ascontiguousarray(x, dtype=np.float32)).reshape(-1, side.tokens, side.width)
    records = np.zeros((len(pages), side.nbytes), np.uint8)
    threads = 1 if len(pages) <= FEW_PAGES else None
    saturated = run_parts(_encode_ints, len(pages), pages, records, side.spec, side.side == "keys", threads=threads)
    out[...] = records.reshape(out.shape)
    return int(sum(saturated))


def encode_keys(k: Any, side: SideLayout, *, channels: Any, out: Any) -> int:
    if isinstance(side.codec, Exact):
        return reference.encode_keys(k, side, channels=channels, out=out)
    if isinstance(side.codec, SignSketch):
        x = reference.page_view(k, side)
        return reference.encode_sketch(x, side, channels, out, family=qjl, pack=_pack_sign_units)
    return _encode_ints_into(k, side, out)


def encode_values(v: Any, side: SideLayout, *, out: Any) -> int:
    if isinstance(side.codec, Exact):
        return reference.encode_values(v, side, out=out)
    return _encode_ints_into(v, side, out)


@kernel_part()
def _decode_int_keys(record, spec, tile, numbers, out):  # type: ignore[no-untyped-def]
    """One page of keys float32 (p, d)."""
    depth = unit_depth(spec.bits)
    size = spec.rows // depth * 4 * depth * spec.bits
    for part in range(spec.groups):
        read_halves(record, spec.scale + 2 * part * spec.rows, spec.rows, numbers[0])
        read_halves(record, spec.zero + 2 * part * spec.rows, spec.rows, numbers[1])
        for block in range(part * spec.group // 32, (part + 1) * spec.group // 32):
            unpack_codes(record, spec.codes + block * size, spec.rows // depth, spec.bits, tile, 0)
            for lane in range(32):
                for c in range(spec.width):
                    code = tile[c // 8 * UNIT + 8 * lane + c % 8]
                    out[32 * block + lane, c] = code * numbers[0, c] + numbers[1, c]


@kernel_part()
def _decode_int_values(record, spec, tile, numbers, out):  # type: ignore[no-untyped-def]
    """One page of values float32 (p, dv)."""
    depth = unit_depth(spec.bits)
    size = spec.tokens // depth * 4 * depth * spec.bits
    for c in range(spec.width):
        part = c // spec.group
        if c % spec.group == 0:
            read_halves(record, spec.scale + 2 * part * spec.tokens, spec.tokens, numbers[0])
            read_halves(record, spec.zero + 2 * part * spec.tokens, spec.tokens, numbers[1])
        if c % 32 == 0:
            unpack_codes(record, spec.codes + c // 32 * size, spec.tokens // depth, spec.bits, tile, 0)
        for t in range(spec.tokens):
            out[t, c] = tile[t // 8 * UNIT + 8 * (c % 32) + t % 8] * numbers[0, t] + numbers[1, t]


@kernel()
def _decode_ints(records, spec, is_keys):  # type: ignore[no-untyped-def]
    """records uint8 (N, side bytes) to float32 (N, p, width)."""
    out = np.empty((records.shape[0], spec.tokens, spec.width), np.float32)
    rows = max(spec.rows, spec.tokens)
    tile, numbers = np.empty(rows // 8 * UNIT, np.float32), np.empty((2, rows), np.float32)
    for page in range(records.shape[0]):
        if is_keys:
            _decode_int_keys(records[page], spec, tile, numbers, out[page])
        else:
            _decode_int_values(records[page], spec, tile, numbers, out[page])
    return out


def _decode_ints_of(records: Any, side: SideLayout) -> Any:
    lead = records.shape[:-2]
    flat = writable(np.ascontiguousarray(records)).reshape(-1, side.nbytes)
    pages = _decode_ints(flat, side.spec, side.side == "keys")
    return pages.reshape(*lead, records.shape[-2] * side.tokens, side.width)


def decode_keys(records: Any, side: SideLayout) -> Any:
    if side.spec.kind in (KIND_EXACT, KIND_SKETCH):
        return reference.decode_keys(records, side)
    return _decode_ints_of(records, side)


def decode_values(records: Any, side: SideLayout) -> Any:
    if side.spec.kind == KIND_EXACT:
        return reference.decode_values(records, side)
    return _decode_ints_of(records, side)
