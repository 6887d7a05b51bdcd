"""The comparisons that other tests rely on must be able to fail."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from kvsketch.testing import assert_accurate, assert_mean, assert_rate_at_most, assert_same, spacing


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
