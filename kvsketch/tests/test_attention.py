"""Attention over pages and exact tokens against float64: codecs, shapes, heads, ragged rows, masks and options."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvsketch._attend import COEFFICIENTS
from kvsketch.attention import attend
from kvsketch.codecs import Codec, Exact, GroupedInts, SignSketch, TokenInts
from kvsketch.numba_cpu.attention import FUSED_QUERIES, RUN_TOKENS
from kvsketch.testing import CPU_ENGINES, assert_accurate, assert_same
from kvsketch.tests.page_cases import DTYPES, Row, assert_rounded, attend_exactly, make_view

KEYS: dict[str, Codec] = {
    "ints1": GroupedInts(1, 32),
    "ints2": GroupedInts(2, 32),
    "ints3": GroupedInts(3, 64),
    "ints4": GroupedInts(4, 128),
    "ints8": GroupedInts(8, 32),
    "latents1": TokenInts(1, 24),
    "latents3": TokenInts(3),
    "latents4": TokenInts(4, 8),
    "sketch": SignSketch(m=100),
    "sketch-outliers": SignSketch(m=48, kind="gaussian", outliers=3, outlier_m=20),
    "exact": Exact(),
}
VALUES: dict[str, Codec] = {
    "ints1": GroupedInts(1, 8),
    "ints2": GroupedInts(2, 32),
    "ints3": GroupedInts(3, 64),
    "ints4": GroupedInts(4, 16),
    "ints8": GroupedInts(8, 32),
    "latents2": TokenInts(2),
    "exact": Exact(),
}
#: Bits and groups of values: blocks of 32 channels that have one scale, and that have several, of all bits.
VALUE_GROUPS = [
    *((1, 32), (1, 24), (2, 8), (2, 40), (2, 64), (2, 128), (3, 8), (3, 40), (3, 128)),
    *((4, 64), (4, 24), (8, 32), (8, 8), (8, 24), (8, 40)),
]
INTS = (GroupedInts(2, 32), GroupedInts(2, 32))
#: Rows without pages, window or first tokens, without anything, and with several runs of pages.
RAGGED = [Row(4, 3, 7), Row(0, 0, 0), Row(0, 0, 5), Row(2, 0, 0), Row(0, 1, 0), Row(4, 40, 33), Row(0, 7, 150)]

per_engine = pytest.mark.parametrize("engine", CPU_ENGINES)


def queries(b, hq, s, d, dtype="float32", seed=0):
    return np.random.default_rng(1000 + seed).standard_normal((b, hq, s, d)).astype(np.float32).astype(DTYPES[dtype])


def check(engine, q, view, tokens, **options):
    """Compare with float64 and, where nothing is rounded, with the reference engine's own error; returns the result.

    With coefficients of each kind where these are used; the result is that of the default.
    """
    exact, size = attend_exactly(q, tokens, **options)
    largest = max((float(np.abs(v).max()) for _, v in tokens if v.size), default=0.0)
    fused = engine != "reference" and q.shape[1] // view.pages.shape[1] * q.shape[2] <= FUSED_QUERIES
    if fused and not view.layout.keys.codec == view.layout.values.codec == Exact():
        for kind in COEFFICIENTS:
            rounded = attend(q, view, engine=engine, coefficients=kind, **options)
            assert_rounded(rounded, exact, kind, terms=size / largest if largest else 1.0)
        return attend(q, view, engine=engine, **options)
    actual = attend(q, view, engine=engine, **options)
    assert_accurate(actual, exact, exact.astype(np.float32), size=size)
    if engine != "reference":
        assert_accurate(actual, exact, attend(q, view, engine="reference", **options), size=largest)
    return actual


# ---- codecs, shapes and dtypes ----


@per_engine
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("keys", KEYS)
def test_every_key_codec_with_every_value_codec(keys, values, engine):
    rows = [Row(4, 3, 9), Row(0, 2, 40)]
    view, tokens = make_view(KEYS[keys], VALUES[values], d=24, dv=20, h=2, rows=rows)
    check(engine, queries(2, 4, 3, 24), view, tokens)


@per_engine
@pytest.mark.parametrize(
    ("keys", "values"),
    [
        *(("ints2", "ints2"), ("ints3", "ints3"), ("sketch-outliers", "ints1"), ("exact", "exact")),
        ("latents3", "latents2"),
    ],
)
@pytest.mark.parametrize(
    ("d", "dv"),
    [
        *((1, 1), (5, 37), (37, 5), (8, 24), (24, 8), (64, 80), (80, 128), (96, 64), (128, 200), (200, 96)),
        *((130, 257), (257, 96), (512, 512)),
    ],
)
def test_head_sizes(d, dv, keys, values, engine):
    if KEYS[keys] == KEYS["sketch-outliers"] and d < 3:
        keys = "sketch"
    view, tokens = make_view(KEYS[keys], VALUES[values], d=d, dv=dv, h=1, rows=[Row(3, 2, 5)])
    check(engine, queries(1, 2, 2, d), view, tokens)


@per_engine
@pytest.mark.parametrize("values", [GroupedInts(bits, group) for bits, group in VALUE_GROUPS], ids=str)
def test_value_groups(values, engine):
    """Groups of several planes of 8 channels, of one, and that end inside a block of 32 or behind the last channel."""
    view, tokens = make_view(Exact(), values, d=8, dv=136, h=2, rows=[Row(4, 11, 9), Row(0, 2, 0)])
    check(engine, queries(2, 6, 2, 8), view, tokens)


@per_engine
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_key_groups(bits, group, engine):
    """More pages than a tile holds, and a number of channels that does not fill a row of coefficients."""
    view, tokens = make_view(GroupedInts(bits, group), Exact(), d=40, dv=8, h=1, rows=[Row(4, 320 // group + 1, 9)])
    check(engine, queries(1, 3, 2, 40), view, tokens)


@per_engine
@pytest.mark.parametrize(("d", "highest"), [(24, 20), (300, 299)])
def test_sketches_whose_pages_share_their_outlier_channels(d, highest, engine):
    """Channels of the prompt, different for each head; and pages that choose from few, so that only some agree."""
    prompt = SignSketch(m=72, outliers=3, outlier_m=40, outlier_channels="prompt")
    channels = np.array([[3, 7, highest], [0, 1, 5]])
    view, tokens = make_view(prompt, VALUES["ints2"], d=d, dv=24, h=2, rows=[Row(4, 11, 9)], channels=channels)
    check(engine, queries(1, 6, 2, d), view, tokens)
    view, tokens = make_view(KEYS["sketch-outliers"], VALUES["ints2"], d=4, dv=24, h=2, rows=[Row(4, 11, 9)])
    check(engine, queries(1, 6, 2, 4), view, tokens)


#: Query heads on a key/value head, and positions: all numbers of both, and every remainder of their product by 4.
SHAPES = [*((ratio, 1) for ratio in (1, 2, 3, 4, 5, 6, 7, 8, 12)), *((1 + s % 3, s) for s in range(2, 17)), (12, 10)]


@per_engine
@pytest.mark.parametrize("codecs", [("ints2", "ints2"), ("sketch-outliers", "ints4"), ("latents3", "ints2")])
@pytest.mark.parametrize(("ratio", "s"), SHAPES)
def test_query_heads_share_key_heads_in_runs(ratio, s, codecs, engine):
    """T13: ratio 7 is Qwen2's."""
    view, tokens = make_view(KEYS[codecs[0]], VALUES[codecs[1]], d=40, dv=24, h=2, rows=[Row(4, 2, 20)])
    check(engine, queries(1, 2 * ratio, s, 40), view, tokens)


@per_engine
@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_tokens_of_every_dtype(dtype, engine):
    for codecs in (INTS, (Exact(), Exact()), (SignSketch(m=64), GroupedInts(3, 16))):
        view, tokens = make_view(*codecs, d=37, dv=21, h=2, rows=[Row(4, 2, 35), Row(1, 5, 2)], dtype=dtype)
        check(engine, queries(2, 2, 2, 37), view, tokens)


@per_engine
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_queries_of_half_precision_give_what_their_float32_copies_give(dtype, engine):
    for s in (2, FUSED_QUERIES + 1):
        view, _ = make_view(*INTS, d=16, dv=24, h=1, rows=[Row(4, 2, 35)])
        q = queries(1, 2, s, 16, dtype)
        wide = attend(q.astype(np.float32), view, engine=engine)
        assert_same(attend(q, view, engine=engine), wide.astype(DTYPES[dtype]))


@per_engine
def test_strided_and_read_only_queries(engine):
    view, tokens = make_view(*INTS, d=16, dv=24, h=2, rows=[Row(4, 2, 35)])
    q = queries(1, 3, 4, 32).swapaxes(1, 2)[..., ::2]
    q.flags.writeable = False
    assert_same(check(engine, q, view, tokens), attend(q.copy(), view, engine=engine))


# ---- rows ----


@per_engine
@pytest.mark.parametrize("s", [1, 4])
def test_ragged_rows(s, engine):
    """Queries beyond a row's start see nothing and give zeros; what lies beyond a row's counts (NaN) is not read."""
    view, tokens = make_view(GroupedInts(2, 32), GroupedInts(4, 32), d=16, dv=24, h=1, rows=RAGGED)
    assert (view.page_counts * 32 > 2 * RUN_TOKENS).any()
    out = check(engine, queries(len(RAGGED), 2, s, 16), view, tokens)
    assert not out[1].any()
    for r, row in enumerate(RAGGED):
        hidden = max(0, s - row.sinks - 32 * row.pages - row.window)
        assert not out[r, :, :hidden].any()
        assert (out[r, :, hidden:] != 0).all()


@per_engine
@pytest.mark.parametrize("keys", ["ints3", "ints4", "sketch-outliers", "exact"])
def test_many_runs_of_pages(keys, engine):
    """Runs that end in the middle of a tile, of pages of 32, 64 and 128 tokens."""
    p = KEYS[keys].page_tokens("keys")
    for count in (RUN_TOKENS // p, RUN_TOKENS // p + 1, 5 * RUN_TOKENS // p + 3):
        view, tokens = make_view(KEYS[keys], VALUES["ints2"], d=8, dv=9, h=1, rows=[Row(2, count, 3)])
        check(engine, queries(1, 1, 2, 8), view, tokens)


@per_engine
def test_a_window_longer_than_any_tile(engine):
    """Cuts in a window of 1100 tokens, which the reference takes in two tiles."""
    view, tokens = make_view(*INTS, d=8, dv=9, h=1, rows=[Row(4, 1, 1100)])
    limits = np.array([[36, 37, 500, 1059, 1060, 1061, 1136]])
    check(engine, queries(1, 1, 7, 8), view, tokens, limits=limits)


@per_engine
def test_a_row_gives_what_it_gives_alone(engine):
    rows = [Row(4, 3, 7), Row(0, 5, 0), Row(4, 0, 3)]
    view, _ = make_view(*INTS, d=16, dv=24, h=2, rows=rows)
    q = queries(3, 4, 2, 16)
    together = attend(q, view, engine=engine)
    for r in range(3):
        alone = view._replace(**{name: getattr(view, name)[r : r + 1] for name in view._fields[1:]})
        assert_same(attend(q[r : r + 1], alone, engine=engine)[0], together[r])


@per_engine
def test_empty_batches_heads_and_queries(engine):
    view, _ = make_view(*INTS, d=16, dv=24, h=2, rows=[Row(4, 3, 7)])
    for b, hq, s in ((1, 4, 0), (1, 0, 2)):
        assert attend(queries(b, hq, s, 16), view, engine=engine).shape == (b, hq, s, 24)
    nothing = view._replace(**{name: getattr(view, name)[:0] for name in view._fields[1:]})
    assert attend(queries(0, 4, 2, 16), nothing, engine=engine).shape == (0, 4, 2, 24)


@per_engine
def test_exact_arrays_may_be_strided_and_without_room(engine):
    view, tokens = make_view(*INTS, d=16, dv=24, h=2, rows=[Row(0, 2, 7)])
    none: dict[str, Any] = {name: getattr(view, name)[:, :, :0] for name in ("sink_k", "sink_v")}
    turned: dict[str, Any] = {name: np.asfortranarray(getattr(view, name)) for name in ("window_k", "window_v")}
    check(engine, queries(1, 2, 3, 16), view._replace(**none, **turned), tokens)
    bare, tokens = make_view(*INTS, d=16, dv=24, h=2, rows=[Row(4, 0, 7)])
    check(engine, queries(1, 2, 3, 16), bare._replace(pages=bare.pages[:, :, :0]), tokens)


# ---- what queries see ----


@per_engine
def test_the_default_limits_are_causal(engine):
    view, tokens = make_view(*INTS, d=16, dv=24, h=2, rows=[Row(4, 2, 1), Row(0, 0, 2)])
    q = queries(2, 2, 4, 16)
    by_default = check(engine, q, view, tokens)
    limits = np.array([[66, 67, 68, 69], [0, 0, 1, 2]])
    assert_same(attend(q, view, limits=limits, engine=engine), by_default)
    first = tokens[1][1][:, 0]
    np.testing.assert_allclose(by_default[1, :, 2], first, rtol=0, atol=1e-6)


@per_engine
@pytest.mark.parametrize("keys", ["ints4", "sketch", "exact"])
def test_limits_cut_anywhere(keys, engine):
    """At, before and after the ends of first tokens, pages, tiles and window, in any order, and beyond all tokens."""
    view, tokens = make_view(KEYS[keys], VALUES["ints2"], d=16, dv=24, h=1, rows=[Row(4, 8, 9), Row(0, 3, 0)])
    p, n = view.layout.page_tokens, view.lengths.max()
    cuts = [0, 1, 3, 4, 5, p + 3, p + 4, p + 5, 131, 132, 133, 4 + 8 * p, 5 + 8 * p, n - 1, n, n + 9, 2**40, -3, 64, 7]
    limits = np.array([cuts, cuts[::-1]])
    out = check(engine, queries(2, 2, len(cuts), 16), view, tokens, limits=limits)
    assert not out[0, :, 0].any()
    assert not out[0, :, -3].any()


@per_engine
@pytest.mark.parametrize("heads", [1, 6])
def test_bias_is_added_at_a_row_s_own_positions(heads, engine):
    rows = [Row(4, 2, 9), Row(0, 1, 3), Row(3, 6, 130)]
    view, tokens = make_view(*INTS, d=16, dv=24, h=2, rows=rows)
    rng = np.random.default_rng(4)
    bias = rng.standard_normal((3, heads, 5, view.lengths.max() + 7)).astype(np.float32)
    bias[rng.random(bias.shape) < 0.3] = -np.inf
    bias[:, :, 1, :40] = -np.inf  # all of the second row's tokens, and the first tiles of others
    bias[:, :, 2] = -np.inf
    bias[:, :, 3, 10:] = -np.inf
    q = queries(3, 6, 5, 16)
    out = check(engine, q, view, tokens, bias=bias)
    assert not out[:, :, 2].any()
    assert not out[1, :, 1].any()
    if heads == 1:
        assert_same(attend(q, view, bias=np.repeat(bias, 6, axis=1), engine=engine), out)


@per_engine
def test_the_lowest_float32_hides_as_well_as_infinity(engine):
    """T20: masks made of a dtype's lowest number, and a query that has nothing else."""
    view, tokens = make_view(*INTS, d=16, dv=24, h=2, rows=[Row(4, 2, 9)])
    hidden = np.random.default_rng(5).random((1, 1, 3, 77)) < 0.5
    bias = np.where(hidden, -np.inf, 0).astype(np.float32)
    lowest = np.where(hidden, np.finfo(np.float32).min, 0).astype(np.float32)
    q = queries(1, 4, 3, 16)
    assert_same(attend(q, view, bias=lowest, engine=engine), check(engine, q, view, tokens, bias=bias))
    lowest[...] = np.finfo(np.float32).min
    assert np.isfinite(attend(q, view, bias=lowest, engine=engine)).all()


@per_engine
def test_bias_of_any_memory_order_and_dtype(engine):
    view, tokens = make_view(*INTS, d=16, dv=24, h=2, rows=[Row(4, 2, 9)])
    q = queries(1, 4, 3, 16)
    bias = np.random.default_rng(5).standard_normal((1, 1, 3, 77)).astype(np.float16)
    expected = check(engine, q, view, tokens, bias=bias.astype(np.float32))
    for given in (bias, np.asfortranarray(bias.astype(np.float32)), np.repeat(bias, 2, axis=-1)[..., ::2]):
        assert_same(attend(q, view, bias=given, engine=engine), expected)


OPTIONS: dict[str, dict[str, Any]] = {
    "scale": {"scale": 0.7},
    "no scale": {"scale": 0.0},
    "negative scale": {"scale": -0.2},
    "softcap": {"softcap": 1.5},
    "softcap and scale": {"softcap": 20, "scale": 3.0},
    "sink logits": {"sink_logits": np.array([-5, 0, 3.5, 40], np.float32)},
    "no sink": {"sink_logits": np.array([-np.inf, 0, -np.inf, -np.inf], np.float32)},
    "all": {"scale": 0.9, "softcap": 2.0, "sink_logits": np.array([1, 0, -2, 4], np.float32)},
}


@per_engine
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, masked, engine):
    view, tokens = make_view(*INTS, d=16, dv=24, h=2, rows=[Row(4, 20, 9), Row(0, 1, 0), Row(0, 0, 0)])
    options = dict(OPTIONS[name])
    if masked:
        rng = np.random.default_rng(6)
        bias = rng.standard_normal((3, 4, 3, view.lengths.max())).astype(np.float32)
        bias[rng.random(bias.shape) < 0.5] = -np.inf
        options |= {"bias": bias, "limits": rng.integers(0, 650, (3, 3))}
    check(engine, queries(3, 4, 3, 16), view, tokens, **options)


@per_engine
@pytest.mark.parametrize("codecs", [("ints2", "ints2"), ("sketch", "ints3"), ("exact", "exact")])
@pytest.mark.parametrize("sink_logits", [None, np.array([0, 2], np.float32)])
def test_what_sees_nothing_is_zero(sink_logits, codecs, engine):
    """T19: hidden by limits, by a bias of -inf, or because the row is empty; warnings are errors."""
    view, _ = make_view(KEYS[codecs[0]], VALUES[codecs[1]], d=16, dv=24, h=1, rows=[Row(4, 3, 5), Row(0, 0, 0)])
    hidden = np.full((2, 1, 3, view.lengths.max()), -np.inf, np.float32)
    for s in (3, FUSED_QUERIES):
        q = queries(2, 2, s, 16)
        for options in (
            {"limits": np.zeros((2, s), np.int64)},
            {"bias": np.repeat(hidden[:, :, :1], s, axis=2)},
            {"bias": np.repeat(hidden[:, :, :1], s, axis=2), "softcap": 3.0},
        ):
            assert not attend(q, view, sink_logits=sink_logits, engine=engine, **options).any()
        assert not attend(q, view, sink_logits=sink_logits, engine=engine)[1].any()


# ---- many queries ----


@per_engine
@pytest.mark.parametrize("s", [FUSED_QUERIES // 2, FUSED_QUERIES // 2 + 1, 150])
@pytest.mark.parametrize("codecs", [("ints3", "ints4"), ("sketch-outliers", "ints2"), ("exact", "exact")])
def test_many_queries(codecs, s, engine):
    """Around the number of query rows where the Numba engine goes over to whole tiles, rows shorter than s among them.

    The row of 40 pages has more tokens than a tile of the reference.
    """
    rows = [Row(4, 1, 66), Row(0, 1, 3)]
    rows[0] = Row(4, 40, 3) if s == 150 else rows[0]
    view, tokens = make_view(KEYS[codecs[0]], VALUES[codecs[1]], d=16, dv=12, h=1, rows=rows)
    bias = np.random.default_rng(7).standard_normal((2, 2, s, view.lengths.max())).astype(np.float32)
    bias[:, :, ::5, 20:] = -np.inf
    logits = np.array([0.5, -1], np.float32)
    check(engine, queries(2, 2, s, 16), view, tokens)
    check(engine, queries(2, 2, s, 16), view, tokens, bias=bias, softcap=5.0, sink_logits=logits)
