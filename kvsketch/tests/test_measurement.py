"""Times, memory and neighbours are measured, not assumed: each measure sees what it is there to see."""

from __future__ import annotations

import subprocess
import sys
import time
from functools import partial

import numpy as np
import psutil
import pytest

from kvsketch.measurement import NEIGHBOUR_LIMIT, Neighbours, Step, other_cpu_seconds, peak_extra_bytes, time_steps


def no_progress(description: str, completed: int, total: int | None) -> None:
    """Forget the progress."""


def test_steps_are_interleaved_and_prepared_outside_the_clock() -> None:
    calls: list[str] = []

    def prepare() -> None:
        calls.append("prepare")
        time.sleep(0.02)

    steps = [Step(name, prepare, partial(calls.append, name)) for name in "abc"]
    timings = time_steps(steps, rounds=4, warm_up=2, progress=no_progress)
    assert calls[::2] == ["prepare"] * 18
    assert "".join(calls[1::2]) == "abcbcacababcbcacab"
    assert set(timings) == set("abc")
    for timing in timings.values():
        assert 0 < timing.first_quartile <= timing.median <= timing.third_quartile < 15


def test_warm_up_does_not_count_and_quartiles_are_in_milliseconds() -> None:
    delays = iter([0.2, 0.01, 0.02, 0.03, 0.04, 0.05])
    (timing,) = time_steps(
        [Step("a", lambda: None, lambda: time.sleep(next(delays)))], rounds=5, warm_up=1, progress=no_progress
    ).values()
    assert 30 <= timing.median < 150
    assert timing.first_quartile <= timing.median - 10
    assert timing.spread > 0.1


def test_peak_memory_sees_what_a_step_allocates_and_frees() -> None:
    size = 64 << 20
    peak = peak_extra_bytes(lambda: np.ones(size, np.uint8).sum())
    nothing = peak_extra_bytes(lambda: None)
    if peak is None or nothing is None:
        pytest.skip("this system does not reset the high-water mark of memory")
    assert 0.95 * size < peak < 1.5 * size  # the kernel counts pages in batches
    assert nothing < size / 8


def test_memory_freed_before_counts_when_it_is_used_again() -> None:
    """Many small blocks stay with the allocator when freed: a step that takes them again must still show."""
    blocks = [np.ones(10_000, np.uint8) for _ in range(4000)]
    keep = blocks[-1]
    del blocks
    peak = peak_extra_bytes(lambda: [np.ones(10_000, np.uint8) for _ in range(4000)])
    if peak is None:
        pytest.skip("this system does not reset the high-water mark of memory")
    assert keep.sum() == 10_000
    assert peak > 30e6


def test_a_busy_process_is_seen_unless_it_is_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        assert busy.pid not in other_cpu_seconds()
        monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: [])
        neighbours = Neighbours()
        time.sleep(1.5)
        assert busy.pid in other_cpu_seconds()
        assert neighbours.busiest_share() > NEIGHBOUR_LIMIT
    finally:
        busy.kill()
        busy.wait()
