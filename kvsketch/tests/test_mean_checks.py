"""Means within a tolerance, and means that refute a bound: false alarms as stated, and power."""

from __future__ import annotations

import numpy as np
import pytest

from kvsketch.statistical_tests import check_mean, check_mean_above, check_rate_at_most

LEVEL, RUNS, N = 0.05, 1000, 200


def test_mean_at_the_end_of_its_tolerance_raises_no_more_alarms_than_stated():
    """1000 runs at level .05, means off by the whole tolerance; the count by its exact law, chance 1e-6."""
    rng = np.random.default_rng(0)
    shift = np.array([0.3, -0.5])
    failures = 0
    for _ in range(RUNS):
        samples = rng.standard_normal((N, 2)) + shift
        failures += not check_mean("", samples, [0, 0], tolerance=[0.3, 0.5], level=LEVEL).passed
    assert check_rate_at_most("", failures, RUNS, LEVEL).passed
    assert failures > 0


def test_mean_beyond_its_tolerance_is_found():
    samples = np.random.default_rng(1).standard_normal(N)
    assert check_mean("", samples + 0.5, 0, tolerance=0.5).passed
    assert check_mean("", samples - 0.5, 0, tolerance=0.5).passed
    assert not check_mean("", samples + 1.2, 0, tolerance=0.5).passed
    assert not check_mean("", samples - 1.2, 0, tolerance=0.5).passed
    assert check_mean("", samples + 0.2, 0, tolerance=0.5).statistic == 0


def test_tolerance_of_constant_samples():
    same = np.full(N, 2.0)
    assert check_mean("", same, 1.5, tolerance=0.5).passed
    assert not check_mean("", same, 1.4, tolerance=0.5).passed


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_samples_that_are_not_finite_fail(value):
    samples = np.random.default_rng(1).standard_normal(N)
    samples[3] = value
    assert not check_mean("", samples, 0).passed
    assert not check_mean("", samples, 0, tolerance=10.0).passed


def test_refuting_a_bound_on_a_mean():
    """At the bound itself no more refutations than stated: 1000 runs at level .05, chance 1e-6."""
    rng = np.random.default_rng(2)
    refuted = sum(check_mean_above("", rng.standard_normal(N), 0, level=LEVEL).passed for _ in range(RUNS))
    assert check_rate_at_most("", refuted, RUNS, LEVEL).passed
    assert refuted > 0
    samples = rng.standard_normal(N)
    assert check_mean_above("", samples + 1, 0).passed
    assert not check_mean_above("", samples - 1, 0).passed
    check = check_mean_above("", samples, 0)
    assert (check.relation, check.n, check.false_alarm) == (">=", N, 1e-6)
