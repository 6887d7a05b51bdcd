"""Statistical tests with a stated probability of a false alarm.

Each gives a :class:`Check`: what was computed, where it must stay, and how probable it is that it does not although
the claim is true. Thresholds of means are those of the normal law, or of Student's where the variance comes from the
samples, moved outwards by the first term of the Cornish-Fisher expansion for the skewness of the samples; thresholds of
counts are exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from kvsketch._checks import check_integer

__all__ = [
    "FALSE_ALARM",
    "Check",
    "check_at_least",
    "check_at_most",
    "check_mean",
    "check_mean_above",
    "check_rate_above",
    "check_rate_at_most",
    "check_variance",
    "mean_deviation",
    "smallest_rate",
    "smallest_shift",
]

#: Probability that a test fails though what it tests is true.
FALSE_ALARM = 1e-6
#: Fewest samples for which the normal law is taken for that of a mean.
FEWEST_SAMPLES = 100


@dataclass(frozen=True)
class Check:
    """One comparison of a statistic with a threshold.

    Attributes
    ----------
    what : str
        What is compared, in plain words.
    n : int
        Independent samples behind it.
    statistic, threshold : float
    relation : {"<=", ">="}
        How the statistic must stand to the threshold.
    false_alarm : float
        Probability that it does not although the claim is true; 0 where chance has no part.
    """

    what: str
    n: int
    statistic: float
    threshold: float
    relation: str
    false_alarm: float

    @property
    def passed(self) -> bool:
        """Whether the comparison holds; False where the statistic is NaN."""
        if self.relation == "<=":
            return bool(self.statistic <= self.threshold)
        return bool(self.statistic >= self.threshold)

    def __str__(self) -> str:
        chance = f"chance of a false alarm {self.false_alarm:.1e}" if self.false_alarm else "no chance in it"
        verdict = "passes" if self.passed else "FAILS"
        return (
            f"{self.what}: {self.statistic:.6g} {self.relation} {self.threshold:.6g} {verdict} (N = {self.n}, {chance})"
        )


def check_at_most(what: str, value: float, limit: float, *, n: int = 1) -> Check:
    """`value` is at most `limit`, without chance."""
    return Check(what, n, float(value), float(limit), "<=", 0.0)


def check_at_least(what: str, value: float, limit: float, *, n: int = 1) -> Check:
    """`value` is at least `limit`, without chance."""
    return Check(what, n, float(value), float(limit), ">=", 0.0)


def mean_deviation(samples: Any, mean: Any, variance: Any = None) -> Any:
    """(mean of `samples` - `mean`) in standard errors, over axis 0.

    The standard error comes from the known `variance` of one sample, or else from the samples' own. Where it is 0, the
    deviation is 0 if the means agree to rounding and infinite otherwise.
    """
    samples = np.asarray(samples, dtype=np.float64)
    variance = samples.var(axis=0, ddof=1) if variance is None else np.asarray(variance, dtype=np.float64)
    shift, error = samples.mean(axis=0) - mean, np.sqrt(variance / len(samples))
    constant = error <= 1e-12 * np.maximum(np.abs(mean), 1e-300)
    same = np.abs(shift) <= 1e-6 * np.abs(mean)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(constant, np.where(same, 0.0, np.inf), shift / error)


def check_mean(
    what: str, samples: Any, mean: Any, variance: Any = None, *, tolerance: Any = 0.0, level: float = FALSE_ALARM
) -> Check:
    """Independent `samples` (N, ...) have the expected `mean` (...), or one within `tolerance` (...) of it.

    The statistic is the largest deviation of any entry, beyond the tolerance and in standard errors: from the known
    `variance` (...) of one sample, or from the samples' own. Entries may depend on one another; each is given its part
    of `level`.

    Power: a mean that is off by :func:`smallest_shift` standard deviations is found with the probability named there.
    """
    samples = _samples(samples)
    # Infinite samples end as NaN, which passes no check.
    with np.errstate(invalid="ignore"):
        shift = samples.mean(axis=0) - mean
        # The nearest mean that is within the tolerance.
        mean = mean + np.clip(shift, -np.asarray(tolerance), tolerance)
        deviation = np.abs(mean_deviation(samples, mean, variance))
        limits = _deviation_limits(samples, level, known=variance is not None)
    return _furthest(what, len(samples), deviation, limits, level)


def check_mean_above(what: str, samples: Any, bound: float, *, level: float = FALSE_ALARM) -> Check:
    """Independent `samples` (N,) refute a mean of at most `bound`, by the samples' own variance.

    `level` is the probability of a refutation where none is due. The statistic is in standard errors.
    """
    samples = _samples(samples)
    limit = _deviation_limits(samples, 2 * level, known=False)
    return Check(what, len(samples), float(mean_deviation(samples, bound)), float(limit), ">=", level)


def check_variance(what: str, samples: Any, mean: Any, variance: Any, *, level: float = FALSE_ALARM) -> Check:
    """Independent `samples` (N, ...) of the known `mean` (...) have the expected `variance` (...).

    The mean of the squared deviations is compared by its own sampling error, as in :func:`check_mean`. With samples of
    about normal law a variance that is off by a share of ``8.2 sqrt(2/N)`` is found with probability 0.999.
    """
    squares = (_samples(samples) - mean) ** 2
    return check_mean(what, squares, variance, level=level)


def check_rate_at_most(what: str, events: int, trials: int, rate: float, *, level: float = FALSE_ALARM) -> Check:
    """`events` in independent `trials` do not refute a probability of at most `rate`, by the exact binomial law.

    The threshold is the largest count whose excess has a probability of at most `level` at `rate` itself.
    """
    _check_counts(events, trials)
    most = stats.binom.isf(level, trials, rate)
    return Check(what, trials, events, float(most), "<=", level)


def check_rate_above(what: str, events: int, trials: int, rate: float, *, level: float = FALSE_ALARM) -> Check:
    """`events` in independent `trials` refute a probability of at most `rate`, by the exact binomial law.

    The threshold is the smallest count whose probability, and that of all above, is at most `level` at `rate` itself:
    the probability of a refutation where none is due.
    """
    _check_counts(events, trials)
    least = stats.binom.isf(level, trials, rate) + 1
    return Check(what, trials, events, float(least), ">=", level)


def smallest_shift(n: int, *, level: float = FALSE_ALARM, miss: float = 1e-3, tests: int = 1) -> float:
    """Shift of a mean, in standard deviations of one sample, that N samples find with probability ``1 - miss``."""
    n = check_integer("n", n, low=1)
    return float((stats.norm.isf(level / (2 * tests)) + stats.norm.isf(miss)) / np.sqrt(n))


def smallest_rate(trials: int, rate: float, *, level: float = FALSE_ALARM, miss: float = 1e-3) -> float:
    """True probability of an event that `trials` find to be more than `rate` with probability ``1 - miss``."""
    trials = check_integer("trials", trials, low=1)
    most = stats.binom.isf(level, trials, rate)
    # P[Binomial(trials, p) <= most] = miss, by the beta law.
    return float(stats.beta.isf(miss, most + 1, trials - most)) if most < trials else 1.0


def _samples(samples: Any) -> Any:
    samples = np.asarray(samples, dtype=np.float64)
    if samples.ndim == 0 or len(samples) < FEWEST_SAMPLES:
        raise ValueError(f"samples must be at least {FEWEST_SAMPLES} along axis 0, got shape {samples.shape}")
    return samples


def _check_counts(events: int, trials: int) -> None:
    check_integer("trials", trials, low=1)
    check_integer("events", events, low=0, high=trials)


def _deviation_limits(samples: Any, level: float, *, known: bool) -> Any:
    """Largest allowed deviations, in standard errors, of the means of `samples` (N, ...)."""
    n, entries = len(samples), max(1, samples[0].size)
    tail = level / (2 * entries)
    z = float(stats.norm.isf(tail) if known else stats.t.isf(tail, n - 1))
    centred = samples - samples.mean(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        # 0 / 0 where all samples are the same.
        skewness = np.nan_to_num(np.abs((centred**3).mean(axis=0)) / (centred**2).mean(axis=0) ** 1.5)
    # Of a mean over its true, or over its estimated standard error.
    return z + skewness * ((z**2 - 1) if known else (2 * z**2 + 1)) / (6 * np.sqrt(n))


def _furthest(what: str, n: int, deviation: Any, limits: Any, level: float) -> Check:
    """The entry that is nearest to its limit, or furthest beyond."""
    deviation, limits = np.atleast_1d(deviation).ravel(), np.atleast_1d(limits).ravel()
    worst = int(np.argmax(np.nan_to_num(deviation / limits, nan=np.inf)))
    return Check(what, n, float(deviation[worst]), float(limits[worst]), "<=", level)
