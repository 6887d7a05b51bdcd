"""Attention over decoded tiles with an online softmax, in plain array calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvsketch._dispatch import namespace
from kvsketch.attention import CacheView
from kvsketch.reference.pages import decode_keys, decode_values

#: Tokens that are decoded at a time: temporaries are bounded by this, not by the length of the cache.
TILE_TOKENS = 1024


def tiles_level(queries: int, most: int) -> str:
    """What engines report whose own kernels take at most so many query rows, and that leave more to these tiles."""
    return f"decoded tiles: {queries} query rows are more than {most}"


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


class OnlineSoftmax:
    """Softmax of scores that come tile by tile, and what it mixes: a running maximum, sum and weighted mix.

    `logits` (h, ratio, 1, 1) join the sum only; -inf for none.
    """

    def __init__(self, logits: Any, s: int, dv: int) -> None:
        xp = namespace(logits)
        h, ratio = logits.shape[:2]
        self.highest = xp.broadcast_to(logits, (h, ratio, s, 1))
        self.total = xp.where(xp.isfinite(self.highest), xp.float32(1), xp.float32(0))
        self.mixed = xp.zeros((h, ratio, s, dv), dtype=xp.float32)

    def add(self, scores: Any, v: Any, *, softcap: float | None, bias: Any, seen: Any) -> None:
        """Take in scores (h, ratio, s, t) of values (h, t, dv); `bias` (1 or h*ratio, s, t), `seen` (s, t)."""
        xp = namespace(scores)
        h, ratio, s, t = scores.shape
        if softcap is not None:
            scores = xp.float32(softcap) * xp.tanh(scores / xp.float32(softcap))
        if bias is not None:
            part = xp.asarray(bias, dtype=xp.float32)
            scores = scores + (part if part.shape[0] == 1 else part.reshape(h, ratio, s, t))
        scores = xp.where(seen, scores, -xp.inf)
        new = xp.maximum(self.highest, scores.max(axis=-1, keepdims=True))
        shift = xp.where(xp.isfinite(new), new, xp.float32(0))
        weights = xp.exp(scores - shift)
        decay = xp.exp(self.highest - shift)
        self.total = self.total * decay + weights.sum(axis=-1, keepdims=True)
        product = xp.matmul(weights.reshape(h, ratio * s, t), v)
        self.mixed = self.mixed * decay + product.reshape(self.mixed.shape)
        self.highest = new

    def result(self) -> Any:
        """(h, ratio, s, dv); zeros for a query that saw nothing."""
        xp = namespace(self.mixed)
        return self.mixed / xp.where(self.total > 0, self.total, xp.float32(1))


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
    logits = xp.full((h, ratio, 1, 1), -xp.inf, dtype=xp.float32)
    if sink_logits is not None:
        logits[...] = xp.asarray(sink_logits, dtype=xp.float32).reshape(h, ratio, 1, 1)
    for row in range(b):
        queries = q[row].astype(xp.float32).reshape(h, ratio * s, d)
        softmax = OnlineSoftmax(logits, s, dv)
        for first, k, v in row_tiles(view, row):
            t = k.shape[1]
            scores = xp.matmul(queries, xp.swapaxes(k, -1, -2)).reshape(h, ratio, s, t) * xp.float32(scale)
            softmax.add(
                scores,
                v,
                softcap=softcap,
                bias=None if bias is None else bias[row, :, :, first : first + t],
                seen=first + xp.arange(t) < limits[row, :, None],
            )
        out[row] = softmax.result().reshape(hq, s, dv).astype(q.dtype)
    return out
