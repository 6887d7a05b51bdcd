"""Whitened factors have the least output error of their rank, and two-sided ones the least error that gradients weigh.

Proof. With G = E[h h^T] and any root L L^T = G, E|(W - M) h|^2 = |W L - M L|^2; M L takes every value of the rank of M,
so Eckart and Young's theorem for W L gives the least: the squares of its singular values beyond the rank. Projecting
the outputs on the first left singular vectors U of W L, M = U U^T W, reaches it: M L is the cut of W L. For weights
on both sides the same holds of P W L, P the root of the damped second moment of gradients.

SVD-LLM takes the Cholesky factor for L and forms M = cut(W L) L^-1: the same matrix, for U U^T W L L^-1 = U U^T W.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from kvsketch import palu
from kvsketch.palu import Factors
from kvsketch.statistical_tests import check_at_least, check_at_most
from kvsketch.validation.claim import HOLDS, Claim, Figure, Outcome, Setting, Twin
from kvsketch.validation.palu_problems import (
    Factoring,
    Problem,
    anisotropic,
    check_least,
    cut_error,
    factors_of,
    join,
)

OUT, IN, TOKENS = 24, 40, 400
#: Largest over smallest second moment of the inputs, and of the gradients.
CONDITION, GRADIENT_CONDITION = 1e4, 1e3
RANKS = (2, 12, 20)
#: A method that minimises something else has at least this many times the error.
MARGIN = 1.1
#: Relative distance from the textbook's way, which loses digits by an inverse.
APART = 1e-8


def make_problem(setting: Setting) -> Problem:
    rng = setting.generator("palu whitening")
    return Problem(
        rng.standard_normal((OUT, IN)),
        anisotropic(TOKENS, IN, CONDITION, rng),
        anisotropic(TOKENS, OUT, GRADIENT_CONDITION, rng),
    )


def by_cholesky(problem: Problem, rank: int) -> Any:
    """SVD-LLM's product of a `rank`: of W L, L the Cholesky factor of the Gram, cut, times the inverse of L."""
    root = np.linalg.cholesky(problem.gram)
    u, s, v = np.linalg.svd(problem.weight @ root, full_matrices=False)
    return np.linalg.solve(root.T, (u[:, :rank] * s[:rank] @ v[:rank]).T).T


def check_methods(setting: Setting, factor: Factoring) -> Outcome:
    """Each method minimises its own error, clearly better than the other two."""
    outcome = Outcome()
    both = make_problem(setting)
    outputs, numbers = replace(both, gradients=None), Problem(both.weight)
    plain, whitened, two_sided = factor(numbers), factor(outputs), factor(both)
    rivals = (
        ("whitened", outputs, whitened, {"plain": plain, "two-sided": two_sided}),
        ("two-sided", both, two_sided, {"plain": plain, "whitened": whitened}),
    )
    for name, problem, own, others in rivals:
        rng = setting.generator("palu whitening", name)
        outcome.checks += check_least(name, problem, RANKS, rng, factor)
        errors = [cut_error(problem, own, rank) for rank in RANKS]
        total = problem.error(np.zeros_like(problem.weight))
        measured = [f"{name} {join(error / total for error in errors)}"]
        for other, factors in others.items():
            found = [cut_error(problem, factors, rank) for rank in RANKS]
            ratio = min(x / error for x, error in zip(found, errors, strict=True))
            outcome.checks.append(
                check_at_least(f"error that {name} factors minimise: {other} over {name}", ratio, MARGIN, n=len(RANKS))
            )
            measured.append(f"{other} {join(x / total for x in found)}")
        what = "output error" if name == "whitened" else "output error weighted by gradients"
        outcome.figures.append(Figure(f"share of the {what} left, ranks {join(RANKS)}", "", "", "; ".join(measured)))
    products = [(by_cholesky(outputs, rank), np.matmul(*whitened.cut(rank)[::-1])) for rank in RANKS]
    apart = max(float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted)) for wanted, found in products)
    outcome.checks.append(
        check_at_most("whitened: relative distance from SVD-LLM's product by Cholesky", apart, APART, n=len(RANKS))
    )
    outcome.figures.append(Figure("relative distance of whitened factors from SVD-LLM's", "0", "0", f"{apart:.1e}"))
    return outcome


def run(setting: Setting) -> Outcome:
    return check_methods(setting, factors_of)


def without_gram(problem: Problem) -> Factors:
    """The plain decomposition in place of the whitened one."""
    return factors_of(problem if problem.gradients is not None else Problem(problem.weight))


def without_gradients(problem: Problem) -> Factors:
    """Whitened factors in place of two-sided ones."""
    return factors_of(replace(problem, gradients=None))


def with_root_of_gram(problem: Problem) -> Factors:
    """The Gram's root in its place: inputs weigh too little."""
    if problem.inputs is None or problem.gradients is not None:
        return factors_of(problem)
    moments, vectors = np.linalg.eigh(problem.gram)
    return palu.factorise(problem.weight, vectors * np.sqrt(moments) @ vectors.T, method="whitened")


CLAIM = Claim(
    name="palu_whitening",
    title="A weight is best factored for what it makes of real inputs, not for its own numbers",
    source="Palu, settings (the truncation-aware SVD of SVD-LLM, arXiv 2403.07378)",
    published="weights are factored after whitening with a Cholesky factor of the inputs' second moment",
    proved="whitening minimises E|W h - M h|^2 over all M of its rank, without a Cholesky factor or an inverse; with "
    "the gradients' second moment on the other side, the error that the loss feels to first order (shown in "
    "validation/palu_whitening.py)",
    finding="Whitened factors have the least error of the outputs, and the plain decomposition clearly more as soon as "
    "inputs prefer some directions. They are SVD-LLM's to rounding. Weighing the outputs by the loss's gradients too "
    "gives the least of that error, which is the better choice if the loss is what counts.",
    verdict=HOLDS,
    run=run,
    twins=(
        Twin("plain factors called whitened", lambda setting: check_methods(setting, without_gram)),
        Twin("whitened factors called two-sided", lambda setting: check_methods(setting, without_gradients)),
        Twin("the root of the Gram in its place", lambda setting: check_methods(setting, with_root_of_gram)),
    ),
    on_engines=False,
)
