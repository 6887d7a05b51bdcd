"""How far sketched scores scatter: the exact variance for Gaussian and for orthogonal rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from kvsketch.bounds import sketch_variance
from kvsketch.rotation import Projection
from kvsketch.statistical_tests import check_mean
from kvsketch.validation.claim import HOLDS, Claim, Figure, Outcome, Setting, Twin
from kvsketch.validation.draws import (
    KEY_NORM,
    QUERY_NORM,
    Estimate,
    draw_estimates,
    estimate_scores,
    exact_scores,
    pairs,
    with_projection,
)

COSINES = np.array([-1, -0.8, -0.5, -0.2, 0, 0.3, 0.6, 0.9, 1])
HEADS = 16
#: Kind of rows, head size, rows, and draws in the quick setting: Gaussian; part of a block, one block, several, several
#: with a part of one.
CASES = (
    ("gaussian", 8, 8, 400),
    ("orthogonal", 16, 8, 300),
    ("orthogonal", 8, 8, 400),
    ("orthogonal", 16, 32, 300),
    ("orthogonal", 16, 40, 300),
)
MORE_CASES = (
    ("gaussian", 64, 200, 150),
    ("orthogonal", 2, 3, 400),
    ("orthogonal", 64, 64, 150),
    ("orthogonal", 96, 250, 150),
)
FULL = 10
#: Head size and rows of the picture, and its draws.
PICTURE, PICTURE_DRAWS = 64, 120


def squared_errors(
    setting: Setting, cosines: Any, kind: str, d: int, m: int, draws: int, estimate: Estimate = estimate_scores
) -> Any:
    """((est - <q,k>)/(|q||k|))^2, averaged over as many pairs as there are heads: samples (draws, cosines)."""
    q, k = pairs(d, cosines, setting.generator("pairs", kind, d, m), heads=HEADS)
    seeds = setting.seeds(draws, "variance", kind, d, m)
    found = draw_estimates(setting, q, k, m=m, kind=kind, seeds=seeds, estimate=estimate)
    errors = (found - exact_scores(q, k)) / (KEY_NORM * QUERY_NORM)
    return (errors**2).mean(axis=(1, 3))


def check_cases(
    setting: Setting, cases: Any, estimate: Estimate = estimate_scores, law: Any = sketch_variance
) -> Outcome:
    """The mean squared error at all cosines is the variance, within its own sampling error."""
    outcome, ratios = Outcome(), []
    for kind, d, m, draws in cases:
        draws = setting.draws(draws, FULL * draws)
        squares = squared_errors(setting, COSINES, kind, d, m, draws, estimate)
        variance = law(m, d, COSINES, kind=kind)
        what = f"mean squared error of {HEADS} pairs, {kind} rows, d = {d}, m = {m}, {len(COSINES)} cosines"
        outcome.checks.append(check_mean(what, squares, variance, level=setting.level / len(cases)))
        ratios += list(squares.mean(axis=0) / variance)
    found = f"{min(ratios):.3f} to {max(ratios):.3f}"
    outcome.figures.append(Figure("variance over the predicted one, all cases and cosines", "", "1", found))
    return outcome


def draw_picture(setting: Setting) -> dict[str, Any]:
    """Measured and predicted variance over the cosine, one full block and as many Gaussian rows."""
    cosines = np.linspace(-1, 1, 17)
    series: dict[str, Any] = {
        "title": f"Variance of a sketched score, d = m = {PICTURE}, |q| = |k| = 1",
        "cosine": cosines.tolist(),
    }
    for kind in ("gaussian", "orthogonal"):
        draws = setting.draws(PICTURE_DRAWS, FULL * PICTURE_DRAWS)
        squares = squared_errors(setting, cosines, kind, PICTURE, PICTURE, draws)
        series[f"measured {kind}"] = squares.mean(axis=0).tolist()
        series[f"predicted {kind}"] = sketch_variance(PICTURE, PICTURE, cosines, kind=kind).tolist()
    return series


def run(setting: Setting) -> Outcome:
    outcome = check_cases(setting, CASES + MORE_CASES if setting.full else CASES)
    outcome.series = draw_picture(setting)
    return outcome


def independent_law(m: int, d: int, cosine: Any, *, kind: str) -> Any:
    return sketch_variance(m, d, cosine, kind="gaussian")


def orthogonal_law(m: int, d: int, cosine: Any, *, kind: str) -> Any:
    return sketch_variance(m, d, cosine, kind="orthogonal")


def repeat_row(projection: Projection) -> Projection:
    """Its first row used twice, its last not at all."""
    return replace(projection, matrix=np.concatenate([projection.matrix[:1], projection.matrix[:-1]]))


CLAIM = Claim(
    name="variance",
    title="How much a sketched score scatters is known exactly",
    source="kvsketch (for Gaussian rows from the proof of QJL, Lemma 3.2)",
    published="none",
    proved="(pi/2 - t^2)/m for Gaussian rows at cosine t; c_d^2/m (1 + (m-1)(2/pi)(t^2 - (1-t^2)/(d-1))) - t^2 for one "
    "block of orthogonal rows; blocks add (bounds.sketch_variance)",
    finding="The formulas derived here give the measured scatter at every angle between query and key, for random rows "
    "and for orthogonal ones, whole blocks or parts.",
    verdict=HOLDS,
    run=run,
    twins=(
        Twin(
            "the Gaussian law for orthogonal rows",
            lambda setting: check_cases(setting, CASES[2:3], law=independent_law),
        ),
        Twin(
            "the orthogonal law for Gaussian rows",
            lambda setting: check_cases(setting, CASES[:1], law=orthogonal_law),
        ),
        Twin("one row used twice", lambda setting: check_cases(setting, CASES[2:3], with_projection(repeat_row))),
    ),
)
