"""Attention over latents in plain array calls: keys and values are rebuilt a tile at a time."""

from __future__ import annotations

from typing import Any

from kvsketch._dispatch import namespace
from kvsketch._palu_inputs import FirstTokens, KeyNorm, Reconstruction, Rope
from kvsketch.attention import CacheView
from kvsketch.reference.attention import OnlineSoftmax, row_tiles


def turn(k: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
    """Keys (..., t, d) turned by RoPE, cos and sin (t, rotary); channels from `rotary` on stay."""
    xp = namespace(k)
    rotary = cos.shape[-1]
    x, rest = k[..., :rotary], k[..., rotary:]
    if interleaved:
        pairs = x.reshape(*x.shape[:-1], rotary // 2, 2)
        partner = xp.stack([-pairs[..., 1], pairs[..., 0]], axis=-1).reshape(x.shape)
    else:
        partner = xp.concatenate([-x[..., rotary // 2 :], x[..., : rotary // 2]], axis=-1)
    return xp.concatenate([x * cos + partner * sin, rest], axis=-1)


def rebuild_keys(latents: Any, matrices: Reconstruction, key_norm: KeyNorm | None, rope: Rope | None, at: Any) -> Any:
    """Keys (heads, t, d) of key latents (t, r) float32 of tokens at positions `at` (t,)."""
    xp, heads = namespace(latents), matrices.heads
    if matrices.up_k is None:
        return xp.broadcast_to(latents, (heads, *latents.shape))
    k = xp.matmul(latents, matrices.up_k.T)
    if matrices.key_bias is not None:
        k = k + matrices.key_bias
    k = xp.swapaxes(k.reshape(k.shape[0], heads, -1), 0, 1)
    if key_norm is not None:
        k = k / xp.sqrt((k * k).mean(axis=-1, keepdims=True) + xp.float32(key_norm.eps)) * key_norm.weight
    return k if rope is None else turn(k, rope.cos[at], rope.sin[at], rope.interleaved)


def attend(
    q: Any,
    view: CacheView,
    matrices: Reconstruction,
    *,
    rope: Rope | None,
    positions: Any,
    key_norm: KeyNorm | None,
    first: FirstTokens | None,
    limits: Any,
    bias: Any,
    scale: float,
    softcap: float | None,
    coefficients: str,
) -> Any:
    """See :func:`kvsketch.palu.attend`, for one slice; `coefficients` may be rounded to, but are not here."""
    xp = namespace(q)
    b, hq, s, _ = q.shape
    heads = matrices.heads
    ratio, rank = hq // heads, view.layout.values.width
    dv = rank if matrices.up_v is None else matrices.up_v.shape[0] // heads
    if limits is None:
        limits = view.causal_limits(s)
    out = xp.zeros((b, hq, s, dv), dtype=q.dtype)
    none = xp.full((heads, ratio, 1, 1), -xp.inf, dtype=xp.float32)
    for row in range(b):
        queries = q[row].astype(xp.float32).reshape(heads, ratio * s, -1)
        softmax = OnlineSoftmax(none, s, dv)
        for start, key_latents, value_latents in row_tiles(view, row):
            t = key_latents.shape[1]
            at = start + xp.arange(t) if positions is None else positions[row, start : start + t]
            k = rebuild_keys(key_latents[0], matrices, key_norm, rope, at)
            v = value_latents
            if matrices.up_v is not None:
                v = xp.swapaxes(xp.matmul(v[0], matrices.up_v.T).reshape(t, heads, dv), 0, 1)
            if first is not None:
                exact = max(0, min(t, int(first.counts[row]) - start))
                k, v = (
                    xp.concatenate([true[row, :, start : start + exact].astype(xp.float32), x[:, exact:]], axis=1)
                    for true, x in ((first.k, k), (first.v, v))
                )
            scores = xp.matmul(queries, xp.swapaxes(k, -1, -2)).reshape(heads, ratio, s, t) * xp.float32(scale)
            softmax.add(
                scores,
                v,
                softcap=softcap,
                bias=None if bias is None else bias[row, :, :, start : start + t],
                seen=start + xp.arange(t) < limits[row, :, None],
            )
        out[row] = softmax.result().reshape(hq, s, dv).astype(q.dtype)
    return out
