"""Page records encoded and decoded on a GPU, the same bytes as the reference's.

A kernel reads the numbers where they lie, in their dtype, and writes the records where they belong. What the functions
that encode return is known to the device alone: an array of no axes, for which they do not wait.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvsketch._dispatch import namespace
from kvsketch.cuda_raw import _places, qjl
from kvsketch.cuda_raw._compile import launch
from kvsketch.cuda_raw._places import on_its_device
from kvsketch.layout import KIND_EXACT, KIND_SKETCH, LANES, SideLayout
from kvsketch.reference import pages as reference

ENCODE, DECODE, EXACT = "pages_encode.cu", "pages_decode.cu", "pages_exact.cu"
#: As in the sources: threads of a block, channels or tokens of a thread, and items of eight threads of a block.
THREADS, OCT = 128, 8
ITEMS = THREADS // 8
#: Channels of a block that encodes groups of channels, at most, unless groups are larger.
SEGMENT = 256


@on_its_device
def select_channels(k: Any, side: SideLayout) -> Any:
    return reference.select(k, side, qjl.select_outlier_channels)


@on_its_device
def encode_keys(k: Any, side: SideLayout, *, channels: Any, out: Any) -> Any:
    return _encode(k, side, channels, out)


@on_its_device
def encode_values(v: Any, side: SideLayout, *, out: Any) -> Any:
    return _encode(v, side, None, out)


def _encode(x: Any, side: SideLayout, channels: Any, out: Any) -> Any:
    """Write pages of `x` (..., P*p, width) to `out` (..., P, side bytes); number of saturated scales and norms."""
    if not x.size:
        return 0
    xp = namespace(x)
    records = out
    if _places.locate(x, records, side) is None:
        x = xp.ascontiguousarray(x)
        if _places.locate(x, records, side) is None:
            records = out.copy()
    if side.spec.kind == KIND_SKETCH:
        found = qjl.encode_pages(x, side, channels, records)
    else:
        found = xp.zeros(1, np.uint32)
        for pages in _places.page_parts(records.shape[-2], _items(side)):
            tokens = slice(pages.start * side.tokens, pages.stop * side.tokens)
            _encode_part(x[..., tokens, :], side, records[..., pages, :], found)
    if records is not out:
        out[...] = records
    return 0 if side.spec.kind == KIND_EXACT else found[0]


def _items(side: SideLayout) -> int:
    """Most items that any kernel here makes of a page."""
    return side.tokens * _places.blocks_of(side.width, OCT)


def _encode_part(x: Any, side: SideLayout, records: Any, found: Any) -> None:
    places, spec = _places.locate(x, records, side), side.spec
    pages, heads = records.shape[-2], _places.grid_heads(records)
    numbers = _places.side_numbers(side)
    if spec.kind == KIND_EXACT:
        grid = (_places.blocks_of(pages * _items(side), THREADS), heads)
        launch(EXACT, "encode_exact", grid, (THREADS,), (x, records, places, numbers))
    elif not side.by_token:
        grid = (_places.blocks_of(pages * spec.groups * spec.rows // OCT, ITEMS), heads)
        kernel = f"encode_by_channel<{spec.bits}>"
        launch(ENCODE, kernel, grid, (THREADS,), (x, records, found, places, numbers))
    else:
        lane_blocks = _lane_blocks(spec.width, spec.group)
        segments = _places.blocks_of(spec.width, lane_blocks * LANES)
        # A pair is 16 tokens, two items for each block of lanes.
        pairs = max(1, ITEMS // 2 // lane_blocks)
        grid = (_places.blocks_of(pages * spec.tokens // 16, pairs) * segments, heads)
        cut = map(np.int32, (segments, lane_blocks, pairs))
        kernel = f"encode_by_token<{spec.bits}>"
        launch(ENCODE, kernel, grid, (THREADS,), (x, records, found, places, numbers, *cut))


def _lane_blocks(width: int, group: int) -> int:
    """Blocks of 32 channels that a thread block takes: whole groups, and about :data:`SEGMENT` channels."""
    together = math.lcm(group, LANES)
    channels = together * max(1, SEGMENT // together)
    return _places.blocks_of(min(width, channels), LANES)


@on_its_device
def decode_keys(records: Any, side: SideLayout) -> Any:
    return _decode(records, side)


@on_its_device
def decode_values(records: Any, side: SideLayout) -> Any:
    return _decode(records, side)


def _decode(records: Any, side: SideLayout) -> Any:
    """Numbers float32 (..., P*p, width) of `records` (..., P, side bytes)."""
    xp = namespace(records)
    x = xp.empty((*records.shape[:-2], records.shape[-2] * side.tokens, side.width), np.float32)
    if not x.size:
        return x
    if _places.locate(x, records, side) is None:
        records = records.copy()
    if side.spec.kind == KIND_SKETCH:
        qjl.decode_pages(records, side, x)
        return x
    for pages in _places.page_parts(records.shape[-2], _items(side)):
        tokens = slice(pages.start * side.tokens, pages.stop * side.tokens)
        _decode_part(records[..., pages, :], side, x[..., tokens, :])
    return x


def _decode_part(records: Any, side: SideLayout, x: Any) -> None:
    spec = side.spec
    pages, heads = records.shape[-2], _places.grid_heads(records)
    if spec.kind == KIND_EXACT:
        file, kernel, grid = EXACT, "decode_exact", _places.blocks_of(pages * _items(side), THREADS)
    elif side.by_token:
        items = pages * spec.tokens // OCT * _places.blocks_of(spec.width, LANES)
        file, kernel, grid = DECODE, "decode_by_token", _places.blocks_of(items, ITEMS)
    else:
        items = pages * spec.tokens // LANES * _places.blocks_of(spec.width, OCT)
        file, kernel, grid = DECODE, "decode_by_channel", _places.blocks_of(items, ITEMS)
    args = (records, x, _places.locate(x, records, side), _places.side_numbers(side))
    launch(file, kernel, (grid, heads), (THREADS,), args)
