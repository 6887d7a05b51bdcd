"""Claims of every kind of outcome, for the tests of what runs claims and reports on them."""

from __future__ import annotations

import os

import numpy as np

from kvsketch.statistical_tests import Check
from kvsketch.validation.claim import CORRECTED, Claim, Figure, Outcome, Setting


def holds(setting: Setting) -> Outcome:
    checks = [
        Check("a mean <of> means", 1000, 1.5 + setting.seed, 5.0, "<=", setting.level / 2),
        Check("threads", 1, float(os.environ.get("OMP_NUM_THREADS", "0")), 1.0, "<=", 0.0),
    ]
    return Outcome(checks, [Figure("a rate", "1 %", "2 %", "1.9 %")], {"cosine": np.array([0.0, np.inf])})


def fails(setting: Setting) -> Outcome:
    return Outcome([Check("a mean that is off", 1000, 9.0, 5.0, "<=", setting.level)])


def is_nan(setting: Setting) -> Outcome:
    return Outcome([Check("a mean of nothing", 1000, float("nan"), 5.0, "<=", setting.level)])


def is_empty(setting: Setting) -> Outcome:
    return Outcome()


def raises(setting: Setting) -> Outcome:
    raise ArithmeticError(f"no sums with seed {setting.seed}")


def dies(setting: Setting) -> Outcome:
    os._exit(3)


class Lacking(Claim):
    """A claim that needs what is nowhere."""

    def missing(self) -> str:
        return "the moon is not installed"


RUNS = {run.__name__: run for run in (holds, fails, is_nan, is_empty, raises, dies)}


def load(name: str) -> Claim:
    """The claim called `name`: one of the functions above, or ``"lacks"``."""
    kind = Lacking if name == "lacks" else Claim
    return kind(
        name=name,
        title=f"What {name} says",
        source="Lemma <1>",
        published="a & b",
        proved="c",
        finding="It is so.",
        verdict=CORRECTED,
        run=RUNS.get(name, holds),
        twins=(),
    )
