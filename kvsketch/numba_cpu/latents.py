"""Products of matrices with tiles of latents, and scores of pages whose integers are grouped along a token's channels.

A tile holds :data:`SPAN` tokens side by side, a channel a row: so lie the codes of such a page, and what is done to
keys rebuilt from latents is done to vectors of tokens. Kernels work on addresses; pitches and steps are in bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvsketch.layout import SideSpec, unit_bytes, unit_rows
from kvsketch.numba_cpu._compile import inner
from kvsketch.numba_cpu._tiers import TIER, VECTOR_BYTES
from kvsketch.numba_cpu.emit import (
    F32,
    I8,
    I64,
    LANES,
    VECTORS,
    emit_constant,
    emit_load,
    emit_multiply_add,
    emit_shuffle,
    emit_splat,
    emit_store,
)
from kvsketch.numba_cpu.integers import CODES, GROUP, GROUPS, SCALE, TOKENS, WIDTH, ZERO
from kvsketch.numba_cpu.simd import load_floats, load_halves, load_long, operation, store_float, store_floats

#: Tokens of a tile, and bytes of one of its rows.
SPAN = 64
PITCH = 4 * SPAN
#: Rows of a matrix that share a load of a tile, and vectors of tokens they are multiplied with: registers for the sums.
ROWS = 4
COLUMNS = 4 if TIER == "avx512-vnni" else 2
#: Channels of a block of codes.
BLOCK = 32


def pack_rows(matrix: Any) -> Any:
    """Rows (..., M, k) as float32 (..., ceil(M/ROWS), k, ROWS), zeros behind the last: what :func:`multiply` takes."""
    *lead, count, depth = matrix.shape
    blocks = -(-count // ROWS)
    packed = np.zeros((*lead, blocks * ROWS, depth), np.float32)
    packed[..., :count, :] = matrix
    return np.ascontiguousarray(np.swapaxes(packed.reshape(*lead, blocks, ROWS, depth), -1, -2))


@intrinsic
def _multiply_block(_context: Any, packed: Any, depth: Any, tile: Any, starts: Any, out: Any, pitch: Any) -> Any:
    """ROWS packed rows times COLUMNS vectors of a tile of `depth` rows, added to a number a row, at `starts`."""

    def emit(b: ir.IRBuilder, packed: Any, depth: Any, tile: Any, starts: Any, out: Any, pitch: Any) -> None:
        kind = VECTORS["float32"]
        sums = [[cgutils.alloca_once(b, kind) for _ in range(COLUMNS)] for _ in range(ROWS)]
        for i in range(ROWS):
            start = emit_splat(b, emit_load(b, starts, 4 * i, F32), LANES)
            for x in sums[i]:
                b.store(start, x)
        with cgutils.for_range(b, depth) as loop:
            row, weights = b.add(tile, b.mul(loop.index, I64(PITCH))), b.add(packed, b.mul(loop.index, I64(4 * ROWS)))
            numbers = [emit_load(b, row, VECTOR_BYTES * j, kind) for j in range(COLUMNS)]
            for i in range(ROWS):
                weight = emit_splat(b, emit_load(b, weights, 4 * i, F32), LANES)
                for x, number in zip(sums[i], numbers, strict=True):
                    b.store(emit_multiply_add(b, weight, number, b.load(x)), x)
        for i in range(ROWS):
            target = b.add(out, b.mul(pitch, I64(i)))
            for j, x in enumerate(sums[i]):
                emit_store(b, target, VECTOR_BYTES * j, b.load(x))

    return operation(types.void(*[types.intp] * 6), emit)


@inner
def multiply(packed, blocks, depth, tile, starts, out):  # type: ignore[no-untyped-def]
    """``starts + rows @ tile``: rows packed (blocks, depth, ROWS), starts (blocks, ROWS), out (blocks*ROWS, SPAN)."""
    for block in range(blocks):
        for at in range(0, PITCH, COLUMNS * VECTOR_BYTES):
            _multiply_block(
                packed + 4 * ROWS * depth * block, depth, tile + at, starts + 4 * ROWS * block,
                out + ROWS * PITCH * block + at, PITCH,
            )  # fmt: skip


# -- tiles ------------------------------------------------------------------------------------------------------------


def _emit_plane(b: ir.IRBuilder, vectors: list[Any], bits: int, octet: int, plane: int) -> Any:
    """Codes of 8 lanes by 8 rows, 64 bytes, of a unit given as its vectors (docs/layout.md)."""

    def take(x: Any, shift: int, width: int) -> Any:
        shifted = b.lshr(x, emit_constant(x.type, shift)) if shift else x
        return b.and_(shifted, emit_constant(x.type, (1 << width) - 1)) if shift + width < 8 else shifted

    if bits == 1:
        return take(vectors[0], plane + 4 * octet, 1)
    if bits == 3:
        high = take(vectors[2], plane + 4 * octet, 1)
        return b.or_(take(vectors[octet], 2 * plane, 2), b.shl(high, emit_constant(high.type, 2)))
    planes = 8 // bits
    return take(vectors[plane // planes], bits * (plane % planes), bits)


def _make_spread_unit(bits: int) -> Any:
    """``spread(unit, scales, zeros, tile)``: a unit's 32 channels as numbers in the rows of a tile.

    `scales` and `zeros` are, for each plane of 8 channels, the addresses of those of the unit's first token.
    """

    @intrinsic
    def spread(_context: Any, unit: Any, scales: Any, zeros: Any, tile: Any) -> Any:
        def emit(b: ir.IRBuilder, unit: Any, scales: Any, zeros: Any, tile: Any) -> None:
            kind = ir.VectorType(F32, 8)
            vectors = [emit_load(b, unit, 64 * i, ir.VectorType(I8, 64)) for i in range(unit_bytes(bits) // 64)]
            for octet in range(unit_rows(bits) // 8):
                for plane in range(4):
                    scale, zero = (emit_load(b, b.extract_value(x, plane), 32 * octet, kind) for x in (scales, zeros))
                    codes = _emit_plane(b, vectors, bits, octet, plane)
                    for lane in range(8):
                        code = emit_shuffle(b, codes, codes, list(range(8 * lane, 8 * lane + 8)))
                        number = b.uitofp(b.zext(code, ir.VectorType(ir.IntType(32), 8)), kind)
                        # Rounded twice, as decoded pages are.
                        number = b.fadd(b.fmul(number, scale), zero)
                        emit_store(b, tile, PITCH * (8 * plane + lane) + 32 * octet, number)

        four = types.UniTuple(types.intp, 4)
        return operation(types.void(types.intp, four, four, types.intp), emit)

    return spread


def make_spread_pages(bits: int) -> Any:
    """``spread(page, step, first, count, spec, tile, constants)``: `count` tokens, from `first` on, as a tile.

    `first` and `count` are multiples of 32; `constants` has room for :func:`constant_bytes`.
    """
    unit, depth = unit_bytes(bits), unit_rows(bits)
    spread_unit = _make_spread_unit(bits)

    @inner
    def spread(page, step, first, count, spec, tile, constants):  # type: ignore[no-untyped-def]
        tokens, group, groups = load_long(spec + TOKENS), load_long(spec + GROUP), load_long(spec + GROUPS)
        blocks = (load_long(spec + WIDTH) + BLOCK - 1) // BLOCK
        zeros = constants + PITCH * groups
        for start in range(0, count, 32):
            record, inside = page + (first + start) // tokens * step, (first + start) % tokens
            for part in range(groups):
                at, target = record + 2 * (part * tokens + inside), PITCH * part + 4 * start
                for t in range(0, 32, LANES):
                    store_floats(constants + target + 4 * t, load_halves(at + load_long(spec + SCALE) + 2 * t))
                    store_floats(zeros + target + 4 * t, load_halves(at + load_long(spec + ZERO) + 2 * t))
        for block in range(blocks):
            g0, g1 = min(BLOCK * block // group, groups - 1), min((BLOCK * block + 8) // group, groups - 1)
            g2, g3 = min((BLOCK * block + 16) // group, groups - 1), min((BLOCK * block + 24) // group, groups - 1)
            s0, s1, s2, s3 = PITCH * g0, PITCH * g1, PITCH * g2, PITCH * g3
            for start in range(0, count, 32):
                record, inside = page + (first + start) // tokens * step, (first + start) % tokens
                codes = record + load_long(spec + CODES) + (block * tokens + inside) // depth * unit
                for t in range(start, start + 32, depth):
                    a, z = constants + 4 * t, zeros + 4 * t
                    spread_unit(
                        codes, (a + s0, a + s1, a + s2, a + s3), (z + s0, z + s1, z + s2, z + s3),
                        tile + PITCH * BLOCK * block + 4 * t,
                    )  # fmt: skip
                    codes += unit

    return spread


def tile_bytes(width: int) -> int:
    """Bytes of a tile of `width` channels, filled up to whole blocks."""
    return PITCH * (-(-width // BLOCK) * BLOCK)


def constant_bytes(spec: SideSpec) -> int:
    """Bytes of the scales and zeros of a tile."""
    return 2 * PITCH * spec.groups


# -- scores -----------------------------------------------------------------------------------------------------------

#: Where a score kernel finds, in bytes of its last argument, the address of packed queries.
QUERIES_AT = 0


def score_scratch(spec: SideSpec) -> int:
    """Bytes that :func:`make_score` works in."""
    return tile_bytes(spec.width) + constant_bytes(spec) + ROWS * PITCH + 64


@inner
def copy_scores(block, count, tokens, scores, pitch):  # type: ignore[no-untyped-def]
    """`count` rows of a product, `tokens` of each rounded up to whole vectors, to rows of scores."""
    for i in range(count):
        for at in range(0, 4 * tokens, VECTOR_BYTES):
            store_floats(scores + pitch * i + at, load_floats(block + PITCH * i + at))


@inner
def score_tile(packed, queries, depth, tile, tokens, scores, pitch, block):  # type: ignore[no-untyped-def]
    """Scores of a tile for packed queries; `block` is ROWS rows of room, and ROWS zeros behind it."""
    zeros = block + ROWS * PITCH
    for i in range(ROWS):
        store_float(zeros + 4 * i, np.float32(0))
    for first in range(0, queries, ROWS):
        multiply(packed + 4 * depth * first, 1, depth, tile, zeros, block)
        copy_scores(block, min(ROWS, queries - first), tokens, scores + pitch * first, pitch)


def make_score(bits: int) -> Any:
    """A kernel that scores `count` pages of latents, from the address of the first one's key side on."""
    spread = make_spread_pages(bits)

    def score(page, step, count, spec, _q, _q_pitch, queries, scores, pitch, scratch, extra):  # type: ignore[no-untyped-def]
        width, total = load_long(spec + WIDTH), count * load_long(spec + TOKENS)
        tile = scratch
        constants = tile + PITCH * ((width + BLOCK - 1) // BLOCK * BLOCK)
        block = constants + 2 * PITCH * load_long(spec + GROUPS)
        for first in range(0, total, SPAN):
            here = min(SPAN, total - first)
            spread(page, step, first, here, spec, tile, constants)
            score_tile(load_long(extra + QUERIES_AT), queries, width, tile, here, scores + 4 * first, pitch, block)

    return score
