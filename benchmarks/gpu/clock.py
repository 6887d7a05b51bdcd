"""How long the device takes: by CUDA events, with cold caches and no gap in which it waits for the host.

A call's kernels take less time than Python takes to ask for them. So the device is first given something to do for
long enough, a kernel that only counts cycles; what is asked for meanwhile then runs without a gap between two events.
Whether the host was in time is seen from the first event, which must not have been reached when the call returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from benchmarks.timing import Entrant, Race, turns
from kvsketch._progress import Progress, no_progress
from kvsketch.measurement import STEADY_LIMIT

#: Cycles that the device is kept busy before a call, to begin with and at most: about 1 and 60 ms.
FIRST_CYCLES, MOST_CYCLES = 1 << 21, 1 << 27
#: More than a device's clock has, so that a wait of so many lasts longer than a second.
CYCLES_A_SECOND = 4 * 10**9
#: Bytes of the last cache where CUDA does not tell.
LAST_CACHE_BYTES = 64 << 20
WAIT_SOURCE = """
extern "C" __global__ void wait_cycles(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {}
}
"""


class Clock(Protocol):
    """What times a call; `gaps` counts the times in which the device waited for the host."""

    gaps: int

    def seconds(self, run: Callable[[], object]) -> float:
        """Seconds that what `run` asks for takes."""


class HostClock:
    """The clock of a dry run: what the host takes, which says nothing about a GPU."""

    gaps = 0

    def seconds(self, run: Callable[[], object]) -> float:
        """Seconds of the call itself."""
        start = time.perf_counter()
        run()
        return time.perf_counter() - start


class EventClock:
    """CUDA events on CuPy's current stream, which is torch's too unless either was told otherwise."""

    def __init__(self, cupy: Any) -> None:
        self._cuda = cupy.cuda
        last_cache = cupy.cuda.Device().attributes.get("L2CacheSize") or LAST_CACHE_BYTES
        self._large = cupy.empty(2 * int(last_cache), dtype=cupy.uint8)
        self._wait = cupy.RawKernel(WAIT_SOURCE, "wait_cycles")
        #: Cycles that the host turned out to need for a call, where the usual ones were too few.
        self._cycles: WeakKeyDictionary[Callable[[], object], int] = WeakKeyDictionary()
        self._int64 = cupy.int64
        self.gaps = 0

    def seconds(self, run: Callable[[], object]) -> float:
        """Seconds between two events around the call, what it reads being in memory and in no cache.

        Repeated with more for the device to do before when the host was too slow; counted in `gaps` when it still is.
        """
        cycles = self._cycles.get(run, FIRST_CYCLES)
        while True:
            start, end = self._cuda.Event(), self._cuda.Event()
            self._large.fill(1)
            self._wait((1,), (1,), (self._int64(cycles),))
            start.record()
            before = time.perf_counter()
            run()
            needed = time.perf_counter() - before
            late = bool(start.done)
            end.record()
            end.synchronize()
            if not late or cycles >= MOST_CYCLES:
                self.gaps += late
                return float(self._cuda.get_elapsed_time(start, end)) / 1e3
            cycles = min(MOST_CYCLES, max(2 * cycles, int(needed * CYCLES_A_SECOND)))
            self._cycles[run] = cycles


def run_gpu_race(
    clock: Clock,
    entrants: Sequence[Entrant],
    *,
    rounds: int,
    steady: str,
    warm_up: int = 1,
    progress: Progress = no_progress,
    title: str = "Timing",
) -> Race:
    """:func:`benchmarks.timing.run_race` with a device's clock.

    Marked as contended when the device waited for the host, or the times of the entrant `steady` vary by more than
    10 %.
    """
    seconds: dict[str, list[float]] = {entrant.name: [] for entrant in entrants}
    gaps = clock.gaps
    for turn, entrant in turns(entrants, rounds, warm_up):
        progress(title, turn + warm_up, rounds + warm_up)
        entrant.prepare()
        elapsed = clock.seconds(entrant.run)
        if turn >= 0:
            seconds[entrant.name].append(elapsed)
    race = Race(seconds)
    reasons = []
    if clock.gaps > gaps:
        reasons.append(f"the device waited for the host in {clock.gaps - gaps} calls")
    if race.timing(steady).spread > STEADY_LIMIT:
        reasons.append(f"what does not change varied by {race.timing(steady).spread:.0%}")
    return Race(seconds, ", ".join(reasons))
