"""Lemma 3.2 of QJL with outlier channels split off: the sum of both parts' estimates is right on average."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from kvsketch._checks import FLOAT_DTYPES
from kvsketch.qjl import sketch_keys, sketch_scores
from kvsketch.rotation import Projection
from kvsketch.statistical_tests import check_mean
from kvsketch.validation.claim import HOLDS, Claim, Figure, Outcome, Setting, Twin
from kvsketch.validation.draws import exact_scores
from kvsketch.validation.split_keys import (
    PAGE,
    SplitEstimate,
    draw_split_estimates,
    estimate_split,
    planted_outliers,
    split,
)

D, OUTLIERS = 32, 3
#: Rows of S and S_out, kind of rows, dtype, and draws in the quick setting.
CASES = (
    (64, 32, "orthogonal", "float32", 200),
    (24, 40, "orthogonal", "float16", 150),
    (32, 16, "gaussian", "float32", 150),
    (64, 32, "orthogonal", "bfloat16", 150),
)
FULL = 10
#: Rounding as a share of the size of an estimate: that of norms to float16, and that of the result to its dtype. The
#: size, sqrt(E est^2), is at most sqrt(pi/2) (|q_in||k_in| + |q_out||k_out|).
ROUNDING = {"float32": 2.0**-11, "float16": 2.0**-11 + 2.0**-11, "bfloat16": 2.0**-11 + 2.0**-8}


def check_cases(setting: Setting, cases: Any, estimate: SplitEstimate = estimate_split) -> Outcome:
    """The mean, over draws of both projections, of estimate less score: as a share of |q_in||k_in| + |q_out||k_out|,
    and averaged over the tokens of a page, which share a draw."""
    outcome, errors = Outcome(), []
    for m, outlier_m, kind, dtype, draws in cases:
        q, k, channels = planted_outliers(D, OUTLIERS, setting.generator("keys", m, kind))
        q, k = q.astype(FLOAT_DTYPES[dtype]), k.astype(FLOAT_DTYPES[dtype])
        found = draw_split_estimates(
            setting,
            q,
            k,
            m=m,
            outlier_m=outlier_m,
            kind=kind,
            outliers=OUTLIERS,
            draws=setting.draws(draws, FULL * draws),
            estimate=estimate,
        )
        shares = ((found - exact_scores(q, k)[0, 0]) / part_sizes(q, k, channels)).mean(axis=2)
        what = (
            f"mean error over {PAGE} tokens, {OUTLIERS} outlier channels, {kind} rows, m = {m} and {outlier_m}, {dtype}"
        )
        tolerance = np.sqrt(np.pi / 2) * ROUNDING[dtype]
        outcome.checks.append(check_mean(what, shares, 0.0, tolerance=tolerance, level=setting.level / len(cases)))
        errors.append(np.abs(shares.mean(axis=0)).max())
    what = "largest error of a mean with outliers split off, as a share of |q_in||k_in| + |q_out||k_out|"
    outcome.figures.append(Figure(what, "0", "0", f"{max(errors):.4f}"))
    return outcome


def part_sizes(q: Any, k: Any, channels: Any) -> Any:
    """|q_in||k_in| + |q_out||k_out| (s, n)."""
    norms = [[np.linalg.norm(part[0, 0], axis=1) for part in split(x, channels)] for x in (q, k)]
    return np.outer(norms[0][0], norms[1][0]) + np.outer(norms[0][1], norms[1][1])


def leave_outliers_out(q: Any, k: Any, projection: Projection, outer: Projection, outliers: int, engine: str) -> Any:
    """Estimates of the part without outlier channels alone."""
    keys = sketch_keys(k, projection, outliers=outliers, outlier_projection=outer, page=PAGE, engine=engine)
    keys = replace(keys, outlier_norms=np.zeros_like(keys.outlier_norms))
    return sketch_scores(q, keys, projection, outlier_projection=outer, engine=engine)


def scale_outlier_constant(
    q: Any, k: Any, projection: Projection, outer: Projection, outliers: int, engine: str
) -> Any:
    return estimate_split(q, k, projection, replace(outer, constant=1.05 * outer.constant), outliers, engine)


CLAIM = Claim(
    name="unbiased_outliers",
    title="The sketched score stays right on average when a few large channels are sketched apart",
    source="QJL, section 4.1",
    published="outlier channels and the rest are sketched by two instances of QJL",
    proved="the sum of two unbiased estimates: E est = <q_in, k_in> + <q_out, k_out> = <q, k>",
    finding="True, in every number format: splitting the large channels off does not shift scores.",
    verdict=HOLDS,
    run=lambda setting: check_cases(setting, CASES),
    twins=(
        Twin(
            "the outliers' constant off by 5 %",
            lambda setting: check_cases(setting, CASES[:1], scale_outlier_constant),
        ),
        Twin("the outliers left out", lambda setting: check_cases(setting, CASES[:1], leave_outliers_out)),
    ),
)
