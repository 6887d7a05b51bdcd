"""What rounding coefficients costs attention over pages, on data of several kinds and with outlying numbers."""

from __future__ import annotations

import numpy as np
import pytest

from kvsketch import pages
from kvsketch._attend import COEFFICIENTS
from kvsketch.attention import CacheView, attend
from kvsketch.cache import Cache
from kvsketch.codecs import GroupedInts, SignSketch
from kvsketch.layout import page_layout
from kvsketch.tests.page_cases import ROUNDING, attend_exactly

INTS = (GroupedInts(2, 32), GroupedInts(2, 32))

per_kind = pytest.mark.parametrize("kind", COEFFICIENTS)


def queries(b, hq, s, d, seed=0):
    return np.random.default_rng(1000 + seed).standard_normal((b, hq, s, d)).astype(np.float32)


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
