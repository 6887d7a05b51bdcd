"""How two things are compared: in turns in one process, with cold caches, ratios taken within each round."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import psutil

from benchmarks.bandwidth import read_all
from benchmarks.machine import flush_bytes
from kvsketch._progress import Progress, no_progress
from kvsketch.measurement import NEIGHBOUR_LIMIT, STEADY_LIMIT, Neighbours, Timing

#: Rounds of an entrant that loses by far anyhow.
FEW_ROUNDS = 3


def _nothing() -> None:
    """No preparation."""


class Entrant(NamedTuple):
    """One thing to time: `run` is inside the clock; `prepare` is called before the caches are flushed, outside it.

    `rounds` is the number of rounds that it takes part in, for one that is slow; None: all.
    """

    name: str
    run: Callable[[], object]
    prepare: Callable[[], None] = _nothing
    rounds: int | None = None


class Ratio(NamedTuple):
    """Quartiles of ratios."""

    first_quartile: float
    median: float
    third_quartile: float


def quartiles(numbers: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile; of fewer than three numbers their extremes and mean."""
    if len(numbers) < 3:
        return min(numbers), statistics.fmean(numbers), max(numbers)
    first, median, third = statistics.quantiles(numbers, n=4)
    return first, median, third


@dataclass(frozen=True)
class Race:
    """Seconds of each entrant, by round, and why they are not to be trusted: empty when nothing speaks against them."""

    seconds: dict[str, list[float]]
    contended: str = ""

    def timing(self, name: str) -> Timing:
        """Quartiles of an entrant's times, in milliseconds."""
        return Timing(*(1e3 * q for q in quartiles(self.seconds[name])))

    def ratio(self, over: str, under: str) -> Ratio:
        """Quartiles of time of `over` / time of `under`, over the rounds in which both ran."""
        pairs = zip(self.seconds[over], self.seconds[under], strict=False)
        return Ratio(*quartiles([x / y for x, y in pairs]))

    def share_ratio(self, over: str, under: str, floor: str) -> Ratio | None:
        """Quartiles of (over - floor) / (under - floor) within rounds; None where noise hides either share."""
        rounds = zip(self.seconds[over], self.seconds[under], self.seconds[floor], strict=False)
        shares = [(x - z, y - z) for x, y, z in rounds]
        ratios = [x / y for x, y in shares if min(x, y) > 0]
        return Ratio(*quartiles(ratios)) if len(ratios) > len(shares) / 2 else None

    def best(self, names: Sequence[str]) -> str:
        """The fastest of `names`, by median."""
        return min(names, key=lambda name: statistics.median(self.seconds[name]))


class _Steal:
    """Share of the processor time that the host of a virtual machine gives to others."""

    def __init__(self) -> None:
        self._before = psutil.cpu_times()

    def share(self) -> float:
        now = psutil.cpu_times()
        total = sum(now) - sum(self._before)
        return (getattr(now, "steal", 0.0) - getattr(self._before, "steal", 0.0)) / total if total > 0 else 0.0


def run_race(
    entrants: Sequence[Entrant],
    *,
    rounds: int,
    warm_up: int = 1,
    flush: bool = True,
    steady: str | None = None,
    progress: Progress = no_progress,
    title: str = "Timing",
) -> Race:
    """Time each of `entrants` in each of `rounds` rounds, after `warm_up` rounds that do not count.

    A round runs each once, starting one further each time. With `flush` a large array is read before each call, so that
    nothing that it needs is in the processor's caches. The race is marked as contended when another process used more
    than 5 % of a core, the host took more than 5 % of the time, or the times of what does not change vary by more than
    10 % (interquartile range over median): of those reads, or of the entrant `steady`.
    """
    large = np.ones((flush_bytes() if flush else 0) // 4, np.float32)
    seconds: dict[str, list[float]] = {entrant.name: [] for entrant in entrants}
    if len(seconds) != len(entrants):
        raise ValueError(f"entrants share a name: {[e.name for e in entrants]}")
    reads: list[float] = []
    others: tuple[Neighbours, _Steal] | None = None
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for turn, entrant in turns(entrants, rounds, warm_up):
            if turn == 0 and others is None:
                others = Neighbours(), _Steal()
            progress(title, turn + warm_up, rounds + warm_up)
            entrant.prepare()
            start = time.perf_counter()
            read_all(large)
            flushed = time.perf_counter()
            entrant.run()
            end = time.perf_counter()
            if turn >= 0:
                reads.append(flushed - start)
                seconds[entrant.name].append(end - flushed)
    finally:
        if collecting:
            gc.enable()
    unsteady = seconds[steady] if steady is not None else reads if flush else []
    shares = (0.0, 0.0) if others is None else (others[0].busiest_share(), others[1].share())
    return Race(seconds, _contention(*shares, unsteady))


def turns(entrants: Sequence[Entrant], rounds: int, warm_up: int) -> Iterator[tuple[int, Entrant]]:
    """Who runs in which round, as (round, entrant); rounds below 0 do not count. A round starts one further each time.

    An entrant of few rounds takes part in one that does not count and in the first that do.
    """
    for turn in range(-warm_up, rounds):
        first = turn % len(entrants)
        for entrant in (*entrants[first:], *entrants[:first]):
            if entrant.rounds is None or -1 <= turn < entrant.rounds:
                yield turn, entrant


def _contention(neighbour: float, stolen: float, reads: Sequence[float]) -> str:
    """Why times are not to be trusted, in a few words; empty when nothing speaks against them."""
    reasons = []
    if neighbour > NEIGHBOUR_LIMIT:
        reasons.append(f"another process used {neighbour:.0%} of a core")
    if stolen > NEIGHBOUR_LIMIT:
        reasons.append(f"the host took {stolen:.0%} of the time")
    if len(reads) > 3:
        spread = Timing(*quartiles(reads)).spread
        if spread > STEADY_LIMIT:
            reasons.append(f"what does not change varied by {spread:.0%}")
    return ", ".join(reasons)


class Fit(NamedTuple):
    """``time = factor * size^exponent``, and the largest ratio by which a time misses it."""

    exponent: float
    factor: float
    largest_miss: float


def fit_power(sizes: Sequence[float], times: Sequence[float]) -> Fit:
    """The power law through at least two times, by least squares of logarithms."""
    x, y = np.log(np.asarray(sizes, np.float64)), np.log(np.asarray(times, np.float64))
    exponent, offset = np.polyfit(x, y, 1)
    miss = np.abs(y - (exponent * x + offset)).max()
    return Fit(float(exponent), float(np.exp(offset)), float(np.exp(miss)))
