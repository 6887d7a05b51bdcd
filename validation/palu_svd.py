"""The plain factorisation of a weight is the best of its rank (Eckart and Young).

Proof. Let M have rank r and s_i(X) be the singular values of X, descending. Subtract from W the matrix M
and then the first i - 1 singular directions of W - M: what is left stretches no vector by more than s_i(W - M), and
what was subtracted has rank r + i - 1 at most, so it vanishes on a vector in the span of the first r + i right singular
vectors of W, which W stretches by s_(r + i)(W) at least. So s_(r + i)(W) <= s_i(W - M), and |W - M|^2, the sum of all
s_i(W - M)^2, is at least the sum of s_j(W)^2 over j > r, which the cut singular value decomposition reaches.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvsketch.palu import Factors
from kvsketch.statistical_tests import check_at_most
from kvsketch.validation.claim import HOLDS, Claim, Figure, Outcome, Setting, Twin
from kvsketch.validation.palu_problems import (
    ROUNDING,
    Factoring,
    Problem,
    check_least,
    cut_error,
    factors_of,
    join,
    planted_weight,
)

#: Outputs and inputs of weights: wide, tall, square.
SHAPES = ((24, 40), (40, 24), (32, 32))
#: Each singular value over the one before.
DECAY = 0.85
RANKS = (1, 8, 16, 23)


def check_shapes(setting: Setting, factor: Factoring) -> Outcome:
    """Weights whose singular values are known by construction, cut to several ranks."""
    outcome = Outcome()
    apart = 0.0
    for out, width in SHAPES:
        rng = setting.generator("palu svd", out, width)
        spectrum = DECAY ** np.arange(min(out, width))
        problem = Problem(planted_weight(out, width, spectrum, rng))
        factors = factor(problem)
        apart = max(apart, float(np.abs(factors.spectrum / spectrum - 1).max()))
        outcome.checks += check_least(f"weight {out} x {width}", problem, RANKS, rng, factor)
        squares = np.square(spectrum)
        outcome.figures.append(
            Figure(
                f"share of the squares of a weight {out} x {width} that is lost at ranks {join(RANKS)}",
                "",
                join(squares[rank:].sum() / squares.sum() for rank in RANKS),
                join(cut_error(problem, factors, rank) / squares.sum() for rank in RANKS),
            )
        )
    outcome.checks.append(
        check_at_most("relative distance of singular values from planted ones", apart, ROUNDING, n=len(SHAPES))
    )
    return outcome


def run(setting: Setting) -> Outcome:
    return check_shapes(setting, factors_of)


def without_first(problem: Problem) -> Factors:
    """The second direction in place of the first, and so on."""
    factors = factors_of(problem)
    return replace(factors, down=np.roll(factors.down, -1, axis=0), up=np.roll(factors.up, -1, axis=1))


def scaled(problem: Problem) -> Factors:
    """One of the two factors is 1 % too large."""
    factors = factors_of(problem)
    return replace(factors, up=1.01 * factors.up)


CLAIM = Claim(
    name="palu_svd",
    title="Cutting a weight's singular value decomposition is the best a low rank can do",
    source="Palu, low-rank projection (Eckart and Young, 1936)",
    published="W = A B with the largest singular values is the optimal approximation of its rank",
    proved="|W - M|^2 is at least the sum of the squared singular values left out, for every M of that rank (shown in "
    "validation/palu_svd.py)",
    finding="The library's plain factors lose exactly the squares of the singular values that are left out. No changed "
    "factors of the same size lose less, nor does a search that starts anywhere. That is the best for the weight's own "
    "numbers; what the model computes with them is another question.",
    verdict=HOLDS,
    run=run,
    twins=(
        Twin("the largest direction is left out", lambda setting: check_shapes(setting, without_first)),
        Twin("one factor 1 % too large", lambda setting: check_shapes(setting, scaled)),
    ),
    on_engines=False,
)
