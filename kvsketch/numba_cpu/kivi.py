"""KIVI in Numba: see :mod:`kvsketch.kivi` for what is computed.

:func:`quantize_rows` and :func:`quantize_columns` are for use inside other Numba code too. No fast-math there: codes,
scales and zeros equal the reference's bit for bit.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvsketch._checks import FLOAT_DTYPES
from kvsketch.kivi import GroupedCodes
from kvsketch.numba_cpu._compile import kernel
from kvsketch.numba_cpu.bitpack import pack_codes, unpack_codes
from kvsketch.numba_cpu.float16 import float_to_half, half_to_float

HALF_MAX = np.float32(65504.0)
FLOAT_MAX = np.float32(np.finfo(np.float32).max)
# Adding and subtracting 1.5 * 2^23 rounds a small float32 to an integer, half to even, and vectorises everywhere.
ROUNDER = np.float32(12582912.0)
# Tokens summed in a row before they join the total: keeps float32 sums of long contexts accurate.
TILE = 256


@kernel(error_model="numpy")
def group_scale(lo, hi, bad, levels):  # type: ignore[no-untyped-def]
    """Scale and zero of a group from its least and largest number, rounded to float16, and how many saturated.

    `bad` says that the group has a NaN. All float32; `levels` is 2^bits - 1.
    """
    if bad:
        return np.float32(0), np.float32(np.nan), 0
    lo = min(max(lo, -FLOAT_MAX), FLOAT_MAX)
    hi = min(max(hi, -FLOAT_MAX), FLOAT_MAX)
    step = np.float32((hi - lo) / levels)
    saturated = int(step > HALF_MAX) + int(abs(lo) > HALF_MAX)
    # Adding zero turns the half -0.0 into +0.0, so that equal groups have equal bytes.
    scale = half_to_float(float_to_half(min(step, HALF_MAX))) + np.float32(0)
    zero = half_to_float(float_to_half(min(max(lo, -HALF_MAX), HALF_MAX))) + np.float32(0)
    return scale, zero, saturated


@kernel(error_model="numpy")
def encode_number(x, scale, zero, levels):  # type: ignore[no-untyped-def]
    """Code of one number of a group; `scale` and `zero` are the rounded ones, all float32."""
    clamped = HALF_MAX if x > HALF_MAX else x
    clamped = -HALF_MAX if clamped < -HALF_MAX else clamped
    steps = (clamped - zero) / scale
    steps = steps if steps > np.float32(0) else np.float32(0)
    steps = levels if steps > levels else steps
    return np.uint8(np.int32((steps + ROUNDER) - ROUNDER))


@kernel()
def quantize_one(x, bits, codes):  # type: ignore[no-untyped-def]
    """Quantize one group, x float32 (g,), into codes uint8 (g,); returns what :func:`group_scale` does."""
    levels = np.float32((1 << bits) - 1)
    lo, hi, bad = x[0], x[0], False
    for number in x:
        lo = number if number < lo else lo
        hi = number if number > hi else hi
        bad |= number != number
    scale, zero, saturated = group_scale(lo, hi, bad, levels)
    if scale > np.float32(0):
        for c in range(x.size):
            codes[c] = encode_number(x[c], scale, zero, levels)
    else:
        codes[:] = 0
    return scale, zero, saturated


@kernel()
def quantize_rows(x, bits, codes, scale, zero):  # type: ignore[no-untyped-def]
    """Quantize groups that are the rows of `x`; returns how many scales and zeros saturated.

    x float32 (groups, g); writes codes uint8 (groups, g) and scale, zero float32 (groups,), rounded to float16.
    """
    saturated = 0
    for row in range(x.shape[0]):
        scale[row], zero[row], clipped = quantize_one(x[row], bits, codes[row])
        saturated += clipped
    return saturated


@kernel()
def quantize_columns(x, bits, codes, scale, zero):  # type: ignore[no-untyped-def]
    """Quantize groups that are the columns of `x`; returns how many scales and zeros saturated.

    x float32 (g, groups); writes codes uint8 (g, groups) and scale, zero float32 (groups,), rounded to float16.
    Equal to :func:`quantize_rows` of the transpose, and vectorised over groups.
    """
    count, width = x.shape
    levels = np.float32((1 << bits) - 1)
    lo, hi, bad = x[0].copy(), x[0].copy(), np.zeros(width, np.bool_)
    for t in range(count):
        for c in range(width):
            number = x[t, c]
            lo[c] = number if number < lo[c] else lo[c]
            hi[c] = number if number > hi[c] else hi[c]
            bad[c] |= number != number
    saturated = 0
    for c in range(width):
        scale[c], zero[c], clipped = group_scale(lo[c], hi[c], bad[c], levels)
        saturated += clipped
    for t in range(count):
        for c in range(width):
            flat = not scale[c] > np.float32(0)
            step = np.float32(1) if flat else scale[c]
            start = np.float32(0) if flat else zero[c]
            code = encode_number(x[t, c], step, start, levels)
            codes[t, c] = np.uint8(0) if flat else code
    return saturated


@kernel()
def _quantize_tokens(x, bits, group, codes, scale, zero):  # type: ignore[no-untyped-def]
    """x (B, n, d), groups of `group` tokens: codes (B, n, d), scale and zero (B, ceil(n/group), d) as halves."""
    saturated = 0
    wide = np.empty((2, x.shape[2]), np.float32)
    for i in range(x.shape[0]):
        for part in range(scale.shape[1]):
            span = slice(part * group, min((part + 1) * group, x.shape[1]))
            saturated += quantize_columns(x[i, span], bits, codes[i, span], wide[0], wide[1])
            for c in range(x.shape[2]):
                scale[i, part, c] = float_to_half(wide[0, c])
                zero[i, part, c] = float_to_half(wide[1, c])
    return saturated


@kernel()
def _quantize_channels(x, bits, group, codes, scale, zero):  # type: ignore[no-untyped-def]
    """x (rows, d), groups of `group` channels: codes (rows, d), scale and zero (rows, ceil(d/group)) as halves."""
    saturated = 0
    for row in range(x.shape[0]):
        for part in range(scale.shape[1]):
            span = slice(part * group, min((part + 1) * group, x.shape[1]))
            s, z, clipped = quantize_one(x[row, span], bits, codes[row, span])
            scale[row, part] = float_to_half(s)
            zero[row, part] = float_to_half(z)
            saturated += clipped
    return saturated


def quantize_groups(x: Any, *, bits: int, group: int, axis: str) -> GroupedCodes:
    x = np.ascontiguousarray(x, dtype=np.float32)
    *outer, n, d = x.shape
    codes = np.empty(x.shape, np.uint8)
    by_tokens = axis == "tokens"
    shape = (*outer, -(-n // group), d) if by_tokens else (*outer, n, -(-d // group))
    scale, zero = np.empty(shape, np.uint16), np.empty(shape, np.uint16)
    kernel, merge = (_quantize_tokens, _merge_outer) if by_tokens else (_quantize_channels, _merge_rows)
    saturated = kernel(merge(x), bits, group, merge(codes), merge(scale), merge(zero))
    packed = pack_codes(codes, bits=bits)
    return GroupedCodes(packed, scale.view(np.float16), zero.view(np.float16), bits, group, axis, d, int(saturated))


def _merge_outer(x: Any) -> Any:
    """View of a contiguous array (..., n, d) as (B, n, d)."""
    return x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])


def _merge_rows(x: Any) -> Any:
    """View of a contiguous array (..., d) as (rows, d)."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _half_bits(numbers: Any) -> Any:
    """A float16 array (..., rows, columns) as contiguous uint16 (B, rows, columns)."""
    return _merge_outer(np.ascontiguousarray(numbers).view(np.uint16))


@kernel()
def _dequantize(codes, scale, zero, token_group, channel_group, saturate, out):  # type: ignore[no-untyped-def]
    for i in range(codes.shape[0]):
        for t in range(codes.shape[1]):
            for c in range(codes.shape[2]):
                s = half_to_float(scale[i, t // token_group, c // channel_group])
                z = half_to_float(zero[i, t // token_group, c // channel_group])
                number = np.float32(codes[i, t, c]) * s + z
                if saturate:
                    number = HALF_MAX if number > HALF_MAX else number
                    number = -HALF_MAX if number < -HALF_MAX else number
                out[i, t, c] = number


def dequantize_groups(codes: GroupedCodes, *, dtype: str = "float32") -> Any:
    numbers = unpack_codes(codes.codes, codes.size, bits=codes.bits)
    out = np.empty(codes.shape, np.float32)
    groups = (codes.group, 1) if codes.axis == "tokens" else (1, codes.group)
    saturate = dtype == "float16"
    _dequantize(
        _merge_outer(numbers), _half_bits(codes.scale), _half_bits(codes.zero), *groups, saturate, _merge_outer(out)
    )
    return _cast(out, FLOAT_DTYPES[dtype])


def _cast(x: Any, dtype: Any) -> Any:
    with np.errstate(all="ignore"):
        return x.astype(dtype, copy=False)


@kernel()
def _unpack_row(packed, bits, out):  # type: ignore[no-untyped-def]
    """Codes of one token, a little-endian bit stream, as float32 numbers."""
    mask = (1 << bits) - 1
    for c in range(out.size):
        first = c * bits
        byte, shift = first >> 3, first & 7
        word = np.int64(packed[byte]) >> shift
        if shift + bits > 8:
            word |= np.int64(packed[byte + 1]) << (8 - shift)
        out[c] = np.float32(word & mask)


@kernel(fastmath={"reassoc", "contract", "nsz"})
def _dot(x, y):  # type: ignore[no-untyped-def]
    total = np.float32(0)
    for c in range(x.size):
        total += x[c] * y[c]
    return total


@kernel()
def _key_scores(q, packed, scale, zero, bits, group, out):  # type: ignore[no-untyped-def]
    """q (B, rows, d), packed (B, n, bytes), scale and zero halves (B, groups, d), out float32 (B, rows, n)."""
    blocks, rows, d = q.shape
    n = packed.shape[1]
    weights = np.empty((rows, d), np.float32)
    zeros = np.empty(d, np.float32)
    offsets = np.empty(rows, np.float32)
    numbers = np.empty(d, np.float32)
    for i in range(blocks):
        for part in range(scale.shape[1]):
            for c in range(d):
                zeros[c] = half_to_float(zero[i, part, c])
                s = half_to_float(scale[i, part, c])
                for r in range(rows):
                    weights[r, c] = q[i, r, c] * s
            for r in range(rows):
                offsets[r] = _dot(q[i, r], zeros)
            for t in range(part * group, min((part + 1) * group, n)):
                _unpack_row(packed[i, t], bits, numbers)
                for r in range(rows):
                    out[i, r, t] = _dot(weights[r], numbers) + offsets[r]


def key_scores(q: Any, codes: GroupedCodes) -> Any:
    b, hq, s, d = q.shape
    h, n = codes.codes.shape[1:3]
    rows = np.ascontiguousarray(q, dtype=np.float32).reshape(b * h, hq // h * s, d)
    packed = _merge_outer(np.ascontiguousarray(codes.codes))
    out = np.empty((b * h, hq // h * s, n), np.float32)
    _key_scores(rows, packed, _half_bits(codes.scale), _half_bits(codes.zero), codes.bits, codes.group, out)
    return _cast(out.reshape(b, hq, s, n), q.dtype)


@kernel()
def _weighted_values(p, packed, scale, zero, bits, group, out):  # type: ignore[no-untyped-def]
    """p (B, rows, n), packed (B, n, bytes), scale and zero halves (B, n, groups), out float32 (B, rows, d)."""
    blocks, rows, d = out.shape
    n, groups = packed.shape[1], scale.shape[2]
    sums = np.empty((rows, d), np.float32)
    offsets = np.empty((rows, groups), np.float32)
    numbers = np.empty(d, np.float32)
    for i in range(blocks):
        out[i] = np.float32(0)
        for first in range(0, n, TILE):
            sums[:] = np.float32(0)
            offsets[:] = np.float32(0)
            for t in range(first, min(first + TILE, n)):
                _unpack_row(packed[i, t], bits, numbers)
                for part in range(groups):
                    s = half_to_float(scale[i, t, part])
                    z = half_to_float(zero[i, t, part])
                    start, stop = part * group, min((part + 1) * group, d)
                    for r in range(rows):
                        weight = p[i, r, t] * s
                        offsets[r, part] += p[i, r, t] * z
                        for c in range(start, stop):
                            sums[r, c] += weight * numbers[c]
            for r in range(rows):
                for c in range(d):
                    out[i, r, c] += sums[r, c] + offsets[r, c // group]


def weighted_values(p: Any, codes: GroupedCodes) -> Any:
    b, hq, s, n = p.shape
    h = codes.codes.shape[1]
    rows = np.ascontiguousarray(p, dtype=np.float32).reshape(b * h, hq // h * s, n)
    packed = _merge_outer(np.ascontiguousarray(codes.codes))
    out = np.empty((b * h, hq // h * s, codes.size), np.float32)
    _weighted_values(rows, packed, _half_bits(codes.scale), _half_bits(codes.zero), codes.bits, codes.group, out)
    return _cast(out.reshape(b, hq, s, codes.size), p.dtype)
