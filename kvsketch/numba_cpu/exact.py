"""Scores and weighted values of exact tokens, as float32 whatever they are stored as."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvsketch.layout import DTYPE_CODES
from kvsketch.numba_cpu._compile import inner
from kvsketch.numba_cpu.emit import LANES, emit_reduce_each, emit_store
from kvsketch.numba_cpu.float16 import half_to_float
from kvsketch.numba_cpu.simd import (
    floats,
    load_bfloats,
    load_float,
    load_floats,
    load_halves,
    load_word,
    multiply_add,
    operation,
    splat,
    store_float,
    store_floats,
    sum_all,
)

FLOAT32, FLOAT16 = DTYPE_CODES["float32"], DTYPE_CODES["float16"]


@intrinsic
def _store_sums(_context: Any, target: Any, w: Any, x: Any, y: Any, z: Any) -> Any:
    """Write the sums of four vectors, one after the other."""

    def emit(b: ir.IRBuilder, target: Any, w: Any, x: Any, y: Any, z: Any) -> None:
        emit_store(b, target, 0, emit_reduce_each(b, [w, x, y, z], ir.IRBuilder.fadd))

    return operation(types.void(types.intp, floats, floats, floats, floats), emit)


@inner
def number_bytes(dtype):  # type: ignore[no-untyped-def]
    """Bytes of an exact number."""
    return 4 if dtype == FLOAT32 else 2


@inner
def _load_number(address, dtype):  # type: ignore[no-untyped-def]
    if dtype == FLOAT32:
        return load_float(address)
    if dtype == FLOAT16:
        return half_to_float(load_word(address))
    return np.uint32(np.uint32(load_word(address)) << np.uint32(16)).view(np.float32)


@inner
def as_floats(numbers, dtype, tokens, width, target, pitch):  # type: ignore[no-untyped-def]
    """Exact tokens one after the other at `numbers` as rows of float32, zeros behind `width`; `pitch` in bytes."""
    size, whole = number_bytes(dtype), width // LANES * LANES
    for t in range(tokens):
        row, out = numbers + size * width * t, target + pitch * t
        if dtype == FLOAT32:
            for c in range(0, whole, LANES):
                store_floats(out + 4 * c, load_floats(row + 4 * c))
        elif dtype == FLOAT16:
            for c in range(0, whole, LANES):
                store_floats(out + 4 * c, load_halves(row + 2 * c))
        else:
            for c in range(0, whole, LANES):
                store_floats(out + 4 * c, load_bfloats(row + 2 * c))
        for c in range(whole, pitch // 4):
            store_float(out + 4 * c, _load_number(row + size * c, dtype) if c < width else np.float32(0))


@inner
def score_floats(keys, pitch, tokens, q, q_pitch, queries, scores, score_pitch):  # type: ignore[no-untyped-def]
    """Scores of rows of float32; all pitches in bytes, that of the keys a whole number of vectors."""
    whole = tokens // 4 * 4
    for i in range(queries):
        query, target = q + q_pitch * i, scores + score_pitch * i
        for t in range(0, whole, 4):
            key = keys + pitch * t
            a, b, c, d = (splat(np.float32(0)), splat(np.float32(0)), splat(np.float32(0)), splat(np.float32(0)))
            for at in range(0, pitch, 4 * LANES):
                x = load_floats(query + at)
                a = multiply_add(x, load_floats(key + at), a)
                b = multiply_add(x, load_floats(key + pitch + at), b)
                c = multiply_add(x, load_floats(key + 2 * pitch + at), c)
                d = multiply_add(x, load_floats(key + 3 * pitch + at), d)
            _store_sums(target + 4 * t, a, b, c, d)
        for t in range(whole, tokens):
            total = splat(np.float32(0))
            for at in range(0, pitch, 4 * LANES):
                total = multiply_add(load_floats(query + at), load_floats(keys + pitch * t + at), total)
            store_float(target + 4 * t, sum_all(total))


@inner
def mix_floats(values, pitch, tokens, weights, weight_pitch, queries, mix, mix_pitch):  # type: ignore[no-untyped-def]
    """Add rows of float32 with a weight a token and query to the queries' mixes; all pitches in bytes."""
    vector = 4 * LANES
    whole = pitch // (4 * vector) * (4 * vector)
    for i in range(queries):
        weight = weights + weight_pitch * i
        for at in range(0, whole, 4 * vector):
            out, row = mix + mix_pitch * i + at, values + at
            a, b = load_floats(out), load_floats(out + vector)
            c, d = load_floats(out + 2 * vector), load_floats(out + 3 * vector)
            for t in range(tokens):
                w = splat(load_float(weight + 4 * t))
                a = multiply_add(load_floats(row), w, a)
                b = multiply_add(load_floats(row + vector), w, b)
                c = multiply_add(load_floats(row + 2 * vector), w, c)
                d = multiply_add(load_floats(row + 3 * vector), w, d)
                row += pitch
            store_floats(out, a)
            store_floats(out + vector, b)
            store_floats(out + 2 * vector, c)
            store_floats(out + 3 * vector, d)
        for at in range(whole, pitch, vector):
            out = mix + mix_pitch * i + at
            total = load_floats(out)
            for t in range(tokens):
                w = splat(load_float(weight + 4 * t))
                total = multiply_add(load_floats(values + pitch * t + at), w, total)
            store_floats(out, total)
