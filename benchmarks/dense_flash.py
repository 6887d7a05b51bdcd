"""A dense flash decode in Numba, fp32 or bf16 keys and values: the exact rival that kvsketch must be quoted against.

One pass with an online softmax. Its two inner loops are LLVM vector code, because plain loops are several times slower:
scores of a few tokens for a few heads at once, and weighted values of a few channels for a few heads, each with as many
sums as the machine has registers for. A bf16 number is the upper half of a float32 one, so a load gives two vectors,
by a shift and a mask, even channels and odd ones; queries and results are put in that order instead of the cache.

Lines are asked for ahead of their use, and to the second cache: of the first there are few open requests, on a Zen 4
core twice as much time goes by when they are used up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from benchmarks.sharing import run_shares
from kvsketch.numba_cpu._compile import kernel, kernel_part
from kvsketch.numba_cpu._tiers import TIER
from kvsketch.numba_cpu.emit import (
    F32,
    I32,
    emit_call,
    emit_constant,
    emit_maximum,
    emit_multiply_add,
    emit_reduce,
    emit_shuffle,
    emit_splat,
)

#: float32 numbers of a vector, and sums of the score loop: 32 registers of 16 with AVX-512, 16 of 8 with AVX2.
LANES = 16 if TIER == "avx512-vnni" else 8
#: Heads of a loop over several; tokens of the score loop for them and for one head; vectors of the value loop.
HEADS, TOKENS, ONE_HEAD_TOKENS, VECTORS = 4, LANES // 4, 4, LANES // 4
#: Tokens whose scores are computed before the softmax is updated, and tokens by which lines are asked for ahead.
TILE, AHEAD = 64, 64

_FLOATS, _WORDS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
_ZERO = emit_constant(_FLOATS, 0.0)
#: Coefficients of 2^f on [-1/2, 1/2], lowest first: the Taylor series, relative error below 2e-7.
_EXP2 = [math.log(2) ** i / math.factorial(i) for i in range(7)]


def _load(b: ir.IRBuilder, pointer: Any, kind: ir.Type = _FLOATS) -> Any:
    loaded = b.load(b.bitcast(pointer, kind.as_pointer()))
    loaded.align = 2
    return loaded


def _store(b: ir.IRBuilder, pointer: Any, value: Any) -> None:
    b.store(value, b.bitcast(pointer, value.type.as_pointer())).align = 4


def _load_pair(b: ir.IRBuilder, pointer: Any, half: bool) -> tuple[Any, Any]:
    """2 LANES numbers as two vectors: the first and the second half of float32, even and odd ones of bf16."""
    if not half:
        return _load(b, pointer), _load(b, b.gep(pointer, [I32(LANES)]))
    words = _load(b, pointer, _WORDS)
    even, odd = b.shl(words, emit_constant(_WORDS, 16)), b.and_(words, emit_constant(_WORDS, -65536))
    return b.bitcast(even, _FLOATS), b.bitcast(odd, _FLOATS)


def _prefetch_pair(b: ir.IRBuilder, pointer: Any, half: bool) -> None:
    """Ask for the 2 LANES numbers at `pointer`, which may lie beyond the array's end."""
    for offset in range(0, 2 * LANES, 32 if half else 16):
        line = b.gep(pointer, [I32(offset)])
        emit_call(b, "llvm.prefetch.p0", ir.VoidType(), [line, I32(0), I32(2), I32(1)])


def _sum_lanes(b: ir.IRBuilder, vectors: list[Any]) -> Any:
    """LANES vectors to one whose lane i is the sum of vector i."""
    while len(vectors) > 1:
        width = LANES // len(vectors)  # lanes that are of one vector by now
        low = [i + j for i in range(0, LANES, 2 * width) for j in (*range(width), *range(LANES, LANES + width))]
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [
            b.fadd(emit_shuffle(b, x, y, low), emit_shuffle(b, x, y, [i + width for i in low])) for x, y in pairs
        ]
    return vectors[0]


def _exp2(b: ir.IRBuilder, x: Any) -> Any:
    """2^x of each lane, for x <= 0; 2^-126 below that."""
    x = emit_maximum(b, x, emit_constant(_FLOATS, -126.0))
    whole = emit_call(b, f"llvm.rint.v{LANES}f32", _FLOATS, [x])
    fraction, result = b.fsub(x, whole), emit_constant(_FLOATS, _EXP2[-1])
    for coefficient in _EXP2[-2::-1]:
        result = emit_multiply_add(b, result, fraction, emit_constant(_FLOATS, coefficient))
    exponent = b.add(b.fptosi(whole, _WORDS), emit_constant(_WORDS, 127))
    return b.fmul(result, b.bitcast(b.shl(exponent, emit_constant(_WORDS, 23)), _FLOATS))


def _operation(signature: Any, emit: Callable[..., None]) -> tuple[Any, Callable[..., Any]]:
    """Code that `emit` makes of a builder, pointers to the first elements of arrays, and the other arguments."""

    def generate(context: Any, b: ir.IRBuilder, sig: Any, arguments: Any) -> Any:
        kinds = zip(sig.args, arguments, strict=True)
        emit(b, *(context.make_array(k)(context, b, x).data if isinstance(k, types.Array) else x for k, x in kinds))
        return context.get_dummy_value()

    return signature, generate


def _sums(b: ir.IRBuilder, count: int) -> list[Any]:
    """Room for `count` vectors, zeros; the compiler makes registers of it."""
    slots = [cgutils.alloca_once(b, _FLOATS) for _ in range(count)]
    for slot in slots:
        b.store(_ZERO, slot)
    return slots


@intrinsic(prefer_literal=True)
def _score(_context, keys, token, d, queries, head, scores, tile, heads, tokens):  # type: ignore[no-untyped-def]
    """scores[head + i, tile + j] = <queries[head + i], keys[token + j]> for `heads` heads and `tokens` tokens."""
    half, head_count, token_count = keys.dtype == types.uint16, heads.literal_value, tokens.literal_value

    def emit(b, keys, token, d, queries, head, scores, tile, _heads, _tokens):  # type: ignore[no-untyped-def]
        size = token.type
        sums = _sums(b, head_count * token_count)
        with cgutils.for_range_slice(b, size(0), d, size(2 * LANES), inc=True) as (c, _):
            rows = [b.gep(keys, [b.add(b.mul(b.add(token, size(j)), d), c)]) for j in range(token_count)]
            for row in rows:
                _prefetch_pair(b, b.gep(row, [b.mul(d, size(AHEAD))]), half)
            numbers = [_load_pair(b, row, half) for row in rows]
            for i in range(head_count):
                query = _load_pair(b, b.gep(queries, [b.add(b.mul(b.add(head, size(i)), d), c)]), False)
                for j in range(token_count):
                    total = b.load(sums[i * token_count + j])
                    for x, y in zip(numbers[j], query, strict=True):
                        total = emit_multiply_add(b, x, y, total)
                    b.store(total, sums[i * token_count + j])
        total = _sum_lanes(b, [b.load(slot) for slot in sums] * (LANES // len(sums)))
        for i in range(head_count):
            part = emit_shuffle(b, total, total, list(range(i * token_count, (i + 1) * token_count)))
            _store(b, b.gep(scores, [b.add(b.mul(b.add(head, size(i)), size(TILE)), tile)]), part)

    size = types.intp
    return _operation(types.void(keys, size, size, queries, size, scores, size, heads, tokens), emit)


@intrinsic
def _weigh(_context, scores, head, count, state):  # type: ignore[no-untyped-def]
    """scores[head, :count] to 2^(score - maximum); state[head] = maximum so far, sum, factor of the sums before."""

    def emit(b, scores, head, count, state):  # type: ignore[no-untyped-def]
        size = head.type
        slots = [b.gep(state, [b.add(b.mul(head, size(3)), size(i))]) for i in range(3)]
        before, total = b.load(slots[0]), b.load(slots[1])
        highest, added = _sums(b, 2)
        b.store(emit_splat(b, before, LANES), highest)
        row = b.gep(scores, [b.mul(head, size(TILE))])
        with cgutils.for_range_slice(b, size(0), count, size(LANES), inc=True) as (j, _):
            x, y = _load(b, b.gep(row, [j])), b.load(highest)
            b.store(emit_maximum(b, x, y), highest)
        new = emit_reduce(b, b.load(highest), emit_maximum)
        shift = emit_splat(b, new, LANES)
        with cgutils.for_range_slice(b, size(0), count, size(LANES), inc=True) as (j, _):
            weight = _exp2(b, b.fsub(_load(b, b.gep(row, [j])), shift))
            _store(b, b.gep(row, [j]), weight)
            b.store(b.fadd(b.load(added), weight), added)
        factor = b.extract_element(_exp2(b, emit_splat(b, b.fsub(before, new), LANES)), I32(0))
        tile_sum = emit_reduce(b, b.load(added), ir.IRBuilder.fadd)
        for slot, value in zip(slots, (new, b.fadd(b.fmul(total, factor), tile_sum), factor), strict=True):
            b.store(value, slot)

    return _operation(types.void(scores, types.intp, types.intp, state), emit)


@intrinsic(prefer_literal=True)
def _mix(_context, values, token, count, d, channel, weights, head, mix, heads):  # type: ignore[no-untyped-def]
    """mix[head + i, channel:] += sum over j < count of weights[head + i, j] * values[token + j, channel:].

    For `heads` heads and VECTORS vectors of channels.
    """
    half, head_count = values.dtype == types.uint16, heads.literal_value

    def emit(b, values, token, count, d, channel, weights, head, mix, _heads):  # type: ignore[no-untyped-def]
        size = token.type
        sums, targets = _sums(b, head_count * VECTORS), []
        for i in range(head_count):
            row = b.add(b.mul(b.add(head, size(i)), d), channel)
            targets += [b.gep(mix, [b.add(row, size(v * LANES))]) for v in range(VECTORS)]
        for slot, target in zip(sums, targets, strict=True):
            b.store(_load(b, target), slot)
        with cgutils.for_range(b, count) as loop:
            here = b.gep(values, [b.add(b.mul(b.add(token, loop.index), d), channel)])
            numbers: list[Any] = []
            for v in range(0, VECTORS, 2):
                pair = b.gep(here, [size(v * LANES)])
                _prefetch_pair(b, b.gep(pair, [b.mul(d, size(AHEAD))]), half)
                numbers += _load_pair(b, pair, half)
            for i in range(head_count):
                row = b.gep(weights, [b.mul(b.add(head, size(i)), size(TILE))])
                weight = emit_splat(b, b.load(b.gep(row, [loop.index])), LANES)
                for v, slot in enumerate(sums[i * VECTORS : (i + 1) * VECTORS]):
                    b.store(emit_multiply_add(b, weight, numbers[v], b.load(slot)), slot)
        for slot, target in zip(sums, targets, strict=True):
            _store(b, target, b.load(slot))

    size = types.intp
    return _operation(types.void(values, size, size, size, size, weights, size, mix, heads), emit)


@kernel_part()
def _position(i, half):  # type: ignore[no-untyped-def]
    """Where channel `i` stands: of bf16, each 2 LANES channels have the even ones first."""
    lane = i % (2 * LANES)
    return i - lane + lane // 2 + lane % 2 * LANES if half else i


@kernel()
def _attend_heads(q, scale, keys, values, half, out, first, last):  # type: ignore[no-untyped-def]
    """Key/value heads `first` to `last`: q (h, heads, d) float32, keys and values (h, n, d), out (h, heads, d)."""
    heads, d = q.shape[1:]
    n = keys.shape[1]
    blocked = heads // HEADS * HEADS
    queries, mix = np.empty(heads * d, np.float32), np.empty(heads * d, np.float32)
    scores, state = np.empty(heads * TILE, np.float32), np.empty(heads * 3, np.float32)
    for h in range(first, last):
        k, v = keys[h].reshape(-1), values[h].reshape(-1)
        for i in range(heads):
            state[3 * i], state[3 * i + 1] = np.float32(-3e38), np.float32(0)
            for c in range(d):
                queries[i * d + _position(c, half)] = q[h, i, c] * scale
        mix[:] = 0
        for start in range(0, n, TILE):
            count = min(TILE, n - start)
            for i in range(0, blocked, HEADS):
                for j in range(0, count, TOKENS):
                    _score(k, start + j, d, queries, i, scores, j, HEADS, TOKENS)
            for i in range(blocked, heads):
                for j in range(0, count, ONE_HEAD_TOKENS):
                    _score(k, start + j, d, queries, i, scores, j, 1, ONE_HEAD_TOKENS)
            for i in range(heads):
                _weigh(scores, i, count, state)
                if state[3 * i + 2] != 1:
                    mix[i * d : (i + 1) * d] *= state[3 * i + 2]
            for c in range(0, d, VECTORS * LANES):
                for i in range(0, blocked, HEADS):
                    _mix(v, start, count, d, c, scores, i, mix, HEADS)
                for i in range(blocked, heads):
                    _mix(v, start, count, d, c, scores, i, mix, 1)
        for i in range(heads):
            for c in range(d):
                out[h, i, c] = mix[i * d + _position(c, half)] / state[3 * i + 1]


def dense_flash(q: Any, k: Any, v: Any, *, threads: int = 1) -> Any:
    """Softmax attention of one query a head over exact keys and values.

    Parameters
    ----------
    q : (hq, d) float32
    k, v : (h, n, d) float32 or bfloat16, n a multiple of 16, d of 64, h dividing hq
    threads
        Threads to share the key/value heads among.

    Returns
    -------
    (hq, d) float32
    """
    hq, d = q.shape
    h, n, _ = k.shape
    if n % 16 or d % 64 or hq % h or k.shape != v.shape or k.dtype != v.dtype:
        raise ValueError(f"q {q.shape}, k {k.shape} {k.dtype}, v {v.shape} {v.dtype} do not fit; see the docstring")
    half = k.dtype == ml_dtypes.bfloat16
    numbers = np.uint16 if half else np.float32
    out = np.empty((h, hq // h, d), np.float32)
    scale = np.float32(math.log2(math.e) / math.sqrt(d))
    arguments = (q.reshape(h, hq // h, d), scale, k.view(numbers), v.view(numbers), half, out)
    run_shares(_attend_heads, h, *arguments, threads=threads)
    return out.reshape(hq, d)
