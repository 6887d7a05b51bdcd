"""Comparisons that the tests share: the only place where tolerances are set.

Numbers are judged against a float64 result and the reference engine's own error, random claims by a statistic whose
probability of a false alarm is stated.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import numpy as np

from kvsketch._checks import FLOAT_DTYPES

__all__ = [
    "CPU_ENGINES",
    "FALSE_ALARM",
    "assert_accurate",
    "assert_mean",
    "assert_rate_at_most",
    "assert_same",
    "mean_deviation",
    "spacing",
]

#: Engines that run on NumPy arrays, the specification first.
CPU_ENGINES = ("reference", "numba_cpu")

#: Probability that a statistical test fails though what it tests is true.
FALSE_ALARM = 1e-6

#: An engine may err this many times as much as the reference does against float64 ...
_ERROR_RATIO = 2.0
#: ... plus this many spacings of its dtype (or of float32, in which sums are kept) at the size of the result.
_ERROR_SPACINGS = 4.0


def spacing(dtype: Any) -> float:
    """Distance from 1 to the next number of float `dtype` (float64, float32, float16 or bfloat16)."""
    mantissa_bits = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}
    return 2.0 ** -mantissa_bits[str(np.dtype(dtype))]


def assert_accurate(actual: Any, exact: Any, reference: Any, *, size: float | None = None) -> None:
    """Assert that `actual` errs at most twice as much as `reference` does, plus an absolute term.

    `actual` and `reference` are results of one operation in one dtype, `exact` is that result in float64. The error is
    the largest over the array; the absolute term is four spacings of the dtype times `size`, by default the largest
    finite magnitude in `exact`. Give `size` where the result comes from sums that cancel: the magnitude of their terms.
    What is not finite in `exact` must be the same in `actual`.
    """
    exact = np.asarray(exact, dtype=np.float64)
    assert actual.shape == exact.shape, f"shape {actual.shape}, expected {exact.shape}"
    assert reference.shape == exact.shape, f"the reference has shape {reference.shape}, expected {exact.shape}"
    assert actual.dtype == reference.dtype, f"dtype {actual.dtype}, the reference has {reference.dtype}"
    step = spacing(actual.dtype)
    found, wanted = np.asarray(actual).astype(np.float64), np.asarray(reference).astype(np.float64)
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(found[~finite], exact[~finite])
    if not finite.any():
        return
    size = float(np.abs(exact[finite]).max()) if size is None else size
    error = np.abs(found[finite] - exact[finite]).max()
    own_error = np.abs(wanted[finite] - exact[finite]).max()
    limit = _ERROR_RATIO * own_error + _ERROR_SPACINGS * step * size
    assert error <= limit, f"largest error {error:.3e}, limit {limit:.3e} (the reference errs by {own_error:.3e})"


def assert_same(actual: Any, expected: Any) -> None:
    """Assert equal dtype, shape and numbers, NaN equal to NaN: for bits, codes and what is stored beside them."""
    assert actual.dtype == expected.dtype, f"dtype {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    if str(actual.dtype) in FLOAT_DTYPES:
        actual, expected = np.asarray(actual).astype(np.float64), np.asarray(expected).astype(np.float64)
    np.testing.assert_array_equal(actual, expected)


def mean_deviation(samples: Any, mean: Any, variance: Any = None) -> Any:
    """(mean of `samples` - `mean`) in standard errors, over axis 0.

    The standard error comes from the known `variance` of one sample, or else from the samples' own.
    """
    samples = np.asarray(samples, dtype=np.float64)
    variance = samples.var(axis=0, ddof=1) if variance is None else np.asarray(variance, dtype=np.float64)
    return (samples.mean(axis=0) - mean) / np.sqrt(variance / len(samples))


def assert_mean(samples: Any, mean: Any, variance: Any = None, *, tests: int = 1) -> None:
    """Assert that independent `samples` (N, ...) have the expected `mean` (...), by the normal approximation.

    A test that makes `tests` such calls, or of as many entries in all, fails by chance with probability FALSE_ALARM.
    """
    deviation = np.abs(mean_deviation(samples, mean, variance))
    limit = NormalDist().inv_cdf(1 - FALSE_ALARM / (2 * max(tests, deviation.size)))
    assert np.all(deviation <= limit), f"mean off by {deviation.max():.2f} standard errors, limit {limit:.2f}"


def assert_rate_at_most(events: int, trials: int, rate: float, *, tests: int = 1) -> None:
    """Assert that `events` of `trials` independent trials do not refute a probability of at most `rate`.

    Fails when P[Binomial(trials, rate) >= events] < FALSE_ALARM / tests.
    """
    from scipy.stats import binom

    chance = float(binom.sf(events - 1, trials, rate))
    assert chance >= FALSE_ALARM / tests, f"{events} of {trials} at rate {rate}: chance {chance:.1e}"
