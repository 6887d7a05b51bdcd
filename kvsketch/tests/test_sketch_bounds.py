"""Moments, gains, tails of orthogonal rows and mean weights of sketches, against quadrature and simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats
from scipy.integrate import quad
from scipy.special import erfcinv

from kvsketch import bounds
from kvsketch.testing import assert_mean, assert_rate_at_most


@pytest.mark.parametrize("order", range(1, 9))
def test_moments_are_those_of_a_scaled_normal_number(order):
    expected = stats.norm.expect(lambda g: (math.sqrt(math.pi / 2) * abs(g)) ** order)
    assert bounds.sketch_moment(order) == pytest.approx(expected, rel=1e-6)


def test_published_size_has_four_thirds_in_the_place_of_pi():
    for eps, delta in ((0.1, 0.01), (0.5, 0.001), (2.0, 0.1)):
        log = math.log(2 / delta)
        assert bounds.sketch_size_published(eps, delta) == math.ceil(4 / 3 * (1 + eps) / eps**2 * log)
        assert bounds.sketch_size_bernstein(eps, delta) == math.ceil((math.pi + 4 / 3 * eps) / eps**2 * log)
        assert bounds.sketch_size(eps, delta) < bounds.sketch_size_bernstein(eps, delta)


def test_no_constant_of_bernstein_below_two_thirds_will_do():
    v = bounds.sketch_moment(2)
    needed = [
        (2 * bounds.sketch_moment(order) / (math.factorial(order) * v)) ** (1 / (order - 2)) for order in range(3, 60)
    ]
    assert needed[0] == pytest.approx(2 / 3)
    assert np.all(np.diff(needed) < 0)
    assert v > 2 / 3


def test_orthogonal_rows_always_help_and_by_how_much():
    gains = [
        bounds.sketch_orthogonal_gain(m, d, cosine)
        for d in (2, 3, 7, 64, 300)
        for m in (1, 2, 3, 64, 65, 1000)
        for cosine in (-1.0, -0.3, 0.0, 0.8, 1.0)
    ]
    assert min(gains) > 1
    assert bounds.sketch_orthogonal_gain(10**5, 10**5, 0.0) == pytest.approx(1 / (1 - 2 / math.pi), rel=1e-4)
    assert bounds.sketch_orthogonal_gain(10**4, 10**4, 1.0) == pytest.approx((math.pi - 2) / (math.pi - 3), rel=1e-3)
    with pytest.raises(ValueError, match="d must be >= 2, got 1"):
        bounds.sketch_orthogonal_gain(1, 1, 0.0)


def test_tail_of_orthogonal_rows_is_about_that_of_gaussian_ones():
    for d, ratio in ((2, 1.5708), (16, 1.034), (64, 1.0079), (1024, 1.0005)):
        exponents = [
            math.log(2 / bound)
            for bound in (bounds.sketch_failure_bound(500, 0.2), bounds.sketch_failure_bound_orthogonal(500, d, 0.2))
        ]
        assert exponents[0] / exponents[1] == pytest.approx(ratio, rel=1e-3)
        m = bounds.sketch_size_orthogonal(0.2, 0.01, d)
        assert bounds.sketch_failure_bound_orthogonal(m, d, 0.2) <= 0.01
        assert bounds.sketch_failure_bound_orthogonal(m - 1, d, 0.2) > 0.01
    assert bounds.sketch_failure_bound_orthogonal(1, 2, 0.01) == 1.0


def estimates_of_a_block(rng, draws, m, d, cosine):
    """Estimates of unit vectors with that cosine by one block of m Haar-orthogonal rows of norm sqrt(d)."""
    # The first two columns of a Haar matrix: what the rows make of two orthonormal vectors.
    a, b = np.linalg.qr(rng.standard_normal((draws, d, 2)))[0].transpose(2, 0, 1)
    # QR leaves the columns' signs to chance of its own; any fixed choice is made random here.
    a, b = (x * rng.choice((-1.0, 1.0), size=(draws, 1)) for x in (a, b))
    products = math.sqrt(d) * (cosine * a + math.sqrt(1 - cosine**2) * b)[:, :m]
    return bounds.sketch_constant(d) * np.mean(products * np.sign(a[:, :m]), axis=1)


@pytest.mark.parametrize(("m", "d"), [(8, 8), (5, 8), (2, 2), (1, 3)])
def test_a_block_estimate_has_the_law_of_the_proof(m, d):
    """The representation in the proof of the orthogonal tail, by a two-sample Kolmogorov-Smirnov test.

    N = 2 x 20,000; false alarm 1e-6 in all four cases. The twin, sqrt(m) in the place of sqrt(m - A^2), is found out.
    """
    rng, draws, t = np.random.default_rng(11), 20_000, 0.4
    w = math.sqrt(1 - t**2)
    a = rng.standard_normal((draws, d))
    a /= np.linalg.norm(a, axis=1, keepdims=True)
    x = rng.standard_normal((draws, d - 1))
    x = x[:, 0] / np.linalg.norm(x, axis=1)
    sums = np.abs(a[:, :m]).sum(axis=1)
    factor = bounds.sketch_constant(d) * math.sqrt(d) / m
    found = estimates_of_a_block(rng, draws, m, d, t)
    assert stats.ks_2samp(found, factor * (t * sums + w * np.sqrt(m - sums**2) * x)).pvalue > 1e-6 / 4
    if m > 1:
        assert stats.ks_2samp(found, factor * (t * sums + w * math.sqrt(m) * x)).pvalue < 1e-12


@pytest.mark.parametrize(("m", "d", "cosine"), [(8, 8, 0.0), (8, 8, 1.0), (5, 8, 0.6), (2, 2, 0.3)])
def test_moment_generating_function_stays_below_that_of_the_proof(m, d, cosine):
    """E e^(l (est - t)) <= e^(l^2 v/2): N = 20,000, by a normal approximation on the logarithms; chance 1e-6."""
    errors = estimates_of_a_block(np.random.default_rng(3), 20_000, m, d, cosine) - cosine
    v = bounds.sketch_constant(d) ** 2 * d / (m * (d - 1))
    for size in (-2.0, -0.5, 0.5, 2.0):
        scale = size / math.sqrt(v)
        weights = np.exp(scale * errors - size**2 / 2)
        assert weights.mean() - 1 <= 4.9 * weights.std() / math.sqrt(len(weights))


def test_orthogonal_size_keeps_its_promise_where_a_fifth_of_it_does_not():
    """N = 4000 blocks, eps = .5, delta = .05, d = 64; chance of a false alarm 1e-6."""
    rng, eps, delta, d = np.random.default_rng(5), 0.5, 0.05, 64
    m = bounds.sketch_size_orthogonal(eps, delta, d)
    assert m < d
    events = [int((np.abs(estimates_of_a_block(rng, 4000, rows, d, 0.0)) > eps).sum()) for rows in (m, m // 5)]
    assert_rate_at_most(events[0], 4000, delta)
    with pytest.raises(AssertionError, match=r"at rate 0\.05"):
        assert_rate_at_most(events[1], 4000, delta)


@pytest.mark.parametrize(("m", "score", "norm"), [(1, 0.0, 1.0), (4, 1.5, 2.0), (16, -3.0, 3.0), (100, 2.0, 5.0)])
def test_mean_weight_is_the_integral_over_a_row(m, score, norm):
    scale = math.sqrt(math.pi / 2) / m
    along, _ = quad(lambda x: math.exp(scale * score * abs(x) - x * x / 2), -30, 30, points=[0])
    across = math.exp(scale**2 * (norm**2 - score**2) / 2)
    expected = (along / math.sqrt(2 * math.pi) * across) ** m
    assert bounds.sketch_weight_mean(m, score, norm) == pytest.approx(expected, rel=1e-6)


def test_mean_weight_is_nearly_that_of_a_normal_score():
    m, norm = 256, 4.0
    for cosine in (-1.0, 0.0, 0.5, 1.0):
        variance = norm**2 * bounds.sketch_variance(m, 64, cosine, kind="gaussian")
        normal = math.exp(norm * cosine + variance / 2)
        assert bounds.sketch_weight_mean(m, norm * cosine, norm) == pytest.approx(normal, rel=1e-3)
    with pytest.raises(ValueError, match=r"score must lie in \[-norm, norm\]"):
        bounds.sketch_weight_mean(m, 4.1, norm)


def test_mean_weight_of_a_simulated_sketch():
    """N = 40,000, q orthogonal to k, where the estimate is normal: chance of a false alarm 1e-6. Twin: no effect."""
    m, norm = 20, 2.0
    x = np.random.default_rng(2).standard_normal((40_000, m))
    weights = np.exp(norm * math.sqrt(math.pi / 2) * x.mean(axis=1))
    assert_mean(weights, bounds.sketch_weight_mean(m, 0.0, norm))
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean(weights, 1.0)


def test_size_is_nearly_needed_for_small_delta():
    shares = [erfcinv(delta) ** 2 / math.log(2 / delta) for delta in (0.05, 1e-3, 1e-9, 1e-100)]
    assert np.all(np.diff(shares) > 0)
    assert 0.98 < shares[-1] < 1
