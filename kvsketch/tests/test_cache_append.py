"""Appending: which tokens are encoded when, that chunks and neighbours make no difference, and what is stored."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from kvsketch.cache import Cache
from kvsketch.codecs import Exact, GroupedInts, SignSketch
from kvsketch.tests.cache_cases import (
    ENGINES,
    PAIRS,
    append_in_chunks,
    assert_same_rows,
    cache_state,
    make_cache,
    make_tokens,
    row_state,
)


def quantize(x: Any, bits: int, group: int, axis: int) -> Any:
    """KIVI's rule written out for one group after the other (arXiv 2402.02750): what a cache must give back."""
    x = np.moveaxis(x, axis, -1)
    out = np.empty_like(x)
    for first in range(0, x.shape[-1], group):
        part = x[..., first : first + group]
        lowest, highest = part.min(axis=-1, keepdims=True), part.max(axis=-1, keepdims=True)
        scale = ((highest - lowest) / np.float32(2**bits - 1)).astype(np.float16).astype(np.float32)
        zero = lowest.astype(np.float16).astype(np.float32)
        codes = np.clip(np.rint((part - zero) / np.where(scale == 0, 1, scale)), 0, 2**bits - 1)
        out[..., first : first + group] = codes * scale + zero
    return np.moveaxis(out, -1, axis)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("d", [64, 80, 96, 128, 192, 256])
def test_any_length_and_head_size_reads_back_as_the_rule_says(d: int, group: int, engine: str) -> None:
    """T1: no length has to be a multiple of the group."""
    k, v = make_tokens(d, 1, 2, 129, d)
    for n in (1, 2, 3, 31, 32, 33, 63, 65, 127, 128, 129):
        cache = Cache(GroupedInts(2, group), GroupedInts(4, group), residual_length=5, sink_tokens=2, engine=engine)
        cache.append(k[:, :, :n], v[:, :, :n])
        cache.flush()
        pages = max(0, (n - 7) // max(32, group))
        assert cache.page_counts.tolist() == [pages]
        encoded = slice(2, 2 + pages * max(32, group))
        expected_k, expected_v = k[0, :, :n].copy(), v[0, :, :n].copy()
        if pages:
            expected_k[:, encoded] = quantize(k[0, :, encoded], 2, group, axis=1)
            expected_v[:, encoded] = quantize(v[0, :, encoded], 4, group, axis=2)
        found_k, found_v = cache.decode(0)
        np.testing.assert_allclose(found_k, expected_k, rtol=0, atol=2e-6 * np.abs(k).max())
        np.testing.assert_allclose(found_v, expected_v, rtol=0, atol=2e-6 * np.abs(v).max())


def test_a_group_larger_than_the_head_or_not_dividing_it() -> None:
    """T2: d = 96 with g = 64 has a partial last group; what cannot be held is refused when the cache is built."""
    k, v = make_tokens(0, 1, 1, 70, 96)
    cache = Cache(GroupedInts(2, 64), GroupedInts(2, 64), residual_length=0, sink_tokens=0)
    cache.append(k, v)
    cache.flush()
    np.testing.assert_allclose(cache.decode(0)[1][:, :64], quantize(v[0, :, :64], 2, 64, axis=2), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match=r"group=96 does not fit keys, which take group in \[32, 64, 128\]"):
        Cache(GroupedInts(2, 96), GroupedInts(2, 32))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("pair", PAIRS)
def test_pages_become_due_by_the_rule_and_are_encoded_one_append_later(pair: str, engine: str) -> None:
    """T5, T6: only whole pages, never a page of one token, and the window stays within R + p."""
    residual, sinks = 32, 4
    cache = make_cache(pair, residual_length=residual, sink_tokens=sinks, engine=engine)
    k, v = make_tokens(1, 1, 2, 400)
    cache.append(k[:, :, :32], v[:, :, :32])
    page = cache.view().layout.page_tokens
    for n in range(32, 400):
        before = n  # tokens held when the append begins
        cache.append(k[:, :, n : n + 1], v[:, :, n : n + 1])
        pages = max(0, (before - sinks - residual) // page)
        assert cache.page_counts.tolist() == [pages]
        assert cache.exact_tokens.tolist() == [n + 1 - pages * page]
        assert cache.exact_tokens[0] <= sinks + residual + page
    if pair != "exact-exact":
        found = cache.decode(0)[0]
        error = np.abs(found - k[0]).max(axis=(0, 2))
        encoded = np.arange(400) - sinks
        is_encoded = (encoded >= 0) & (encoded < cache.page_counts[0] * page)
        assert (error[~is_encoded] == 0).all()
        if pair != "exact-ints8":
            assert (error[is_encoded] > 0).all()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("n", [40, 129])
def test_chunks_make_no_difference(n: int, pair: str, engine: str) -> None:
    """T7: the same tokens in any pieces are the same bytes after a flush."""
    k, v = make_tokens(2, 2, 2, n, 16, 24)
    caches = []
    for chunks in ([n], [1] * n, [7, 33] + [n - 40] * (n > 40), [32, 8] + [1] * (n - 40)):
        cache = make_cache(pair, residual_length=8, sink_tokens=3, engine=engine)
        append_in_chunks(cache, k, v, chunks)
        cache.flush()
        caches.append(cache)
    assert caches[0].page_counts[0] == (n - 11) // caches[0].view().layout.page_tokens
    for cache in caches[1:]:
        for row in range(2):
            assert_same_rows(caches[0], row, cache, row)


@pytest.mark.parametrize("residual", [0, 1, 31])
def test_a_residual_shorter_than_a_group(residual: int) -> None:
    """T8: all complete pages are encoded, the remainder is kept."""
    cache = make_cache(residual_length=residual, sink_tokens=0)
    k, v = make_tokens(3, 1, 1, 100)
    append_in_chunks(cache, k, v, [50, 50])
    cache.flush()
    assert cache.page_counts.tolist() == [(100 - residual) // 32]
    assert cache.exact_tokens.tolist() == [100 - 32 * ((100 - residual) // 32)]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("pair", PAIRS)
def test_rows_and_heads_do_not_touch_each_other(pair: str, engine: str) -> None:
    """T9: what a row or head stores does not depend on its neighbours, however large they are."""
    k, v = make_tokens(4, 2, 2, 150)
    k[1] *= 50
    v[1] *= 50
    k[:, 1] *= 50
    both, alone, one_head = (make_cache(pair, engine=engine) for _ in range(3))
    both.append(k, v)
    alone.append(k[:1], v[:1])
    one_head.append(k[:1, :1], v[:1, :1])
    for cache in (both, alone, one_head):
        cache.flush()
    assert_same_rows(both, 0, alone, 0)
    page_bytes = row_state(both, 0)[0][2]
    assert page_bytes[: len(page_bytes) // 2] == row_state(one_head, 0)[0][2]


def test_the_first_append_may_be_one_token_and_an_empty_one_does_nothing() -> None:
    """T12."""
    k, v = make_tokens(5, 1, 2, 70)
    cache = make_cache()
    cache.append(k[:, :, :0], v[:, :, :0])
    assert cache.is_empty
    assert cache.batch == 0
    append_in_chunks(cache, k, v, [1, 69])
    before = cache_state(cache)
    cache.append(k[:, :, :0], v[:, :, :0])
    assert cache_state(cache) == before
    once = make_cache()
    once.append(k, v)
    assert_same_rows(once, 0, cache, 0)


@pytest.mark.parametrize("pair", PAIRS)
def test_a_token_is_encoded_once(pair: str) -> None:
    """T28: the pages of the first 128 tokens do not change over 1000 more."""
    k, v = make_tokens(6, 1, 2, 1200)
    cache = make_cache(pair, residual_length=32, sink_tokens=0)
    append_in_chunks(cache, k[:, :, :200], v[:, :, :200], [200])
    cache.flush(spare=0)
    page = cache.view().layout.page_tokens
    first = cache.view().pages[:, :, : 128 // page].copy()
    append_in_chunks(cache, k[:, :, 200:], v[:, :, 200:], [1] * 1000)
    np.testing.assert_array_equal(cache.view().pages[:, :, : 128 // page], first)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("kind", ["left", "right", "holes", "empty row"])
def test_padding_is_not_stored(kind: str, pair: str, engine: str) -> None:
    """A row of a padded batch, prompt and steps, holds the bytes of that row alone."""
    n, steps, b = 150, 40, 3
    k, v = make_tokens(7, b, 2, n + steps)
    valid = np.ones((b, n + steps), dtype=bool)
    rng = np.random.default_rng(8)
    for row, count in enumerate((n, 97, 3)):
        if kind == "left":
            valid[row, : n - count] = False
        elif kind == "right":
            valid[row, count:n] = False
        elif kind == "holes":
            valid[row, rng.permutation(n)[count:]] = False
        elif row == 1:
            valid[row] = False
    k[~valid[:, None].repeat(2, axis=1)] = np.nan  # padding may hold anything
    chunks = [100, 50] + [1] * 10 + [5] + [1] * 25
    batch = make_cache(pair, engine=engine)
    append_in_chunks(batch, k, v, chunks, valid)
    assert batch.length == n + steps
    assert batch.lengths.tolist() == valid.sum(axis=1).tolist()
    for row in range(b):
        alone, first = make_cache(pair, engine=engine), 0
        for s in chunks:
            here = np.flatnonzero(valid[row, first : first + s]) + first
            alone.append(k[row : row + 1][:, :, here], v[row : row + 1][:, :, here])
            first += s
        if alone.is_empty:
            assert batch.lengths[row] == 0
            continue
        alone.flush()
        batch.flush()
        assert_same_rows(batch, row, alone, 0)


def test_the_window_is_given_back_after_a_long_prompt() -> None:
    k, v = make_tokens(9, 1, 2, 4000, 32)
    cache = make_cache()
    cache.append(k, v)
    assert cache.allocated_nbytes >= k.nbytes + v.nbytes - 4 * 2 * 2 * 32 * 4
    cache.flush(spare=64)
    assert cache.exact_tokens[0] <= 4 + 32 + 64 + 31
    assert cache.exact_tokens[0] >= 4 + 32 + 64
    assert cache.allocated_nbytes < 1.3 * cache.nbytes


def test_page_buffers_grow_by_a_quarter_and_not_within_what_was_reserved() -> None:
    k, v = make_tokens(10, 1, 1, 3000)
    cache = make_cache(sink_tokens=0, residual_length=0)
    reserved = make_cache(sink_tokens=0, residual_length=0, max_tokens=2000)
    later = make_cache(sink_tokens=0, residual_length=0)
    capacities = []
    for first in range(0, 3000, 10):
        for each in (cache, reserved, later):
            each.append(k[:, :, first : first + 10], v[:, :, first : first + 10])
        if first == 0:
            later.reserve(2000)
        capacities.append(cache.view().pages.shape[2])
        if first <= 2000:
            assert reserved.view().pages.shape[2] == later.view().pages.shape[2] == 2000 // 32
    for old, new in itertools.pairwise(capacities):
        assert new <= max(old + 1, 1.25 * old)
    assert len(set(capacities)) < 25
    assert_same_rows(cache, 0, reserved, 0)
    assert_same_rows(cache, 0, later, 0)


@pytest.mark.parametrize("residual_length", [0, 20, 128])
@pytest.mark.parametrize("prompt", [1, 3, 100, 700])
@pytest.mark.parametrize(("spare", "loaded"), [(0, False), (0, True), (64, False)])
def test_no_buffer_moves_by_steps_within_what_was_reserved(
    prompt: int, spare: int, loaded: bool, residual_length: int
) -> None:
    """Nor the window's, whose room is settled when there is no page that is due."""
    k, v = make_tokens(12, 2, 1, 1000)
    cache = make_cache(sink_tokens=2, residual_length=residual_length)
    valid = np.arange(prompt) >= np.array([[0], [prompt // 2]])
    cache.append(k[:, :, :prompt], v[:, :, :prompt], valid=valid)
    cache.flush(spare=spare)
    if loaded:
        cache = Cache.from_tensors(*cache.to_tensors())
    cache.reserve(prompt + 250)
    moved = []
    for i in range(prompt, prompt + 250):
        before = cache.view()
        cache.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
        after = cache.view()
        moved.append(
            any(getattr(before, x).ctypes.data != getattr(after, x).ctypes.data for x in ("pages", "window_k"))
        )
    assert sum(moved) <= (1 if spare else 0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_exact_parts_keep_the_dtype_they_came_in_or_the_one_asked_for(dtype: str) -> None:
    import ml_dtypes

    wanted = np.dtype({"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[dtype])
    k, v = make_tokens(11, 1, 2, 100)
    came, asked = make_cache("exact-exact"), make_cache("exact-exact", exact_dtype=dtype)
    came.append(k.astype(wanted), v.astype(wanted))
    asked.append(k, v)
    for cache in (came, asked):
        cache.flush()
        assert cache.view().window_k.dtype == wanted
        assert cache.key_bits == cache.value_bits == 16
        np.testing.assert_array_equal(cache.decode(0)[0], k.astype(wanted).astype(np.float32)[0])
    assert came.report()["dense_nbytes_model"] * 2 == asked.report()["dense_nbytes_model"]


@pytest.mark.parametrize("engine", ENGINES)
def test_outlier_channels_from_the_prompt_are_state(engine: str) -> None:
    """Chosen once, a row and head, from the window of the row when its first page is encoded; then kept."""
    codec = SignSketch(m=64, outliers=2, outlier_m=32, outlier_channels="prompt")
    k, v = make_tokens(12, 2, 2, 300)
    k[:, :, :4, 5] = 1e4  # the first tokens do not take part
    k[0, :, 4:200, 9] += 100
    k[1, :, 4:200, 0] += 100
    k[:, :, 200:, 12] += 1000  # later tokens do not either
    batch = Cache(codec, Exact(), engine=engine)
    batch.append(k[:, :, :200], v[:, :, :200])
    append_in_chunks(batch, k[:, :, 200:], v[:, :, 200:], [1] * 100)
    layout = batch.view().layout.keys
    field = layout.field("channels")
    for row, largest in ((0, 9), (1, 0)):
        stored = batch.view().pages[row, :, : int(batch.page_counts[row]), field.offset : field.offset + 2]
        assert (stored == stored[:, :1]).all()
        assert all(largest in head for head in stored[:, 0].tolist())
        assert not any(5 in head or 12 in head for head in stored[:, 0].tolist())
        alone = Cache(codec, Exact(), engine=engine)
        alone.append(k[row : row + 1, :, :200], v[row : row + 1, :, :200])
        append_in_chunks(alone, k[row : row + 1, :, 200:], v[row : row + 1, :, 200:], [1] * 100)
        assert_same_rows(batch, row, alone, 0)


def test_views_share_the_cache_and_cannot_be_written() -> None:
    cache = make_cache()
    cache.append(*make_tokens(13, 1, 1, 100))
    view = cache.view()
    assert all(np.shares_memory(a, b) for a, b in zip(view[1:], cache.view()[1:], strict=True) if a.size)
    for array in view[1:]:
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
