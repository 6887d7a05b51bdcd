"""What the cache tests share: settings, random tokens, the live bytes of a row and a float64 attention."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvsketch.cache import Cache
from kvsketch.codecs import Codec, Exact, GroupedInts, SignSketch, TokenInts

ENGINES = ("reference", "numba_cpu")

#: A key codec and a value codec each, of all kinds.
PAIRS: dict[str, tuple[Codec, Codec]] = {
    "ints2-ints2": (GroupedInts(2, 32), GroupedInts(2, 32)),
    "ints4-ints3": (GroupedInts(4, 64), GroupedInts(3, 16)),
    "exact-exact": (Exact(), Exact()),
    "sketch-ints2": (SignSketch(m=64), GroupedInts(2, 32)),
    "outliers-ints1": (SignSketch(m=48, outliers=3, outlier_m=32), GroupedInts(1, 8)),
    "exact-ints8": (Exact(), GroupedInts(8, 32)),
    "latents3-latents2": (TokenInts(3), TokenInts(2, 8)),
}


def make_cache(pair: str = "ints2-ints2", **options: Any) -> Cache:
    """An empty cache of one of :data:`PAIRS`."""
    return Cache(*PAIRS[pair], **options)


def make_tokens(
    seed: int, b: int, h: int, n: int, d: int = 16, dv: int | None = None, dtype: Any = np.float32
) -> tuple[Any, Any]:
    """Normal keys (b, h, n, d) and values (b, h, n, dv), some key channels much larger than others."""
    rng = np.random.default_rng(seed)
    k = rng.standard_normal((b, h, n, d)) * (1 + 9 * (np.arange(d) % 7 == 3))
    v = rng.standard_normal((b, h, n, d if dv is None else dv))
    return k.astype(dtype), v.astype(dtype)


def append_in_chunks(cache: Cache, k: Any, v: Any, chunks: list[int], valid: Any = None) -> None:
    """Append `k`, `v` in pieces of the given sizes, which must sum to all tokens."""
    assert sum(chunks) == k.shape[2]
    first = 0
    for s in chunks:
        part = slice(first, first + s)
        cache.append(k[:, :, part], v[:, :, part], valid=None if valid is None else valid[:, part])
        first += s


def row_state(cache: Cache, row: int) -> list[tuple[str, tuple[int, ...], bytes]]:
    """Everything that is stored of a row, as bytes."""
    view = cache.view()
    start, count = int(view.window_starts[row]), int(view.window_counts[row])
    sinks = int(view.sink_counts[row])
    arrays = {
        "pages": view.pages[row, :, : int(view.page_counts[row])],
        "sink_k": view.sink_k[row, :, :sinks],
        "sink_v": view.sink_v[row, :, :sinks],
        "window_k": view.window_k[row, :, start : start + count],
        "window_v": view.window_v[row, :, start : start + count],
    }
    return [(name, a.shape, a.tobytes()) for name, a in arrays.items()]


def cache_state(cache: Cache) -> Any:
    """Everything that a cache's behaviour depends on, for comparing before and after."""
    if cache.is_empty:
        return None
    return (
        cache.length,
        cache.lengths.tolist(),
        cache.page_counts.tolist(),
        cache.saturated,
        [row_state(cache, row) for row in range(cache.batch)],
    )


def assert_same_rows(a: Cache, row_a: int, b: Cache, row_b: int) -> None:
    """Assert that two rows hold the same bytes in the same places."""
    for (name, shape_a, bytes_a), (_, shape_b, bytes_b) in zip(row_state(a, row_a), row_state(b, row_b), strict=True):
        assert shape_a == shape_b, f"{name}: {shape_a} and {shape_b}"
        assert bytes_a == bytes_b, f"{name} differs"


def exact_attention(q: Any, k: Any, v: Any, visible: Any, scale: float | None = None, added: Any = 0.0) -> Any:
    """Softmax attention in float64 of q (hq, s, d) over k (h, n, d), v (h, n, dv) where `visible` (s, n)."""
    ratio = q.shape[0] // k.shape[0]
    k, v = (np.repeat(x.astype(np.float64), ratio, axis=0) for x in (k, v))
    scores = q.astype(np.float64) @ k.swapaxes(1, 2) * (1 / np.sqrt(q.shape[2]) if scale is None else scale) + added
    scores = np.where(visible, scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = weights.sum(axis=-1, keepdims=True)
    return weights @ v / np.where(total > 0, total, 1)
