"""KIVI on a GPU: see :mod:`kvsketch.kivi` for what is computed. Codes, scales and zeros equal the reference's.

The products here read codes that are arrays; those of a cache's pages are in :mod:`kvsketch.cuda_raw.attention`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvsketch._checks import FLOAT_DTYPES
from kvsketch._dispatch import namespace
from kvsketch.bitpack import packed_bytes
from kvsketch.cuda_raw import _places
from kvsketch.cuda_raw._compile import launch
from kvsketch.cuda_raw._places import on_its_device
from kvsketch.kivi import GroupedCodes
from kvsketch.layout import DTYPE_CODES

FILE, PRODUCTS = "kivi.cu", "kivi_products.cu"
GROUPS = np.dtype(
    [
        ("tokens", np.int64),
        *((name, np.int32) for name in ("heads", "width", "bits", "group", "parts", "by_token", "bytes", "unused")),
    ]
)
PRODUCT = np.dtype(
    [
        ("tokens", np.int64),
        *((name, np.int32) for name in ("heads", "queries", "width", "bits", "group", "parts", "bytes", "dtype")),
        *((name, np.int32) for name in ("splits", "unused")),
    ]
)
#: As in the sources: threads of a block, channels of a thread, and threads that look for a group's range.
THREADS, OCT, SEARCHERS = 128, 8, 8
#: Tokens, queries and channels of a block.
TOKENS, QUERIES, WEIGHTS, CHANNELS = 32, 8, 4, 128
#: Tokens of a split of the values, at least, and blocks that are enough to fill a device.
SPLIT_TOKENS, ENOUGH_BLOCKS = 256, 512


@on_its_device
def quantize_groups(x: Any, *, bits: int, group: int, axis: str) -> GroupedCodes:
    xp = namespace(x)
    *outer, n, d = x.shape
    by_token = axis == "channels"
    parts = _places.blocks_of(d if by_token else n, group)
    codes = xp.empty((*outer, n, packed_bytes(d, bits)), np.uint8)
    scale, zero = (xp.empty((*outer, n, parts) if by_token else (*outer, parts, d), np.float16) for _ in range(2))
    found = xp.zeros(1, np.uint32)
    if codes.size:
        x, places = _places.locate_vectors(x)
        heads, groups = _places.grid_heads(x), _groups(codes, d, bits, group, parts, by_token)
        halves = scale.view(np.uint16), zero.view(np.uint16)
        if by_token:
            kernel, blocks = "scale_channels", _places.blocks_of(n * parts, THREADS // SEARCHERS)
        else:
            kernel, blocks = "scale_tokens", parts * _places.blocks_of(d, THREADS)
        launch(FILE, kernel, (blocks, heads), (THREADS,), (x, *halves, found, places, groups))
        grid = (_places.blocks_of(n * _places.blocks_of(d, OCT), THREADS), heads)
        launch(FILE, "quantize", grid, (THREADS,), (x, *halves, codes, places, groups))
    return GroupedCodes(codes, scale, zero, bits, group, axis, d, int(found[0]))


def _groups(codes: Any, d: int, bits: int, group: int, parts: int, by_token: bool) -> Any:
    """``Groups`` of kivi.cu, for codes (..., n, bytes)."""
    *outer, n, size = codes.shape
    group = min(group, d if by_token else n)
    return np.array((n, math.prod(outer), d, bits, group, parts, by_token, size, 0), GROUPS)


@on_its_device
def dequantize_groups(codes: GroupedCodes, *, dtype: str = "float32") -> Any:
    xp = namespace(codes.codes)
    x = xp.empty(codes.shape, FLOAT_DTYPES[dtype])
    if x.size:
        by_token = codes.axis == "channels"
        parts = codes.scale.shape[-1 if by_token else -2]
        groups = _groups(codes.codes, codes.size, codes.bits, codes.group, parts, by_token)
        grid = (_places.blocks_of(x.shape[-2] * _places.blocks_of(codes.size, OCT), THREADS), _places.grid_heads(x))
        launch(FILE, "dequantize", grid, (THREADS,), (*_arrays(codes), x, np.int32(DTYPE_CODES[dtype]), groups))
    return x


def _arrays(codes: GroupedCodes) -> tuple[Any, Any, Any]:
    """Contiguous codes, and scale and zero as their bits."""
    xp = namespace(codes.codes)
    halves = (xp.ascontiguousarray(numbers).view(np.uint16) for numbers in (codes.scale, codes.zero))
    return xp.ascontiguousarray(codes.codes), *halves


@on_its_device
def key_scores(q: Any, codes: GroupedCodes) -> Any:
    xp = namespace(q)
    b, hq, s, _ = q.shape
    h, n = codes.codes.shape[1:3]
    scores = xp.empty((b, hq, s, n), q.dtype)
    if scores.size:
        q, queries, parts = xp.ascontiguousarray(q), hq // h * s, codes.scale.shape[-2]
        tiles = parts * _places.blocks_of(min(codes.group, n), TOKENS) * _places.blocks_of(queries, QUERIES)
        grid = (tiles, min(b * h, _places.MOST_HEADS))
        args = (q, *_arrays(codes), scores, _product(q, codes, queries, parts, 1))
        launch(PRODUCTS, "key_scores", grid, (THREADS,), args)
    return scores


def _product(x: Any, codes: GroupedCodes, queries: int, parts: int, splits: int) -> Any:
    """``Product`` of kivi_products.cu."""
    b, h, n, size = codes.codes.shape
    group = min(codes.group, n if codes.axis == "tokens" else codes.size)
    numbers = (codes.size, codes.bits, group, parts, size, _places.dtype_code(x), splits, 0)
    return np.array((n, b * h, queries, *numbers), PRODUCT)


@on_its_device
def weighted_values(p: Any, codes: GroupedCodes) -> Any:
    xp = namespace(p)
    b, hq, s, n = p.shape
    h, d = codes.codes.shape[1], codes.size
    out = xp.empty((b, hq, s, d), p.dtype)
    if not out.size:
        return out
    p, queries, parts = xp.ascontiguousarray(p), hq // h * s, codes.scale.shape[-1]
    heads, blocks, tiles = b * h, _places.blocks_of(d, CHANNELS), _places.blocks_of(queries, WEIGHTS)
    splits = min(_places.blocks_of(n, SPLIT_TOKENS), _places.blocks_of(ENOUGH_BLOCKS, heads * blocks * tiles))
    sums = xp.empty((max(splits, 1), *out.shape), np.float32)
    grid = (len(sums) * blocks * tiles, min(heads, _places.MOST_HEADS))
    args = (p, *_arrays(codes), sums, _product(p, codes, queries, parts, len(sums)))
    launch(PRODUCTS, "weighted_values", grid, (THREADS,), args)
    joined = (sums, out, np.int32(_places.dtype_code(out)), np.int64(out.size), np.int32(len(sums)))
    launch(PRODUCTS, "join_splits", (_places.blocks_of(out.size, THREADS),), (THREADS,), joined)
    return out
