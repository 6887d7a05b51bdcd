"""Sign sketches of keys on a GPU.

Sums run over the channels in order and products are rounded before they are added, so that bits are the reference's:
no tensor core does that. Functions that return how many norms saturated wait for the device once.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from kvsketch._dispatch import namespace
from kvsketch.cuda_raw import _places
from kvsketch.cuda_raw._compile import launch
from kvsketch.cuda_raw._places import on_its_device
from kvsketch.layout import LANES, SideLayout, unit_rows
from kvsketch.reference.pages import projections, write_field

SKETCH = np.dtype(
    [
        ("tokens", np.int64),
        *((name, np.int32) for name in ("page", "pages", "tiles", "row_tiles", "width", "m", "pitch", "outliers")),
        *((name, np.int32) for name in ("part", "codes", "norms", "units")),
    ]
)
SCORES = np.dtype(
    [
        ("tokens", np.int64),
        *((name, np.int32) for name in ("heads", "queries", "page", "pages", "tiles", "outliers", "width", "m")),
        *((name, np.int32) for name in ("pitch", "outlier_m", "outlier_pitch", "dtype")),
        ("factor", np.float32),
        ("outlier_factor", np.float32),
    ]
)
#: As in sketch.cuh: tokens of a tile, most rows of one, and which channels are taken.
TILE_TOKENS, TILE_ROWS = 32, 256
ALL_CHANNELS, ALL_BUT_LISTED, LISTED = 0, 1, 2
#: As in the other sources: threads of a block, and queries of a block of scores.
THREADS, QUERIES = 128, 8


@on_its_device
def sketch_vectors(x: Any, matrix: Any) -> tuple[Any, Any, int]:
    """Signs (..., ceil(m/8)) and float16 norms (...) of vectors `x` (..., d), and how many norms saturated."""
    xp = namespace(x)
    *lead, d = x.shape
    found = xp.zeros(1, np.uint32)
    # Vectors of a single axis are one head of one token.
    vectors = x.reshape(1, 1, d) if x.ndim == 1 else x
    signs, norms = _sketch(vectors, matrix, None, vectors.shape[-2], ALL_CHANNELS, found)
    return signs.reshape(*lead, -(-matrix.shape[0] // 8)), norms.reshape(lead), int(found[0])


@on_its_device
def round_norms(squares: Any) -> tuple[Any, int]:
    """Square roots of `squares` as float16, at most 65504, and how many were above that."""
    xp = namespace(squares)
    found, norms = xp.zeros(1, np.uint32), xp.empty(squares.shape, np.float16)
    grid = (_places.blocks_of(squares.size, THREADS),)
    args = (xp.ascontiguousarray(squares), norms.view(np.uint16), found, np.int64(squares.size))
    launch("qjl.cu", "round_norms", grid, (THREADS,), args)
    return norms, int(found[0])


@on_its_device
def select_outlier_channels(k: Any, outliers: int, page: int) -> Any:
    return largest_channels(_sum_squares(k, page), outliers)


def _sum_squares(x: Any, page: int) -> Any:
    """Sums of squares float32 (..., ceil(n/page), d) of numbers (..., n, d) over the tokens of each page."""
    *lead, n, d = x.shape
    page = min(page, max(n, 1))
    pages = -(-n // page)
    squares = namespace(x).empty((*lead, pages, d), np.float32)
    if squares.size:
        x, places = _places.locate_vectors(x)
        grid = (pages * _places.blocks_of(d, THREADS), _places.grid_heads(x))
        args = (x, squares, places, np.int64(n), np.int32(page), np.int32(pages), np.int32(d))
        launch("outliers.cu", "sum_squares", grid, (THREADS,), args)
    return squares


@on_its_device
def largest_channels(squares: Any, outliers: int) -> Any:
    """Increasing indices (..., outliers) of the largest `squares` (..., d): NaN first, ties to the lowest index."""
    xp = namespace(squares)
    *lead, d = squares.shape
    chosen = xp.empty((*lead, outliers), np.int64)
    if chosen.size:
        args = (xp.ascontiguousarray(squares), chosen, np.int32(d), np.int32(outliers))
        launch("outliers.cu", "largest_channels", (math.prod(lead),), (THREADS,), args)
    return chosen


@on_its_device
def split_outliers(k: Any, channels: Any, page: int) -> tuple[Any, Any]:
    """k_in and k_out: `k` (b, h, n, d) with zeros at the `channels` (b, h, ceil(n/page), outliers), and the rest."""
    xp = namespace(k)
    n, d = k.shape[-2:]
    inner, outer = xp.empty(k.shape, k.dtype), xp.empty(k.shape, k.dtype)
    if k.size:
        k, places = _places.locate_vectors(k)
        grid = (_places.blocks_of(n * d, THREADS), _places.grid_heads(k))
        sizes = (np.int64(n), *map(np.int32, (min(page, n), channels.shape[2], d, channels.shape[3])))
        args = (k, _as_indices(channels), inner, outer, places, *sizes)
        launch("outliers.cu", "split_outliers", grid, (THREADS,), args)
    return inner, outer


@on_its_device
def sketch_keys(k: Any, matrix: Any, channels: Any, outlier_matrix: Any, page: int) -> tuple[Any, ...]:
    found = namespace(k).zeros(1, np.uint32)
    if channels is None:
        signs, norms = _sketch(k, matrix, None, k.shape[2], ALL_CHANNELS, found)
        return signs, norms, None, None, int(found[0])
    inner = _sketch(k, matrix, channels, page, ALL_BUT_LISTED, found)
    outer = _sketch(k, outlier_matrix, channels, page, LISTED, found)
    return *inner, *outer, int(found[0])


@on_its_device
def sketch_scores(q: Any, keys: Any, matrix: Any, constant: float, outlier_matrix: Any, outlier_constant: float) -> Any:
    xp = namespace(q)
    b, hq, s, d = q.shape
    h, n = keys.norms.shape[1:]
    scores = xp.empty((b, hq, s, n), q.dtype)
    if not scores.size:
        return scores
    queries = hq // h * s
    q = xp.ascontiguousarray(q).reshape(b, h, queries, d)
    base = _project(q, matrix)
    m = matrix.shape[0]
    main = _scored(keys.signs, keys.norms, matrix)
    if keys.channels is None:
        page, outer, outlier_m, channels = n, main, 1, xp.zeros((1, 0), np.int64)
    else:
        page, outlier_m, channels = min(keys.page, n), outlier_matrix.shape[0], _as_indices(keys.channels)
        outer = _scored(keys.outlier_signs, keys.outlier_norms, outlier_matrix)
    pages, tiles = -(-n // page), _places.blocks_of(page, TILE_TOKENS)
    shape = np.array(
        (
            *(n, b * h, queries, page, pages, tiles, channels.shape[-1], d, m, main[2].shape[1]),
            *(outlier_m, outer[2].shape[1], _places.dtype_code(q), constant / m, outlier_constant / outlier_m),
        ),
        SCORES,
    )
    grid = (pages * tiles * _places.blocks_of(queries, QUERIES), min(b * h, _places.MOST_HEADS))
    launch("qjl_scores.cu", "sketch_scores", grid, (THREADS,), (q, base, *main, *outer, channels, scores, shape))
    return scores


def _scored(signs: Any, norms: Any, matrix: Any) -> tuple[Any, Any, Any]:
    """One part of sketched keys as scores read it: signs, norms as their bits, and the projection's columns."""
    xp = namespace(signs)
    return xp.ascontiguousarray(signs), xp.ascontiguousarray(norms).view(np.uint16), _columns(matrix)


def encode_pages(x: Any, side: SideLayout, channels: Any, records: Any) -> Any:
    """Write pages of keys `x` (..., P*p, d) to `records` (..., P, side bytes); uint32 (1,), how many norms saturated.

    Channels are chosen for each page where `channels` (..., outliers) are not given.
    """
    xp = namespace(x)
    found = xp.zeros(1, np.uint32)
    main, outer = _tables(side, xp.cuda.Device().id)
    if outer is None:
        _sketch_pages(x, side, records, main[0], None, ALL_CHANNELS, found)
        return found
    if channels is None:
        chosen = largest_channels(_sum_squares(x, side.tokens), side.spec.outliers)
    else:
        shape = (*x.shape[:-2], x.shape[-2] // side.tokens, side.spec.outliers)
        chosen = _as_indices(xp.broadcast_to(channels[..., None, :], shape))
    write_field(records, side, "channels", chosen)
    _sketch_pages(x, side, records, main[0], chosen, ALL_BUT_LISTED, found)
    _sketch_pages(x, side, records, outer[0], chosen, LISTED, found)
    return found


def _sketch_pages(x: Any, side: SideLayout, records: Any, columns: Any, channels: Any, part: int, found: Any) -> None:
    """Signs and norms of one part of the channels to their fields; `channels` int64 (..., P, outliers) or None."""
    spec, outer = side.spec, part == LISTED
    m = spec.outlier_m if outer else spec.m
    fields = (spec.outlier_codes, spec.outlier_norms) if outer else (spec.codes, spec.norms)
    units = _places.blocks_of(m, unit_rows(1))
    sketch = _sketch_shape(x.shape[-2], side.tokens, side.width, m, spec.outliers, part, *fields, units)
    channels = namespace(x).zeros(1, np.int64) if channels is None else channels
    args = (x, columns, channels, records, found, _places.locate(x, records, side), sketch)
    _launch_tiles("sketch_pages", sketch, _places.grid_heads(x), args)


def _sketch(x: Any, matrix: Any, channels: Any, page: int, part: int, found: Any) -> tuple[Any, Any]:
    """Signs (..., n, ceil(m/8)) and norms (..., n) of one part of the channels of vectors `x` (..., n, d).

    `channels` (..., ceil(n/page), outliers) or None.
    """
    xp = namespace(x)
    *lead, n, d = x.shape
    m = matrix.shape[0]
    signs, norms = xp.empty((*lead, n, -(-m // 8)), np.uint8), xp.empty((*lead, n), np.float16)
    if norms.size:
        channels = xp.zeros((1, 0), np.int64) if channels is None else _as_indices(channels)
        sketch = _sketch_shape(n, page, d, m, channels.shape[-1], part)
        x, places = _places.locate_vectors(x)
        args = (x, _columns(matrix), channels, signs, norms.view(np.uint16), found, places, sketch)
        _launch_tiles("sketch_vectors", sketch, _places.grid_heads(x), args)
    return signs, norms


def _project(x: Any, matrix: Any) -> Any:
    """Products float32 (..., n, m) of vectors `x` (..., n, d), n > 0, with the rows of a projection."""
    xp = namespace(x)
    *lead, n, d = x.shape
    products = xp.empty((*lead, n, matrix.shape[0]), np.float32)
    sketch = _sketch_shape(n, n, d, matrix.shape[0], 0, ALL_CHANNELS)
    x, places = _places.locate_vectors(x)
    args = (x, _columns(matrix), xp.zeros(1, np.int64), products, places, sketch)
    _launch_tiles("project_vectors", sketch, _places.grid_heads(x), args)
    return products


def _sketch_shape(
    n: int, page: int, d: int, m: int, outliers: int, part: int, codes: int = 0, norms: int = 0, units: int = 0
) -> Any:
    """``Sketch`` of sketch.cuh."""
    page = min(page, n)
    row_tiles, rows = _row_tiles(m)
    sizes = (page, -(-n // page), _places.blocks_of(page, TILE_TOKENS), row_tiles, d, m, row_tiles * rows)
    return np.array((n, *sizes, outliers, part, codes, norms, units), SKETCH)


def _launch_tiles(kernel: str, sketch: Any, heads: int, args: tuple[Any, ...]) -> None:
    tiles = int(sketch["row_tiles"]) * int(sketch["pages"]) * int(sketch["tiles"])
    launch("qjl.cu", kernel, (tiles, heads), (int(sketch["pitch"]) // int(sketch["row_tiles"]),), args)


def decode_pages(records: Any, side: SideLayout, x: Any) -> None:
    """Write the keys that `records` (..., P, side bytes) stand for to `x` float32 (..., P*p, d)."""
    main, outer = _tables(side, namespace(records).cuda.Device().id)
    outer = outer or main
    blocks = records.shape[-2] * side.tokens // LANES * _places.blocks_of(side.width, THREADS)
    grid = (blocks, _places.grid_heads(records))
    places, numbers = _places.locate(x, records, side), _places.side_numbers(side)
    factors = np.float32(main[2]), np.float32(outer[2])
    args = (records, main[1], outer[1], x, places, numbers, *factors)
    launch("pages_sketch.cu", "decode_sketch", grid, (THREADS,), args)


@lru_cache(maxsize=64)
def _tables(side: SideLayout, device: int) -> tuple[tuple[Any, Any, float], tuple[Any, Any, float] | None]:
    """Of a side's projections, on the current device, number `device`: columns, matrix and c/m."""
    import cupy

    def table(projection: Any) -> tuple[Any, Any, float]:
        matrix = cupy.asarray(projection.matrix)
        return _columns(matrix), matrix, projection.constant / projection.m

    main, outer = projections(side)
    tables = table(main), None if outer is None else table(outer)
    # Whatever stream uses them later finds them complete.
    cupy.cuda.get_current_stream().synchronize()
    return tables


def _row_tiles(m: int) -> tuple[int, int]:
    """How many tiles `m` rows are cut into, and rows of a tile: a multiple of 32."""
    tiles = _places.blocks_of(m, TILE_ROWS)
    return tiles, 32 * _places.blocks_of(m, 32 * tiles)


def _as_indices(channels: Any) -> Any:
    return namespace(channels).ascontiguousarray(channels.astype(np.int64, copy=False))


def _columns(matrix: Any) -> Any:
    """`matrix` (m, d) transposed, with zeros for the rows that its tiles have more."""
    xp = namespace(matrix)
    m, d = matrix.shape
    columns = xp.zeros((d, math.prod(_row_tiles(m))), np.float32)
    columns[:, :m] = matrix.T
    return columns
