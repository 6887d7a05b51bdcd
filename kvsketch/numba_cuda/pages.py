"""Page records: quantized or sketched, then packed, and read back a thread a number."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numba import cuda

from kvsketch._checks import FLOAT_DTYPES
from kvsketch._dispatch import namespace
from kvsketch.codecs import Exact, SignSketch
from kvsketch.layout import SideLayout
from kvsketch.numba_cuda._launch import as_bits, launch
from kvsketch.numba_cuda.numbers import number_of, side_records
from kvsketch.numba_cuda.qjl import select_outlier_channels
from kvsketch.numba_cuda.quantize import quantize_lines
from kvsketch.numba_cuda.sketches import chosen_channels, largest_channels, nothing_chosen, sketch_rows
from kvsketch.numba_cuda.units import pack_units
from kvsketch.reference.pages import projections, select


def select_channels(k: Any, side: SideLayout) -> Any:
    return select(k, side, select_outlier_channels)


def encode_keys(k: Any, side: SideLayout, *, channels: Any, out: Any) -> int:
    return _encode(k, side, channels, out)


def encode_values(v: Any, side: SideLayout, *, out: Any) -> int:
    return _encode(v, side, None, out)


def decode_keys(records: Any, side: SideLayout) -> Any:
    return _decode(records, side)


def decode_values(records: Any, side: SideLayout) -> Any:
    return _decode(records, side)


def _encode(x: Any, side: SideLayout, channels: Any, out: Any) -> int:
    """Write pages of `x` (..., P*p, width) to `out` (..., P, side bytes), which may be strided."""
    xp = namespace(x)
    *lead, n, width = x.shape
    count = n // side.tokens
    pages = x.reshape(math.prod(lead) * count, side.tokens, width)
    records = xp.zeros((len(pages), side.nbytes), dtype=xp.uint8)
    if isinstance(side.codec, Exact):
        saturated = _write_exact(pages, side, records)
    elif isinstance(side.codec, SignSketch):
        if channels is not None:
            channels = xp.repeat(channels.reshape(math.prod(lead), 1, side.codec.outliers), count, axis=0)
        saturated = _write_sketch(pages, side, channels, records)
    else:
        saturated = _write_integers(pages, side, records)
    out[...] = records.reshape(out.shape)
    return saturated


def _field(records: Any, side: SideLayout, name: str) -> Any:
    """A field of `records` (P, side bytes) to read and write, (P, *field shape)."""
    f = side.field(name)
    return records[:, f.offset : f.offset + f.nbytes].view(f.dtype).reshape(len(records), *f.shape)


def _write_exact(pages: Any, side: SideLayout, records: Any) -> int:
    numbers = _field(records, side, "numbers")
    numbers[...] = as_bits(pages.astype(FLOAT_DTYPES[side.dtype], copy=False))
    return 0


def _write_integers(pages: Any, side: SideLayout, records: Any) -> int:
    """Write pages (P, p, width) whose groups are channels of one token, or tokens of one channel."""
    scale, zero = _field(records, side, "scale"), _field(records, side, "zero")
    codes = namespace(pages).empty(pages.shape, dtype=np.uint8)
    turned = codes.swapaxes(1, 2)
    if side.by_token:
        lines, lanes = (pages, codes, scale.swapaxes(1, 2), zero.swapaxes(1, 2)), turned
    else:
        # What fills the channels up to whole units has no scale.
        scale, zero = scale[..., : side.width], zero[..., : side.width]
        lines, lanes = (pages.swapaxes(1, 2), turned, scale.swapaxes(1, 2), zero.swapaxes(1, 2)), codes
    saturated = quantize_lines(lines[0], side.spec.bits, side.spec.group, *lines[1:])
    pack_units(lanes, side.spec.bits, records, side.spec.codes)
    return saturated


def _write_sketch(pages: Any, side: SideLayout, channels: Any, records: Any) -> int:
    """Write sketches of pages (P, p, d); `channels` (P, 1, outliers) are chosen for each page when left out."""
    main, outlier = projections(side)
    chosen = nothing_chosen(pages, len(pages), side.width)
    parts = [(main, "codes", "norms")]
    if outlier is not None:
        if channels is None:
            channels = largest_channels(pages, side.spec.outliers, side.tokens)
        _field(records, side, "channels")[...] = channels[:, 0]
        chosen = chosen_channels(channels, side.width)
        parts.append((outlier, "outlier_codes", "outlier_norms"))
    saturated = 0
    for part, (projection, codes, norms) in enumerate(parts):
        matrix = projection.matrix_beside(pages)
        signs, clipped = sketch_rows(pages, matrix, chosen, part, side.tokens, _field(records, side, norms))
        pack_units(signs, 1, records, side.field(codes).offset)
        saturated += clipped
    return saturated


def _decode(records: Any, side: SideLayout) -> Any:
    """Numbers float32 (..., P*p, width) of `records` (..., P, side bytes), which may be strided."""
    xp = namespace(records)
    *lead, count, _ = records.shape
    pages = xp.ascontiguousarray(records).reshape(math.prod(lead) * count, side.nbytes)
    x = xp.empty((len(pages), side.tokens, side.width), dtype=xp.float32)
    launch(_decode_kernel(number_of(side)), x.size, side_records(pages, side), x)
    return x.reshape(*lead, count * side.tokens, side.width)


@cache
def _decode_kernel(number: Any) -> Any:
    """The kernel for sides whose numbers `number` reads."""

    @cuda.jit
    def decode_pages(side, x):
        """A thread to each number of `x` (P, p, width)."""
        pages, tokens, width = x.shape
        index, c = divmod(cuda.grid(1), width)
        page, token = divmod(index, tokens)
        if page < pages:
            x[page, token, c] = number(side, page, token, c)

    return decode_pages
