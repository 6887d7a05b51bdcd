"""Attention over pages and exact tokens: the parts of a cache one after another, split over tokens, then combined."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvsketch._dispatch import namespace
from kvsketch.attention import CacheView
from kvsketch.codecs import SignSketch
from kvsketch.layout import SideLayout
from kvsketch.numba_cuda._launch import launch, launch_blocks
from kvsketch.numba_cuda.attention_kernels import (
    QUERY_TILE,
    SHARED_BYTES,
    combine_splits,
    part_kernel,
    plain_query,
    sketch_key,
    sketch_query,
)
from kvsketch.numba_cuda.numbers import exact_number, exact_records, number_of, side_records
from kvsketch.reference.pages import projections

#: Blocks that fill a device: tokens are split until there are so many, but not into less than SPLIT_TOKENS.
ENOUGH_BLOCKS = 1024
SPLIT_TOKENS = 256


class Part(NamedTuple):
    """Tokens of all rows that are stored alike: the sinks, the pages or the window of a cache."""

    keys: Any  #: records of :mod:`kvsketch.numba_cuda.numbers`, whose pages are (b, h, capacity) of them
    values: Any
    key_number: Any
    value_number: Any
    sketch: SideLayout | None  #: of the keys, where these are sketched
    capacity: int
    counts: Any  #: (b,) int64 on the device, as all that follow: tokens of each row
    starts: Any  #: (b,) where they begin
    firsts: Any  #: (b,) positions of the first ones in their rows

    @property
    def room(self) -> int:
        """The most tokens that a row may have."""
        return int(self.capacity * self.keys.spec.tokens)


def exact_part(k: Any, v: Any, counts: Any, starts: Any, firsts: Any) -> Part:
    """Exact tokens k (b, h, t, d) and v (b, h, t, dv), of which each row's are ``counts`` from ``starts`` on."""
    key, value = (exact_number(str(x.dtype)) for x in (k, v))
    return Part(exact_records(k), exact_records(v), key, value, None, 1, counts, starts, firsts)


def cache_parts(view: CacheView) -> list[Part]:
    """Sinks, pages and window of a cache, in the order of positions; those that it has room for."""
    layout, xp = view.layout, namespace(view.pages)
    counts = (view.sink_counts, view.page_counts, view.window_starts, view.window_counts)
    sinks, pages, starts, window = map(xp.asarray, counts)
    none, paged = xp.zeros_like(sinks), pages * layout.page_tokens
    parts = []
    if view.sink_k.size:
        parts.append(exact_part(view.sink_k, view.sink_v, sinks, none, none))
    if view.pages.size:
        *_, capacity, record_bytes = view.pages.shape
        records = view.pages.reshape(-1, record_bytes)
        parts.append(
            Part(
                side_records(records, layout.keys),
                side_records(records, layout.values, layout.value_offset),
                number_of(layout.keys),
                number_of(layout.values),
                layout.keys if isinstance(layout.keys.codec, SignSketch) else None,
                capacity,
                paged,
                none,
                sinks,
            )
        )
    if view.window_k.size:
        parts.append(exact_part(view.window_k, view.window_v, window, starts, sinks + paged))
    return parts


class Softmax:
    """Softmax attention of queries `q` (b, h, x, d) float32, x of them to a key/value head, over parts.

    What each split of the tokens has seen is kept un-normalised in `partial` (b, h, splits, x, dv + 2): the mix of its
    values, the sum of its weights, and the logarithm of what both were divided by, the largest score.
    """

    def __init__(
        self,
        q: Any,
        dv: int,
        longest: int,
        *,
        limits: Any,
        bias: Any,
        scale: float,
        softcap: float | None,
    ) -> None:
        xp = namespace(q)
        b, h, count, _ = q.shape
        self.q, self.dv, self.limits = q, dv, limits
        self.bias = xp.zeros((1, 1, 1, 1), dtype=xp.float32) if bias is None else xp.asarray(bias, dtype=xp.float32)
        self.biased = int(bias is not None)
        self.scale, self.softcap = np.float32(scale), np.float32(0 if softcap is None else softcap)
        self.tiles = -(-count // QUERY_TILE)
        splits = ENOUGH_BLOCKS // max(b * h * self.tiles, 1)
        splits = max(1, min(splits, -(-longest // SPLIT_TOKENS)))
        self.partial = xp.zeros((b, h, splits, count, dv + 2), dtype=xp.float32)
        self.partial[..., -1] = -xp.inf

    def add(self, part: Part) -> None:
        """Take in the tokens of a part."""
        xp = namespace(self.q)
        queries, width, key, query = self.q, self.q.shape[3], part.key_number, plain_query
        if part.sketch is not None:
            # Keys are rows of signs, and their outlier channels; queries are projected to meet them.
            main, _ = projections(part.sketch)
            queries = xp.concatenate([xp.matmul(queries, main.matrix_beside(queries).T), queries], axis=-1)
            width, key, query = main.m + part.sketch.spec.outliers, sketch_key, sketch_query
        b, h, splits, _, _ = self.partial.shape
        launch_blocks(
            part_kernel(query, key, part.value_number),
            b * h * splits * self.tiles,
            queries,
            part.keys,
            part.values,
            part.capacity,
            xp.stack([part.counts, part.starts, part.firsts]),
            self.limits,
            self.bias,
            self.biased,
            width,
            self.scale,
            self.softcap,
            self.partial,
            shared=SHARED_BYTES,
        )

    def result(self, s: int, sink_logits: Any = None) -> Any:
        """The mix of values, float32 (b, hq, s, dv); the logits (hq,) of learned sinks join the sums only."""
        xp = namespace(self.q)
        b, h, _, count, _ = self.partial.shape
        heads = h * count // max(s, 1)
        logits = xp.full(heads, -xp.inf, dtype=xp.float32)
        if sink_logits is not None:
            logits[...] = xp.asarray(sink_logits, dtype=xp.float32)
        out = xp.empty((b, heads, s, self.dv), dtype=xp.float32)
        launch(combine_splits, out.size, self.partial, logits, out)
        return out


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
    if not q.size:
        return xp.zeros((b, hq, s, dv), dtype=q.dtype)
    parts = cache_parts(view)
    softmax = Softmax(
        q.astype(xp.float32).reshape(b, h, hq // h * s, d),
        dv,
        max((part.room for part in parts), default=0),
        limits=causal_limits(view, s) if limits is None else xp.asarray(limits),
        bias=bias,
        scale=scale,
        softcap=softcap,
    )
    for part in parts:
        softmax.add(part)
    return softmax.result(s, sink_logits).astype(q.dtype)


def causal_limits(view: CacheView, s: int) -> Any:
    """:meth:`kvsketch.attention.CacheView.causal_limits`, on the device wherever the counts lie."""
    xp = namespace(view.pages)
    sinks, pages, window = map(xp.asarray, (view.sink_counts, view.page_counts, view.window_counts))
    lengths = sinks + pages * view.layout.page_tokens + window
    return xp.clip(lengths[:, None] + xp.arange(1 - s, 1), 0, None)
