"""Attention over pages: torch's as an oracle, threads, memory, numbers that are large or none, and errors."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from kvsketch._attend import COEFFICIENTS
from kvsketch.attention import attend
from kvsketch.codecs import Exact, GroupedInts, SignSketch
from kvsketch.layout import page_layout
from kvsketch.numba_cpu import _threads
from kvsketch.testing import CPU_ENGINES, assert_accurate, assert_same
from kvsketch.tests.page_cases import Row, assert_rounded, attend_exactly, make_view

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
