"""Attention over decoded tiles with an online softmax, in plain array calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvsketch._dispatch import namespace
from kvsketch.attention import CacheView
from kvsketch.reference.pages import decode_keys, decode_values

#: Tokens that are decoded at a time: temporaries are bounded by this, not by the length of the cache.
TILE_TOKENS = 1024


def row_tiles(view: CacheView, row: int) -> Iterator[tuple[int, Any, Any]]:
    """The tokens of a row in order, as tiles (position of the first, keys (h, t, d), values (h, t, dv)) in float32."""
    xp = namespace(view.pages)
    layout = view.layout
    sinks, pages = int(view.sink_counts[row]), int(view.page_counts[row])
    start, window = int(view.window_starts[row]), int(view.window_counts[row])
    position = 0
    if sinks:
        k, v = view.sink_k[row, :, :sinks], view.sink_v[row, :, :sinks]
        yield position, k.astype(xp.float32), v.astype(xp.float32)
    position += sinks
    step = max(1, TILE_TOKENS // layout.page_tokens)
    for first in range(0, pages, step):
        records = view.pages[row, :, first : min(first + step, pages)]
        k = decode_keys(records[..., : layout.value_offset], layout.keys)
        v = decode_values(records[..., layout.value_offset :], layout.values)
        yield position + first * layout.page_tokens, k, v
    position += pages * layout.page_tokens
    for first in range(0, window, TILE_TOKENS):
        here = slice(start + first, start + min(first + TILE_TOKENS, window))
        k, v = view.window_k[row, :, here], view.window_v[row, :, here]
        yield position + first, k.astype(xp.float32), v.astype(xp.float32)


def attend(
    q: Any,
    view: CacheView,
    *,
    limits: Any,
    bias: Any,
    scale: float,
    softcap: float | None,
    sink_logits: Any,
    coefficients: str,
) -> Any:
    """See :func:`kvsketch.attention.attend`; everything is float32 here, whatever `coefficients` allow."""
    xp = namespace(q)
    b, hq, s, d = q.shape
    h, dv = view.pages.shape[1], view.layout.values.width
    ratio = hq // h
    if limits is None:
        limits = view.causal_limits(s)
    out = xp.zeros((b, hq, s, dv), dtype=q.dtype)
    for row in range(b):
        queries = q[row].astype(xp.float32).reshape(h, ratio * s, d)
        highest = xp.full((h, ratio, s, 1), -xp.inf, dtype=xp.float32)
        if sink_logits is not None:
            highest[...] = xp.asarray(sink_logits, dtype=xp.float32).reshape(h, ratio, 1, 1)
        total = xp.where(xp.isfinite(highest), xp.float32(1), xp.float32(0))
        mixed = xp.zeros((h, ratio, s, dv), dtype=xp.float32)
        for first, k, v in row_tiles(view, row):
            t = k.shape[1]
            scores = xp.matmul(queries, xp.swapaxes(k, -1, -2)).reshape(h, ratio, s, t) * xp.float32(scale)
            if softcap is not None:
                scores = xp.float32(softcap) * xp.tanh(scores / xp.float32(softcap))
            if bias is not None:
                part = xp.asarray(bias[row, :, :, first : first + t], dtype=xp.float32)
                scores = scores + (part if part.shape[0] == 1 else part.reshape(h, ratio, s, t))
            seen = first + xp.arange(t) < limits[row, :, None]
            scores = xp.where(seen, scores, -xp.inf)
            new = xp.maximum(highest, scores.max(axis=-1, keepdims=True))
            shift = xp.where(xp.isfinite(new), new, xp.float32(0))
            weights = xp.exp(scores - shift)
            decay = xp.exp(highest - shift)
            total = total * decay + weights.sum(axis=-1, keepdims=True)
            product = xp.matmul(weights.reshape(h, ratio * s, t), v)
            mixed = mixed * decay + product.reshape(h, ratio, s, dv)
            highest = new
        result = mixed / xp.where(total > 0, total, xp.float32(1))
        out[row] = result.reshape(hq, s, dv).astype(q.dtype)
    return out
