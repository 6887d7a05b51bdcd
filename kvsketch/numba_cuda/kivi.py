"""KIVI: groups quantized a thread a group, products a thread a result."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numba import cuda

from kvsketch._checks import FLOAT_DTYPES
from kvsketch._dispatch import namespace
from kvsketch.kivi import GroupedCodes
from kvsketch.numba_cuda._launch import launch
from kvsketch.numba_cuda.arithmetic import LARGEST_HALF, READ, WRITE, product, read_half
from kvsketch.numba_cuda.bitpack import pack_codes, stream_code
from kvsketch.numba_cuda.quantize import clamped, quantize_lines


def quantize_groups(x: Any, *, bits: int, group: int, axis: str) -> GroupedCodes:
    xp = namespace(x)
    *outer, n, d = x.shape
    by_token = axis == "channels"
    shape = (n, -(-d // group)) if by_token else (-(-n // group), d)
    rows = x.reshape(math.prod(outer), n, d)
    codes = xp.empty(rows.shape, dtype=xp.uint8)
    scale, zero = (xp.empty((len(rows), *shape), dtype=xp.float16) for _ in range(2))
    lines = [rows, codes, scale, zero] if by_token else [y.swapaxes(1, 2) for y in (rows, codes, scale, zero)]
    saturated = quantize_lines(lines[0], bits, group, *lines[1:])
    packed = pack_codes(codes.reshape(x.shape), bits)
    return GroupedCodes(
        packed, scale.reshape(*outer, *shape), zero.reshape(*outer, *shape), bits, group, axis, d, saturated
    )


def dequantize_groups(codes: GroupedCodes, *, dtype: str = "float32") -> Any:
    *outer, n, d = codes.shape
    x = namespace(codes.codes).empty((math.prod(outer), n, d), dtype=FLOAT_DTYPES[dtype])
    launch(_dequantize(dtype), x.size, *_arguments(codes, math.prod(outer)), x)
    return x.reshape(codes.shape)


def key_scores(q: Any, codes: GroupedCodes) -> Any:
    b, hq, s, _ = q.shape
    h, n = codes.codes.shape[1:3]
    scores = namespace(q).empty((b * h, hq // h * s, n), dtype=q.dtype)
    rows = q.reshape(b * h, hq // h * s, q.shape[3])
    launch(_key_scores(str(q.dtype)), scores.size, rows, *_arguments(codes, b * h), scores)
    return scores.reshape(b, hq, s, n)


def weighted_values(p: Any, codes: GroupedCodes) -> Any:
    b, hq, s, n = p.shape
    h = codes.codes.shape[1]
    sums = namespace(p).empty((b * h, hq // h * s, codes.size), dtype=p.dtype)
    rows = p.reshape(b * h, hq // h * s, n)
    launch(_weighted_values(str(p.dtype)), sums.size, rows, *_arguments(codes, b * h), sums)
    return sums.reshape(b, hq, s, codes.size)


def _arguments(codes: GroupedCodes, rows: int) -> tuple[Any, ...]:
    """What :func:`_number` needs: packed codes, scale and zero of `rows` rows, bits and groups along both axes."""
    arrays = (y.reshape(rows, *y.shape[-2:]) for y in (codes.codes, codes.scale, codes.zero))
    groups = (codes.group, 1) if codes.axis == "tokens" else (1, codes.group)
    return (*arrays, codes.bits, *groups)


@cuda.jit(device=True)
def _number(packed, scale, zero, bits, tokens, channels, row, token, c):
    """A number that is in a group of `tokens` tokens by `channels` channels, one of them 1."""
    code = np.float32(stream_code(packed[row], token, c, bits))
    part, line = token // tokens, c // channels
    return product(code, read_half(scale[row, part, line])) + read_half(zero[row, part, line])


@cache
def _dequantize(dtype: str) -> Any:
    write, half = WRITE[dtype], dtype == "float16"

    @cuda.jit
    def dequantize(packed, scale, zero, bits, tokens, channels, x):
        """A thread to each number of `x` (rows, n, d)."""
        rows, n, d = x.shape
        index, c = divmod(cuda.grid(1), d)
        row, token = divmod(index, n)
        if row < rows:
            number = _number(packed, scale, zero, bits, tokens, channels, row, token, c)
            if half and number == number:
                number = clamped(number, LARGEST_HALF)
            x[row, token, c] = write(number)

    return dequantize


@cache
def _key_scores(dtype: str) -> Any:
    read, write = READ[dtype], WRITE[dtype]

    @cuda.jit
    def key_scores_of_tokens(q, packed, scale, zero, bits, tokens, channels, scores):
        """A thread to each of `scores` (rows, queries, n)."""
        rows, queries, n = scores.shape
        index, token = divmod(cuda.grid(1), n)
        row, x = divmod(index, queries)
        if row < rows:
            total = np.float32(0)
            for c in range(q.shape[2]):
                total += read(q[row, x, c]) * _number(packed, scale, zero, bits, tokens, channels, row, token, c)
            scores[row, x, token] = write(total)

    return key_scores_of_tokens


@cache
def _weighted_values(dtype: str) -> Any:
    read, write = READ[dtype], WRITE[dtype]

    @cuda.jit
    def weigh_values(p, packed, scale, zero, bits, tokens, channels, sums):
        """A thread to each of `sums` (rows, queries, dv)."""
        rows, queries, dv = sums.shape
        index, c = divmod(cuda.grid(1), dv)
        row, x = divmod(index, queries)
        if row < rows:
            total = np.float32(0)
            for token in range(p.shape[2]):
                total += read(p[row, x, token]) * _number(packed, scale, zero, bits, tokens, channels, row, token, c)
            sums[row, x, c] = write(total)

    return weigh_values
