"""Sign sketches of keys in plain array calls."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvsketch._dispatch import namespace
from kvsketch.reference.bitpack import pack_signs, unpack_signs

FLOAT16_MAX = 65504.0


def sketch_vectors(x: Any, matrix: Any) -> tuple[Any, Any, int]:
    """Signs (..., ceil(m/8)) and float16 norms (...) of vectors `x` (..., d), and how many norms saturated.

    Sums run over the channels in order, in float32, so that every engine finds the same bits.
    """
    xp = namespace(x)
    x = x.astype(xp.float32)
    projected = xp.zeros((*x.shape[:-1], matrix.shape[0]), dtype=xp.float32)
    squares = xp.zeros(x.shape[:-1], dtype=xp.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for c in range(x.shape[-1]):
            projected += x[..., c, None] * matrix[:, c]
            squares += x[..., c] * x[..., c]
    norms, saturated = round_norms(squares)
    return pack_signs(projected), norms, saturated


def round_norms(squares: Any) -> tuple[Any, int]:
    """Square roots of `squares` as float16, at most 65504, and how many were above that."""
    xp = namespace(squares)
    norms = xp.sqrt(squares)
    return xp.minimum(norms, xp.float32(FLOAT16_MAX)).astype(xp.float16), int((norms > FLOAT16_MAX).sum())


def select_outlier_channels(k: Any, outliers: int, page: int) -> Any:
    xp = namespace(k)
    b, h, n, d = k.shape
    squares = xp.zeros((b, h, -(-n // page), d), dtype=xp.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for token in range(min(page, n)):
            rows = k[:, :, token::page].astype(xp.float32)
            squares[:, :, : rows.shape[2]] += rows * rows
    return largest_channels(squares, outliers)


def largest_channels(squares: Any, outliers: int) -> Any:
    """Increasing indices (..., outliers) of the largest `squares` (..., d): NaN first, ties to the lowest index."""
    xp = namespace(squares)
    order = xp.argsort(-xp.where(xp.isnan(squares), xp.float32(xp.inf), squares), axis=-1, kind="stable")
    return xp.sort(order[..., :outliers], axis=-1).astype(xp.int64)


def outlier_mask(channels: Any, d: int) -> Any:
    """Booleans (..., d), true at `channels` (..., outliers)."""
    return (channels[..., None] == namespace(channels).arange(d)).any(axis=-2)


def split_outliers(k: Any, channels: Any, page: int) -> tuple[Any, Any]:
    """k_in and k_out: `k` (b, h, n, d) with zeros at the `channels` (b, h, ceil(n/page), outliers), and the rest."""
    xp = namespace(k)
    outlying = xp.repeat(outlier_mask(channels, k.shape[-1]), page, axis=2)[:, :, : k.shape[2]]
    zero = k.dtype.type(0)
    return xp.where(outlying, zero, k), xp.where(outlying, k, zero)


def sketch_keys(k: Any, matrix: Any, channels: Any, outlier_matrix: Any, page: int) -> tuple[Any, ...]:
    if channels is None:
        signs, norms, saturated = sketch_vectors(k, matrix)
        return signs, norms, None, None, saturated
    inner, outer = split_outliers(k, channels, page)
    signs, norms, saturated = sketch_vectors(inner, matrix)
    outlier_signs, outlier_norms, outlier_saturated = sketch_vectors(outer, outlier_matrix)
    return signs, norms, outlier_signs, outlier_norms, saturated + outlier_saturated


def sketch_scores(q: Any, keys: Any, matrix: Any, constant: float, outlier_matrix: Any, outlier_constant: float) -> Any:
    xp = namespace(q)
    b, hq, s, d = q.shape
    h, n = keys.norms.shape[1:]
    grouped = q.astype(xp.float32).reshape(b, h, hq // h * s, d)
    zero = xp.float32(0)
    with np.errstate(over="ignore", invalid="ignore"):
        if keys.channels is None:
            scores = _estimate(grouped, keys.signs, keys.norms, matrix, constant)
        else:
            scores = xp.empty((b, h, hq // h * s, n), dtype=xp.float32)
            for index in range(keys.channels.shape[2]):
                tokens = slice(index * keys.page, (index + 1) * keys.page)
                outlying = outlier_mask(keys.channels[:, :, index : index + 1], d)
                inner, outer = xp.where(outlying, zero, grouped), xp.where(outlying, grouped, zero)
                scores[..., tokens] = _estimate(
                    inner, keys.signs[:, :, tokens], keys.norms[:, :, tokens], matrix, constant
                ) + _estimate(
                    outer,
                    keys.outlier_signs[:, :, tokens],
                    keys.outlier_norms[:, :, tokens],
                    outlier_matrix,
                    outlier_constant,
                )
        return scores.reshape(b, hq, s, n).astype(q.dtype)


def _estimate(q: Any, signs: Any, norms: Any, matrix: Any, constant: float) -> Any:
    """Estimates (b, h, x, n) of the products of `q` (b, h, x, d) with sketches of n keys."""
    xp = namespace(q)
    m = matrix.shape[0]
    sums = (q @ matrix.T) @ unpack_signs(signs, m).astype(xp.float32).swapaxes(-1, -2)
    return sums * (norms.astype(xp.float32) * xp.float32(constant / m))[..., None, :]
