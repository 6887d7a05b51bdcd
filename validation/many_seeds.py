"""How often the claims' checks fail over many seeds: ``python -m kvsketch.validation.many_seeds --seeds 200``.

A check that fails once in a million runs cannot be watched failing. So the claims run with a level at which false
alarms are frequent enough to be counted, and with a share of the samples. For each check the table has the probability
that it states, its failures, and between what bounds the true probability lies (Clopper and Pearson, 99.9 % each). A
statement is refuted where so many failures have a chance below 1e-6 under it; the study then ends with exit status 1.

Checks of the form ``found >= limit`` refute something. With few samples they may lack the power to, of which no
probability is stated: they are counted, and not judged. Claims on a model's numbers and claims without chance are left
out, as they say the same for every seed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from scipy import stats

from kvsketch.numba_cpu._threads import core_count
from kvsketch.statistical_tests import check_rate_at_most
from kvsketch.validation.claim import Outcome, Setting
from kvsketch.validation.registry import NAMES, check_names, load_claim
from kvsketch.validation.runner import open_pool

#: Chance that a bound in the table misses the true probability.
MISS = 1e-3


@dataclass
class Tally:
    """One check's failures over the seeds."""

    claim: str
    what: str
    relation: str
    stated: float
    runs: int = 0
    failures: int = 0

    @property
    def bounds(self) -> tuple[float, float]:
        """What the true probability of a failure is at least, and at most."""
        low = stats.beta.ppf(MISS, self.failures, self.runs - self.failures + 1) if self.failures else 0.0
        high = stats.beta.isf(MISS, self.failures + 1, self.runs - self.failures) if self.failures < self.runs else 1.0
        return float(low), float(high)

    @property
    def refuted(self) -> bool:
        """Whether the check fails more often than it states."""
        alarm = check_rate_at_most(self.what, self.failures, self.runs, self.stated)
        return self.relation == "<=" and not alarm.passed


def count_failures(names: Sequence[str], seeds: int, base: Setting, *, jobs: int) -> list[Tally]:
    """Tallies of all checks with chance in them of the claims called `names`; a claim that raises ends the study."""
    tallies: dict[tuple[str, int], Tally] = {}
    with open_pool(jobs) as pool:
        for span in (range(1, 2), range(2, seeds + 1)):
            runs = [(name, pool.submit(_run, name, replace(base, seed=seed))) for seed in span for name in names]
            for name, future in runs:
                for number, check in enumerate(future.result().checks):
                    if check.false_alarm > 0:
                        # Words of a check may name what was found; its place does not.
                        new = Tally(name, check.what, check.relation, check.false_alarm)
                        tally = tallies.setdefault((name, number), new)
                        tally.runs += 1
                        tally.failures += not check.passed
            names = [name for name in names if any(claim == name for claim, _ in tallies)]
    return list(tallies.values())


def _run(name: str, setting: Setting) -> Outcome:
    outcome = load_claim(name).run(setting)
    outcome.series.clear()
    return outcome


def pool_tallies(tallies: Sequence[Tally]) -> Tally:
    """All checks with a stated probability together, as one that states their average."""
    stated = [t for t in tallies if t.relation == "<="]
    runs = sum(t.runs for t in stated)
    average = sum(t.stated * t.runs for t in stated) / max(1, runs)
    return Tally("all", "checks with chance in them", "<=", average, runs, sum(t.failures for t in stated))


def print_tallies(tallies: Sequence[Tally]) -> None:
    """A line a check."""
    print(f"{'failures':>12} {'stated':>9} {'at least':>9} {'at most':>9}  claim: check")
    for tally in tallies:
        low, high = tally.bounds
        note = "  REFUTED" if tally.refuted else "  (power)" if tally.relation == ">=" else ""
        counts = f"{tally.failures} of {tally.runs}"
        print(f"{counts:>12} {tally.stated:>9.2g} {low:>9.2g} {high:>9.2g}  {tally.claim}: {tally.what}{note}")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m kvsketch.validation.many_seeds", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--seeds", type=int, default=200, help="seeds to run (default: 200)")
    parser.add_argument("--share", type=float, default=0.3, help="part of the quick samples (default: 0.3)")
    parser.add_argument(
        "--level", type=float, default=0.05, help="probability of a false alarm a claim (default: 0.05)"
    )
    parser.add_argument("--jobs", type=int, default=core_count(), help="runs at a time (default: one a core)")
    parser.add_argument("--engine", choices=("reference", "numba_cpu"), default="reference")
    parser.add_argument("--only", default=",".join(NAMES), help="claims, with commas between (default: all)")
    chosen = parser.parse_args(arguments)
    for name, fine in (("seeds", chosen.seeds >= 1), ("jobs", chosen.jobs >= 1), ("share", 0 < chosen.share <= 1)):
        if not fine:
            parser.error(f"--{name} is too small or too large: {getattr(chosen, name)}")
    if not 0 < chosen.level < 1:
        parser.error(f"--level must lie strictly between 0 and 1, got {chosen.level}")
    chosen.names = tuple(name.strip() for name in chosen.only.split(","))
    try:
        check_names(chosen.names)
    except ValueError as error:
        parser.error(f"--only: {error}")
    return chosen


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study and print it; 1 where a statement is refuted."""
    chosen = parse_arguments(arguments)
    started = time.perf_counter()
    names = [name for name in chosen.names if not load_claim(name).needs_model]
    base = Setting(level=chosen.level, share=chosen.share, engine=chosen.engine)
    tallies = count_failures(names, chosen.seeds, base, jobs=chosen.jobs)
    together = pool_tallies(tallies)
    print_tallies([*tallies, together])
    print(f"{chosen.seeds} seeds, {chosen.share:g} of the samples, {time.perf_counter() - started:.0f} s")
    return int(any(tally.refuted for tally in (*tallies, together)))


if __name__ == "__main__":
    sys.exit(main())
