"""Rows and length of a cache: reorder, select, repeat, crop, reset, copy and pickle."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from kvsketch.cache import Cache
from kvsketch.codecs import Exact, SignSketch
from kvsketch.tests.cache_cases import (
    PAIRS,
    append_in_chunks,
    cache_state,
    make_cache,
    make_tokens,
)

#: Shorter than the residual, the residual, longer, more than twice as long: T37.
LENGTHS = (20, 32, 75, 200)


def ragged(pair: str, n: int, b: int = 3, **options: Any) -> tuple[Cache, Any, Any, Any]:
    """A left-padded cache of `n` positions with its tokens and their validity; row r has 5r padded positions."""
    k, v = make_tokens(n, b, 2, n)
    valid = np.arange(n) >= 5 * np.arange(b)[:, None]
    cache = make_cache(pair, **options)
    append_in_chunks(cache, k, v, [n - 10] + [1] * 10, valid)
    return cache, k, v, valid


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("n", LENGTHS)
def test_reorder_equals_a_cache_of_the_reordered_rows(n: int, pair: str) -> None:
    """T30: duplicates too, again and again, and appending afterwards tells the rows apart."""
    cache, k, v, valid = ragged(pair, n)
    rows = np.arange(3)
    for order in ([2, 2, 0], [1, 0, 2], [0, 1, 2], [2, 1, 1]):
        cache.reorder(order)
        rows = rows[order]
        expected = make_cache(pair)
        append_in_chunks(expected, k[rows], v[rows], [n - 10] + [1] * 10, valid[rows])
        assert cache_state(cache) == cache_state(expected)
    more_k, more_v = make_tokens(1, 3, 2, 70)
    for each in (cache, expected):
        append_in_chunks(each, more_k, more_v, [30] + [1] * 40)
    assert cache_state(cache) == cache_state(expected)
    assert (cache.decode(1)[0] != cache.decode(2)[0][:, : cache.lengths[1]]).any()


@pytest.mark.parametrize("pair", ["ints2-ints2", "outliers-ints1"])
def test_select_and_repeat(pair: str) -> None:
    n = 120
    for change, rows in (
        (lambda c: c.select([1]), [1]),
        (lambda c: c.select(np.array([2, 0, 0, 1])), [2, 0, 0, 1]),
        (lambda c: c.repeat(2), [0, 0, 1, 1, 2, 2]),
    ):
        cache, k, v, valid = ragged(pair, n)
        change(cache)
        expected = make_cache(pair)
        append_in_chunks(expected, k[rows], v[rows], [n - 10] + [1] * 10, valid[rows])
        more_k, more_v = make_tokens(2, len(rows), 2, 40)
        for each in (cache, expected):
            append_in_chunks(each, more_k, more_v, [1] * 40)
        assert cache.batch == len(rows)
        assert cache_state(cache) == cache_state(expected)


@pytest.mark.parametrize("seed", range(20))
def test_any_sequence_of_calls_keeps_every_row_in_order(seed: int) -> None:
    """Random calls on a cache that loses nothing, against lists of tokens: lengths, order and numbers."""
    rng = np.random.default_rng(seed)
    cache = Cache(Exact(), Exact(), residual_length=int(rng.integers(0, 40)), sink_tokens=int(rng.integers(0, 6)))
    b, h, d = int(rng.integers(1, 4)), 2, 3
    rows: list[list[Any]] = [[] for _ in range(b)]  # of each position the token (h, d), or None for padding
    for _ in range(80):
        call = rng.choice(["step", "step", "append", "padded", "flush", "crop", "reorder", "select", "repeat", "copy"])
        if call in ("step", "append", "padded"):
            s = 1 if call == "step" else int(rng.integers(0, 90))
            k = rng.standard_normal((len(rows), h, s, d)).astype(np.float32)
            valid = rng.random((len(rows), s)) < 0.7 if call == "padded" else np.ones((len(rows), s), dtype=bool)
            cache.append(k, -k, valid=valid)
            for row, tokens in enumerate(rows):
                tokens.extend(k[row, :, i] if valid[row, i] else None for i in range(s))
        elif cache.is_empty:
            continue
        elif call == "flush":
            cache.flush(spare=int(rng.integers(0, 70)))
        elif call == "crop":
            to = cache.length - int(rng.integers(0, 40))
            try:
                cache.crop(to if to > 0 else 1)
            except ValueError:
                continue
            rows = [tokens[: max(to, 1)] for tokens in rows]
        elif call == "copy":
            cache = cache.copy()
        else:
            size = len(rows) if call == "reorder" else int(rng.integers(1, 4))
            chosen = rng.integers(0, len(rows), size).tolist()
            if call == "repeat":
                chosen = [row for row in range(len(rows)) for _ in range(2 if len(rows) < 3 else 1)]
                cache.repeat(len(chosen) // len(rows))
            else:
                (cache.reorder if call == "reorder" else cache.select)(chosen)
            rows = [list(rows[row]) for row in chosen]
        assert cache.length == len(rows[0])
        for row in range(cache.batch):
            expected = [token for token in rows[row] if token is not None]
            assert cache.lengths[row] == len(expected)
            if expected:
                k, v = cache.decode(row)
                np.testing.assert_array_equal(k, np.stack(expected, axis=1))
                np.testing.assert_array_equal(v, -np.stack(expected, axis=1))


def test_repeated_rows_keep_their_own_prompt_channels() -> None:
    codec = SignSketch(m=32, outliers=2, outlier_m=32, outlier_channels="prompt")
    k, v = make_tokens(3, 2, 1, 150)
    k[1, ..., 1] += 50
    cache = Cache(codec, Exact())
    cache.append(k, v)
    cache.flush()
    cache.reorder([1, 1])
    more_k, more_v = make_tokens(4, 2, 1, 64)
    cache.append(more_k, more_v)
    cache.flush()
    assert cache.page_counts.tolist() == [5, 5]
    field = cache.view().layout.keys.field("channels")
    stored = cache.view().pages[..., field.offset : field.offset + 2]
    assert (stored[:, :, :5] == stored[1:, :, :1]).all()


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("padded", [False, True])
def test_crop_equals_a_cache_that_never_saw_the_tokens(n: int, pair: str, padded: bool) -> None:
    """T31: by one token, into the window, to the middle of the first tokens, to 0; then the cache goes on."""
    k, v = make_tokens(5, 2, 2, n + 60)
    valid = np.ones((2, n + 60), dtype=bool)
    if padded:
        valid[1, :9] = False
    for drop in (1, 7, 16, n - 2, n):
        keep = n - drop
        cache, never = make_cache(pair, residual_length=40), make_cache(pair, residual_length=40)
        append_in_chunks(cache, k[:, :, :n], v[:, :, :n], [n], valid[:, :n])  # nothing is encoded yet
        assert cache.page_counts.tolist() == [0, 0]
        cache.crop(keep if drop % 2 else -drop)
        if keep:
            append_in_chunks(never, k[:, :, :keep], v[:, :, :keep], [keep], valid[:, :keep])
        assert cache_state(cache) == cache_state(never)
        for each in (cache, never):
            append_in_chunks(each, k[:, :, n:], v[:, :, n:], [1] * 30 + [30], valid[:, n:])
        assert cache_state(cache) == cache_state(never)


def test_crop_up_to_the_spare_is_always_possible_and_further_raises_before_anything_changes() -> None:
    k, v = make_tokens(6, 1, 2, 500)
    for n in range(300, 340):
        cache, never = make_cache(), make_cache()
        cache.append(k[:, :, :n], v[:, :, :n])
        cache.flush(spare=64)
        never.append(k[:, :, : n - 64], v[:, :, : n - 64])
        cache.crop(-64)
        never.flush()
        assert cache_state(cache) == cache_state(never)
    cache = make_cache()
    cache.append(k, v)
    cache.flush()
    encoded = 4 + 32 * int(cache.page_counts[0])
    before = cache_state(cache)
    for to in (encoded - 1, encoded - 32, 4, 1):
        with pytest.raises(ValueError, match=rf"crop to {to} would drop {500 - to} tokens of row 0, but only"):
            cache.crop(to)
        assert cache_state(cache) == before
    cache.crop(encoded)
    assert cache.exact_tokens.tolist() == [4]
    with pytest.raises(ValueError, match="to must be >= "):
        cache.crop(-encoded - 1)
    cache.crop(10_000)
    assert cache.length == encoded
    cache.crop(0)
    assert cache.is_empty


def test_crop_with_different_validity_in_each_row() -> None:
    """One row's cut may be legal where another row's is not; then nothing happens to either."""
    k, v = make_tokens(7, 2, 1, 200)
    valid = np.ones((2, 200), dtype=bool)
    valid[0, 100:] = False
    cache = make_cache()
    append_in_chunks(cache, k, v, [200], valid)
    cache.flush()
    before = cache_state(cache)
    with pytest.raises(ValueError, match="tokens of row 1"):
        cache.crop(120)
    assert cache_state(cache) == before
    cache.crop(180)
    assert cache.lengths.tolist() == [100, 180]
    cache.crop(165)
    assert cache.lengths.tolist() == [100, 165]


def test_dropped_tokens_cannot_be_read_any_more() -> None:
    """T39: neither through a view nor in the buffers behind it."""
    k, v = make_tokens(8, 1, 1, 120)
    cache = make_cache()
    append_in_chunks(cache, k[:, :, :100], v[:, :, :100], [100])
    cache.append(k[:, :, 100:] * 0 + 777, v[:, :, 100:] * 0 + 777)
    cache.crop(100)
    assert cache.length == 100
    for array in cache.view()[3:]:
        assert not (array == 777).any()
    for part in cache.decode(0):
        assert not (part == 777).any()
        assert part.shape[1] == 100


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, copy.copy, lambda c: c.copy(), lambda c: pickle.loads(pickle.dumps(c))]
)
@pytest.mark.parametrize("n", LENGTHS)
def test_copies_are_independent(n: int, duplicate: Any) -> None:
    """T33: one prefix, several continuations; each equals a run of its own."""
    first, k, v, valid = ragged("sketch-ints2", n)
    before = cache_state(first)
    others = [duplicate(first), duplicate(first)]
    for seed, other in enumerate(others):
        more_k, more_v = make_tokens(seed, 3, 2, 70)
        fresh = make_cache("sketch-ints2")
        append_in_chunks(fresh, k, v, [n - 10] + [1] * 10, valid)
        for each in (other, fresh):
            append_in_chunks(each, more_k, more_v, [40] + [1] * 30)
        assert cache_state(other) == cache_state(fresh)
    assert cache_state(first) == before
    assert first.length == n


def test_reset_allows_another_shape() -> None:
    """T34."""
    cache = make_cache(name="layer 3")
    cache.append(*make_tokens(9, 2, 3, 100, 16))
    with pytest.raises(ValueError, match=r"layer 3: k must have shape \(2, 3, s, 16\) like what is held"):
        cache.append(*make_tokens(9, 5, 3, 1, 16))
    cache.reset()
    assert (cache.length, cache.batch, cache.nbytes, cache.allocated_nbytes) == (0, 0, 0, 0)
    k, v = make_tokens(10, 5, 1, 70, 24, dtype=np.float16)
    cache.append(k, v)
    fresh = make_cache()
    fresh.append(k, v)
    assert cache_state(cache) == cache_state(fresh)


def test_an_empty_cache_can_be_copied_and_reset() -> None:
    for cache in (make_cache().copy(), pickle.loads(pickle.dumps(make_cache()))):
        cache.reset()
        cache.flush()
        cache.crop(0)
        assert cache.is_empty
        for call in (lambda c: c.reorder([0]), lambda c: c.select([0]), lambda c: c.repeat(2), lambda c: c.view()):
            with pytest.raises(ValueError, match="cache is empty; append keys and values before"):
                call(cache)
