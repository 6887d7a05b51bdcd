"""Bit packing on a GPU."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvsketch._dispatch import namespace
from kvsketch.cuda_raw import _places
from kvsketch.cuda_raw._compile import launch
from kvsketch.cuda_raw._places import on_its_device

FILE = "bitpack.cu"
#: As in the source: threads of a block, and numbers of a thread.
THREADS, OCT = 128, 8


@on_its_device
def pack_signs(x: Any) -> Any:
    xp = namespace(x)
    *lead, n = x.shape
    packed = xp.empty((*lead, -(-n // 8)), np.uint8)
    if packed.size:
        x = xp.ascontiguousarray(x)
        largest, zero = (np.uint64(number) for number in _bounds(x.dtype))
        _launch("pack_signs", x, packed, 1, largest, zero, np.int32(x.itemsize))
    return packed


def _bounds(dtype: np.dtype[Any]) -> tuple[int, int]:
    """Bit patterns: the last one, counted without sign, of a number >= 0 that has no sign, and one more such number."""
    sign = 1 << (8 * dtype.itemsize - 1)
    if dtype.kind == "u":
        return 2 * sign - 1, 0
    if dtype.kind == "i":
        return sign - 1, 0
    infinity = np.array(np.inf, dtype).view(f"u{dtype.itemsize}")
    return int(infinity), sign


@on_its_device
def unpack_signs(packed: Any, m: int) -> Any:
    return _unpack(packed, m, 1, np.int8)


@on_its_device
def pack_codes(codes: Any, bits: int) -> Any:
    xp = namespace(codes)
    *lead, n = codes.shape
    packed = xp.empty((*lead, -(-n * bits // 8)), np.uint8)
    if packed.size:
        _launch("pack_codes", xp.ascontiguousarray(codes), packed, bits, np.int32(bits))
    return packed


@on_its_device
def unpack_codes(packed: Any, n: int, bits: int) -> Any:
    return _unpack(packed, n, bits, np.uint8)


def _unpack(packed: Any, n: int, bits: int, dtype: Any) -> Any:
    xp = namespace(packed)
    codes = xp.empty((*packed.shape[:-1], n), dtype)
    if codes.size:
        settings = np.int32(bits), np.int32(dtype is np.int8)
        _launch("unpack_codes", xp.ascontiguousarray(packed), codes.view(np.uint8), bits, *settings, numbers=codes)
    return codes


def _launch(kernel: str, source: Any, target: Any, bits: int, *rest: Any, numbers: Any = None) -> None:
    """Run a kernel on rows of `numbers`, the source if not given: as a single row where streams have no gaps."""
    *lead, n = (source if numbers is None else numbers).shape
    rows = math.prod(lead)
    if n * bits % 8 == 0:
        rows, n = 1, rows * n
    aligned = rows == 1 and source.data.ptr % _places.VECTOR_BYTES == 0
    grid = (_places.blocks_of(rows * _places.blocks_of(n, OCT), THREADS),)
    args = (source, target, np.int64(rows), np.int64(n), *rest, np.int32(aligned))
    launch(FILE, kernel, grid, (THREADS,), args)
