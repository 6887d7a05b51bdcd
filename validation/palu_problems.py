"""Weights with inputs and gradients whose best factors are looked for, and rivals of these: for claims about Palu."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvsketch import palu
from kvsketch.palu import Factors
from kvsketch.statistical_tests import Check, check_at_least, check_at_most

#: What :func:`kvsketch.palu.factorise` adds to the diagonal of gradients' second moments, as a share of its mean.
DAMPING = 1e-4
#: Sizes of changes to factors, relative to their mean number, and changes of each size.
SIZES, CHANGES = (1e-3, 3e-2, 0.5), 12
#: Rounds of alternating least squares from a random start; they end within this share of the least error.
ROUNDS, REACHED = 400, 0.01
#: Relative distance that float64 may put between two ways to the same error.
ROUNDING = 1e-8

#: Factors of a problem's weight; twins bring their own.
Factoring = Callable[["Problem"], Factors]


@dataclass(frozen=True, eq=False)
class Problem:
    """A weight (out, in) and, where errors are weighted, inputs (n, in) and gradients (n, out) of tokens."""

    weight: Any
    inputs: Any = None
    gradients: Any = None

    def error(self, product: Any) -> float:
        """The squared error of `product` (out, in): of the numbers; of the mean output; or weighted by gradients.

        With inputs h it is E|W h - product h|^2 over the tokens themselves, with gradients g E[(g (W - product) h)^2]
        for g and h of any two tokens, and the damping's part.
        """
        return float(np.square(self.weighted(self.weight - product)).sum())

    def weighted(self, difference: Any) -> Any:
        """A matrix whose squares sum up to what `difference` (out, in) costs."""
        if self.inputs is not None:
            difference = difference @ self.inputs.T / np.sqrt(len(self.inputs))
        return difference if self.gradients is None else self._left @ difference

    @property
    def gram(self) -> Any:
        """(in, in) E[h h^T]; None where errors of inputs do not count."""
        return None if self.inputs is None else second_moment(self.inputs)

    @property
    def error_weight(self) -> Any:
        """(out, out) E[g g^T], not damped; None where there are no gradients."""
        return None if self.gradients is None else second_moment(self.gradients)

    @property
    def _left(self) -> Any:
        own = self.gradients / np.sqrt(len(self.gradients))
        return np.concatenate([own, np.sqrt(DAMPING * np.square(own).sum(axis=0).mean()) * np.eye(own.shape[1])])

    def improve(self, down: Any, rounds: int) -> Any:
        """A product after `rounds` of least squares from `down` (r, in): the best up for it, then the best down."""
        gram = np.eye(self.weight.shape[1]) if self.inputs is None else self.gram
        left = np.eye(len(self.weight)) if self.gradients is None else self._left.T @ self._left
        for _ in range(rounds):
            down = np.linalg.qr(down.T)[0].T
            up = np.linalg.qr(np.linalg.solve(down @ gram @ down.T, down @ gram @ self.weight.T).T)[0]
            down = np.linalg.solve(up.T @ left @ up, up.T @ left @ self.weight)
        return up @ down


def second_moment(x: Any) -> Any:
    """(width, width) mean of the outer products of the rows of x (n, width)."""
    return x.T @ x / len(x)


def anisotropic(n: int, width: int, condition: float, rng: np.random.Generator) -> Any:
    """Vectors (n, width) that differ in size by the root of `condition` from the largest direction to the smallest."""
    axes = np.linalg.qr(rng.standard_normal((width, width)))[0]
    return rng.standard_normal((n, width)) * condition ** (-np.arange(width) / (2 * (width - 1))) @ axes.T


def planted_weight(out: int, width: int, spectrum: Any, rng: np.random.Generator) -> Any:
    """A weight (out, width) with the singular values `spectrum` in random directions."""
    left, right = (np.linalg.qr(rng.standard_normal((size, len(spectrum))))[0] for size in (out, width))
    return left * spectrum @ right.T


def factors_of(problem: Problem) -> Factors:
    """The library's factors by the method for what `problem` weighs."""
    method = "plain" if problem.inputs is None else "whitened" if problem.gradients is None else "two-sided"
    return palu.factorise(problem.weight, problem.gram, error_weight=problem.error_weight, method=method)


def changed(down: Any, up: Any, rng: np.random.Generator) -> Iterator[Any]:
    """Products of factors near `down` and `up` and not so near."""
    for size in SIZES:
        for _ in range(CHANGES):
            yield (up + size * np.abs(up).mean() * rng.standard_normal(up.shape)) @ (
                down + size * np.abs(down).mean() * rng.standard_normal(down.shape)
            )


def check_least(
    what: str, problem: Problem, ranks: tuple[int, ...], rng: np.random.Generator, factor: Factoring = factors_of
) -> list[Check]:
    """Cuts to `ranks` have the error of the spectrum's tail, and no rival of the same rank has less."""
    factors = factor(problem)
    spectrum = np.linalg.svd(problem.weighted(problem.weight), compute_uv=False)
    apart, gained = 0.0, 0.0
    near, far = [], []
    for rank in ranks:
        down, up = factors.cut(rank)
        least = float(np.square(spectrum[rank:]).sum())
        error = problem.error(up @ down)
        apart = max(apart, abs(error / least - 1), abs(np.square(factors.spectrum[rank:]).sum() / least - 1))
        near += [problem.error(product) / error for product in changed(down, up, rng)]
        gained = max(gained, 1 - problem.error(problem.improve(down, 1)) / error)
        far.append(problem.error(problem.improve(rng.standard_normal(down.shape), ROUNDS)) / error)
    least_squares = f"{what}: error of least squares from a random start over the error"
    return [
        check_at_most(
            f"{what}: relative distance of the error from the spectrum's tail", apart, ROUNDING, n=len(ranks)
        ),
        check_at_least(f"{what}: least error of changed factors over the error", min(near), 1.0, n=len(near)),
        check_at_most(f"{what}: share of the error that least squares still gain", gained, ROUNDING, n=len(ranks)),
        check_at_least(f"{least_squares}, at least", min(far), 1 - ROUNDING, n=len(far)),
        check_at_most(f"{least_squares}, at most", max(far), 1 + REACHED, n=len(far)),
    ]


def cut_error(problem: Problem, factors: Factors, rank: int) -> float:
    """The error of `problem` with factors cut to `rank`."""
    down, up = factors.cut(rank)
    return problem.error(up @ down)


def join(numbers: Iterable[float]) -> str:
    """Numbers as a list in text."""
    return ", ".join(f"{x:.3g}" for x in numbers)
