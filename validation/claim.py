"""What a claim is, and what checking it gives.

A claim's file holds one :class:`Claim`, called ``CLAIM``: its statement, where it was published, what holds instead,
a function that checks it, and twins. A twin is a broken version that the same checks must find out; a claim whose twin
passes has no power, and fails.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvsketch.statistical_tests import FALSE_ALARM, FEWEST_SAMPLES, Check

#: What a claim can turn out to be.
HOLDS, CORRECTED, REFUTED, MEASURED = "holds", "holds with a corrected constant", "refuted", "measured only"
VERDICTS = (HOLDS, CORRECTED, REFUTED, MEASURED)


@dataclass(frozen=True)
class Setting:
    """How a claim is checked.

    Attributes
    ----------
    full : bool
        With as many samples as minutes allow, instead of those of seconds.
    seed : int
        What all random numbers come from.
    engine : str
        The engine under test.
    level : float
        Probability that a claim as a whole gives a false alarm, at most.
    share : float
        Part of the usual number of samples, for studies over many seeds.
    """

    full: bool = False
    seed: int = 0
    engine: str = "reference"
    level: float = FALSE_ALARM
    share: float = 1.0

    def draws(self, quick: int, full: int | None = None) -> int:
        """Samples to take: `quick` of them, or `full`; a share leaves as many as tests of a mean need."""
        count = full if self.full and full is not None else quick
        return min(count, max(FEWEST_SAMPLES, round(self.share * count)))

    def generator(self, *stream: Any) -> np.random.Generator:
        """Random numbers of their own for everything that is called `stream`."""
        return np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=_key(stream)))

    def seeds(self, count: int, *stream: Any) -> list[int]:
        """Seeds of `count` independent projections of their own for everything that is called `stream`."""
        return [int(x) for x in self.generator("seeds", *stream).integers(0, 2**62, size=count)]


def _key(stream: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(zlib.crc32(repr(part).encode()) for part in stream)


@dataclass(frozen=True)
class Figure:
    """A number that the claim is about: as published, as proved here, and as measured, each as text or empty."""

    what: str
    published: str = ""
    proved: str = ""
    measured: str = ""


@dataclass
class Outcome:
    """What checking gave; `series` holds what pictures are drawn from, lists of numbers by name."""

    checks: list[Check] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    series: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether there are checks and all of them hold."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def false_alarm(self) -> float:
        """Probability that any of the checks fails although the claim is true, at most."""
        return sum(check.false_alarm for check in self.checks)


@dataclass(frozen=True)
class Twin:
    """A broken version of what a claim is about; its checks must fail, by a wide margin."""

    name: str
    run: Callable[[Setting], Outcome]


@dataclass(frozen=True)
class Claim:
    """A claim and how it is checked.

    Attributes
    ----------
    name : str
        As in ``kvsketch validate --only NAME``.
    title : str
        The claim in one sentence that needs no statistics.
    source : str
        Where it is published, or ``"kvsketch"``.
    published, proved : str
        The statement as published, and as proved here (with the function of :mod:`kvsketch.bounds` that has the proof).
    finding : str
        What we found, in one or two sentences that need no statistics.
    verdict : str
        One of :data:`VERDICTS`, where all checks pass.
    run : callable
        Checks the claim on a :class:`Setting`.
    twins : tuple of Twin
    on_engines : bool
        Whether an engine's code is part of what is checked; otherwise one run serves for all.
    needs_model : bool
        Whether it is checked on the keys and values of the demo model.
    """

    name: str
    title: str
    source: str
    published: str
    proved: str
    finding: str
    verdict: str
    run: Callable[[Setting], Outcome]
    twins: tuple[Twin, ...]
    on_engines: bool = True
    needs_model: bool = False

    def missing(self) -> str:
        """Why the claim cannot be checked here; empty where it can."""
        if not self.needs_model:
            return ""
        from kvsketch.validation import model_data

        return model_data.missing()
