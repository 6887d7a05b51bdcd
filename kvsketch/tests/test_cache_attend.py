"""Attention over a cache: against float64 over its decoded tokens, with padding, masks and chunks; and its memory."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from kvsketch.cache import Cache
from kvsketch.codecs import Exact, GroupedInts, SignSketch
from kvsketch.testing import assert_accurate
from kvsketch.tests.cache_cases import (
    ENGINES,
    PAIRS,
    append_in_chunks,
    exact_attention,
    make_cache,
    make_tokens,
)
from kvsketch.tests.page_cases import assert_rounded


def make_queries(seed: int, b: int, hq: int, s: int, d: int = 16) -> Any:
    return np.random.default_rng(seed).standard_normal((b, hq, s, d)).astype(np.float32)


def expected_rows(cache: Cache, q: Any, valid: Any, visible: Any = None, added: Any = None) -> Any:
    """Float64 attention of q over the decoded rows; `visible`, `added` (b, hq, s, length) in padded positions."""
    b, hq, s, _ = q.shape
    length = valid.shape[1]
    causal = np.arange(length) <= np.arange(length - s, length)[:, None]
    rows = []
    for row in range(b):
        here = np.flatnonzero(valid[row])
        seen = np.broadcast_to(causal, (hq, s, length)) if visible is None else causal & visible[row]
        extra = 0.0 if added is None else added[row][..., here]
        rows.append(exact_attention(q[row], *cache.decode(row), seen[..., here], added=extra))
    return np.stack(rows)


def check(cache: Cache, q: Any, expected: Any, **options: Any) -> None:
    """Compare with float64, the reference engine's own error being the yardstick but where coefficients are rounded."""
    if cache.engine != "reference" and not cache.settings.keys == cache.settings.values == Exact():
        # Some key channels are ten times as large as the others, whose coefficients then have fewer bits.
        assert_rounded(cache.attend(q, **options), expected, "int16", terms=64)
        return
    engine, cache.engine = cache.engine, "reference"
    reference = cache.attend(q, **options)
    cache.engine = engine
    assert_accurate(cache.attend(q, **options), expected, reference, size=10.0)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(("hq", "h"), [(4, 1), (14, 2), (3, 3)])
def test_steps_and_chunks_attend_over_what_the_cache_decodes_to(hq: int, h: int, pair: str, engine: str) -> None:
    """T11, T12, T37: dv differs from d; lengths around the residual and the page."""
    k, v = make_tokens(1, 2, h, 220, 16, 24)
    for n in (1, 20, 32, 36, 37, 75, 200):
        for s in (1, 5, 16):
            if s > n:
                continue
            cache = make_cache(pair, engine=engine)
            append_in_chunks(cache, k[:, :, :n], v[:, :, :n], [n - s, s])
            q = make_queries(n, 2, hq, s)
            check(cache, q, expected_rows(cache, q, np.ones((2, n), dtype=bool)))


@pytest.mark.parametrize("engine", ENGINES)
def test_the_first_forward_is_exact(engine: str) -> None:
    """T64: a prompt attends exactly to itself; asked again over the encoded prompt it does not, but nearly."""
    k, v = make_tokens(2, 1, 2, 300, 32)
    cold, warm = make_cache("ints4-ints3", engine=engine), make_cache("ints4-ints3", engine=engine)
    q = make_queries(2, 1, 4, 300, 32)
    cold.append(k, v)
    exact = exact_attention(q[0], k[0], v[0], np.tri(300, dtype=bool))
    first = cold.attend(q)[0]
    np.testing.assert_allclose(first, exact, rtol=0, atol=1e-5)
    warm.append(k[:, :, :200], v[:, :, :200])
    warm.flush()
    warm.append(k[:, :, 200:], v[:, :, 200:])
    again = warm.attend(q[:, :, 200:])[0]
    difference = np.abs(again - exact[:, 200:]).mean()
    assert 1e-4 < difference < 0.1


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["left", "right", "holes"])
@pytest.mark.parametrize("s", [1, 7])
def test_padding_is_not_seen_and_padded_queries_get_zeros(s: int, kind: str, engine: str) -> None:
    n = 140
    k, v = make_tokens(3, 3, 2, n)
    valid = np.ones((3, n), dtype=bool)
    rng = np.random.default_rng(3)
    if kind == "left":
        valid[1, :50], valid[2, : n - 3] = False, False
    elif kind == "right":
        valid[1, 90:], valid[2, 3:] = False, False
    else:
        valid[1:] = rng.random((2, n)) < 0.6
    cache = make_cache(engine=engine)
    append_in_chunks(cache, k, v, [100, n - 100 - s, s], valid)
    q = make_queries(4, 3, 4, s)
    expected = expected_rows(cache, q, valid)
    check(cache, q, expected)
    first_token = valid.argmax(axis=1)
    for row in range(3):
        for i in range(s):
            if n - s + i < first_token[row]:
                assert (expected[row, :, i] == 0).all()
    # A mask that repeats what padding and causality say changes no bit.
    causal = np.arange(n) <= np.arange(n - s, n)[:, None]
    mask = (valid[:, None, None, :] & causal) if s > 1 else valid[:, None, None, :]
    np.testing.assert_array_equal(cache.attend(q, mask=mask), cache.attend(q))
    lowest = np.where(mask, np.float32(0), np.finfo(np.float32).min)
    np.testing.assert_array_equal(cache.attend(q, mask=lowest), cache.attend(q))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("rows", [1, 2])
def test_masks_hide_more_than_causality(rows: int, heads: int, padded: bool, engine: str) -> None:
    n, s = 110, 6
    k, v = make_tokens(5, 2, 2, n)
    valid = np.ones((2, n), dtype=bool)
    if padded:
        valid[1, :30] = False
        valid[0, 50:60] = False
    cache = make_cache("outliers-ints1", residual_length=8, engine=engine)
    append_in_chunks(cache, k, v, [n - s, s], valid)
    q = make_queries(6, 2, 4, s)
    rng = np.random.default_rng(6)
    mask = rng.random((rows, heads, s, n)) < 0.5
    mask[..., 0, :] = False  # a query that sees nothing
    visible = np.broadcast_to(mask, (2, 4, s, n))
    expected = expected_rows(cache, q, valid, visible=visible)
    assert (expected[:, :, 0] == 0).all()
    check(cache, q, expected, mask=mask)
    check(cache, q, expected, mask=np.where(mask, np.float32(0), np.float32(-np.inf)))
    added = rng.standard_normal((rows, heads, s, n)).astype(np.float32)
    expected = expected_rows(cache, q, valid, added=np.broadcast_to(added, (2, 4, s, n)))
    check(cache, q, expected, mask=added)


@pytest.mark.parametrize("engine", ENGINES)
def test_scale_softcap_and_sink_logits_reach_the_engine(engine: str) -> None:
    k, v = make_tokens(7, 1, 2, 90)
    cache = make_cache("exact-exact", engine=engine)
    cache.append(k, v)
    q = make_queries(7, 1, 4, 1)
    scores = 3 * np.tanh(0.5 * (q[0].astype(np.float64) @ np.repeat(k[0], 2, axis=0).swapaxes(1, 2)) / 3)
    sink = np.array([0.5, -1, 2, 0], dtype=np.float32)
    weights = np.exp(scores)
    weights /= weights.sum(axis=-1, keepdims=True) + np.exp(sink)[:, None, None]
    found = cache.attend(q, scale=0.5, softcap=3.0, sink_logits=sink)[0]
    np.testing.assert_allclose(found, weights @ np.repeat(v[0], 2, axis=0), rtol=0, atol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_bad_queries_and_masks_are_named(engine: str) -> None:
    cache = make_cache(engine=engine)
    with pytest.raises(ValueError, match="cache is empty; append keys and values before attend"):
        cache.attend(make_queries(0, 1, 2, 1))
    cache.append(*make_tokens(8, 1, 2, 5))
    with pytest.raises(ValueError, match="q has 6 positions but the cache holds 5"):
        cache.attend(make_queries(0, 1, 2, 6))
    with pytest.raises(ValueError, match="q has 3 heads, which is not a multiple of the 2"):
        cache.attend(make_queries(0, 1, 3, 1))
    with pytest.raises(ValueError, match=r"q must have shape \(b, hq, s, d\)"):
        cache.attend(make_queries(0, 1, 2, 1)[0])
    with pytest.raises(ValueError, match=r"q must have shape \(1, hq, s, 16\)"):
        cache.attend(make_queries(0, 1, 2, 1, d=8))
    q = make_queries(0, 1, 2, 2)
    with pytest.raises(ValueError, match=r"mask must have shape \(1 or 1, 2 or 1, 2, 5\), got \(1, 1, 2, 4\)"):
        cache.attend(q, mask=np.ones((1, 1, 2, 4), dtype=bool))
    with pytest.raises(TypeError, match="mask has dtype int64"):
        cache.attend(q, mask=np.ones((1, 1, 2, 5), dtype=np.int64))
    with pytest.raises(ValueError, match="mask must have shape"):
        cache.attend(q, mask=np.ones((2, 5), dtype=bool))


def score_divergence(keys: Any, k: Any, q: Any) -> float:
    """Mean KL(exact || encoded) of the softmax over the tokens, values being exact."""
    cache = Cache(keys, Exact(), residual_length=0, sink_tokens=0)
    cache.append(k, k)
    cache.flush()
    decoded = cache.decode(0)[0]
    logs = []
    for each in (k[0], decoded):
        scores = q[0].astype(np.float64) @ each.astype(np.float64).swapaxes(1, 2) / np.sqrt(k.shape[3])
        top = scores.max(axis=-1, keepdims=True)
        logs.append(scores - top - np.log(np.exp(scores - top).sum(axis=-1, keepdims=True)))
    return float((np.exp(logs[0]) * (logs[0] - logs[1])).sum(axis=-1).mean())


def test_channels_with_a_large_bias_need_grouping_by_channel_or_outliers() -> None:
    """T21: three channels at 600 (Qwen2.5) drown a plain sketch; grouped keys and outlier channels hold up."""
    rng = np.random.default_rng(9)
    k = rng.standard_normal((1, 2, 512, 128)).astype(np.float32)
    k[..., [3, 40, 90]] += np.array([600, -600, 600], dtype=np.float32)
    q = rng.standard_normal((1, 2, 64, 128)).astype(np.float32)
    grouped = score_divergence(GroupedInts(2, 32), k, q)
    prompt = SignSketch(m=256, outliers=8, outlier_m=256, outlier_channels="prompt")
    outliers = score_divergence(prompt, k, q)
    plain = score_divergence(SignSketch(m=256), k, q)
    assert grouped < 0.2
    assert grouped < outliers < 0.5
    assert plain > 10 * outliers
    # Five of the eight channels are then ordinary ones. Where each page chooses its own, the error of the large common
    # part, the same for all tokens of a page, differs between pages; with no channel to choose it does not.
    by_page = score_divergence(SignSketch(m=256, outliers=8, outlier_m=256), k, q)
    only_three = score_divergence(SignSketch(m=256, outliers=3, outlier_m=256), k, q)
    assert by_page > 10 * outliers
    assert only_three < 0.5


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_unchecked_bad_numbers_stay_in_their_head(bad: float, side: str, engine: str) -> None:
    """T19: other heads and rows attend as if nothing had happened, while exact and when encoded."""
    k, v = make_tokens(10, 2, 2, 150)
    dirty_k, dirty_v = k.copy(), v.copy()
    (dirty_k if side == "k" else dirty_v)[0, 1, 70, 2] = bad
    for pair in PAIRS:
        clean, dirty = (make_cache(pair, engine=engine, checked=False) for _ in range(2))
        q = make_queries(11, 2, 4, 1)
        clean.append(k, v)
        dirty.append(dirty_k, dirty_v)
        for _ in range(2):
            a = clean.attend(q)
            with np.errstate(invalid="ignore", over="ignore"):
                b = dirty.attend(q)
            np.testing.assert_array_equal(a[0, :2], b[0, :2])
            np.testing.assert_array_equal(a[1], b[1])
            clean.flush()
            dirty.flush()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("pair", ["ints2-ints2", "outliers-ints1"])
def test_a_step_never_needs_the_memory_of_a_dense_cache(pair: str, engine: str) -> None:
    """T27: peak of new memory in one step at 16384 tokens, against one layer's dense 16-bit cache."""
    h, d, n = 4, 64, 16384
    cache = make_cache(pair, engine=engine)
    for first in range(0, n, 2048):
        cache.append(*make_tokens(first, 1, h, 2048, d))
        cache.flush(spare=64)
    k, v = make_tokens(1, 1, h, 40, d)
    q = make_queries(12, 1, 2 * h, 1, d)
    cache.append(k[:, :, :1], v[:, :, :1])
    cache.attend(q)  # compiles
    dense = 2 * n * h * d * 2
    peaks = []
    for i in range(1, 40):  # a page is encoded, and the buffer grows, in one of these steps
        tracemalloc.start()
        cache.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
        if i % 8 == 0:
            cache.attend(q)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert max(peaks) < dense
    assert sorted(peaks)[-2] < dense / 2  # but for the growth
