"""The comparisons that other tests rely on must be able to fail."""

from __future__ import annotations

import math
import textwrap
from contextlib import suppress
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvsketch import testing
from kvsketch.qjl import sketch_keys, sketch_scores
from kvsketch.rotation import draw_projection
from kvsketch.statistical_tests import FALSE_ALARM, smallest_rate, smallest_shift
from kvsketch.testing import (
    CPU_ENGINES,
    assert_accurate,
    assert_mean,
    assert_rate_at_most,
    assert_same,
    assert_tail_bound,
    assert_unbiased,
    assert_variance,
    spacing,
)


def test_accuracy_is_judged_by_the_reference_and_the_dtype():
    exact = np.array([1.0, 2.0, np.inf, np.nan])
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        step = 2 * spacing(dtype)
        result = exact.astype(dtype)
        assert_accurate(result, exact, result)
        assert_accurate((exact + 3 * step).astype(dtype), exact, result)
        with pytest.raises(AssertionError, match="largest error"):
            assert_accurate((exact + 6 * step).astype(dtype), exact, result)
        assert_accurate((exact + 6 * step).astype(dtype), exact, (exact - 3 * step).astype(dtype))
        assert_accurate((exact + 6 * step).astype(dtype), exact, result, size=4)
        with pytest.raises(AssertionError):
            assert_accurate(np.where(np.isfinite(exact), exact, 0).astype(dtype), exact, result)
    with pytest.raises(AssertionError, match="shape"):
        assert_accurate(exact[:2].astype(np.float32), exact, exact.astype(np.float32))
    with pytest.raises(AssertionError, match="dtype float16"):
        assert_accurate(exact.astype(np.float16), exact, exact.astype(np.float32))


def test_sameness_is_exact():
    x = np.array([1, np.nan], dtype=ml_dtypes.bfloat16)
    assert_same(x, x.copy())
    for other in (x.astype(np.float32), x[:1], np.array([1, 1], dtype=x.dtype), np.nextafter(x, x[:1] * 0)):
        with pytest.raises(AssertionError):
            assert_same(other, x)


def test_statistics_refute_what_is_false():
    samples = np.random.default_rng(0).standard_normal((10_000, 3))
    assert_mean(samples, 0)
    assert_mean(samples, 0, 1)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean(samples, [0, 0, 0.07])
    assert_rate_at_most(10, 10_000, 0.001)
    assert_rate_at_most(0, 10, 0.001)
    with pytest.raises(AssertionError, match="40 of 10000"):
        assert_rate_at_most(40, 10_000, 0.001)


# ---- estimates of others: a sign sketch of one key, written here once more ----

D, M = 16, 32
Q, K = np.random.default_rng(1).standard_normal((2, 3, D))
EXACT = (Q * K).sum(axis=1)
SIZES = np.linalg.norm(Q, axis=1) * np.linalg.norm(K, axis=1)
VARIANCE = SIZES**2 * (math.pi / 2 - (EXACT / SIZES) ** 2) / M
DRAWS = 4000


def estimate(seed: int, *, constant: float = math.sqrt(math.pi / 2)) -> Any:
    """Estimates (3,) of three scores, with one Gaussian projection for all."""
    rows = np.random.default_rng(seed).standard_normal((M, D))
    signs = np.where(rows @ K.T >= 0, 1, -1)
    return constant * np.linalg.norm(K, axis=1) * (signs * (rows @ Q.T)).mean(axis=0)


def library_estimate(seed: int, *, engine: str) -> Any:
    """The same by the library, each query on its own key."""
    projection = draw_projection(M, D, kind="gaussian", seed=seed)
    q, k = Q.astype(np.float32)[None, :, None], K.astype(np.float32)[None, :, None]
    keys = sketch_keys(k, projection, engine=engine)
    return sketch_scores(q, keys, projection, engine=engine)[0, :, 0, 0]


def test_a_right_estimate_passes_all_three():
    assert assert_unbiased(estimate, EXACT, draws=DRAWS).n == DRAWS
    assert assert_unbiased(estimate, EXACT, draws=DRAWS, variance=VARIANCE, seed=3).false_alarm == FALSE_ALARM
    assert assert_variance(estimate, EXACT, VARIANCE, draws=DRAWS, level=1e-9).false_alarm == 1e-9
    chance = 2 * math.exp(-M * 0.5**2 / math.pi)
    check = assert_tail_bound(estimate, EXACT, size=0.5 * SIZES, chance=chance, draws=DRAWS)
    assert 0 < check.statistic <= check.threshold < DRAWS


@pytest.mark.parametrize("engine", CPU_ENGINES)
def test_estimates_of_each_engine(engine):
    """float16 norms are off by up to 2^-11, which 1000 draws do not see."""
    assert_unbiased(library_estimate, EXACT, draws=1000, variance=VARIANCE, engine=engine)
    assert_variance(library_estimate, EXACT, VARIANCE, draws=1000, engine=engine)
    assert_tail_bound(library_estimate, EXACT, size=SIZES, chance=1e-3, draws=1000, engine=engine)


def test_wrong_estimates_are_found_out():
    with pytest.raises(AssertionError, match=r"mean, in standard errors: .* FAILS \(N = 4000, chance .* 1\.0e-06\)"):
        assert_unbiased(partial(estimate, constant=1.0), EXACT, draws=DRAWS)
    with pytest.raises(AssertionError, match="variance, in standard errors"):
        assert_variance(estimate, EXACT, 0.75 * VARIANCE, draws=DRAWS)
    with pytest.raises(AssertionError, match=r"of 4000 draws at rate 0\.001"):
        assert_tail_bound(estimate, EXACT, size=0.5 * SIZES, chance=0.001, draws=DRAWS)


def test_what_is_promised_to_be_found_is():
    """A mean off by the smallest shift, or errors at the smallest rate, are each missed once in 1000 runs: more than 4
    misses in 100 have a chance of 1e-7."""
    shift, rate = smallest_shift(400), smallest_rate(400, 0.01)

    def shifted(seed: int) -> Any:
        return np.random.default_rng(seed).normal(shift)

    def wrong(seed: int) -> Any:
        return float(np.random.default_rng(seed).random() < rate)

    missed = [0, 0]
    for run in range(100):
        with suppress(AssertionError):
            assert_unbiased(shifted, 0, draws=400, variance=1, seed=run)
            missed[0] += 1
        with suppress(AssertionError):
            assert_tail_bound(wrong, 0, size=0.5, chance=0.01, draws=400, seed=run)
            missed[1] += 1
    assert max(missed) <= 4


def test_seeds_are_independent_and_the_same_on_every_run():
    seen: list[list[int]] = []
    for seed in (0, 0, 1):
        seen.append([])
        assert_tail_bound(
            lambda one, into=seen[-1]: into.append(one) or 0.0, 0.0, size=1, chance=0.5, draws=200, seed=seed
        )
    assert seen[0] == seen[1]
    assert len({*seen[0], *seen[2]}) == 400


def test_nan_counts_as_wrong():
    for draw in (lambda seed: math.nan, lambda seed: np.full(3, np.nan)):
        exact = np.zeros(np.shape(draw(0)))
        with pytest.raises(AssertionError):
            assert_unbiased(draw, exact, draws=100)
        with pytest.raises(AssertionError):
            assert_variance(draw, exact, exact + 1, draws=100)
        with pytest.raises(AssertionError):
            assert_tail_bound(draw, exact, size=1, chance=0.5, draws=100)


def test_mistaken_arguments_are_named():
    with pytest.raises(ValueError, match="draws must be >= 100, got 99"):
        assert_unbiased(estimate, EXACT, draws=99)
    with pytest.raises(ValueError, match=r"estimates of shape \(3,\), but exact has shape \(\)"):
        assert_variance(estimate, 0.0, 1.0, draws=100)
    with pytest.raises(ValueError, match="seed must be >= 0, got -1"):
        assert_tail_bound(estimate, EXACT, size=1, chance=0.5, draws=100, seed=-1)
    with pytest.raises(ValueError, match=r"chance must lie in \[0, 1\], got 1\.5"):
        assert_tail_bound(estimate, EXACT, size=1, chance=1.5, draws=100)
    with pytest.raises(TypeError, match="engine"):
        assert_unbiased(lambda seed: 0.0, 0.0, draws=100, engine="reference")


def test_example_of_the_docstring_runs():
    example = textwrap.dedent((testing.__doc__ or "").partition("a norm::\n")[2].partition("\nForget")[0])
    assert "assert_tail_bound(estimate" in example
    exec(example, {})
    with pytest.raises(AssertionError, match="mean, in standard errors"):
        exec(example.replace("math.sqrt(math.pi / 2) *", ""), {})
