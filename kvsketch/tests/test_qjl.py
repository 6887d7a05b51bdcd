"""Sign sketches: bits and norms over engines and against float64, odd inputs, and bad arguments."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvsketch.qjl import SketchedKeys, select_outlier_channels, sketch_keys, sketch_scores
from kvsketch.rotation import KINDS, Projection, draw_projection
from kvsketch.testing import CPU_ENGINES, assert_accurate, assert_same

ARRAYS = ("signs", "norms", "outlier_signs", "outlier_norms", "channels")
DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)

every_engine = pytest.mark.parametrize("engine", CPU_ENGINES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def draw(shape: tuple[int, ...], dtype=np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def exact_estimate(q, k, projection, constant=None) -> np.ndarray:
    """Definition 3.1 in float64, (b, hq, s, n); rows with a projection near 0 agree with float32 but by rare chance."""
    q, k, matrix = (np.asarray(a).astype(np.float64) for a in (q, k, projection.matrix))
    k = np.repeat(k, q.shape[1] // max(k.shape[1], 1), axis=1)
    signs = np.where(k @ matrix.T >= 0, 1.0, -1.0)
    norms = np.linalg.norm(k, axis=-1).astype(np.float16).astype(np.float64)
    constant = projection.constant if constant is None else constant
    return (q @ matrix.T) @ signs.swapaxes(-1, -2) * norms[:, :, None] * constant / projection.m


def assert_same_keys(actual: SketchedKeys, expected: SketchedKeys) -> None:
    for name in ARRAYS:
        found, wanted = getattr(actual, name), getattr(expected, name)
        assert (found is None) == (wanted is None), name
        if wanted is not None:
            assert_same(found, wanted)
    for name in ("m", "outlier_m", "page", "saturated"):
        assert getattr(actual, name) == getattr(expected, name), name


# Sketches.


@every_dtype
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("d", "m"), [(1, 1), (3, 7), (64, 256), (80, 64), (96, 100), (128, 129), (512, 40)])
def test_same_bits_on_all_engines(dtype, kind, d, m):
    k = draw((2, 3, 45, d), dtype, seed=d)
    projection = draw_projection(m, d, kind=kind)
    expected = sketch_keys(k, projection, engine="reference")
    assert expected.signs.shape == (2, 3, 45, -(-m // 8))
    assert expected.norms.shape == (2, 3, 45)
    assert expected.saturated == 0
    assert expected.nbytes == expected.signs.nbytes + expected.norms.nbytes
    assert_same_keys(sketch_keys(k, projection, engine="numba_cpu"), expected)
    assert_same_keys(sketch_keys(k, projection), expected)


@every_dtype
@pytest.mark.parametrize("page", [32, 7, 100])
def test_same_bits_with_outliers_on_all_engines(dtype, page):
    d = 64
    k = draw((2, 3, 45, d), dtype, seed=1)
    k[:, :, :, 5] *= 20
    first, second = draw_projection(96, d), draw_projection(40, d, stream=1)
    options: dict[str, Any] = {"outliers": 5, "outlier_projection": second, "page": page}
    expected = sketch_keys(k, first, engine="reference", **options)
    assert expected.channels.shape == (2, 3, -(-45 // page), 5)
    assert expected.channels.dtype == np.uint8
    assert (expected.channels == 5).any(axis=-1).all()
    assert_same_keys(sketch_keys(k, first, engine="numba_cpu", **options), expected)


@every_engine
@every_dtype
def test_signs_and_norms_against_float64(engine, dtype):
    """A float32 sum may differ in sign from float64 only where it nearly cancels."""
    k = draw((2, 2, 40, 96), dtype)
    projection = draw_projection(200, 96)
    keys = sketch_keys(k, projection, engine=engine)
    exact = k.astype(np.float64) @ projection.matrix.astype(np.float64).T
    bits = np.unpackbits(keys.signs, axis=-1, bitorder="little")[..., :200].astype(bool)
    clear = np.abs(exact) > 1e-4
    assert clear.mean() > 0.99
    np.testing.assert_array_equal(bits[clear], exact[clear] >= 0)
    norms = np.linalg.norm(k.astype(np.float64), axis=-1)
    np.testing.assert_allclose(keys.norms.astype(np.float64), norms, rtol=2.0**-11 * 1.01)


@every_engine
def test_a_token_is_sketched_alike_in_any_company(engine):
    k = draw((2, 3, 70, 64), seed=2)
    projection = draw_projection(128, 64)
    whole = sketch_keys(k, projection, engine=engine)
    for piece in (np.s_[1:, 2:, 5:6], np.s_[:1, :, 60:]):
        assert_same(sketch_keys(k[piece], projection, engine=engine).signs, whole.signs[piece])
        assert_same(sketch_keys(k[piece], projection, engine=engine).norms, whole.norms[piece])


@every_engine
def test_strided_and_read_only(engine):
    base = draw((2, 50, 3, 128))
    base.flags.writeable = False
    k = base.swapaxes(1, 2)[:, :, ::-1, ::2]
    first, second = draw_projection(96, 64), draw_projection(32, 64, stream=1)
    options: dict[str, Any] = {"outliers": 4, "outlier_projection": second, "engine": engine}
    keys = sketch_keys(k, first, **options)
    assert_same_keys(keys, sketch_keys(k.copy(), first, **options))
    q = base.swapaxes(1, 2)[:, :, :4, 1::2]
    scores = sketch_scores(q, keys, first, outlier_projection=second, engine=engine)
    views = replace(keys, signs=keys.signs[:, ::-1], norms=keys.norms[:, ::-1], channels=keys.channels[:, ::-1])
    views = replace(views, outlier_signs=keys.outlier_signs[:, ::-1], outlier_norms=keys.outlier_norms[:, ::-1])
    assert_same(sketch_scores(q[:, ::-1], views, first, outlier_projection=second, engine=engine), scores[:, ::-1])


@every_engine
def test_golden_sketch(engine):
    """Bits of a projection by hand: sign(0) is +1, bit i of byte i // 8 is row i."""
    rows = np.array([[1, 1], [1, -1], [-1, 1], [0, 0], [0, -1], [-1, -1], [1, 0], [2, -1], [-3, 1]], dtype=np.float32)
    projection = Projection("gaussian", 9, 2, 0, 0, rows, 1.0)
    k = np.array([[1, 1], [0, 0], [3, 4], [-0.0, -2]], dtype=np.float32).reshape(1, 1, 4, 2)
    keys = sketch_keys(k, projection, engine=engine)
    assert keys.signs[0, 0].tolist() == [[0b11001111, 0], [0b11111111, 1], [0b11001101, 0], [0b11111010, 0]]
    assert keys.norms[0, 0].tolist() == [np.float16(math.sqrt(2)), 0, 5, 2]


@every_engine
def test_sums_run_in_channel_order_with_rounded_products(engine):
    """Bits that another order of the sum, a wider sum or a fused multiply-add would turn."""
    e = 2.0**-12
    rows = np.array([[1, 1, 1, 1], [1, -(1 + e), 0, 0]], dtype=np.float32)
    projection = Projection("gaussian", 2, 4, 0, 0, rows, 1.0)
    k = np.array([[1e8, 1, -1e8, -0.5], [1 + 2 * e, 1 + e, 0, 0]], dtype=np.float32).reshape(1, 1, 2, 4)
    assert sketch_keys(k, projection, engine=engine).signs[0, 0, :, 0].tolist() == [0b10, 0b11]


# Scores.


@every_engine
@every_dtype
@pytest.mark.parametrize(("hq", "h"), [(4, 4), (16, 4), (32, 8), (7, 1), (14, 2)])
def test_grouped_query_heads(engine, dtype, hq, h):
    d = 64
    k, q = draw((2, h, 37, d), dtype), draw((2, hq, 3, d), dtype, seed=1)
    projection = draw_projection(96, d)
    keys = sketch_keys(k, projection, engine=engine)
    assert keys.norms.shape == (2, h, 37)
    scores = sketch_scores(q, keys, projection, engine=engine)
    assert scores.shape == (2, hq, 3, 37)
    assert scores.dtype == dtype
    exact = exact_estimate(q, k, projection)
    reference = sketch_scores(q, keys, projection, engine="reference")
    assert_accurate(reference, exact, exact.astype(dtype))
    assert_accurate(scores, exact, reference)


@every_engine
@pytest.mark.parametrize("d", [1, 2, 3, 64, 80, 96, 128, 256, 511, 512])
def test_head_sizes_and_outliers_against_float64(engine, d):
    outliers, page = min(d, 8), 16
    k, q = draw((1, 2, 45, d)), draw((1, 4, 2, d), seed=1)
    k[..., d // 2] += 30
    first, second = draw_projection(d + 5, d), draw_projection(24, d, stream=1)
    keys = sketch_keys(k, first, outliers=outliers, outlier_projection=second, page=page, engine=engine)
    assert keys.channels.dtype == (np.uint8 if d <= 256 else np.uint16)
    exact = np.empty((1, 4, 2, 45))
    for start in range(0, 45, page):
        for head in range(4):
            mask = np.zeros(d, dtype=bool)
            mask[keys.channels[0, head // 2, start // page]] = True
            one_q = q[:, head : head + 1]
            one_k = k[:, head // 2 : head // 2 + 1, start : start + page]
            exact[:, head : head + 1, :, start : start + page] = exact_estimate(
                one_q * ~mask, one_k * ~mask, first
            ) + exact_estimate(one_q * mask, one_k * mask, second)
    reference = sketch_scores(q, keys, first, outlier_projection=second, engine="reference")
    assert_accurate(reference, exact, exact.astype(np.float32))
    assert_accurate(sketch_scores(q, keys, first, outlier_projection=second, engine=engine), exact, reference)


@every_engine
@pytest.mark.parametrize("n", [0, 1, 31, 32, 33, 65])
def test_any_length(engine, n):
    first, second = draw_projection(32, 16), draw_projection(16, 16, stream=1)
    for outliers in (0, 3):
        options: dict[str, Any] = {"outlier_projection": second} if outliers else {}
        keys = sketch_keys(draw((2, 2, n, 16)), first, outliers=outliers, engine=engine, **options)
        for shape in [(2, 4, 1, 16), (2, 4, 0, 16)]:
            scores = sketch_scores(draw(shape), keys, first, engine=engine, **options)
            assert scores.shape == (*shape[:3], n)
    keys = sketch_keys(draw((0, 2, n, 16)), first, engine=engine)
    assert sketch_scores(draw((0, 4, 1, 16)), keys, first, engine=engine).shape == (0, 4, 1, n)


@every_engine
def test_zero_key_and_zero_query_score_zero(engine):
    k, q = draw((1, 2, 40, 32)), draw((1, 2, 3, 32), seed=1)
    k[:, :, 7] = 0
    q[:, :, 1] = 0
    first, second = draw_projection(64, 32), draw_projection(16, 32, stream=1)
    for outliers in (0, 4):
        options: dict[str, Any] = {"outlier_projection": second} if outliers else {}
        keys = sketch_keys(k, first, outliers=outliers, engine=engine, **options)
        scores = sketch_scores(q, keys, first, engine=engine, **options)
        assert (keys.signs[:, :, 7] == 255).all()
        assert (scores[..., 7] == 0).all()
        assert (scores[:, :, 1] == 0).all()
        assert (scores[:, :, 0, :7] != 0).all()


# Odd inputs.


@every_engine
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_bad_numbers_spoil_their_own_token_only(engine, bad):
    k, q = draw((2, 2, 70, 32)), draw((2, 4, 2, 32), seed=1)
    projection = draw_projection(64, 32)
    clean = sketch_keys(k, projection, engine=engine)
    expected = sketch_scores(q, clean, projection, engine=engine)
    k[1, 0, 40, 3] = bad
    keys = sketch_keys(k, projection, engine=engine)
    assert_same_keys(keys, sketch_keys(k, projection, engine="reference"))
    scores = sketch_scores(q, keys, projection, engine=engine)
    others = np.ones((2, 2, 70), dtype=bool)
    others[1, 0, 40] = False
    assert_same(keys.signs[others], clean.signs[others])
    assert_same(keys.norms[others], clean.norms[others])
    spoilt = np.zeros(scores.shape, dtype=bool)
    spoilt[1, :2, :, 40] = True
    assert_same(scores[~spoilt], expected[~spoilt])
    if np.isnan(bad):
        assert np.isnan(scores[spoilt]).all()
        assert keys.saturated == 0
    else:
        assert keys.norms[1, 0, 40] == 65504
        assert keys.saturated == 1
    q[0, 1, 1, 5] = bad
    worse = sketch_scores(q, clean, projection, engine=engine)
    assert not np.isfinite(worse[0, 1, 1]).any()
    worse[0, 1, 1] = expected[0, 1, 1]
    assert_same(worse, expected)


@every_engine
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_numbers_with_outliers_stay_in_their_page(engine, bad):
    k = draw((1, 2, 70, 32))
    first, second = draw_projection(64, 32), draw_projection(16, 32, stream=1)
    options: dict[str, Any] = {"outliers": 4, "outlier_projection": second}
    clean = sketch_keys(k, first, engine=engine, **options)
    k[0, 1, 40, 3] = bad
    keys = sketch_keys(k, first, engine=engine, **options)
    assert_same_keys(keys, sketch_keys(k, first, engine="reference", **options))
    assert 3 in keys.channels[0, 1, 1]
    others = np.ones((1, 2, 70), dtype=bool)
    others[0, 1, 32:64] = False
    for name in ("signs", "norms", "outlier_signs", "outlier_norms"):
        assert_same(getattr(keys, name)[others], getattr(clean, name)[others])
    assert np.isfinite(keys.norms.astype(np.float32)).all()  # the bad channel is split off


@every_engine
def test_large_norms_saturate_and_are_counted(engine):
    k = np.zeros((1, 1, 6, 8), dtype=np.float32)
    k[0, 0, :, 0] = [65504, 65505, 1e30, 3e38, 65503, 1e-9]
    first, second = draw_projection(16, 8), draw_projection(16, 8, stream=1)
    keys = sketch_keys(k, first, engine=engine)
    assert keys.norms[0, 0].tolist() == [65504, 65504, 65504, 65504, 65504, 0]
    assert keys.saturated == 3
    keys = sketch_keys(k, first, outliers=1, outlier_projection=second, engine=engine)
    assert keys.saturated == 3
    assert (keys.norms == 0).all()
    half = np.full((1, 1, 2, 8), 60000, dtype=np.float16)
    keys = sketch_keys(half, first, engine=engine)
    assert keys.saturated == 2
    assert np.isfinite(sketch_scores(half.astype(np.float32), keys, first, engine=engine)).all()
    assert np.isinf(sketch_scores(half, keys, first, engine=engine)).all()


# Bad arguments.


def test_bad_arguments():
    k, q = draw((1, 2, 5, 8)), draw((1, 4, 1, 8))
    not_a_projection: Any = np.ones((16, 8), dtype=np.float32)
    first, second = draw_projection(16, 8), draw_projection(8, 8, stream=1)
    keys = sketch_keys(k, first)
    split = sketch_keys(k, first, outliers=2, outlier_projection=second)
    with pytest.raises(TypeError, match="k has dtype float64; cast it"):
        sketch_keys(k.astype(np.float64), first)
    with pytest.raises(ValueError, match=r"k must have shape \(b, h, n, d\), got \(2, 5, 8\)"):
        sketch_keys(k[0], first)
    with pytest.raises(TypeError, match="projection must be a Projection from draw_projection, got ndarray"):
        sketch_keys(k, not_a_projection)
    with pytest.raises(ValueError, match=r"projection is for head size 8, but k has shape \(1, 2, 5, 6\)"):
        sketch_keys(k[..., :6], first)
    with pytest.raises(ValueError, match="outliers=9 is more than the 8 channels"):
        sketch_keys(k, first, outliers=9, outlier_projection=second)
    with pytest.raises(ValueError, match="outliers=2 needs an outlier_projection"):
        sketch_keys(k, first, outliers=2)
    with pytest.raises(ValueError, match="without outliers"):
        sketch_keys(k, first, outlier_projection=second)
    with pytest.raises(ValueError, match="draw an independent one with stream=1"):
        sketch_keys(k, first, outliers=2, outlier_projection=first)
    with pytest.raises(ValueError, match="page must be >= 1, got 0"):
        sketch_keys(k, first, page=0)
    with pytest.raises(ValueError, match="outliers must be >= 0, got -1"):
        select_outlier_channels(k, -1)
    with pytest.raises(ValueError, match="q has 3 heads, which is not a multiple of the 2 key/value heads"):
        sketch_scores(q[:, :3], keys, first)
    with pytest.raises(ValueError, match="keys hold a batch of 1"):
        sketch_scores(np.repeat(q, 2, axis=0), keys, first)
    with pytest.raises(ValueError, match="projection has m=8 rows, but keys hold 16 signs"):
        sketch_scores(q, keys, second)
    with pytest.raises(ValueError, match="keys were sketched without outliers"):
        sketch_scores(q, keys, first, outlier_projection=second)
    with pytest.raises(ValueError, match="keys were sketched with outliers; give their outlier_projection"):
        sketch_scores(q, split, first)
    with pytest.raises(TypeError, match="q has dtype int64"):
        sketch_scores(q.astype(np.int64), keys, first)
    with pytest.raises(ValueError, match="engine='cuda_raw' does not run on numpy"):
        sketch_keys(k, first, engine="cuda_raw")
