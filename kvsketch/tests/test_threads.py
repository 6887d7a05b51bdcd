"""Threads of the CPU engine: all parts are done once, errors arrive, and nothing is left behind."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvsketch.numba_cpu import _threads
from kvsketch.numba_cpu._threads import run_parts, set_num_threads


@pytest.fixture(autouse=True)
def _three_threads() -> Iterator[None]:
    before = _threads.get_num_threads()
    set_num_threads(3)
    yield
    set_num_threads(before)


class Parts:
    """Stands in for a kernel: counts parts under a lock, for as long as `wait` says of the thread that asks."""

    def __init__(self, slow: float = 0.0, error: Exception | None = None, others_fail: bool = True) -> None:
        self.lock, self.slow, self.error, self.others_fail = threading.Lock(), slow, error, others_fail
        self.main = threading.current_thread()
        self.done: list[int] = []
        self.ended = 0

    def __call__(self, counter: Any, total: int) -> int:
        taken = 0
        is_main = threading.current_thread() is self.main
        if self.error is not None and is_main != self.others_fail:
            raise self.error
        while True:
            with self.lock:
                part = int(counter[0])
                counter[0] += 1
                if part >= total:
                    self.ended += 1
                    return taken
                self.done.append(part)
            taken += 1
            time.sleep(self.slow)


def test_every_part_is_done_once() -> None:
    for _ in range(50):
        parts = Parts(slow=1e-4)
        taken = run_parts(parts, 20)
        assert sorted(parts.done) == list(range(20))
        assert sum(taken) == 20
        assert 1 <= len(taken) <= 3


def test_several_threads_do_take_part() -> None:
    assert len(run_parts(Parts(slow=0.02), 12)) == 3
    assert len(run_parts(Parts(slow=0.02), 12, threads=1)) == 1
    assert len(run_parts(Parts(slow=0.02), 2)) == 2


@pytest.mark.parametrize("others_fail", [False, True])
def test_error_of_any_thread_arrives_and_the_next_call_works(others_fail: bool) -> None:
    parts = Parts(slow=0.02, error=MemoryError("too large"), others_fail=others_fail)
    with pytest.raises(MemoryError, match="too large"):
        run_parts(parts, 12)
    # All that had begun has also ended, whichever thread failed.
    done = len(parts.done)
    time.sleep(0.05)
    assert len(parts.done) == done
    assert len(run_parts(Parts(slow=0.02), 12)) == 3


def test_calls_from_several_threads_at_once() -> None:
    results: list[int] = []

    def call() -> None:
        for _ in range(20):
            results.append(sum(run_parts(Parts(slow=1e-4), 10)))

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert results == [10] * 80


def test_another_number_of_threads_ends_those_that_there_were() -> None:
    def ours() -> int:
        return sum(thread.name == "kvsketch" for thread in threading.enumerate())

    run_parts(Parts(slow=0.02), 12)
    assert ours() >= 2
    set_num_threads(1)
    deadline = time.monotonic() + 5
    while ours() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ours() == 0
    assert run_parts(Parts(), 5) == [5]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_child_of_a_fork_has_threads_of_its_own() -> None:
    run_parts(Parts(slow=0.02), 12)
    child = os.fork()
    if child == 0:
        # Nothing but the exit status leaves the child.
        status = 1
        try:
            status = 0 if len(run_parts(Parts(slow=0.02), 12)) == 3 else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
