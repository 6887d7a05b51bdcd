"""Bad input to a cache, and that a call which fails leaves it as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvsketch import _dispatch, _page_store
from kvsketch._exact_store import ExactStore
from kvsketch._page_store import PageStore
from kvsketch._positions import Positions
from kvsketch.cache import Cache
from kvsketch.codecs import Exact, GroupedInts, SignSketch
from kvsketch.tests.cache_cases import append_in_chunks, cache_state, make_cache, make_tokens


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"residual_length": -1}, ValueError, "residual_length must be >= 0, got -1"),
        ({"residual_length": 1.5}, TypeError, "residual_length must be an integer, got 1.5"),
        ({"sink_tokens": -3}, ValueError, "sink_tokens must be >= 0"),
        ({"max_tokens": -3}, ValueError, "max_tokens must be >= 0"),
        ({"exact_dtype": "float64"}, ValueError, r"exact_dtype must be one of \['float32', 'float16', 'bfloat16'\]"),
        ({"exact_dtype": np.int8}, ValueError, "exact_dtype must be one of"),
        ({"engine": "gpu"}, ValueError, "engine must be None or one of"),
        ({"keys": "ints"}, TypeError, "keys must be one of"),
        ({"values": SignSketch()}, ValueError, "holds keys only"),
        ({"keys": GroupedInts(2, 48)}, ValueError, "group=48 does not fit keys"),
    ],
)
def test_settings_are_checked_when_the_cache_is_built(options: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        Cache(**options)


def bad_calls() -> list[Any]:
    k, v = make_tokens(0, 2, 2, 6)
    nan = k.copy()
    nan[1, 0, 4, 3] = np.nan
    return [
        (ValueError, r"k must have shape \(b, h, s, d\), got \(2, 6, 16\)", lambda c: c.append(k[0], v[0])),
        (ValueError, "k and v must have the same b, h and s", lambda c: c.append(k, v[:, :, :3])),
        (ValueError, "k must have at least one row", lambda c: c.append(k[:0], v[:0])),
        (ValueError, "k must have at least one row and one head", lambda c: c.append(k[:, :0], v[:, :0])),
        (TypeError, "k has dtype float64; cast it", lambda c: c.append(k.astype(float), v)),
        (TypeError, "v has dtype int64; cast it", lambda c: c.append(k, v.astype(int))),
        (TypeError, "expected a NumPy or CuPy array, got builtins.list", lambda c: c.append(k.tolist(), v)),
        (ValueError, r"valid must be bool of shape \(2, 6\)", lambda c: c.append(k, v, valid=np.ones((2, 5), bool))),
        (ValueError, "valid must be bool", lambda c: c.append(k, v, valid=np.ones((2, 6)))),
        (ValueError, "keys hold nan at batch row 1, head 0, token position", lambda c: c.append(nan, v)),
        (ValueError, "values hold nan at batch row 1, head 0, token position", lambda c: c.append(k, nan)),
        (ValueError, "spare must be >= 0", lambda c: c.flush(spare=-1)),
        (ValueError, "n must be >= 0", lambda c: c.reserve(-1)),
    ]


@pytest.mark.parametrize("call", range(len(bad_calls())))
@pytest.mark.parametrize("held", [0, 150])
def test_bad_calls_name_the_argument_and_change_nothing(held: int, call: int) -> None:
    error, message, run = bad_calls()[call]
    cache = make_cache()
    if held:
        cache.append(*make_tokens(1, 2, 2, held))
    before = cache_state(cache)
    with pytest.raises(error, match=message):
        run(cache)
    assert cache_state(cache) == before
    if held:
        assert cache.page_counts.tolist() == [0, 0]


def test_tokens_must_fit_what_is_held() -> None:
    cache = make_cache(name="layer 7")
    k, v = make_tokens(2, 2, 2, 150, 16, 24)
    cache.append(k, v)
    before = cache_state(cache)
    for error, message, other in (
        (ValueError, r"layer 7: k must have shape \(2, 2, s, 16\) like what is held", (k[..., :8], v)),
        (ValueError, r"layer 7: v must have shape \(2, 2, s, 24\)", (k, v[..., :8])),
        (ValueError, "layer 7: k must have shape", (k[:1], v[:1])),
        (TypeError, "layer 7: k has dtype float16, but what is held came in float32", (k.astype(np.float16), v)),
        (TypeError, "layer 7: v has dtype float16", (k, v.astype(np.float16))),
    ):
        with pytest.raises(error, match=message):
            cache.append(*other)
    for rows in ([0], [0, 1, 1], [0, 2], [-1, 0], [0.5, 1], [], [[0, 1]], [True, False]):
        with pytest.raises(ValueError, match="idx must"):
            cache.reorder(rows)
    with pytest.raises(ValueError, match=r"idx must name rows 0\.\.1, got \[2\]"):
        cache.select([2])
    with pytest.raises(ValueError, match="k must be >= 1"):
        cache.repeat(0)
    with pytest.raises(ValueError, match="row must be between 0 and 1, got 2"):
        cache.decode(2)
    assert cache_state(cache) == before


def test_a_codec_that_does_not_fit_the_head_is_refused_at_the_first_append() -> None:
    cache = Cache(SignSketch(m=64, outliers=20, outlier_m=16), Exact())
    with pytest.raises(ValueError, match="outliers=20 is more than the 16 channels of a head"):
        cache.append(*make_tokens(3, 1, 1, 3))
    assert cache.is_empty
    with pytest.raises(ValueError, match="head size must be between 1 and 512, got 513"):
        cache.append(*make_tokens(3, 1, 1, 3, 513))
    cache.append(*make_tokens(3, 1, 1, 3, 20))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", ["keys", "values"])
def test_a_bad_number_is_found_where_it_is(side: str, bad: float) -> None:
    """T19: in outward positions; padding is not looked at."""
    k, v = make_tokens(4, 2, 3, 60)
    valid = np.ones((2, 60), dtype=bool)
    valid[1, :10] = False
    x = k if side == "keys" else v
    x[1, :, :10] = bad
    cache = make_cache(name="layer 2")
    cache.append(k[:, :, :40], v[:, :, :40], valid=valid[:, :40])
    x[1, 2, 47, 5] = bad
    message = f"layer 2: {side} hold {bad} at batch row 1, head 2, token position 47, channel 5; .*checked=False"
    before = cache_state(cache)
    for part in (slice(40, 60), slice(40, 48)):
        with pytest.raises(ValueError, match=message):
            cache.append(k[:, :, part], v[:, :, part], valid=valid[:, part])
    assert cache_state(cache) == before
    cache.checked = False
    cache.append(k[:, :, 40:], v[:, :, 40:], valid=valid[:, 40:])
    assert cache.length == 60


def test_numbers_too_large_for_the_exact_dtype_are_named() -> None:
    k, v = make_tokens(5, 1, 1, 5)
    k[0, 0, 2, 1] = 1e6
    with pytest.raises(ValueError, match=r"keys hold 1000000\.0, which is too large for exact_dtype float16 at batch"):
        make_cache(exact_dtype="float16").append(k, v)


def fail(*args: Any, **options: Any) -> None:
    raise MemoryError("no memory")


@pytest.mark.parametrize("valid", [False, True])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (_page_store, "pages.encode_keys"),
        (_page_store, "pages.encode_values"),
        (PageStore, "reserve"),
        (ExactStore, "make_room"),
        (Positions, "make_room"),
    ],
)
def test_running_out_of_memory_changes_nothing(owner: Any, name: str, valid: bool, monkeypatch: Any) -> None:
    k, v = make_tokens(6, 2, 2, 400)
    padded = np.arange(400) >= np.array([[0], [40]])
    cache, other = make_cache("sketch-ints2"), make_cache("sketch-ints2")
    for each in (cache, other):
        append_in_chunks(each, k[:, :, :200], v[:, :, :200], [150, 50], padded[:, :200] if valid else None)
    before = cache_state(cache)
    with monkeypatch.context() as patch:
        if owner is _page_store:
            found = {name: fail}
            usual = _dispatch.implementation
            patch.setattr(
                owner, "implementation", lambda op, *args, **options: found.get(op) or usual(op, *args, **options)
            )
        else:
            patch.setattr(owner, name, fail)
        with pytest.raises(MemoryError):
            cache.append(k[:, :, 200:], v[:, :, 200:], valid=padded[:, 200:])
        assert cache_state(cache) == before
        if owner is not Positions:
            with pytest.raises(MemoryError):
                cache.flush()
            assert cache_state(cache) == before
    for each in (cache, other):
        each.append(k[:, :, 200:], v[:, :, 200:])
    assert cache_state(cache) == cache_state(other)
