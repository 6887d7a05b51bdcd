"""Bounds against simulation and independent numerics; every statistic is shown to reject a broken twin."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad

from kvsketch import bounds, kivi
from kvsketch._sketch_bounds import _block_variance
from kvsketch.codecs import GroupedInts, SignSketch
from kvsketch.layout import side_layout
from kvsketch.testing import assert_mean, assert_rate_at_most

COSINES = (-1.0, -0.5, 0.0, 0.3, 1.0)


def unit_pair(d, cosine, seed=3):
    """Unit vectors q and k of `d` >= 2 channels with that cosine, in no special direction."""
    basis = np.linalg.qr(np.random.default_rng(seed).standard_normal((d, 2)))[0]
    return cosine * basis[:, 0] + math.sqrt(1 - cosine**2) * basis[:, 1], basis[:, 0]


def haar_blocks(rng, draws, m, d):
    """`draws` matrices (m, d) of independent Haar-orthogonal blocks with rows of norm sqrt(d)."""
    blocks = []
    for rows in [d] * (m // d) + [m % d] * (m % d > 0):
        q, r = np.linalg.qr(rng.standard_normal((draws, d, d)))
        q *= np.sign(np.diagonal(r, axis1=1, axis2=2))[:, None, :]
        blocks.append(math.sqrt(d) * q[:, :rows])
    return np.concatenate(blocks, axis=1)


@lru_cache(maxsize=1)
def draw_rows(kind, draws, m, d, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((draws, m, d)) if kind == "gaussian" else haar_blocks(rng, draws, m, d)


def estimates(rows, q, k, constant):
    return constant * np.linalg.norm(k) * np.mean((rows @ q) * np.where(rows @ k >= 0, 1, -1), axis=-1)


# ---- constant ----


@pytest.mark.parametrize("d", [2, 3, 8, 64, 100, 512])
def test_constant_inverts_the_mean_of_a_coordinate_on_the_sphere(d):
    # A coordinate a of a uniform unit vector has density proportional to (1 - a^2)^((d-3)/2); take a = sin(angle).
    weight, _ = quad(lambda angle: math.cos(angle) ** (d - 2), 0, math.pi / 2)
    mean, _ = quad(lambda angle: math.sin(angle) * math.cos(angle) ** (d - 2), 0, math.pi / 2)
    assert bounds.sketch_constant(d) * math.sqrt(d) * mean / weight == pytest.approx(1, rel=1e-9)


def test_constant_at_the_ends():
    assert bounds.sketch_constant(1) == pytest.approx(1)
    assert bounds.sketch_constant(7, "hadamard") == bounds.sketch_constant(7, "orthogonal")
    assert bounds.sketch_constant(7, "gaussian") == math.sqrt(math.pi / 2)
    assert bounds.sketch_constant(10**6) == pytest.approx(math.sqrt(math.pi / 2), rel=1e-6)


def test_published_constant_is_off_by_one_in_four_d():
    for d in (16, 64, 128):
        assert bounds.sketch_constant_bias_published(d) == pytest.approx(1 / (4 * d), rel=0.03)
    assert round(100 * bounds.sketch_constant_bias_published(64), 2) == 0.39


@pytest.mark.parametrize("cosine", COSINES)
@pytest.mark.parametrize(("kind", "m"), [("gaussian", 12), ("orthogonal", 5), ("orthogonal", 20)])
def test_estimates_are_unbiased(kind, m, cosine):
    # N = 40,000 draws, z test with the exact variance; false alarm 1e-6 in all 15 cases together.
    d = 8
    q, k = unit_pair(d, cosine)
    found = estimates(draw_rows(kind, 40_000, m, d), q, k, bounds.sketch_constant(d, kind))
    assert_mean(found, cosine, max(bounds.sketch_variance(m, d, cosine, kind=kind), 1e-30), tests=15)


def test_the_published_constant_fails_for_orthogonal_rows():
    q, k = unit_pair(8, 1.0)
    found = estimates(draw_rows("orthogonal", 40_000, 20, 8), q, k, math.sqrt(math.pi / 2))
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean(found, 1.0, bounds.sketch_variance(20, 8, 1.0))


# ---- variance ----

VARIANCE_CASES = [("gaussian", 12, 8), ("orthogonal", 1, 8), ("orthogonal", 5, 8), ("orthogonal", 8, 8)]
VARIANCE_CASES += [("orthogonal", 24, 8), ("orthogonal", 21, 8), ("orthogonal", 3, 2)]


@pytest.mark.parametrize("cosine", COSINES)
@pytest.mark.parametrize(("kind", "m", "d"), VARIANCE_CASES)
def test_variance_is_exact(kind, m, d, cosine):
    # N = 40,000 squared deviations against the formula, z test; false alarm 1e-6 in all cases together.
    q, k = unit_pair(d, cosine)
    found = estimates(draw_rows(kind, 40_000, m, d, seed=1), q, k, bounds.sketch_constant(d, kind))
    variance = bounds.sketch_variance(m, d, cosine, kind=kind)
    assert_mean((found - cosine) ** 2, variance, tests=len(VARIANCE_CASES) * len(COSINES))


@pytest.mark.parametrize("cosine", [0.0, 1.0])
@pytest.mark.parametrize("m", [8, 21])
def test_orthogonal_rows_do_not_vary_like_independent_ones(m, cosine):
    q, k = unit_pair(8, cosine)
    found = estimates(draw_rows("orthogonal", 40_000, m, 8, seed=1), q, k, bounds.sketch_constant(8))
    independent = (bounds.sketch_constant(8) ** 2 - cosine**2) / m
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean((found - cosine) ** 2, independent)


def test_one_block_formula_fails_for_several_blocks():
    q, k = unit_pair(8, 0.5)
    found = estimates(draw_rows("orthogonal", 40_000, 12, 8, seed=1), q, k, bounds.sketch_constant(8))
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean((found - 0.5) ** 2, _block_variance(12, 8, 0.5))


def test_full_blocks_need_2_8_to_8_times_fewer_rows():
    gain = [bounds.sketch_variance(512, 512, t, kind="gaussian") / bounds.sketch_variance(512, 512, t) for t in (0, 1)]
    assert gain == pytest.approx([2.75, 8.06], rel=0.01)


def test_variance_of_one_channel_and_of_arrays():
    assert bounds.sketch_variance(3, 1, 1.0) == pytest.approx(0, abs=1e-15)
    together = bounds.sketch_variance(21, 8, np.array(COSINES))
    assert together.tolist() == [bounds.sketch_variance(21, 8, t) for t in COSINES]
    assert isinstance(bounds.sketch_variance(21, 8, 0.5), float)


# ---- tail: Lemma 3.5 ----


def failures(m, eps, cosine, draws, seed=0):
    """How many of `draws` Gaussian sketches of a pair of 3-vectors are off by more than eps |q||k|."""
    rng = np.random.default_rng(seed)
    q, k = unit_pair(3, cosine)
    count = 0
    for _ in range(0, draws, 1000):
        found = estimates(rng.standard_normal((1000, m, 3)), 2 * q, 5 * k, math.sqrt(math.pi / 2))
        count += int((np.abs(found - 10 * cosine) > eps * 10).sum())
    return count


@pytest.mark.parametrize("cosine", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("delta", [0.05, 0.001])
def test_proved_size_keeps_its_promise(cosine, delta):
    # N = 10,000 draws; fails when so many misses have a chance below 1e-6 at rate delta.
    eps = 0.5
    m = bounds.sketch_size(eps, delta)
    assert bounds.sketch_failure_bound(m, eps) <= delta < bounds.sketch_failure_bound(m - 1, eps)
    assert_rate_at_most(failures(m, eps, cosine, 10_000), 10_000, delta, tests=6)


def test_published_size_breaks_its_promise():
    # Lemma 3.5 as published, q orthogonal to k: at delta = .05 it holds, at .001 the rate is .0037 (N = 20,000).
    eps, delta = 0.3, 0.001
    m = bounds.sketch_size_published(eps, delta)
    count = failures(m, eps, 0.0, 20_000)
    with pytest.raises(AssertionError, match=r"at rate 0\.001"):
        assert_rate_at_most(count, 20_000, delta)
    assert_rate_at_most(count, 20_000, bounds.sketch_failure_orthogonal_pair(m, eps))
    assert_rate_at_most(20_000 - count, 20_000, 1 - bounds.sketch_failure_orthogonal_pair(m, eps))


def test_published_size_fails_below_1_356_and_only_there():
    def exact(eps, delta):
        return bounds.sketch_failure_orthogonal_pair(bounds.sketch_size_published(eps, delta), eps) / delta

    assert exact(0.3, 0.05) < 1
    assert [round(exact(0.3, delta) * delta, 4) for delta in (0.05, 0.01, 0.001)] == pytest.approx(
        [0.0422, 0.0151, 0.0037], abs=1e-6
    )
    for eps in (0.1, 0.5, 1.0):
        assert exact(eps, 1e-12) > 1
    assert exact(1.4, 1e-300) < 1


def test_exact_failure_of_an_orthogonal_pair_respects_the_bound():
    for m in (1, 10, 100, 1000):
        for eps in (0.01, 0.1, 0.5, 2.0):
            assert bounds.sketch_failure_orthogonal_pair(m, eps) <= bounds.sketch_failure_bound(m, eps)
    assert bounds.sketch_failure_bound(1, 1e-3) == 1.0


# ---- scores: Theorem 3.6 ----


def score_misses(m, norm, n, limit, draws, seed=0):
    """Draws in which a softmax score of n keys orthogonal to q is off by more than `limit`, all norms `norm`."""
    rng = np.random.default_rng(seed)
    d = 4
    q = np.eye(d)[0] * norm
    keys = rng.standard_normal((n, d)) * (np.arange(d) > 0)
    keys *= norm / np.linalg.norm(keys, axis=1, keepdims=True)
    count = 0
    for _ in range(draws):
        rows = rng.standard_normal((m, d))
        logits = math.sqrt(math.pi / 2) * norm / m * ((rows @ q) @ np.where(rows @ keys.T >= 0, 1.0, -1.0))
        scores = np.exp(logits - logits.max())
        scores /= scores.sum()
        count += bool(np.any(np.abs(scores - 1 / n) > limit / n))
    return count


def test_proved_score_size_keeps_its_promise():
    # N = 500 draws at delta = .05, all 8 scores within 3 eps; chance of a false alarm 1e-6.
    eps, norm, n, delta = 0.38, 1.5, 8, 0.05
    assert bounds.score_error_bound(eps) <= 3 * eps < 3 * 0.39 < bounds.score_error_bound(0.39)
    m = bounds.score_sketch_size(eps, n, norm=norm, delta=delta)
    assert m == math.ceil(math.pi * norm**4 / eps**2 * math.log(2 * n / delta))
    assert_rate_at_most(score_misses(m, norm, n, 3 * eps, 500), 500, delta)


def test_published_score_size_breaks_its_promise():
    # Theorem 3.6 as published, with norms of 4 and 64 keys: misses in most of N = 100 draws.
    eps, norm, n = 0.3, 4.0, 64
    count = score_misses(bounds.score_sketch_size_published(eps, n, norm=norm), norm, n, 3 * eps, 100)
    with pytest.raises(AssertionError, match=r"at rate 0\.5"):
        assert_rate_at_most(count, 100, 0.5)


# ---- attention ----


def test_attention_error_bound_is_attained_by_two_values_and_by_no_others():
    # Two values, 0 and 1: the output is the weight of the second, sigmoid of the difference of their scores.
    for eps in (1e-3, 0.1, 1.0, 5.0):
        logits = np.linspace(-10, 10, 4001)
        change = 1 / (1 + np.exp(-(logits + 2 * eps))) - 1 / (1 + np.exp(-logits))
        assert change.max() <= bounds.attention_error_bound(eps, 1.0) * (1 + 1e-12)
        at_its_worst = 1 / (1 + math.exp(-eps)) - 1 / (1 + math.exp(eps))
        assert at_its_worst == pytest.approx(bounds.attention_error_bound(eps, 1.0), rel=1e-9)
        assert bounds.attention_error_bound(eps, 1.0) < bounds.score_error_bound(eps) / 4
    assert bounds.attention_error_bound(0.1, 3.0, value_error=2.0) == bounds.attention_error_bound(0.1, 3.0) + 2.0


# ---- quantizer ----


@settings(deadline=None, max_examples=200)
@given(
    bits=st.sampled_from([1, 2, 3, 4, 8]),
    offset=st.floats(-3e4, 3e4),
    spread=st.sampled_from([0.0, 1e-8, 3e-7, 1e-5, 1e-3, 0.1, 1.0, 50.0, 5000.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_quantizer_error_is_bounded(bits, offset, spread, seed):
    rng = np.random.default_rng(seed)
    x = (rng.choice([0.0, offset]) + spread * rng.uniform(-1, 1, (40, 16))).astype(np.float32)
    codes = kivi.quantize_groups(x, bits=bits, group=16, axis="channels", engine="reference")
    error = np.abs(kivi.dequantize_groups(codes, engine="reference").astype(np.float64) - x)
    bound = bounds.quantizer_error_bound(x.min(axis=1), x.max(axis=1), bits)
    assert np.all(error.max(axis=1) <= bound)
    # The form a reader remembers: half a step, or the rounding of zero and range to float16.
    lo, span = np.abs(x.min(axis=1).astype(np.float64)), np.ptp(x.astype(np.float64), axis=1)
    step = span / (2**bits - 1)
    tiny = (2**bits) * 2.0**-25
    rough = np.maximum(step / 2 * (1 + 2**-11), 2**-11 * (lo + span)) + tiny + 2.0**-21 * (lo + 2 * span)
    assert np.all(bound <= rough)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_quantizer_bound_is_tight(bits):
    # Broken twin: 0.9 of the bound is exceeded.
    x = np.random.default_rng(0).uniform(-1, 1, (100, 64)).astype(np.float32)
    codes = kivi.quantize_groups(x, bits=bits, group=64, axis="channels", engine="reference")
    error = np.abs(kivi.dequantize_groups(codes, engine="reference") - x).max(axis=1)
    bound = bounds.quantizer_error_bound(x.min(axis=1), x.max(axis=1), bits)
    assert np.all(error <= bound)
    assert np.any(error > 0.9 * bound)


def test_the_textbook_bound_fails_far_from_zero():
    x = np.linspace(100.02, 100.03, 32, dtype=np.float32)[None]
    codes = kivi.quantize_groups(x, bits=8, group=32, axis="channels", engine="reference")
    back = kivi.dequantize_groups(codes, engine="reference").astype(np.float64)
    assert back == pytest.approx(np.full((1, 32), 100.01), abs=1e-4)
    error, textbook = np.abs(back - x), bounds.quantizer_error_bound_textbook(100.02, 100.03, 8)
    assert error.min() > 400 * textbook
    assert error.max() <= bounds.quantizer_error_bound(float(x.min()), float(x.max()), 8)


# ---- bits ----


def test_bits_of_the_published_settings():
    assert bounds.kivi_bits(2, 32) == 3
    assert bounds.kivi_bits(4, 32) == 5
    assert bounds.kivi_bits(2, 64, 96) == pytest.approx((64 + 32) * 2 / 96 + 2 * 32 / 96)
    early, late = (
        [bounds.sketch_bits(d, m, outliers=8, outlier_m=outlier_m) for d in (64, 128)]
        for m, outlier_m in ((512, 128), (256, 256))
    )
    assert (round(early[0], 2), round(late[0], 2)) == (10.53, 8.53)
    keys = (15 * early[1] + 17 * late[1]) / 32
    assert round((keys + bounds.kivi_bits(2, 32)) / 2, 2) == 3.87
    assert bounds.sketch_bits(64, 256) == 272 / 64


def test_bits_equal_the_bytes_of_pages_without_padding():
    for codec in (
        SignSketch(256),
        SignSketch(512, outliers=8, outlier_m=128),
        SignSketch(64, outliers=3, outlier_m=32),
    ):
        for d in (64, 128, 320):
            side = side_layout("keys", codec, 32, d)
            bits = bounds.sketch_bits(d, codec.m, outliers=codec.outliers, outlier_m=codec.outlier_m)
            assert side.used_bytes * 8 / (32 * d) == pytest.approx(bits)
    for bits in (1, 2, 3, 4, 8):
        side = side_layout("values", GroupedInts(bits, 64), 32, 96)
        assert side.used_bytes * 8 / (32 * 96) == pytest.approx(bounds.kivi_bits(bits, 64, 96))


# ---- arguments ----


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: bounds.sketch_constant(0), ValueError, "d must be >= 1, got 0"),
        (lambda: bounds.sketch_constant(8.0), TypeError, "d must be an integer, got 8.0"),  # type: ignore[arg-type]
        (lambda: bounds.sketch_constant(8, "haar"), ValueError, "kind must be one of .* got 'haar'"),
        (lambda: bounds.sketch_variance(0, 8, 0.5), ValueError, "m must be >= 1, got 0"),
        (lambda: bounds.sketch_variance(8, 8, 1.5), ValueError, r"cosine must lie in \[-1, 1\], got 1.5"),
        (lambda: bounds.sketch_variance(8, 8, math.nan), ValueError, "cosine must lie in"),
        (lambda: bounds.sketch_variance(8, 8, 0.5, kind="hadamard"), ValueError, "kind must be one of"),
        (lambda: bounds.sketch_size(0, 0.1), ValueError, "eps must be a positive number, got 0"),
        (lambda: bounds.sketch_size(0.1, 1), ValueError, "delta must lie strictly between 0 and 1, got 1"),
        (lambda: bounds.score_sketch_size(0.1, 4, norm=-1, delta=0.1), ValueError, "norm must be a positive number"),
        (lambda: bounds.score_sketch_size_published(0.1, 1, norm=1), ValueError, "n must be >= 2, got 1"),
        (lambda: bounds.attention_error_bound(0, 1), ValueError, "eps must be a positive number, got 0"),
        (lambda: bounds.attention_error_bound(1, -1), ValueError, "spread must be a number of at least 0, got -1"),
        (lambda: bounds.attention_error_bound(1, 1, value_error=math.inf), ValueError, "value_error must be a number"),
        (lambda: bounds.quantizer_error_bound(1, 0, 2), ValueError, "lo=1.0 and hi=0.0"),
        (lambda: bounds.quantizer_error_bound(0, 7e4, 2), ValueError, "the bound needs"),
        (lambda: bounds.quantizer_error_bound(-6e4, 6e4, 1), ValueError, "the bound needs"),
        (lambda: bounds.quantizer_error_bound(0, 1, 5), ValueError, "bits must be one of"),
        (lambda: bounds.kivi_bits(2, 0), ValueError, "group must be >= 1"),
        (lambda: bounds.sketch_bits(64, 256, outliers=8), ValueError, "outliers=8 and outlier_m=0 go together"),
        (
            lambda: bounds.sketch_bits(64, 256, outliers=65, outlier_m=8),
            ValueError,
            "outliers must be between 0 and 64",
        ),
    ],
)
def test_bad_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
