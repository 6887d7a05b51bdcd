"""How one decode step is measured: time, memory, and whether something else was using the machine meanwhile."""

from __future__ import annotations

import ctypes
import re
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from kvsketch._progress import Progress

#: Share of one core that another process may use before a timing is called contended.
NEIGHBOUR_LIMIT = 0.05
#: Spread (interquartile range over median) of a repeated identical step above which a timing is called contended.
STEADY_LIMIT = 0.10


class Step(NamedTuple):
    """One thing to time: `run` is inside the clock, `prepare` is called just before, outside it."""

    name: str
    prepare: Callable[[], None]
    run: Callable[[], object]


class Timing(NamedTuple):
    """Quartiles in milliseconds of the times of one step."""

    first_quartile: float
    median: float
    third_quartile: float

    @property
    def spread(self) -> float:
        """Interquartile range over median."""
        return (self.third_quartile - self.first_quartile) / self.median


def time_steps(steps: Sequence[Step], *, rounds: int, warm_up: int, progress: Progress) -> dict[str, Timing]:
    """Quartiles of the time of each of `steps`, run `rounds` times after `warm_up` rounds that do not count.

    Every round runs each step once, starting one further each time, so that a slow spell of the machine and the state
    that a step leaves in its caches fall on all of them alike.
    """
    seconds: dict[str, list[float]] = {step.name: [] for step in steps}
    for turn in range(warm_up + rounds):
        progress("Timing decode steps", turn, warm_up + rounds)
        first = turn % len(steps)
        for step in (*steps[first:], *steps[:first]):
            step.prepare()
            start = time.perf_counter()
            step.run()
            elapsed = time.perf_counter() - start
            if turn >= warm_up:
                seconds[step.name].append(elapsed)
    return {name: Timing(*(1e3 * q for q in statistics.quantiles(s, n=4))) for name, s in seconds.items()}


class Neighbours:
    """Processor time that processes other than this one and its children use between two moments."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._before = other_cpu_seconds()

    def busiest_share(self) -> float:
        """Share of one core used since the start by the busiest other process."""
        wall = time.perf_counter() - self._start
        used = (seconds - self._before.get(pid, 0.0) for pid, seconds in other_cpu_seconds().items())
        return max(used, default=0.0) / wall


def other_cpu_seconds() -> dict[int, float]:
    """Processor seconds that each process has used so far, by process id, without this one and its children."""
    me = psutil.Process()
    mine = {me.pid, *(child.pid for child in me.children(recursive=True))}
    seconds = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid not in mine:
                times = process.cpu_times()
                seconds[process.pid] = times.user + times.system
    return seconds


def peak_extra_bytes(run: Callable[[], object]) -> int | None:
    """Bytes by which this process's resident memory rises above its start while `run` runs, at its highest.

    Memory that the allocator holds free is given back to the system first, so that its reuse counts. The kernel keeps
    the high-water mark (``VmHWM``), which is reset before: None on a system that cannot do that.
    """
    try:
        with suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = _status_bytes("VmRSS")
        run()
        return max(0, _status_bytes("VmHWM") - before)
    except OSError:
        return None


def _status_bytes(field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if match is None:
        raise OSError(f"/proc/self/status has no {field}")
    return 1024 * int(match[1])
