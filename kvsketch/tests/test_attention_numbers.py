"""Attention over pages: torch's as an oracle, threads, memory, rounding, numbers that are large or none, and errors."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from kvsketch import pages
from kvsketch._attend import COEFFICIENTS
from kvsketch.attention import CacheView, attend
from kvsketch.cache import Cache
from kvsketch.codecs import Exact, GroupedInts, SignSketch
from kvsketch.layout import page_layout
from kvsketch.numba_cpu import _threads
from kvsketch.testing import CPU_ENGINES, assert_accurate, assert_same
from kvsketch.tests.page_cases import ROUNDING, Row, assert_rounded, attend_exactly, make_view

INTS = (GroupedInts(2, 32), GroupedInts(2, 32))

per_engine = pytest.mark.parametrize("engine", CPU_ENGINES)
per_kind = pytest.mark.parametrize("kind", COEFFICIENTS)


def queries(b, hq, s, d, seed=0):
    return np.random.default_rng(1000 + seed).standard_normal((b, hq, s, d)).astype(np.float32)


# ---- torch ----


@per_engine
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_exact_pages_attend_as_torch_does(dtype, engine):
    torch = pytest.importorskip("torch")
    view, tokens = make_view(Exact(), Exact(), d=64, dv=40, h=2, rows=[Row(4, 20, 9)] * 2, dtype=dtype)
    k, v = (torch.from_numpy(np.stack(x)) for x in zip(*tokens, strict=True))
    q = queries(2, 6, 5, 64)
    bias = np.random.default_rng(1).standard_normal((2, 1, 5, k.shape[2])).astype(np.float32)
    causal = torch.ones(5, k.shape[2], dtype=torch.bool).tril(k.shape[2] - 5)
    added = torch.from_numpy(bias).double().masked_fill(~causal, -np.inf)
    for given, mask in ((None, causal), (bias, added)):
        expected = torch.nn.functional.scaled_dot_product_attention(
            torch.from_numpy(q).double(), k, v, attn_mask=mask, enable_gqa=True
        ).numpy()
        actual = attend(q, view, bias=given, engine=engine)
        assert_accurate(actual, expected, expected.astype(np.float32), size=30.0)


# ---- threads and memory ----


@per_kind
@pytest.mark.parametrize("codecs", [INTS, (SignSketch(m=64, outliers=2, outlier_m=16), GroupedInts(3, 64))])
def test_results_do_not_depend_on_the_number_of_threads(codecs, kind, monkeypatch):
    monkeypatch.setattr("kvsketch.numba_cpu.attention.THREADED_WORK", 0)
    # So many heads that the number of parts, not the length, decides how they are split.
    view, _ = make_view(*codecs, d=16, dv=24, h=8, rows=[Row(4, 60, 9), Row(0, 13, 40)])
    q, before = queries(2, 8, 2, 16), _threads.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 5):
            _threads.set_num_threads(threads)
            found += [attend(q, view, coefficients=kind, engine="numba_cpu") for _ in range(3)]
    finally:
        _threads.set_num_threads(before)
    for other in found[1:]:
        assert_same(other, found[0])


@per_kind
@pytest.mark.parametrize("codecs", [INTS, (SignSketch(m=64, outliers=2, outlier_m=16), GroupedInts(3, 64))])
@pytest.mark.parametrize("ratio", [4, 7])
def test_results_do_not_depend_on_the_order_of_queries(ratio, codecs, kind):
    """Queries are taken a few at a time: whole blocks of them give the same bits, a last one may sum in another order.

    Rounding of coefficients is of a query alone, so that what differs is far below it.
    """
    view, _ = make_view(*codecs, d=40, dv=24, h=1, rows=[Row(4, 12, 9)])
    q = queries(1, ratio, 2, 40)
    limits = np.full((1, 2), view.lengths[0])
    straight = attend(q, view, limits=limits, coefficients=kind, engine="numba_cpu")
    for order in ([*range(1, ratio), 0], [*range(ratio)][::-1]):
        found = attend(q[:, order, ::-1], view, limits=limits, coefficients=kind, engine="numba_cpu")
        turned = straight[:, order, ::-1]
        if ratio == 4:
            assert_same(found, turned)
        else:
            np.testing.assert_allclose(found, turned, rtol=0, atol=4e-6 * np.abs(turned).max())


def long_cache(h=4, d=64, n=16384):
    """A cache of `n` tokens, 2 bits a number, of repeated pages; and the bytes of its numbers in float32."""
    layout = page_layout(*INTS, d, d)
    small, _ = make_view(*INTS, d=d, dv=d, h=h, rows=[Row(4, 4, 32)])
    assert small.layout == layout
    pages = np.tile(small.pages[:, :, :4], (1, 1, n // layout.page_tokens // 4, 1))
    view = small._replace(pages=pages, page_counts=np.array([pages.shape[2]]))
    return view, 2 * h * n * d * 4


def traced_peak(q, view, engine):
    tracemalloc.start()
    try:
        attend(q, view, engine=engine)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@per_engine
@pytest.mark.parametrize("s", [1, 40])
def test_temporaries_do_not_grow_with_the_cache(s, engine):
    """T27: they are below half of the decoded cache at 16384 tokens, and as many at 4096.

    At s = 40 there are 160 query rows on a head, which the Numba engine does not fuse. Below a certain length it keeps
    what threads would share, tens of kilobytes, out of NumPy's sight.
    """
    view, decoded_bytes = long_cache()
    shorter = view._replace(page_counts=view.page_counts // 4)
    q = queries(1, 16, s, 64)
    attend(q, shorter, engine=engine)  # compiles
    peak = traced_peak(q, view, engine)
    assert peak < decoded_bytes / 2
    assert peak < 1.05 * traced_peak(q, shorter, engine) + 100_000


PEAK = """
import resource
from kvsketch.attention import attend
from kvsketch.tests.test_attention_numbers import long_cache, queries
view, decoded_bytes = long_cache(h=8)
q = queries(1, 16, 2, 64)
small = view._replace(page_counts=view.page_counts // 256)
attend(q, small, engine="numba_cpu")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
attend(q, view, engine="numba_cpu")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, decoded_bytes)
"""


def test_compiled_code_does_not_decode_the_cache_either():
    """What Numba allocates is not traced: compare a process's peaks over two pages and over 64 MB of numbers."""
    if sys.platform != "linux":
        pytest.skip("the unit of ru_maxrss is that of Linux")
    printed = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True).stdout
    kilobytes, decoded_bytes = map(int, printed.split())
    assert decoded_bytes == 2 * 8 * 16384 * 64 * 4
    assert kilobytes * 1024 < decoded_bytes / 8


# ---- numbers ----


@per_kind
@per_engine
@pytest.mark.parametrize("keys", [INTS[0], SignSketch(m=64, outliers=2, outlier_m=16)], ids=["ints", "sketch"])
@pytest.mark.parametrize("where", ["first tokens", "page of keys", "page of values", "window", "query"])
def test_what_is_not_a_number_stays_in_its_head(where, keys, engine, kind):
    """T19: NaN in a token of one key/value head, or in one query, spoils that head's or query's results alone."""
    view, _ = make_view(keys, INTS[1], d=16, dv=24, h=2, rows=[Row(4, 3, 9), Row(4, 3, 9)])
    q = queries(2, 6, 2, 16)
    clean = attend(q, view, coefficients=kind, engine=engine)
    spoilt = np.zeros(clean.shape, bool)
    spoilt[1, 3:] = True
    if where == "query":
        q[1, 4, 0, 3] = np.nan
        spoilt[...] = False
        spoilt[1, 4, 0] = True
    elif where == "first tokens":
        view.sink_k[1, 1, 2, 5] = np.nan
    elif where == "window":
        view.window_k[1, 1, view.window_starts[1] + 2, 5] = np.nan
    else:
        side = view.layout.keys if where == "page of keys" else view.layout.values
        name = "norms" if side.codec == keys and keys != INTS[0] else "zero"
        offset = side.field(name).offset + (view.layout.value_offset if side is view.layout.values else 0)
        view.pages[1, 1, 2, offset : offset + 2] = np.array([np.nan], np.float16).view(np.uint8)
    out = attend(q, view, coefficients=kind, engine=engine)
    np.testing.assert_array_equal(out[~spoilt], clean[~spoilt])
    if where == "page of values":
        assert np.isnan(out[1, 3:]).any(axis=-1).all()
    else:
        assert np.isnan(out[spoilt]).all()


def is_rounded(engine, view):
    return engine != "reference" and not view.layout.keys.codec == view.layout.values.codec == Exact()


def check(actual, exact, kind, size, largest, rounded):
    """Compare with float64, by what is lost to rounded coefficients where there are any."""
    if rounded:
        assert_rounded(actual, exact, kind, terms=size / largest)
    else:
        assert_accurate(actual, exact, exact.astype(np.float32), size=size)


@per_kind
@per_engine
@pytest.mark.parametrize("codecs", [INTS, (Exact(), Exact()), (SignSketch(m=64), GroupedInts(3, 16))])
def test_large_scores(codecs, engine, kind):
    """Scores of 1e4: one token takes all, in whichever tile it is; no overflow, no warning."""
    view, tokens = make_view(*codecs, d=16, dv=24, h=1, rows=[Row(4, 20, 9)])
    q, largest = queries(1, 2, 4, 16), np.abs(tokens[0][1]).max()
    for scale in (1e3, -1e3):
        scores = scale * np.einsum("hsd,nd->hsn", q[0].astype(np.float64), tokens[0][0][0])
        assert np.abs(scores).max() > 5e3
        for softcap in (None, 30.0):
            exact, size = attend_exactly(q, tokens, scale=scale, softcap=softcap)
            actual = attend(q, view, scale=scale, softcap=softcap, coefficients=kind, engine=engine)
            check(actual, exact, kind, size, largest, is_rounded(engine, view))


@per_kind
@per_engine
def test_a_later_maximum_takes_over_from_earlier_tiles(engine, kind):
    """Weights are rescaled when a larger score is met: scores rise by 3 a token, in exact tokens and in pages."""
    view, tokens = make_view(*INTS, d=16, dv=24, h=1, rows=[Row(4, 20, 200)])
    n = int(view.lengths[0])
    rise = (3 * np.arange(n, dtype=np.float32)).reshape(1, 1, 1, n)
    q, largest = np.zeros((1, 1, 1, 16), np.float32), float(np.abs(tokens[0][1]).max())
    for bias in (rise, -rise, np.where(np.arange(n) % 100 == 0, rise, 0).astype(np.float32)):
        exact, _ = attend_exactly(q, tokens, bias=bias)
        actual = attend(q, view, bias=bias, coefficients=kind, engine=engine)
        check(actual, exact, kind, 4 * largest, largest, is_rounded(engine, view))


# ---- what rounding costs ----


def long_view(data, mean, keys, d=128, n=4096):
    """A cache of n tokens in pages, queries for it, and its decoded tokens in float64."""
    rng = np.random.default_rng(11)
    k, v = rng.standard_normal((2, 2, n, d), dtype=np.float32)
    q = rng.standard_normal((1, 8, 1, d), dtype=np.float32)
    v += np.float32(mean) * rng.standard_normal(d, dtype=np.float32)
    if data == "peaked":
        q *= 4
    elif data == "outlier channels":
        k[..., [7, 100]] *= 10
    elif data == "sink":  # half of the weight on one token, whose value is small
        direction = q.reshape(2, 4, d).mean(axis=1)
        k[:, 1000], v[:, 1000] = 0, v[:, 1000] / 50
        spread = np.log(np.exp(np.einsum("hd,hnd->hn", direction, k) / np.sqrt(d)).sum(axis=1))
        k[:, 1000] = direction * (spread * np.sqrt(d) / np.square(direction).sum(axis=1))[:, None]
    layout = page_layout(keys, INTS[1], d, d)
    records = np.zeros((1, 2, n // layout.page_tokens, layout.record_bytes), np.uint8)
    parts = records[0, ..., : layout.value_offset], records[0, ..., layout.value_offset :]
    pages.encode_keys(k, layout.keys, out=parts[0])
    pages.encode_values(v, layout.values, out=parts[1])
    none, zero = np.zeros((1, 2, 0, d), np.float32), np.zeros(1, np.int64)
    view = CacheView(layout, records, np.array([records.shape[2]]), none, none, zero, none, none, zero, zero)
    decoded = pages.decode_keys(parts[0], layout.keys), pages.decode_values(parts[1], layout.values)
    return q, view, [x.astype(np.float64) for x in decoded]


@pytest.mark.parametrize("mean", [0.0, 1.0])
@pytest.mark.parametrize("data", ["normal", "peaked", "outlier channels", "sink"])
@pytest.mark.parametrize("keys", [INTS[0], SignSketch(m=256)], ids=["ints", "sketch"])
def test_rounded_coefficients_cost_what_is_promised(keys, data, mean):
    """Relative L2 error against float64 on the same pages: of the mean query, and twice as much of the worst one."""
    q, view, (k, v) = long_view(data, mean, keys)
    scores = np.einsum("hgd,hnd->hgn", q.reshape(2, 4, -1).astype(np.float64), k) / np.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    if data == "sink" and keys == INTS[0]:
        assert 0.1 < np.median(weights[..., 1000]) < 0.9
    exact = (weights @ v).reshape(1, 8, 1, -1)
    errors = []
    for kind in COEFFICIENTS:
        actual = attend(q, view, coefficients=kind, engine="numba_cpu")
        error = np.linalg.norm(actual - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
        assert error.mean() <= ROUNDING[kind], f"{kind}: {error.mean():.2e}"
        assert error.max() <= 2 * ROUNDING[kind], f"{kind}: {error.max():.2e}"
        errors.append(error.mean())
    # Eight bits more make an error a hundredth and less; no less than float32's own.
    assert 1e-7 < errors[0] < errors[1] / 50


# ---- numbers far above the rest ----

#: Relative L2 error of 16-bit coefficients on the kinds of data that the benchmarks use.
PROMISED = 1e-4


def error_of(q, cache, kind="int16", **options):
    """Relative L2 error of a cache's attention against float64 over what it decodes to."""
    tokens = [tuple(x.astype(np.float64) for x in cache.decode(row)) for row in range(q.shape[0])]
    exact, _ = attend_exactly(q, tokens, **options)
    actual = attend(q, cache.view(), coefficients=kind, engine="numba_cpu", **options)
    return float(np.linalg.norm(actual - exact) / np.linalg.norm(exact))


def filled(codecs, k, v):
    cache = Cache(*codecs, residual_length=32)
    cache.append(k, v)
    cache.flush()
    return cache


def benchmark_data(kind, h=2, d=128, n=2500, ratio=4, seed=0):
    """Queries (1, h*ratio, 1, d), keys and values, of the benchmarks' four kinds."""
    rng = np.random.default_rng(seed)
    k, v = rng.standard_normal((2, 1, h, n, d), dtype=np.float32)
    q = rng.standard_normal((1, h * ratio, 1, d), dtype=np.float32)
    if kind == "peaked":
        k *= 4
    elif kind == "outlier channels":
        k[..., rng.permutation(d)[:4]] *= 20
    elif kind == "sinks":
        mean = q.reshape(1, h, ratio, d).mean(2, keepdims=True)
        k[:, :, :4] = mean * (8 * np.sqrt(d) / np.square(mean).sum(-1, keepdims=True))
        v[:, :, :4] *= 0.1
    return q, k, v


@pytest.mark.parametrize("kind", ["gaussian", "peaked", "outlier channels", "sinks"])
@pytest.mark.parametrize(
    "codecs",
    [*[(GroupedInts(bits, 32), GroupedInts(bits, 32)) for bits in (2, 3, 4, 8)], (SignSketch(m=256), INTS[1])],
    ids=["2 bits", "3 bits", "4 bits", "8 bits", "sketch"],
)
def test_16_bits_keep_the_promise_on_all_kinds_of_data(codecs, kind):
    """The median of three draws: few queries have an error that varies more than that of many."""
    draws = [benchmark_data(kind, h=4, seed=seed) for seed in range(3)]
    errors = [error_of(q, filled(codecs, k, v)) for q, k, v in draws]
    assert np.median(errors) <= PROMISED, errors


@per_kind
@pytest.mark.parametrize("ratio", [1, 3, 4, 7])
@pytest.mark.parametrize("d", [80, 96])
@pytest.mark.parametrize(
    "codecs",
    [(GroupedInts(2, 32), GroupedInts(2, 16)), (GroupedInts(3, 64), GroupedInts(3, 64)), (GroupedInts(8, 32),) * 2],
    ids=["2 bits", "3 bits", "8 bits"],
)
def test_outliers_of_all_sizes(codecs, d, ratio, kind):
    """Channels of keys up to 1e3 times as large, for queries of very different sizes; the last tile is not whole."""
    q, k, v = benchmark_data("gaussian", d=d, n=32 * 21 + 5, ratio=ratio)
    k[..., [0, 7, 41, d - 1]] *= [30, 1e3, 10, 3]
    q[..., [0, 7, 41, d - 1]] /= [10, 1e3, 5, 1]
    q *= np.geomspace(0.05, 3, q.shape[1], dtype=np.float32)[:, None, None]
    cache = filled(codecs, k, v)
    bound = ROUNDING[kind]
    assert error_of(q, cache, kind) <= bound
    assert error_of(q, cache, kind, softcap=20.0) <= bound
    limits = np.array([[32 * 9 + 3]])
    assert error_of(q, cache, kind, limits=limits) <= bound
    bias = np.where(np.random.default_rng(1).random((1, 1, 1, k.shape[2])) < 0.5, -np.inf, 0).astype(np.float32)
    assert error_of(q, cache, kind, bias=bias) <= bound


@pytest.mark.parametrize("codecs", [INTS, (GroupedInts(4, 32), GroupedInts(4, 128))], ids=["2 bits", "4 bits"])
def test_one_channel_of_ten_thousand(codecs):
    """Its products are of the size of the others', and its scale 1e4 times theirs."""
    q, k, v = benchmark_data("gaussian", n=700)
    k[..., 50] *= 1e4
    q[..., 50] = 1e-4
    assert error_of(q, filled(codecs, k, v)) <= PROMISED


@per_kind
def test_more_outlying_channels_than_are_left_out(kind):
    """Then none stands out, and nothing is left out."""
    q, k, v = benchmark_data("gaussian", n=700)
    k[..., :60] *= 10
    q[..., :60] /= 10
    assert error_of(q, filled(INTS, k, v), kind) <= ROUNDING[kind]


@per_kind
@pytest.mark.parametrize("groups", [16, 24, 32, 128])
def test_all_mass_in_one_token(groups, kind):
    """The result is that token's value; the others in its tile do not blur it."""
    q, k, v = benchmark_data("gaussian", h=1, n=700, ratio=3)
    k[:, :, 333] = 40 * q.mean(axis=1) / np.sqrt(np.square(q.mean(axis=1)).mean())
    cache = filled((GroupedInts(2, 32), GroupedInts(2, groups)), k, v)
    assert error_of(q, cache, kind) <= (1e-5 if kind == "int16" else 5e-3)


@per_kind
def test_zeros_have_no_outliers(kind):
    q, k, v = benchmark_data("gaussian", n=300)
    for keys, values, given in ((0 * k, v, q), (k, v, 0 * q), (k, 0 * v + 1, q)):
        assert error_of(given, filled(INTS, keys, values), kind) <= ROUNDING[kind]


def test_masked_tokens_are_not_outliers():
    """A token that a query does not see takes no part in what is left out, however large its score."""
    q, k, v = benchmark_data("gaussian", h=1, n=600)
    k[:, :, 100] = 30 * q.mean(axis=1)
    cache = filled(INTS, k, v)
    bias = np.zeros((1, 1, 1, 600), np.float32)
    bias[..., 100] = -np.inf
    assert error_of(q, cache, bias=bias) <= PROMISED


# ---- errors ----


def test_arguments_that_do_not_fit_are_refused():
    view, _ = make_view(*INTS, d=16, dv=24, h=2, rows=[Row(4, 2, 9), Row(0, 1, 0)])
    q = queries(2, 4, 3, 16)
    with pytest.raises(TypeError, match="q has dtype float64; cast it to one of"):
        attend(q.astype(np.float64), view)
    with pytest.raises(TypeError, match="q must be a NumPy or CuPy array, got list"):
        attend(q.tolist(), view)
    with pytest.raises(ValueError, match=r"q must have shape \(b, hq, s, d\), got \(4, 3, 16\)"):
        attend(q[0], view)
    for given in (q[:1], q[..., :15]):
        with pytest.raises(ValueError, match=r"q must have shape \(2, hq, s, 16\), got"):
            attend(given, view)
    with pytest.raises(ValueError, match="q has 3 heads, which is not a multiple of the 2 key/value heads"):
        attend(q[:, :3], view)
    for softcap in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="softcap must be positive, got"):
            attend(q, view, softcap=softcap)
    shape: tuple[int, ...]
    for shape in ((2,), (4, 1), ()):
        with pytest.raises(ValueError, match=r"sink_logits must have shape \(4,\), got"):
            attend(q, view, sink_logits=np.zeros(shape, np.float32))
    for shape in ((2,), (2, 4), (1, 3), (2, 3, 1)):
        with pytest.raises(ValueError, match=r"limits must have shape \(2, 3\), got"):
            attend(q, view, limits=np.zeros(shape, np.int64))
    n = 4 + 2 * 32 + 9
    for shape in ((2, 1, 3, n - 1), (1, 1, 3, n), (2, 2, 3, n), (2, 1, 1, n), (2, 3, n)):
        with pytest.raises(ValueError, match=rf"bias must have shape \(2, 1 or 4, 3, n >= {n}\), got"):
            attend(q, view, bias=np.zeros(shape, np.float32))
    with pytest.raises(ValueError, match=r"coefficients must be .*int16.*int8.*, got 'int4'"):
        attend(q, view, coefficients="int4")
    with pytest.raises(ValueError, match="engine='cuda_raw' does not run on numpy arrays"):
        attend(q, view, engine="cuda_raw")
