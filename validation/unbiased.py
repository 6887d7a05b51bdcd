"""Lemma 3.2 of QJL: the estimate of a score is right on average."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from kvsketch._checks import FLOAT_DTYPES
from kvsketch.bitpack import unpack_signs
from kvsketch.bounds import sketch_constant_bias_published, sketch_variance
from kvsketch.qjl import sketch_keys, sketch_scores
from kvsketch.rotation import Projection, draw_projection
from kvsketch.statistical_tests import check_mean
from kvsketch.validation.claim import CORRECTED, Claim, Figure, Outcome, Setting, Twin
from kvsketch.validation.draws import (
    KEY_NORM,
    QUERY_NORM,
    Estimate,
    draw_estimates,
    estimate_scores,
    exact_scores,
    pairs,
    with_constant,
    with_projection,
)

COSINES = np.array([-1, -0.7, -0.2, 0, 0.5, 0.9, 1])
HEADS = 16
#: Kind of rows, head size, rows, dtype, and draws in the quick setting. Rows are a part of a block, one block, several,
#: or several with a part of one.
CASES = (
    ("gaussian", 2, 3, "float32", 250),
    ("gaussian", 64, 48, "float32", 150),
    ("gaussian", 256, 32, "float32", 120),
    ("orthogonal", 2, 2, "float32", 400),
    ("orthogonal", 16, 8, "float32", 250),
    ("orthogonal", 16, 16, "float32", 250),
    ("orthogonal", 16, 40, "float32", 400),
    ("orthogonal", 64, 64, "float16", 120),
    ("orthogonal", 32, 64, "bfloat16", 120),
    ("orthogonal", 128, 48, "float32", 100),
)
MORE_CASES = (
    ("gaussian", 8, 24, "bfloat16", 250),
    ("gaussian", 128, 256, "float16", 120),
    ("orthogonal", 64, 200, "float32", 120),
    ("orthogonal", 96, 96, "bfloat16", 120),
    ("orthogonal", 256, 320, "float32", 100),
)
#: The case of the twins.
SHARP = (("orthogonal", 16, 40, "float32", 400),)
#: Draws of --full, as a multiple of the quick ones.
FULL = 6
#: Rounding as a share of the estimate's size: that of a key's norm to float16 (exact for float32 keys, whose norm is
#: KEY_NORM), and that of the result to its dtype.
ROUNDING = {"float32": 1e-6, "float16": 2.0**-11 + 2.0**-11, "bfloat16": 2.0**-11 + 2.0**-8}


def check_cases(setting: Setting, cases: Any, estimate: Estimate = estimate_scores) -> Outcome:
    """The mean estimate at all cosines, of as many pairs as there are heads; all heads share a draw's projection.

    Keys and queries in half precision are rounded first, and the estimate compared with the rounded pair's score. What
    rounding of norm and result can shift the mean by is allowed: as a share of sqrt(E est^2).
    """
    outcome = Outcome()
    for kind, d, m, dtype, draws in cases:
        q, k = pairs(d, COSINES, setting.generator("pairs", kind, d, m), heads=HEADS)
        q, k = q.astype(FLOAT_DTYPES[dtype]), k.astype(FLOAT_DTYPES[dtype])
        seeds = setting.seeds(setting.draws(draws, FULL * draws), "unbiased", kind, d, m)
        found = draw_estimates(setting, q, k, m=m, kind=kind, seeds=seeds, estimate=estimate)
        found = found.mean(axis=(1, 3)) / (KEY_NORM * QUERY_NORM)
        exact = exact_scores(q, k).mean(axis=(1, 3))[0] / (KEY_NORM * QUERY_NORM)
        size = np.sqrt(sketch_variance(m, d, COSINES, kind=kind) + COSINES**2)
        what = f"mean estimate of {HEADS} pairs, {kind} rows, d = {d}, m = {m}, {dtype}, {len(COSINES)} cosines"
        level = setting.level / len(cases)
        outcome.checks.append(check_mean(what, found, exact, tolerance=ROUNDING[dtype] * size, level=level))
        if (kind, d, m) == SHARP[0][:3]:
            outcome.figures.append(describe_parallel_pair(d, found[:, -1]))
    return outcome


def describe_parallel_pair(d: int, scores: Any) -> Figure:
    """What the mean of `scores` is, and would be with the published constant, for a query along its key."""
    published = 1 + sketch_constant_bias_published(d)
    measured = f"{scores.mean():.4f} ± {2 * scores.std() / math.sqrt(len(scores)):.4f}"
    what = f"mean score of parallel unit vectors, truly 1, orthogonal rows, d = {d}"
    return Figure(what, f"1 ({published:.4f} with sqrt(pi/2))", "1", measured)


def estimate_from_signs(q: Any, k: Any, projection: Projection, engine: str) -> Any:
    """Estimates where the query, too, is reduced to signs: right for angles, |q||k| (1 - 2 angle/pi) on average."""
    queries, keys = (sketch_keys(x, projection, engine=engine) for x in (q, k))
    signs = [unpack_signs(x.signs, projection.m, engine=engine).astype(np.float32) for x in (queries, keys)]
    agreement = signs[0] @ signs[1].swapaxes(-1, -2) / projection.m
    return agreement * queries.norms[..., None].astype(np.float32) * keys.norms[:, :, None].astype(np.float32)


def measure_signs_on_both_sides(setting: Setting) -> Figure:
    d, m = 16, 64
    q, k = pairs(d, [0.5], setting.generator("both sides"), heads=HEADS)
    seeds = setting.seeds(setting.draws(100), "both sides")
    found = draw_estimates(setting, q, k, m=m, kind="orthogonal", seeds=seeds, estimate=estimate_from_signs)
    mean = found.mean() / (KEY_NORM * QUERY_NORM)
    return Figure("a score of 0.5 when the query is reduced to signs too", "", f"{1 / 3:.3f}", f"{mean:.3f}")


def run(setting: Setting) -> Outcome:
    outcome = check_cases(setting, CASES + MORE_CASES if setting.full else CASES)
    for d in (16, 64, 128):
        bias = f"{100 * sketch_constant_bias_published(d):+.2f} %"
        outcome.figures.append(Figure(f"bias of every score with sqrt(pi/2) on orthogonal rows, d = {d}", "0", bias))
    outcome.figures.append(measure_signs_on_both_sides(setting))
    return outcome


def use_published_constant(projection: Projection) -> Projection:
    """The published code's constant, on orthogonal rows too."""
    return replace(projection, constant=math.sqrt(math.pi / 2))


def drop_norm(q: Any, k: Any, projection: Projection, engine: str) -> Any:
    """Estimates that leave the key's norm out."""
    keys = sketch_keys(k, projection, engine=engine)
    return sketch_scores(q, replace(keys, norms=np.ones_like(keys.norms)), projection, engine=engine)


def ignore_seed(projection: Projection) -> Projection:
    """The same projection in all draws."""
    return draw_projection(projection.m, projection.d, kind=projection.kind, seed=0)


CLAIM = Claim(
    name="unbiased",
    title="The sketched score is right on average",
    source="QJL, Lemma 3.2",
    published="E est = <q, k> with c = sqrt(pi/2), for Gaussian rows; the experiments use orthogonal rows with it",
    proved="c = sqrt(pi/2) for Gaussian rows, c_d = sqrt(pi/d) Gamma((d+1)/2)/Gamma(d/2) for orthogonal ones "
    "(bounds.sketch_constant)",
    finding="True for random Gaussian rows as published. For the orthogonal rows that the paper's experiments use, the "
    "published constant makes every score too large, by 0.4 % at 64 channels; with the constant derived here it is "
    "exact.",
    verdict=CORRECTED,
    run=run,
    twins=(
        Twin(
            "sqrt(pi/2) on orthogonal rows, d = 16",
            lambda setting: check_cases(setting, SHARP, with_projection(use_published_constant)),
        ),
        Twin("a constant off by 1 %", lambda setting: check_cases(setting, SHARP, with_constant(1.01))),
        Twin("signs on both sides", lambda setting: check_cases(setting, SHARP, estimate_from_signs)),
        Twin("the key's norm left out", lambda setting: check_cases(setting, SHARP, drop_norm)),
        Twin("one seed for all draws", lambda setting: check_cases(setting, SHARP, with_projection(ignore_seed))),
    ),
)
