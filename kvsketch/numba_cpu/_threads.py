"""Threads of this engine: plain ones that sleep between calls.

Kernels run without the GIL, so ordinary threads do. Those of an OpenMP runtime, Numba's parallel loops among them, spin
for a while after each call and take the cores from torch's own, which spin too: on two cores a decode step of a model
then takes many times longer.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import Lock, Thread
from typing import Any

import numpy as np

from kvsketch._checks import check_integer


def core_count() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Worker:
    """A thread that waits for a job, does it, and waits again.

    Two locks are all that passes between it and the thread that gives it jobs: an executor's futures take longer than
    a decode step's kernel in one of two threads.
    """

    def __init__(self) -> None:
        self._start, self._done = Lock(), Lock()
        self._start.acquire()
        self._done.acquire()
        self._job: tuple[Any, ...] | None = None
        self._outcome: Any = None
        Thread(target=self._work, name="kvsketch", daemon=True).start()

    def begin(self, *job: Any) -> None:
        """Call ``job[0](*job[1:])`` in this thread."""
        self._job = job
        self._start.release()

    def end(self) -> Any:
        """What the job returned or raised; None for a job that had not begun, which is dropped."""
        if self._start.acquire(blocking=False):
            self._job = None
            return None
        try:
            self._done.acquire()
        except BaseException:
            # An interrupt: the job's memory must be kept until it is done all the same.
            self._done.acquire()
            raise
        outcome, self._outcome = self._outcome, None
        return outcome

    def stop(self) -> None:
        """Let the thread, which has no job, end."""
        self._start.release()

    def _work(self) -> None:
        while True:
            self._start.acquire()
            job, self._job = self._job, None
            if job is None:
                return
            try:
                self._outcome = job[0](*job[1:])
            except BaseException as error:  # raised again where the job was given
                self._outcome = error
            # What a job holds is freed before its results are used.
            del job
            self._done.release()


class _Pool:
    """How many threads to use, and those besides the calling one once they are needed."""

    def __init__(self) -> None:
        self.count = core_count()
        self.forget_threads()

    def forget_threads(self) -> None:
        """After a fork: the child has none of its parent's threads."""
        self.workers: list[_Worker] = []
        #: Held by the thread that uses the workers.
        self.used = Lock()

    def stop(self) -> None:
        """Let the workers end; none has a job."""
        workers, self.workers = self.workers, []
        for worker in workers:
            worker.stop()


_POOL = _Pool()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_POOL.forget_threads)


def get_num_threads() -> int:
    """Threads that a kernel uses at most."""
    return _POOL.count


def set_num_threads(count: int) -> None:
    """Let kernels use up to `count` threads, the calling one included. Results do not depend on it."""
    count = check_integer("count", count, low=1)
    if count != _POOL.count:
        with _POOL.used:
            _POOL.count = count
            _POOL.stop()


def run_parts(kernel: Callable[..., Any], total: int, *arguments: Any, threads: int | None = None) -> list[Any]:
    """Run ``kernel(counter, total, *arguments)`` on up to `threads` threads (default: all); what those that ran return.

    Each takes the numbers of parts, below `total`, one after the other from the shared `counter`, an int64 array of one
    element, with :func:`kvsketch.numba_cpu.simd.take_next`: a thread that starts late just does less. While another
    thread of the program has the workers, the calling thread does all.
    """
    count = max(1, min(_POOL.count if threads is None else threads, total))
    counter = np.zeros(1, np.int64)
    pool = _POOL
    if count == 1 or not pool.used.acquire(blocking=False):
        return [kernel(counter, total, *arguments)]
    try:
        while len(pool.workers) < count - 1:
            pool.workers.append(_Worker())
        begun, outcomes = pool.workers[: count - 1], []
        for worker in begun:
            worker.begin(kernel, counter, total, *arguments)
        try:
            outcomes.append(kernel(counter, total, *arguments))
        finally:
            # One that has not started by now has nothing left to do.
            outcomes.extend([worker.end() for worker in begun])
    finally:
        pool.used.release()
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return [outcome for outcome in outcomes if outcome is not None]
