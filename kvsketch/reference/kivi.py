"""KIVI in plain array calls: see :mod:`kvsketch.kivi` for what is computed."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvsketch._checks import FLOAT_DTYPES
from kvsketch._dispatch import namespace
from kvsketch.kivi import GroupedCodes
from kvsketch.reference.bitpack import pack_codes, unpack_codes

HALF_MAX = 65504.0
FLOAT_MAX = float(np.finfo(np.float32).max)


def quantize_block(x: Any, bits: int) -> tuple[Any, Any, Any, int]:
    """Quantize groups that lie along the last axis: the rule of :mod:`kvsketch.kivi`, with no padding.

    `x` is float32 of shape (..., g), g >= 1. Returns codes uint8 (..., g), scale and zero float16 (...), and how many
    scales and zeros were saturated.
    """
    xp = namespace(x)
    levels = np.float32(2**bits - 1)
    with np.errstate(all="ignore"):
        bad = xp.isnan(x).any(axis=-1)
        lo = xp.clip(x.min(axis=-1), -FLOAT_MAX, FLOAT_MAX)
        hi = xp.clip(x.max(axis=-1), -FLOAT_MAX, FLOAT_MAX)
        step = xp.where(bad, np.float32(0), (hi - lo) / levels)
        lo = xp.where(bad, np.float32(np.nan), lo)
        saturated = int((step > HALF_MAX).sum() + (abs(lo) > HALF_MAX).sum())
        # Adding zero turns the half -0.0 into +0.0, so that equal groups have equal bytes.
        scale = xp.minimum(step, np.float32(HALF_MAX)).astype(np.float16) + np.float16(0)
        zero = xp.clip(lo, -HALF_MAX, HALF_MAX).astype(np.float16) + np.float16(0)
        wide = scale.astype(np.float32)[..., None]
        distance = xp.clip(x, -HALF_MAX, HALF_MAX) - zero.astype(np.float32)[..., None]
        steps = distance / xp.where(wide > 0, wide, np.float32(1))
        codes = xp.where(wide > 0, xp.clip(xp.rint(steps), 0, levels), np.float32(0)).astype(np.uint8)
    return codes, scale, zero, saturated


def quantize_groups(x: Any, *, bits: int, group: int, axis: str) -> GroupedCodes:
    xp = namespace(x)
    x = x.astype(np.float32)
    *outer, n, d = x.shape
    count = n if axis == "tokens" else d
    parts = []
    saturated = 0
    for start in range(0, count, group):
        if axis == "tokens":
            columns = xp.swapaxes(x[..., start : start + group, :], -1, -2)
            codes, scale, zero, clipped = quantize_block(columns, bits)
            parts.append((xp.swapaxes(codes, -1, -2), scale[..., None, :], zero[..., None, :]))
        else:
            codes, scale, zero, clipped = quantize_block(x[..., start : start + group], bits)
            parts.append((codes, scale[..., None], zero[..., None]))
        saturated += clipped
    if parts:
        along = -2 if axis == "tokens" else -1
        codes, scale, zero = (xp.concatenate(arrays, axis=along) for arrays in zip(*parts, strict=True))
    else:
        codes = xp.zeros(x.shape, np.uint8)
        scale = zero = xp.zeros((*outer, 0, d), np.float16)
    return GroupedCodes(pack_codes(codes, bits=bits), scale, zero, bits, group, axis, d, saturated)


def _unpack(codes: GroupedCodes) -> Any:
    return unpack_codes(codes.codes, codes.size, bits=codes.bits).astype(np.float32)


def _expand(numbers: Any, codes: GroupedCodes) -> Any:
    """A scale or zero repeated over the members of its group: float32 (..., n, d)."""
    xp = namespace(numbers)
    axis = -2 if codes.axis == "tokens" else -1
    count = codes.codes.shape[-2] if codes.axis == "tokens" else codes.size
    repeated = xp.repeat(numbers.astype(np.float32), codes.group, axis=axis)
    return repeated[..., :count, :] if codes.axis == "tokens" else repeated[..., :count]


def dequantize_groups(codes: GroupedCodes, *, dtype: str = "float32") -> Any:
    xp = namespace(codes.codes)
    with np.errstate(all="ignore"):
        x = _unpack(codes) * _expand(codes.scale, codes) + _expand(codes.zero, codes)
        if dtype == "float16":
            x = xp.clip(x, -HALF_MAX, HALF_MAX)
        return x.astype(FLOAT_DTYPES[dtype])


def _pad(x: Any, count: int, axis: int) -> Any:
    """`x` with zeros appended along `axis` until that axis has `count` elements."""
    shape = list(x.shape)
    shape[axis] = count - shape[axis]
    xp = namespace(x)
    return xp.concatenate([x, xp.zeros(shape, x.dtype)], axis=axis)


def key_scores(q: Any, codes: GroupedCodes) -> Any:
    xp = namespace(q)
    b, hq, s, d = q.shape
    h, n = codes.codes.shape[1:3]
    groups = codes.scale.shape[-2]
    rows = q.astype(np.float32).reshape(b, h, 1, hq // h * s, d)
    numbers = _pad(_unpack(codes), groups * codes.group, -2).reshape(b, h, groups, codes.group, d)
    with np.errstate(all="ignore"):
        weights = rows * codes.scale.astype(np.float32)[..., None, :]
        offsets = xp.matmul(rows, codes.zero.astype(np.float32)[..., None])
        scores = xp.matmul(weights, xp.swapaxes(numbers, -1, -2)) + offsets
        scores = xp.swapaxes(scores, 2, 3).reshape(b, hq, s, groups * codes.group)
        return scores[..., :n].astype(q.dtype)


def weighted_values(p: Any, codes: GroupedCodes) -> Any:
    xp = namespace(p)
    b, hq, s, n = p.shape
    h = codes.codes.shape[1]
    groups = codes.scale.shape[-1]
    weights = p.astype(np.float32).reshape(b, h, 1, hq // h * s, n)
    numbers = _pad(_unpack(codes), groups * codes.group, -1).reshape(b, h, n, groups, codes.group)
    scale, zero = (xp.swapaxes(x.astype(np.float32), -1, -2)[..., None, :] for x in (codes.scale, codes.zero))
    with np.errstate(all="ignore"):
        offsets = xp.matmul(weights, xp.swapaxes(zero, -1, -2))
        sums = xp.matmul(weights * scale, xp.moveaxis(numbers, 2, 3)) + offsets
        sums = xp.swapaxes(sums, 2, 3).reshape(b, hq, s, groups * codes.group)
        return sums[..., : codes.size].astype(p.dtype)
