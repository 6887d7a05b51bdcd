"""Codes as the units of a page (docs/layout.md): the layout's transpositions, in registers.

Keys: a unit's lanes are tokens and its rows channels; values: lanes are channels and rows tokens. Codes are packed four
vectors at a time into bytes such that each 16-byte lane holds four numbers of the first vector, of the second and so
on; what is left to do is at most one shuffle of bytes and one of 32-bit words for each 64 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvsketch.layout import unit_bytes, unit_rows
from kvsketch.numba_cpu._tiers import TIER, VECTOR_BYTES
from kvsketch.numba_cpu.emit import I64, LANES, VECTORS, emit_call, emit_constant, emit_shuffle, emit_store
from kvsketch.numba_cpu.encode_groups import (
    ITEM_BYTES,
    emit_codes,
    emit_load_numbers,
    emit_load_parameters,
    emit_spread_parameters,
)
from kvsketch.numba_cpu.simd import operation

#: Lanes of 16 bytes in a vector: each holds four 32-bit words.
QUADS = LANES // 4
_PACKS = {"avx512-vnni": "llvm.x86.avx512.%s.512", "avx2": "llvm.x86.avx2.%s"}


def block_channels(bits: int) -> int:
    """Channels of keys that are encoded at a time."""
    return max(LANES, unit_rows(bits))


def emit_bytes(b: ir.IRBuilder, codes: list[Any]) -> Any:
    """Four vectors of int32 as bytes, negative ones as 0: lane L holds numbers 4L..4L+3 of the first, second, ...

    Codes are at most 255; in the generic tier they are not negative.
    """
    if TIER in _PACKS:
        words = [
            emit_call(b, _PACKS[TIER] % "packssdw", VECTORS["int16"], [codes[i], codes[i + 1]]) for i in range(0, 4, 2)
        ]
        return emit_call(b, _PACKS[TIER] % "packuswb", VECTORS["uint8"], words)
    low, high = (emit_shuffle(b, codes[i], codes[i + 1], list(range(2 * LANES))) for i in range(0, 4, 2))
    return b.trunc(emit_shuffle(b, low, high, list(range(4 * LANES))), VECTORS["uint8"])


def emit_transpose_bytes(b: ir.IRBuilder, x: Any) -> Any:
    """The 4 by 4 bytes of each 16-byte lane, transposed."""
    order = [16 * lane + 4 * (i % 4) + i // 4 for lane in range(QUADS) for i in range(16)]
    return emit_shuffle(b, x, x, order)


def _emit_shift_left(b: ir.IRBuilder, x: Any, count: int) -> Any:
    """Bytes shifted by `count` bits, none of which is lost."""
    kind = ir.VectorType(ir.IntType(16), x.type.count // 2)
    return b.bitcast(b.shl(b.bitcast(x, kind), emit_constant(kind, count)), x.type)


def _emit_join(b: ir.IRBuilder, planes: list[Any], bits: int) -> Any:
    joined = planes[0]
    for i, plane in enumerate(planes[1:], 1):
        joined = b.or_(joined, _emit_shift_left(b, plane, bits * i))
    return joined


def emit_planes(b: ir.IRBuilder, codes: list[Any], bits: int) -> list[Any]:
    """Codes of lanes 0-7, 8-15, 16-23 and 24-31 of 8 rows, as bytes, put together: a byte each vector of the unit.

    With 1 and 3 bits the last one, the (high) bits, fills only half of its bytes: see :func:`emit_halves_joined`.
    """
    if bits == 3:
        low, one = emit_constant(codes[0].type, 3), emit_constant(codes[0].type, 1)
        wide = ir.VectorType(ir.IntType(16), codes[0].type.count // 2)
        high = []
        for x in codes:
            shifted = b.lshr(b.bitcast(x, wide), emit_constant(wide, 2))
            high.append(b.and_(b.bitcast(shifted, x.type), one))
        return [_emit_join(b, [b.and_(x, low) for x in codes], 2), _emit_join(b, high, 1)]
    if bits == 1:
        return [_emit_join(b, codes, 1)]
    planes = 8 // bits
    return [_emit_join(b, codes[i : i + planes], bits) for i in range(0, 4, planes)]


def emit_store_unit(b: ir.IRBuilder, target: Any, offset: int, octets: list[list[list[Any]]], bits: int) -> None:
    """Write a unit: for each 8 of its rows the vectors of :func:`emit_planes`, each as the pieces of 64 bytes."""

    def store(offset: int, pieces: list[Any]) -> None:
        for i, piece in enumerate(pieces):
            emit_store(b, target, offset + VECTOR_BYTES * i, piece)

    if unit_rows(bits) == 8:
        for i, pieces in enumerate(octets[0]):
            store(offset + 64 * i, pieces)
        return
    for i, octet in enumerate(octets):
        if bits == 3:
            store(offset + 64 * i, octet[0])
    first, second = (octet[-1] for octet in octets)
    store(
        offset + 64 * (bits - 1),
        [b.or_(x, _emit_shift_left(b, y, 4)) for x, y in zip(first, second, strict=True)],
    )


def _emit_gather_words(b: ir.IRBuilder, sources: list[Any], words: list[tuple[int, int]]) -> list[Any]:
    """Pieces of 64 bytes, vectors of bytes, made of 32-bit words: (source, word) of each; two sources a piece."""
    pieces = []
    for start in range(0, len(words), LANES):
        part = words[start : start + LANES]
        used = sorted({source for source, _ in part})
        first, last = (b.bitcast(sources[i], VECTORS["int32"]) for i in (used[0], used[-1]))
        indices = [word + (LANES if source != used[0] else 0) for source, word in part]
        pieces.append(b.bitcast(emit_shuffle(b, first, last, indices), VECTORS["uint8"]))
    return pieces


def emit_key_unit(b: ir.IRBuilder, code: Callable[[int, int], Any], bits: int, octets: int) -> list[list[list[Any]]]:
    """Codes of 32 tokens by 8 channels for each of `octets`, as :func:`emit_store_unit` takes them.

    ``code(token, vector)`` are the int32 codes of LANES channels.
    """
    vectors = 8 * octets // LANES
    halves: list[list[list[Any]]] = []  # of tokens i < 4 and i >= 4: for each vector its bytes
    for half in range(2):
        halves.append(
            [
                emit_planes(
                    b,
                    [emit_bytes(b, [code(8 * p + 4 * half + i, v) for i in range(4)]) for p in range(4)],
                    bits,
                )
                for v in range(vectors)
            ]
        )
    result = []
    for octet in range(octets):
        words = []
        for i in range(8):
            for quad in (2 * octet, 2 * octet + 1):
                v, lane = divmod(quad, QUADS)
                words.append((2 * v + i // 4, 4 * lane + i % 4))
        planes = []
        for kind in range(len(halves[0][0])):
            sources = [halves[half][v][kind] for v in range(vectors) for half in range(2)]
            planes.append(_emit_gather_words(b, sources, words))
        result.append(planes)
    return result


def emit_value_octet(b: ir.IRBuilder, code: Callable[[int, int], Any], bits: int) -> list[list[Any]]:
    """Codes of 8 tokens by 32 channels, as :func:`emit_store_unit` takes them for 8 rows.

    ``code(token, vector)`` are the int32 codes of LANES channels.
    """
    vectors = 32 // LANES
    sources = []  # vector by vector, of tokens 0-3 and 4-7: the tokens' bytes of each channel
    for v in range(vectors):
        for half in range(2):
            sources.append(emit_transpose_bytes(b, emit_bytes(b, [code(4 * half + i, v) for i in range(4)])))
    pieces = []
    for plane in range(4):
        words = []
        for i in range(8):
            v, lane = divmod(2 * plane + i // 4, QUADS)
            words += [(2 * v, 4 * lane + i % 4), (2 * v + 1, 4 * lane + i % 4)]
        pieces.append(_emit_gather_words(b, sources, words))
    by_piece = [emit_planes(b, [pieces[plane][i] for plane in range(4)], bits) for i in range(len(pieces[0]))]
    return [[planes[kind] for planes in by_piece] for kind in range(len(by_piece[0]))]


def _rows(b: ir.IRBuilder, x: Any, pitch: Any, count: int) -> list[Any]:
    return [b.add(x, b.mul(pitch, I64(t))) for t in range(count)]


def make_pack_keys(bits: int, dtype: str) -> Any:
    """``pack(x, pitch, parameters, target)``: units of 32 tokens by :func:`block_channels` channels."""
    block, depth, size = block_channels(bits), unit_rows(bits), ITEM_BYTES[dtype]

    @intrinsic
    def pack(_context: Any, x: Any, pitch: Any, parameters: Any, target: Any) -> Any:
        def emit(b: ir.IRBuilder, x: Any, pitch: Any, parameters: Any, target: Any) -> None:
            rows = _rows(b, x, pitch, 32)
            groups = [emit_load_parameters(b, parameters, block, LANES * v) for v in range(block // LANES)]

            def code(token: int, v: int) -> Any:
                return emit_codes(b, emit_load_numbers(b, rows[token], size * LANES * v, dtype), groups[v])

            octets = emit_key_unit(b, code, bits, block // 8)
            for i, first in enumerate(range(0, block // 8, depth // 8)):
                emit_store_unit(b, target, unit_bytes(bits) * i, octets[first : first + depth // 8], bits)

        return operation(types.void(types.intp, types.intp, types.intp, types.intp), emit)

    return pack


def make_pack_values(bits: int, dtype: str, shared: bool) -> Any:
    """``pack(x, pitch, groups, target)``: a unit of 32 channels by 8 or 16 tokens.

    `groups` are the addresses of the first token's parameters in the groups of channels 0-7, 8-15, 16-23 and 24-31,
    which lie 32 apart; `shared` says that they are all the same.
    """
    size = ITEM_BYTES[dtype]
    octets = unit_rows(bits) // 8

    @intrinsic
    def pack(_context: Any, x: Any, pitch: Any, groups: Any, target: Any) -> Any:
        def emit(b: ir.IRBuilder, x: Any, pitch: Any, groups: Any, target: Any) -> None:
            rows = _rows(b, x, pitch, 8 * octets)
            addresses = [b.extract_value(groups, i) for i in range(4)]
            parameters: dict[tuple[int, int], list[Any]] = {}

            def of(token: int, v: int) -> list[Any]:
                first = 0 if shared else LANES * v // 8
                count = 1 if shared else max(LANES // 8, 1)
                key = token, first
                if key not in parameters:
                    parameters[key] = emit_spread_parameters(b, addresses[first : first + count], 32, token)
                return parameters[key]

            def make_code(first: int) -> Callable[[int, int], Any]:
                def code(token: int, v: int) -> Any:
                    numbers = emit_load_numbers(b, rows[first + token], size * LANES * v, dtype)
                    return emit_codes(b, numbers, of(first + token, v))

                return code

            found = [emit_value_octet(b, make_code(8 * i), bits) for i in range(octets)]
            emit_store_unit(b, target, 0, found, bits)

        return operation(types.void(types.intp, types.intp, types.UniTuple(types.intp, 4), types.intp), emit)

    return pack
