"""Few cases that cover all pairs: of any two settings, every two values meet in at least one case."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping
from typing import Any

#: Cases that are drawn for each one that is taken.
DRAWS = 60


def pairwise(axes: Mapping[str, Iterable[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Cases, a value of each axis by name, in which all pairs of values of two axes occur; the same for a seed.

    Each case is the one, of some random ones through a pair still missing, that has the most pairs still missing.
    """
    values = {name: list(axis) for name, axis in axes.items()}
    names = list(values)
    missing = {
        ((one, i), (other, j))
        for one, other in itertools.combinations(names, 2)
        for i in range(len(values[one]))
        for j in range(len(values[other]))
    }
    rng = random.Random(seed)
    cases = []
    while missing:
        first = min(missing)
        drawn = []
        for _ in range(DRAWS):
            case = {name: rng.randrange(len(values[name])) for name in names} | dict(first)
            drawn.append((len(missing & _pairs(case)), case))
        best = max(drawn, key=lambda scored: scored[0])[1]
        missing -= _pairs(best)
        cases.append({name: values[name][index] for name, index in best.items()})
    return cases


def _pairs(case: dict[str, int]) -> set[tuple[tuple[str, int], tuple[str, int]]]:
    return set(itertools.combinations(case.items(), 2))
