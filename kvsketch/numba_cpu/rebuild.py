"""Scores of keys that are rebuilt from latents: a tile at a time, times the matrix, with bias, norm and RoPE.

The tokens of a tile lie side by side (:mod:`kvsketch.numba_cpu.latents`), so that everything done to a key's channels
is done to vectors of tokens. Kernels work on addresses; pitches and steps are in bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvsketch.layout import KIND_LATENTS, SideSpec
from kvsketch.numba_cpu._compile import inner
from kvsketch.numba_cpu._tiers import VECTOR_BYTES
from kvsketch.numba_cpu.emit import I64, LANES, VECTORS, emit_call, emit_load, emit_shuffle, emit_store
from kvsketch.numba_cpu.exact import as_floats, number_bytes
from kvsketch.numba_cpu.fused import POSITION_AT, ROW_AT
from kvsketch.numba_cpu.integers import TOKENS, WIDTH
from kvsketch.numba_cpu.latents import (
    PITCH,
    QUERIES_AT,
    ROWS,
    SPAN,
    constant_bytes,
    make_spread_pages,
    multiply,
    score_tile,
    tile_bytes,
)
from kvsketch.numba_cpu.simd import (
    divide,
    floats,
    load_float,
    load_floats,
    load_long,
    multiply_add,
    operation,
    splat,
    store_float,
    store_floats,
    store_long,
)

#: Where a kernel finds the address of the numbers below, in bytes of its last argument.
MATRICES_AT = 8
#: What a slice's keys are rebuilt with, int64 each: sizes, and addresses of float32 arrays or 0.
FIELDS = (
    "heads",
    "d",
    "packed",  #: up_k, packed head by head (heads, blocks, r, ROWS)
    "bias",  #: (heads, blocks * ROWS)
    "norm",  #: (d,) or 0
    "eps",  #: of the norm, the address of one number
    "cos",  #: (positions, rotary) or 0
    "sin",
    "rotary",
    "interleaved",
    "positions",  #: int64 (b, longest), or 0: a token's number in its row
    "longest",
)
HEADS, HEAD_SIZE, PACKED, BIAS, NORM, EPS, COS, SIN, ROTARY, INTERLEAVED, POSITIONS, LONGEST = range(
    0, 8 * len(FIELDS), 8
)
#: Where kernels find the dtype of exact latents, in bytes of the numbers of a side.
DTYPE = 8 * SideSpec._fields.index("dtype")


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def rebuild_scratch(spec: SideSpec, d: int, rotary: int) -> int:
    """Bytes that a kernel of :func:`make_rebuild_score` works in."""
    keys = PITCH * _round_up(d, ROWS)
    rows = 4 * SPAN * _round_up(spec.width, LANES) + 8 * SPAN
    block = ROWS * PITCH + 64
    return tile_bytes(spec.width) + keys + block + 2 * PITCH * rotary + max(rows, constant_bytes(spec) + 8 * SPAN)


@intrinsic
def _square_root(_context: Any, x: Any) -> Any:
    """The square root of each number."""
    kind = VECTORS["float32"]
    return operation(floats(floats), lambda b, x: emit_call(b, f"llvm.sqrt.v{LANES}f32", kind, [x]))


@intrinsic
def _transpose_block(_context: Any, addresses: Any, offset: Any, target: Any) -> Any:
    """LANES numbers at `offset` from each of LANES addresses, as LANES rows of a tile."""

    def emit(b: ir.IRBuilder, addresses: Any, offset: Any, target: Any) -> None:
        rows = [
            emit_load(b, b.add(emit_load(b, addresses, 8 * i, I64), offset), 0, VECTORS["float32"])
            for i in range(LANES)
        ]
        step = 1
        while step < LANES:
            low = [j if not j & step else LANES + j - step for j in range(LANES)]
            high = [j + step if not j & step else LANES + j for j in range(LANES)]
            for i in range(LANES):
                if not i & step:
                    x, y = rows[i], rows[i + step]
                    rows[i], rows[i + step] = emit_shuffle(b, x, y, low), emit_shuffle(b, x, y, high)
            step *= 2
        for i, row in enumerate(rows):
            emit_store(b, target, PITCH * i, row)

    return operation(types.void(types.intp, types.intp, types.intp), emit)


@inner
def _turn_rows(addresses, count, width, tile):  # type: ignore[no-untyped-def]
    """`width` numbers at each of `count` addresses, a multiple of LANES, as the columns of a tile."""
    for t in range(0, count, LANES):
        if width < LANES:
            for i in range(LANES):
                for c in range(width):
                    number = load_float(load_long(addresses + 8 * (t + i)) + 4 * c)
                    store_float(tile + PITCH * c + 4 * (t + i), number)
            continue
        for c in range(0, width, LANES):
            first = min(c, width - LANES)
            _transpose_block(addresses + 8 * t, 4 * first, tile + PITCH * first + 4 * t)


@inner
def _spread_exact(keys, tokens, width, dtype, tile, rows):  # type: ignore[no-untyped-def]
    """Exact latents of `tokens` tokens, one after the other, as a tile."""
    wide = (width + LANES - 1) // LANES * LANES
    addresses = rows + 4 * wide * SPAN
    as_floats(keys, dtype, tokens, width, rows, 4 * wide)
    whole = (tokens + LANES - 1) // LANES * LANES
    for t in range(whole):
        store_long(addresses + 8 * t, rows + 4 * wide * min(t, tokens - 1))
    _turn_rows(addresses, whole, wide, tile)


@inner
def _spread_tables(matrices, row, position, tokens, cos, sin, addresses):  # type: ignore[no-untyped-def]
    """Cosines and sines of a tile's tokens, as tiles."""
    rotary, positions = load_long(matrices + ROTARY), load_long(matrices + POSITIONS)
    given = positions + 8 * (row * load_long(matrices + LONGEST) + position)
    whole = (tokens + LANES - 1) // LANES * LANES
    for which in range(2):
        table = load_long(matrices + (COS if which == 0 else SIN))
        for t in range(whole):
            last = min(t, tokens - 1)
            at = load_long(given + 8 * last) if positions != 0 else position + last
            store_long(addresses + 8 * t, table + 4 * rotary * at)
        _turn_rows(addresses, whole, rotary, cos if which == 0 else sin)


@inner
def _norm_keys(keys, d, weight, eps):  # type: ignore[no-untyped-def]
    """Divide each key by the root of its mean square and multiply its channels by their weights."""
    share = splat(np.float32(1) / np.float32(d))
    for at in range(0, PITCH, VECTOR_BYTES):
        total = splat(np.float32(0))
        for c in range(d):
            x = load_floats(keys + PITCH * c + at)
            total = multiply_add(x, x, total)
        inverse = divide(splat(np.float32(1)), _square_root(multiply_add(total, share, splat(eps))))
        for c in range(d):
            place = keys + PITCH * c + at
            store_floats(place, load_floats(place) * inverse * splat(load_float(weight + 4 * c)))


@inner
def _turn_keys(keys, rotary, interleaved, cos, sin):  # type: ignore[no-untyped-def]
    """RoPE: pairs of channels turned by each token's angles."""
    for pair in range(rotary // 2):
        first = 2 * pair if interleaved else pair
        second = first + 1 if interleaved else pair + rotary // 2
        for at in range(0, PITCH, VECTOR_BYTES):
            a, b = PITCH * first + at, PITCH * second + at
            x, y = load_floats(keys + a), load_floats(keys + b)
            store_floats(keys + a, x * load_floats(cos + a) - y * load_floats(sin + a))
            store_floats(keys + b, multiply_add(x, load_floats(sin + b), y * load_floats(cos + b)))


def make_rebuild_score(kind: int, bits: int, paged: bool) -> Any:
    """A kernel that scores keys rebuilt from latents: of `count` pages, or not `paged` of `count` exact tokens."""
    encoded = kind == KIND_LATENTS and paged
    spread_pages = make_spread_pages(bits if encoded else 2)

    @inner
    def spread(page, step, first, here, spec, tile, room):  # type: ignore[no-untyped-def]
        if encoded:
            spread_pages(page, step, first, here, spec, tile, room)
            return
        width, tokens = load_long(spec + WIDTH), load_long(spec + TOKENS)
        row = number_bytes(load_long(spec + DTYPE)) * width
        if paged:
            # Pages have a multiple of 32 tokens, tiles begin at a multiple of SPAN.
            for t in range(0, here, 32):
                record = page + (first + t) // tokens * step + (first + t) % tokens * row
                _spread_exact(record, 32, width, load_long(spec + DTYPE), tile + 4 * t, room)
        else:
            _spread_exact(page + first * row, here, width, load_long(spec + DTYPE), tile, room)

    def score(page, step, count, spec, _q, _q_pitch, queries, scores, pitch, scratch, extra):  # type: ignore[no-untyped-def]
        matrices, packed_q = load_long(extra + MATRICES_AT), load_long(extra + QUERIES_AT)
        heads, d, width = load_long(matrices + HEADS), load_long(matrices + HEAD_SIZE), load_long(spec + WIDTH)
        rotary, blocks = load_long(matrices + ROTARY), (d + ROWS - 1) // ROWS
        each = queries // heads
        query_bytes = 4 * ROWS * d * ((each + ROWS - 1) // ROWS)
        total = count * load_long(spec + TOKENS) if paged else count
        tile = scratch
        keys = tile + PITCH * ((width + 31) // 32 * 32)
        block = keys + PITCH * ROWS * blocks
        cos = block + ROWS * PITCH + 64
        sin = cos + PITCH * rotary
        room = sin + PITCH * rotary
        for first in range(0, total, SPAN):
            here = min(SPAN, total - first)
            if rotary > 0:
                position = load_long(extra + POSITION_AT) + first
                _spread_tables(matrices, load_long(extra + ROW_AT), position, here, cos, sin, room)
            spread(page, step, first, here, spec, tile, room)
            for head in range(heads):
                at = head * blocks * ROWS
                multiply(
                    load_long(matrices + PACKED) + 4 * at * width, blocks, width, tile,
                    load_long(matrices + BIAS) + 4 * at, keys,
                )  # fmt: skip
                if load_long(matrices + NORM) != 0:
                    _norm_keys(keys, d, load_long(matrices + NORM), load_float(load_long(matrices + EPS)))
                if rotary > 0:
                    _turn_keys(keys, rotary, load_long(matrices + INTERLEAVED) != 0, cos, sin)
                score_tile(
                    packed_q + query_bytes * head, each, d, keys, here, scores + pitch * each * head + 4 * first, pitch,
                    block,
                )  # fmt: skip

    return score
