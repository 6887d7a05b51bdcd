"""Attention on CUDA over several tiles and splits, ragged rows, and what is hidden or beyond a row's counts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvsketch.attention import CacheView, HeldView, attend
from kvsketch.codecs import Codec, Exact, GroupedInts, SignSketch, TokenInts
from kvsketch.cuda_raw import attention, attention_plan
from kvsketch.testing import assert_same
from kvsketch.tests.cuda_attention_cases import attend_on_device, check, moved, queries, take_simt
from kvsketch.tests.cuda_host import running, stand_in
from kvsketch.tests.cuda_host.arrays import ndarray
from kvsketch.tests.cuda_host.devices import pretending
from kvsketch.tests.cuda_host.fixtures import needs_compiler
from kvsketch.tests.page_cases import Row, make_view

pytestmark = needs_compiler

INTS = (GroupedInts(2, 32), GroupedInts(2, 32))
PAIRS: dict[str, tuple[Codec, Codec]] = {
    "ints": INTS,
    "wide pages": (GroupedInts(3, 128), GroupedInts(3, 24)),
    "sketch": (SignSketch(m=48, outliers=3, outlier_m=20), GroupedInts(2, 32)),
    "latents": (TokenInts(3), GroupedInts(3, 64)),
    "exact": (Exact(), GroupedInts(4, 32)),
}
#: Rows without pages, window or first tokens, without anything, and with several tiles of each.
RAGGED = [Row(4, 3, 7), Row(0, 0, 0), Row(0, 0, 5), Row(2, 0, 0), Row(0, 1, 0), Row(4, 20, 33), Row(300, 2, 290)]


@pytest.fixture(params=["check", "fast"], autouse=True)
def _execution(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    take_simt(monkeypatch)
    with running(request.param, "reverse" if request.param == "fast" else "round-robin"):
        yield


@pytest.fixture(params=["a run of all tokens", "as many splits as there can be"])
def _runs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of splits depends on the device's size: one block takes all tokens, or none takes a second tile."""
    size = 1000 if request.param.startswith("as many") else 0
    monkeypatch.setattr(attention, "multiprocessors", lambda _: size)


@pytest.mark.usefixtures("_runs")
@pytest.mark.parametrize("pair", PAIRS)
def test_runs_of_several_tiles(cupy: Any, pair: str) -> None:
    """Scores grow along the tokens, so that every tile has a new largest one."""
    keys, values = PAIRS[pair]
    page = keys.page_tokens("keys")
    view, tokens = make_view(keys, values, d=24, dv=40, h=1, rows=[Row(3, 672 // page, 5), Row(0, 3, 600)])
    n = int(view.lengths.max())
    bias = np.broadcast_to(np.arange(n, dtype=np.float32) / 16, (2, 1, 3, n)).copy()
    check(cupy, queries(2, 2, 3, 24), view, tokens, bias=bias)
    check(cupy, queries(2, 2, 3, 24), view, tokens, bias=-bias)


@pytest.mark.usefixtures("_runs")
@pytest.mark.parametrize("s", [1, 4])
def test_ragged_rows(cupy: Any, s: int) -> None:
    """Queries beyond a row's start see nothing and give zeros; what lies beyond a row's counts (NaN) is not read."""
    view, tokens = make_view(*INTS, d=16, dv=24, h=1, rows=RAGGED)
    out = check(cupy, queries(len(RAGGED), 2, s, 16), view, tokens)
    for r, row in enumerate(RAGGED):
        hidden = max(0, s - sum(row[:1] + row[2:]) - 32 * row.pages)
        assert not out[r, :, :hidden].any()
        assert (out[r, :, hidden:] != 0).all()


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("sink_logits", [None, np.array([0, 2], np.float32)])
def test_what_sees_nothing_is_zero(cupy: Any, sink_logits: Any, pair: str) -> None:
    view, _ = make_view(*PAIRS[pair], d=16, dv=24, h=1, rows=[Row(4, 3, 5), Row(0, 0, 0)])
    hidden = np.full((2, 1, 3, int(view.lengths.max())), -np.inf, np.float32)
    q = queries(2, 2, 3, 16)
    for options in ({"limits": np.zeros((2, 3), np.int64)}, {"bias": hidden}, {"bias": hidden, "softcap": 3.0}):
        assert not attend_on_device(cupy, q, view, sink_logits=sink_logits, **options).any()


def test_limits_cut_anywhere(cupy: Any) -> None:
    """At, before and after the ends of first tokens, pages, tiles and window, in any order, and beyond all tokens."""
    view, tokens = make_view(*INTS, d=16, dv=24, h=1, rows=[Row(4, 8, 9), Row(0, 3, 0)])
    n = int(view.lengths.max())
    cuts = [0, 1, 3, 4, 5, 35, 36, 37, 131, 132, 133, 260, 261, n - 1, n, n + 9, 2**40, -3, 64, 7]
    out = check(cupy, queries(2, 2, len(cuts), 16), view, tokens, limits=np.array([cuts, cuts[::-1]]))
    assert not out[0, :, 0].any()
    assert not out[0, :, -3].any()


def test_the_lowest_float32_hides_no_more_than_the_reference_says(cupy: Any) -> None:
    view, tokens = make_view(*INTS, d=16, dv=24, h=2, rows=[Row(4, 2, 9)])
    q = queries(1, 4, 3, 16)
    hidden = np.random.default_rng(5).random((1, 1, 3, 77)) < 0.5
    lowest = np.where(hidden, np.finfo(np.float32).min, 0).astype(np.float32)
    bias = np.where(hidden, -np.inf, 0).astype(np.float32)
    assert_same(attend_on_device(cupy, q, view, bias=lowest), check(cupy, q, view, tokens, bias=bias))
    lowest[...] = np.finfo(np.float32).min
    np.testing.assert_allclose(
        attend_on_device(cupy, q, view, bias=lowest), attend(q, view, bias=lowest, engine="reference"), rtol=1e-5
    )


@pytest.mark.parametrize("scale", [0.0, -0.2, 3.0])
def test_scales(cupy: Any, scale: float) -> None:
    view, tokens = make_view(*INTS, d=16, dv=24, h=2, rows=[Row(4, 2, 9)])
    for softcap in (None, 2.0):
        check(cupy, queries(1, 4, 3, 16), view, tokens, scale=scale, softcap=softcap)


def test_what_is_not_finite_stays_where_it_belongs(cupy: Any) -> None:
    """Infinite and NaN scores reach what they reach in the reference, and nothing else."""
    view, _ = make_view(*INTS, d=8, dv=8, h=1, rows=[Row(0, 1, 3)] * 2)
    view.window_k[0, 0, 1, 0] = np.nan
    q = queries(2, 1, 2, 8)
    out, expected = attend_on_device(cupy, q, view), attend(q, view, engine="reference")
    np.testing.assert_array_equal(np.isnan(out), np.isnan(expected))
    assert np.isnan(out[0, 0, 1]).all()
    assert np.isfinite(out[1]).all()


def test_strided_arrays_of_every_kind(cupy: Any) -> None:
    view, tokens = make_view(*INTS, d=16, dv=24, h=2, rows=[Row(0, 2, 7)])
    q = queries(1, 3, 4, 32).swapaxes(1, 2)[..., ::2]
    there = moved(cupy, view)
    for name in ("window_k", "window_v"):
        turned = cupy.asarray(np.ascontiguousarray(getattr(view, name).swapaxes(1, 3))).swapaxes(1, 3)
        there = there._replace(**{name: turned})
    for name in ("sink_k", "sink_v"):
        there = there._replace(**{name: getattr(there, name)[:, :, :0]})
    out = attend(cupy.asarray(np.ascontiguousarray(q[:, ::-1]))[:, ::-1], there)
    assert_same(out.get(), check(cupy, np.ascontiguousarray(q), view, tokens))


def test_empty_batches_heads_and_queries(cupy: Any) -> None:
    view, _ = make_view(*INTS, d=16, dv=24, h=2, rows=[Row(4, 3, 7)])
    for b, hq, s in ((1, 4, 0), (1, 0, 2)):
        assert attend_on_device(cupy, queries(b, hq, s, 16), view).shape == (b, hq, s, 24)
    nothing: CacheView = view._replace(**{name: getattr(view, name)[:0] for name in view._fields[1:]})
    assert attend_on_device(cupy, queries(0, 4, 2, 16), nothing).shape == (0, 4, 2, 24)


@pytest.mark.parametrize("s", [attention.FUSED_QUERIES // 2, attention.FUSED_QUERIES // 2 + 1])
def test_many_queries(cupy: Any, s: int) -> None:
    """Around the number of query rows where tiles are decoded for a matrix product, rows shorter than s among them."""
    view, tokens = make_view(*INTS, d=16, dv=12, h=1, rows=[Row(4, 1, 66), Row(0, 1, 3)])
    check(cupy, queries(2, 2, s, 16), view, tokens, softcap=5.0, sink_logits=np.array([0.5, -1], np.float32))


def test_offsets_beyond_32_bits(cupy: Any) -> None:
    """The second head's pages begin 2 GiB behind the first head's; memory that nothing is written to is not there."""
    view, tokens = make_view(*INTS, d=16, dv=24, h=2, rows=[Row(4, 2, 7)])
    q = queries(1, 4, 2, 16)
    there = moved(cupy, view)
    if not isinstance(there.pages, ndarray):
        pytest.skip("needs memory that is not there until it is written to")
    step = view.layout.record_bytes
    capacity = 2**31 // step + 5
    pages = np.zeros((1, 2, capacity, step), np.uint8)
    pages[:, :, :2] = view.pages[:, :, :2]
    far = there._replace(pages=ndarray(pages))
    assert_same(attend(cupy.asarray(q), far).get(), check(cupy, q, view, tokens))


def test_arrays_of_another_device_than_the_current_one(cupy: Any) -> None:
    if not isinstance(cupy, stand_in.StandIn):
        pytest.skip("needs a second device")
    view, _ = make_view(*PAIRS["sketch"], d=16, dv=24, h=2, rows=[Row(4, 2, 7)])
    q = queries(1, 4, 2, 16)
    expected = attend_on_device(cupy, q, view)
    with pretending(count=2):
        with cupy.cuda.Device(1):
            there, queries_there = moved(cupy, view), cupy.asarray(q)
        out = attend(queries_there, there)
        assert (out.device.id, cupy.cuda.Device().id) == (1, 0)
        with cupy.cuda.Device(1):
            assert_same(out.get(), expected)


# ---- the plan of splits ----


def cuts(n: int, splits: int, step: int) -> list[int]:
    """Lengths of a row's runs, as cut_of in attention.cuh has them."""
    steps = -(-n // step)
    run = -(-steps // splits) * step if splits else 0
    return [max(min(run, n - run * split), 0) for split in range(splits)]


@pytest.mark.parametrize("multiprocessors", [0, 1, 16, 132, 10**6])
@pytest.mark.parametrize("group", [32, 128])
def test_splits_cover_all_tokens_and_are_no_more_than_there_is_room_for(group: int, multiprocessors: int) -> None:
    view, _ = make_view(GroupedInts(2, group), GroupedInts(2, 32), d=8, dv=8, h=1, rows=[Row(1, 1, 1)])
    for most in ((0, 0, 0), (0, 0, 1), (1, 4, 0), (9, 0, 257), (10**6, 4, 128), (10**7, 10**5, 10**6)):
        for heads, share in itertools.product((1, 8, 4096), (None, 1, 0.01)):
            held = None if share is None else max(most[0], int(share * most[0] * heads))
            plan = attention_plan.plan_splits(
                view.layout, *most, held=held, heads=heads, tiles=2, step=256, multiprocessors=multiprocessors
            )
            assert plan.splits <= 1024
            assert plan.exact_step == 256
            assert plan.page_step * view.layout.page_tokens % 256 == 0
            assert share is not None or plan.page_step * view.layout.page_tokens == 256
            splits = (plan.page_splits, plan.sink_splits, plan.splits - plan.page_splits - plan.sink_splits)
            steps = (plan.page_step, plan.exact_step, plan.exact_step)
            for row in (most, tuple(n // 3 for n in most), tuple(min(n, 1) for n in most)):
                for n, of, step in zip(row, splits, steps, strict=True):
                    assert sum(cuts(n, of, step)) == n
                    assert n == 0 or len([run for run in cuts(n, of, step) if run]) > of // 2 or n < of * step


@pytest.mark.parametrize("pages", [[4096] + [64] * 63, [1024] + [32] * 15, [1024] * 16, list(range(16, 1040, 16)), [9]])
def test_a_long_row_among_short_ones_is_cut_as_finely(pages: list[int]) -> None:
    """Of 4 blocks for each of 132 multiprocessors none has more than twice its share, nor are there many more."""
    view, _ = make_view(*INTS, d=8, dv=8, h=1, rows=[Row(1, 1, 1)])
    h, blocks, step = 8, 4 * 132, 2
    plan = attention_plan.plan_splits(
        view.layout, max(pages), 4, 64,
        held=h * sum(pages), heads=h * len(pages), tiles=1, step=step * view.layout.page_tokens, multiprocessors=132,
    )  # fmt: skip
    runs = [run for n in pages for run in cuts(n, plan.page_splits, plan.page_step) if run] * h
    assert sum(runs) == h * sum(pages)
    assert max(runs) <= max(2 * sum(runs) / blocks, step)
    assert len(runs) <= blocks + h * len(pages)


def test_rows_are_cut_by_their_own_counts(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is for many more tokens than any row has, and the counts on the device are those that are read."""
    view, tokens = make_view(*INTS, d=16, dv=24, h=1, rows=[Row(4, 37, 200), Row(0, 9, 3), Row(2, 0, 1)])
    q = queries(3, 2, 2, 16)
    plan = attention.plan_splits
    monkeypatch.setattr(attention, "plan_splits", lambda layout, *_, **sizes: plan(layout, 500, 4, 900, **sizes))
    for size in (0, 1, 16):
        monkeypatch.setattr(attention, "multiprocessors", lambda _, size=size: size)
        check(cupy, q, view, tokens)
    wrong = view._replace(page_counts=view.page_counts + 1)
    expected = attend_on_device(cupy, q, view)
    held = HeldView(*moved(cupy, wrong)).with_counts(cupy.asarray(view.counts))
    assert_same(attend(cupy.asarray(q), held).get(), expected)
