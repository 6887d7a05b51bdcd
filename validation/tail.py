"""Lemma 3.5 of QJL: how many rows keep a score within a given error, with a given probability."""

from __future__ import annotations

import math
from typing import Any

from scipy import stats
from scipy.special import erfcinv

from kvsketch.bounds import (
    sketch_failure_bound,
    sketch_failure_orthogonal_pair,
    sketch_size,
    sketch_size_bernstein,
    sketch_size_published,
)
from kvsketch.statistical_tests import check_rate_above, check_rate_at_most
from kvsketch.validation.claim import CORRECTED, Claim, Figure, Outcome, Setting, Twin
from kvsketch.validation.draws import KEY_NORM, QUERY_NORM, count_failures, pairs

#: Where the published condition is refuted: eps, delta, and draws.
REFUTED_AT = ((0.3, 0.001, 40_000), (0.1, 0.01, 10_000))
#: Where the corrected one is tried: eps, delta, cosine and head size.
GRID = (
    *((0.5, 0.1, cosine, 2) for cosine in (-1, 0, 0.7)),
    *((0.5, 0.01, cosine, 2) for cosine in (0, 0.5, 1)),
    (0.3, 0.01, 0, 3),
    (0.8, 0.01, 0, 16),
    (0.5, 0.01, 0.3, 64),
)
MORE_GRID = tuple((eps, 0.001, cosine, d) for eps in (0.3, 0.5, 1.0) for cosine in (0, 0.6, 1) for d in (2, 32))
GRID_DRAWS, FULL_GRID_DRAWS = 2000, 50_000
#: Draws that show the rate at half of the rows, .018 where .01 is promised.
TWIN_DRAWS = 30_000
#: The picture: eps, rows, and draws for each.
PICTURE_EPS, PICTURE_ROWS = 0.3, (10, 25, 50, 75, 100, 125, 150, 175, 200)
PICTURE_DRAWS, FULL_PICTURE_DRAWS = 4000, 100_000


def count(setting: Setting, eps: float, cosine: float, d: int, m: int, draws: int) -> int:
    """Sketches of m Gaussian rows, of `draws`, whose estimate is off by more than eps |q||k|."""
    stream = ("tail", eps, cosine, d, m)
    q, k = (x[0, 0] for x in pairs(d, [cosine], setting.generator(*stream)))
    limit = eps * QUERY_NORM * KEY_NORM
    return count_failures(setting, q, k, limit, m=m, kind="gaussian", draws=draws, stream=str(stream))


def refute_published(setting: Setting, outcome: Outcome, level: float) -> None:
    """A query at right angles to the key fails more often than the published condition promises.

    The true rates (:func:`sketch_failure_orthogonal_pair`) are .0037 and .026 for promises of .001 and .01. Counts miss
    the thresholds with a probability below 1e-7.
    """
    for eps, delta, draws in REFUTED_AT:
        m = sketch_size_published(eps, delta)
        events = count(setting, eps, 0, 2, m, draws)
        what = f"failures with the published m = {m}, eps = {eps}, cosine 0, more than delta = {delta} allows"
        outcome.checks.append(check_rate_above(what, events, draws, delta, level=level / (2 * len(REFUTED_AT))))
        exact = sketch_failure_orthogonal_pair(m, eps)
        for name, number, rate in (("failures", events, exact), ("successes", draws - events, 1 - exact)):
            what = f"{name} with m = {m}, eps = {eps}, cosine 0, by the exact law"
            outcome.checks.append(check_rate_at_most(what, number, draws, rate, level=level / (4 * len(REFUTED_AT))))
        log_p = stats.binom.logsf(events - 1, draws, delta) / math.log(10)
        found = f"{events / draws:.4f} ({events} of {draws}; p = 1e{log_p:.0f} if {delta} were true)"
        what = f"share of failures, eps = {eps}, with the m = {m} published for {delta}"
        outcome.figures.append(Figure(what, f"<= {delta}", f"{exact:.4f}", found))


def check_size(setting: Setting, cases: Any, draws: int, share: float, level: float) -> Outcome:
    """`share` of the corrected number of rows keeps the promise in each case."""
    outcome = Outcome()
    rates = []
    for eps, delta, cosine, d in cases:
        m = max(1, int(share * sketch_size(eps, delta)))
        events = count(setting, eps, cosine, d, m, draws)
        what = f"failures with m = {m}, eps = {eps}, delta = {delta}, cosine {cosine}, d = {d}"
        outcome.checks.append(check_rate_at_most(what, events, draws, delta, level=level / len(cases)))
        rates.append(events / draws / delta)
    what = f"largest share of failures over delta, {len(cases)} settings, with the corrected m"
    outcome.figures.append(Figure(what, "", "<= 1", f"{max(rates):.2f}"))
    return outcome


def needed_share(delta: float) -> float:
    """Rows that a pair at right angles needs, over those of :func:`sketch_size`: erfcinv(delta)^2/log(2/delta)."""
    return float(erfcinv(delta) ** 2 / math.log(2 / delta))


def draw_picture(setting: Setting) -> dict[str, Any]:
    """Share of failures over m at right angles, with the published and the proved bound and the exact law."""
    eps, draws = PICTURE_EPS, setting.draws(PICTURE_DRAWS, FULL_PICTURE_DRAWS)
    return {
        "title": f"Share of scores off by more than eps = {eps}, query at right angles to the key",
        "m": list(PICTURE_ROWS),
        "measured": [count(setting, eps, 0, 2, m, draws) / draws for m in PICTURE_ROWS],
        "published": [min(1.0, 2 * math.exp(-m * eps**2 / (4 / 3 * (1 + eps)))) for m in PICTURE_ROWS],
        "proved": [sketch_failure_bound(m, eps) for m in PICTURE_ROWS],
        "exact": [sketch_failure_orthogonal_pair(m, eps) for m in PICTURE_ROWS],
    }


def run(setting: Setting) -> Outcome:
    cases = GRID + MORE_GRID if setting.full else GRID
    outcome = check_size(setting, cases, setting.draws(GRID_DRAWS, FULL_GRID_DRAWS), 1, setting.level / 2)
    refute_published(setting, outcome, setting.level / 2)
    outcome.series = draw_picture(setting)
    eps, delta = 0.3, 0.01
    sizes = [sketch_size_published(eps, delta), sketch_size(eps, delta)]
    bernstein = sketch_size_bernstein(eps, delta)
    outcome.figures += [
        Figure(f"rows for eps = {eps}, delta = {delta}", str(sizes[0]), f"{sizes[1]} (by Bernstein {bernstein})"),
        Figure(
            "rows truly needed at right angles, as a share of the corrected number, delta = .05, .001, 1e-6",
            "",
            ", ".join(f"{needed_share(x):.2f}" for x in (0.05, 0.001, 1e-6)) + "; tends to 1",
        ),
    ]
    return outcome


def use_half(setting: Setting) -> Outcome:
    return check_size(setting, [(0.5, 0.01, 0, 2)], TWIN_DRAWS, 0.5, setting.level)


def use_published(setting: Setting) -> Outcome:
    eps, delta, draws = REFUTED_AT[0]
    share = sketch_size_published(eps, delta) / sketch_size(eps, delta)
    return check_size(setting, [(eps, delta, 0, 2)], draws, share, setting.level)


CLAIM = Claim(
    name="tail",
    title="Enough sketched bits keep a score as close as wanted, but more are needed than published",
    source="QJL, Lemma 3.5",
    published="m >= 4/3 (1+eps)/eps^2 log(2/delta) keeps P(|est - <q,k>| > eps |q||k|) <= delta",
    proved="m >= pi/eps^2 log(2/delta) does, for Gaussian rows (bounds.sketch_size); for small delta nothing less can: "
    "at right angles the probability is exactly erfc(eps sqrt(m/pi))",
    finding="With the published number of bits the error exceeds its limit more often than promised: nearly 4 times as "
    "often for a promise of 1 in 1000. For errors of up to 30 % about twice as many bits keep the promise; for rare "
    "failures hardly fewer would do.",
    verdict=CORRECTED,
    run=run,
    twins=(Twin("half of the rows", use_half), Twin("the published number of rows", use_published)),
    on_engines=False,
)
