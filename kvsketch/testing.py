"""Comparisons that the tests share, and that tests of other sketches can use: the only place where tolerances are set.

Numbers are judged against a float64 result and the reference engine's own error, random claims by a statistic whose
probability of a false alarm is stated (:mod:`kvsketch.statistical_tests`).

:func:`assert_unbiased`, :func:`assert_variance` and :func:`assert_tail_bound` test a random estimate of your own. They
take a function ``draw(seed)`` that makes one independent estimate, a number or an array of any shape. Here a sketch
that keeps the signs of random projections of a key, of 64 channels, as 256 bits and a norm::

    import math
    import numpy as np
    from kvsketch.testing import assert_tail_bound, assert_unbiased, assert_variance

    q, noise = np.random.default_rng(1).standard_normal((2, 64))
    k = q + noise
    norms = np.linalg.norm(q) * np.linalg.norm(k)
    cosine = q @ k / norms

    def estimate(seed):
        rows = np.random.default_rng(seed).standard_normal((256, 64))
        signs = np.where(rows @ k >= 0, 1, -1)
        return math.sqrt(math.pi / 2) * np.linalg.norm(k) * np.mean(signs * (rows @ q))

    assert_unbiased(estimate, q @ k, draws=2000)
    assert_variance(estimate, q @ k, norms**2 * (math.pi / 2 - cosine**2) / 256, draws=2000)
    assert_tail_bound(estimate, q @ k, size=0.3 * norms, chance=2 * math.exp(-256 * 0.3**2 / math.pi), draws=2000)

Forget the factor sqrt(pi/2), and the first one raises: ``AssertionError: mean, in standard errors: ... FAILS``. With
``engine="numba_cpu"`` the function is called as ``draw(seed, engine="numba_cpu")``: one test serves every engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvsketch import statistical_tests
from kvsketch._checks import FLOAT_DTYPES, check_integer
from kvsketch.statistical_tests import FALSE_ALARM, Check, mean_deviation

__all__ = [
    "CPU_ENGINES",
    "FALSE_ALARM",
    "assert_accurate",
    "assert_mean",
    "assert_rate_at_most",
    "assert_same",
    "assert_tail_bound",
    "assert_unbiased",
    "assert_variance",
    "mean_deviation",
    "spacing",
]

#: Engines that run on NumPy arrays, the specification first.
CPU_ENGINES = ("reference", "numba_cpu")

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


def assert_mean(samples: Any, mean: Any, variance: Any = None, *, tests: int = 1) -> None:
    """Assert that independent `samples` (N, ...) have the expected `mean` (...).

    A test that makes `tests` such calls, or of as many entries in all, fails by chance with probability FALSE_ALARM;
    otherwise as :func:`kvsketch.statistical_tests.check_mean`.
    """
    entries = np.size(samples[0])
    level = FALSE_ALARM * entries / max(tests, entries)
    _demand(statistical_tests.check_mean("mean, in standard errors", samples, mean, variance, level=level))


def assert_rate_at_most(events: int, trials: int, rate: float, *, tests: int = 1) -> None:
    """Assert that `events` of `trials` independent trials do not refute a probability of at most `rate`.

    Fails when P[Binomial(trials, rate) >= events] < FALSE_ALARM / tests.
    """
    what = f"{events} of {trials} at rate {rate}"
    _demand(statistical_tests.check_rate_at_most(what, events, trials, rate, level=FALSE_ALARM / tests))


def assert_unbiased(
    draw: Callable[..., Any],
    exact: Any,
    *,
    draws: int,
    variance: Any = None,
    seed: int = 0,
    engine: str | None = None,
    level: float = FALSE_ALARM,
) -> Check:
    """Assert that a random estimate is right on average.

    Parameters
    ----------
    draw : callable
        ``draw(seed)``, or ``draw(seed, engine=engine)`` when `engine` is given: one estimate, a number or an array,
        independent for every seed (a large integer).
    exact : float or array
        What the estimate should be on average, entry by entry.
    draws : int
        Independent estimates to take, at least 100.
    variance : float or array, optional
        The estimate's variance where it is known, entry by entry: standard errors are then exact. Otherwise they are
        the samples' own.
    seed : int
        What the seeds of the draws come from: the test is the same on every run.
    engine : str, optional
        Passed on to `draw`.
    level : float
        Probability that it fails though the estimate is unbiased, all entries together. It rests on the law of means
        being normal but for the skewness of the samples, which is accounted for; many more draws than 100 are wise
        where the estimate has heavy tails.

    Returns
    -------
    Check
        What was compared: print it to see how near the limit it came.

    Raises
    ------
    AssertionError
        When the mean of an entry is further from `exact` than chance allows. A mean that is off by
        ``smallest_shift(draws, level=level, tests=entries)`` standard deviations of one estimate is found with
        probability 0.999 (:func:`kvsketch.statistical_tests.smallest_shift`): 0.25 at 1000 draws of one number, 0.08 at
        10,000. Estimates that are NaN fail.
    """
    samples, exact = _draw_samples(draw, exact, draws, seed, engine)
    return _demand(statistical_tests.check_mean("mean, in standard errors", samples, exact, variance, level=level))


def assert_variance(
    draw: Callable[..., Any],
    exact: Any,
    variance: Any,
    *,
    draws: int,
    seed: int = 0,
    engine: str | None = None,
    level: float = FALSE_ALARM,
) -> Check:
    """Assert that a random estimate, right on average, has the `variance` that is claimed, entry by entry.

    Parameters, `level` and result are those of :func:`assert_unbiased`. What is compared is the mean of
    ``(estimate - exact)^2`` with `variance`, by its own sampling error; test the mean first.

    Raises
    ------
    AssertionError
        When the variance is further off, either way, than chance allows. Of estimates of about normal law, one whose
        variance is off by a share of ``sqrt(2) smallest_shift(draws, level=level, tests=entries)`` is found with
        probability 0.999: 36 % at 1000 draws of one number, 11 % at 10,000.
    """
    samples, exact = _draw_samples(draw, exact, draws, seed, engine)
    return _demand(
        statistical_tests.check_variance("variance, in standard errors", samples, exact, variance, level=level)
    )


def assert_tail_bound(
    draw: Callable[..., Any],
    exact: Any,
    *,
    size: Any,
    chance: float,
    draws: int,
    seed: int = 0,
    engine: str | None = None,
    level: float = FALSE_ALARM,
) -> Check:
    """Assert that a random estimate is off by more than `size` with a probability of at most `chance`, entry by entry.

    Parameters, `level` and result are those of :func:`assert_unbiased`, besides

    size : float or array
        Largest error that does not count; an estimate that is NaN counts.
    chance : float
        The claimed bound on the probability of a larger one, between 0 and 1.

    `level` is exact here, by the binomial law; each of the entries has its part of it.

    Raises
    ------
    AssertionError
        When an entry errs more often than such a probability allows. A true probability of
        ``smallest_rate(draws, chance, level=level / entries)`` is found with probability 0.999
        (:func:`kvsketch.statistical_tests.smallest_rate`): 0.048 at 1000 draws for a claimed 0.01, 0.0193 at 10,000.
    """
    if not 0 <= chance <= 1:
        raise ValueError(f"chance must lie in [0, 1], got {chance!r}")
    samples, exact = _draw_samples(draw, exact, draws, seed, engine)
    # Not `> size`, which a NaN is not.
    events = np.atleast_1d((~(np.abs(samples - exact) <= size)).sum(axis=0))
    what = f"errors beyond the size, of {draws} draws at rate {chance}"
    return _demand(
        statistical_tests.check_rate_at_most(what, int(events.max()), draws, chance, level=level / events.size)
    )


def _draw_samples(draw: Callable[..., Any], exact: Any, draws: int, seed: int, engine: str | None) -> tuple[Any, Any]:
    """Estimates (draws, ...) from independent seeds, and `exact` (...), both float64."""
    draws = check_integer("draws", draws, low=statistical_tests.FEWEST_SAMPLES)
    exact = np.asarray(exact, dtype=np.float64)
    options = {} if engine is None else {"engine": engine}
    seeds = np.random.default_rng(check_integer("seed", seed, low=0)).integers(0, 2**62, size=draws)
    samples = np.array([np.asarray(draw(int(one), **options), dtype=np.float64) for one in seeds])
    if samples.shape[1:] != exact.shape:
        raise ValueError(
            f"draw gives estimates of shape {samples.shape[1:]}, but exact has shape {exact.shape}; give the same shape"
        )
    return samples, exact


def _demand(check: Check) -> Check:
    assert check.passed, str(check)
    return check
