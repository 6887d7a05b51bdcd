"""The statistical tests keep their stated probability of a false alarm, and find what they say they find."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import stats

from kvsketch import statistical_tests as tests
from kvsketch.statistical_tests import Check

#: Level at which false alarms are frequent enough to be counted, and in how many runs they are.
LEVEL, RUNS = 0.05, 1000
N = 400

#: Checks of true claims, by a generator; some at the edge of what is claimed.
TRUE: dict[str, Callable[[np.random.Generator], Check]] = {
    "mean, known variance": lambda rng: tests.check_mean("", rng.standard_normal(N), 0, 1, level=LEVEL),
    "mean, own variance": lambda rng: tests.check_mean("", rng.standard_normal(N), 0, level=LEVEL),
    "mean, few samples": lambda rng: tests.check_mean("", rng.standard_normal(100), 0, level=LEVEL),
    "mean, skewed, known variance": lambda rng: tests.check_mean("", rng.exponential(size=N), 1, 1, level=LEVEL),
    "mean, skewed, own variance": lambda rng: tests.check_mean("", rng.exponential(size=N), 1, level=LEVEL),
    "mean, log-normal": lambda rng: tests.check_mean(
        "", rng.lognormal(sigma=0.5, size=N), math.exp(1 / 8), level=LEVEL
    ),
    "mean, many entries": lambda rng: tests.check_mean("", rng.standard_normal((N, 5)), 0, 1, level=LEVEL),
    "mean, the same entry": lambda rng: tests.check_mean("", np.tile(rng.standard_normal(N), (3, 1)).T, 0, level=LEVEL),
    "variance, normal": lambda rng: tests.check_variance("", rng.normal(1, 3, (N, 2)), 1, 9, level=LEVEL),
    "variance, skewed": lambda rng: tests.check_variance("", rng.exponential(size=4 * N), 1, 1, level=LEVEL),
    "rate at most": lambda rng: tests.check_rate_at_most("", rng.binomial(N, 0.03), N, 0.03, level=LEVEL),
}


@pytest.mark.parametrize("check", TRUE.values(), ids=TRUE)
def test_false_alarms_are_no_more_frequent_than_stated(check: Callable[[np.random.Generator], Check]) -> None:
    """1000 runs at level .05: the number of failures must not refute that level (exact binomial law, chance 1e-6)."""
    found = [check(np.random.default_rng([seed, 5])) for seed in range(RUNS)]
    assert {one.false_alarm for one in found} == {LEVEL}
    failures = sum(not one.passed for one in found)
    alarm = tests.check_rate_at_most("false alarms", failures, RUNS, LEVEL)
    assert alarm.passed, f"{failures} of {RUNS}"


def test_a_refutation_of_what_is_true_is_no_more_frequent_than_stated() -> None:
    rng = np.random.default_rng(0)
    events = rng.binomial(N, 0.03, size=RUNS)
    refuted = sum(tests.check_rate_above("", int(count), N, 0.03, level=LEVEL).passed for count in events)
    assert tests.check_rate_at_most("", refuted, RUNS, LEVEL).passed
    assert refuted > 0


@pytest.mark.parametrize("n", [100, 1000, 10_000])
def test_limits_of_skewed_means_are_right_far_out(n: int) -> None:
    """The mean of N exponential numbers has a gamma law, so the chance of a false alarm at 1e-6 is known exactly."""
    samples = stats.expon.ppf((np.arange(n) + 0.5) / n)
    limit = tests.check_mean("", samples, 1, 1).threshold
    assert limit > stats.norm.isf(tests.FALSE_ALARM / 2)
    high = stats.gamma.sf(n + limit * math.sqrt(n), n)
    low = stats.gamma.cdf(n - limit * math.sqrt(n), n)
    assert high + low <= tests.FALSE_ALARM
    plain = stats.norm.isf(tests.FALSE_ALARM / 2)
    assert stats.gamma.sf(n + plain * math.sqrt(n), n) > 1.4 * tests.FALSE_ALARM / 2


@pytest.mark.parametrize("known", [True, False])
def test_smallest_shift_is_found(known: bool) -> None:
    """250 means off by what is promised to be found with probability .999, at level .05 and at 1e-6."""
    for level in (LEVEL, tests.FALSE_ALARM):
        shift = tests.smallest_shift(4000, level=level) * (1 if known else 1.03)
        missed = 0
        for seed in range(RUNS // 4):
            samples = np.random.default_rng([seed, 6]).standard_normal(4000) + shift
            missed += tests.check_mean("", samples, 0, 1 if known else None, level=level).passed
        assert tests.check_rate_at_most("", missed, RUNS // 4, 1e-3).passed


def test_smallest_shift_shrinks_with_more_samples_and_grows_with_demands() -> None:
    base = tests.smallest_shift(1000)
    assert tests.smallest_shift(4000) == pytest.approx(base / 2)
    assert base == pytest.approx(0.2524, abs=1e-4)
    assert tests.smallest_shift(1000, tests=10) > base > tests.smallest_shift(1000, level=0.05)
    assert tests.smallest_shift(1000, miss=1e-6) > base


@pytest.mark.parametrize(("trials", "rate"), [(1000, 0.01), (100, 0.3), (50, 0.0)])
def test_smallest_rate_is_found(trials: int, rate: float) -> None:
    found = tests.smallest_rate(trials, rate)
    most = tests.check_rate_at_most("", 0, trials, rate).threshold
    assert stats.binom.cdf(most, trials, found) == pytest.approx(1e-3)
    assert rate < found < 1
    assert tests.smallest_rate(3, 0.99) == 1


def test_variance_off_by_the_stated_share_is_found() -> None:
    share = 8.2 * math.sqrt(2 / 4000)
    for factor in (1 + share, 1 - share):
        samples = np.random.default_rng(1).standard_normal((4000, 20))
        missed = sum(tests.check_variance("", one, 0, factor).passed for one in samples.T)
        assert missed <= 1


def test_rate_thresholds_are_exact() -> None:
    at_most = tests.check_rate_at_most("x", 3, 100, 0.01, level=0.01)
    assert stats.binom.sf(at_most.threshold, 100, 0.01) <= 0.01 < stats.binom.sf(at_most.threshold - 1, 100, 0.01)
    above = tests.check_rate_above("x", 3, 100, 0.01, level=0.01)
    assert above.threshold == at_most.threshold + 1
    assert (at_most.passed, above.passed) == (True, False)
    events = int(above.threshold)
    assert tests.check_rate_above("x", events, 100, 0.01, level=0.01).passed
    assert not tests.check_rate_at_most("x", events, 100, 0.01, level=0.01).passed
    assert not tests.check_rate_at_most("x", 1, 100, 0.0).passed


def test_constants() -> None:
    same = np.full(200, 0.25)
    assert tests.check_mean("", same, 0.25).passed
    assert tests.check_mean("", np.zeros((200, 3)), 0, 0).passed
    assert not tests.check_mean("", same, 0.26).passed
    assert not tests.check_mean("", same, 0.26, 0).passed
    assert not tests.check_mean("", np.zeros(200), 1e-9).passed
    assert tests.mean_deviation(same, 0.26) == np.inf
    assert tests.check_variance("", same, 0.25, 0).passed
    assert not tests.check_variance("", same, 0.25, 0.1).passed


def test_nan_fails() -> None:
    samples = np.random.default_rng(0).standard_normal((200, 3))
    samples[7, 1] = np.nan
    assert not tests.check_mean("", samples, 0).passed
    assert not tests.check_mean("", samples, 0, 1).passed
    assert not tests.check_variance("", samples, 0, 1).passed
    assert not tests.check_at_most("", math.nan, 1).passed
    assert not tests.check_at_least("", math.nan, 1).passed


def test_comparisons_without_chance() -> None:
    check = tests.check_at_most("size", 2, 2, n=7)
    assert (check.passed, check.false_alarm, check.n) == (True, 0, 7)
    assert str(check) == "size: 2 <= 2 passes (N = 7, no chance in it)"
    assert not tests.check_at_most("size", 2.1, 2).passed
    assert tests.check_at_least("size", 2, 2).passed
    assert not tests.check_at_least("size", 1.9, 2).passed
    failed = tests.check_rate_at_most("failures", 9, 10, 0.01)
    assert str(failed) == "failures: 9 <= 4 FAILS (N = 10, chance of a false alarm 1.0e-06)"


MISTAKES: list[tuple[Callable[[], Any], str]] = [
    (lambda: tests.check_mean("", np.zeros(99), 0), r"at least 100 along axis 0, got shape \(99,\)"),
    (lambda: tests.check_mean("", 3.0, 0), r"got shape \(\)"),
    (lambda: tests.check_variance("", np.zeros(5), 0, 1), "at least 100"),
    (lambda: tests.check_rate_at_most("", 1, 0, 0.5), "trials must be >= 1, got 0"),
    (lambda: tests.check_rate_above("", 11, 10, 0.5), "events must be .*11"),
    (lambda: tests.check_rate_at_most("", -1, 10, 0.5), "events must be .*-1"),
    (lambda: tests.smallest_shift(0), "n must be >= 1, got 0"),
    (lambda: tests.smallest_rate(0, 0.5), "trials must be >= 1, got 0"),
]


@pytest.mark.parametrize(("call", "message"), MISTAKES)
def test_mistakes_are_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
