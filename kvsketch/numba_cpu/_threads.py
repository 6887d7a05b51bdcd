"""Threads of this engine: plain ones that sleep between calls.

Kernels run without the GIL, so ordinary threads do. Those of an OpenMP runtime, Numba's parallel loops among them, spin
for a while after each call and take the cores from torch's own, which spin too: on two cores a decode step of a model
then takes many times longer.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from kvsketch._checks import check_integer


def core_count() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Pool:
    """How many threads to use, and those besides the calling one once they are needed."""

    def __init__(self) -> None:
        self.count = core_count()
        self.executor: ThreadPoolExecutor | None = None

    def forget_threads(self) -> None:
        """After a fork: the child has none of its parent's threads."""
        self.executor = None


_POOL = _Pool()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_POOL.forget_threads)


def get_num_threads() -> int:
    """Threads that a kernel uses at most."""
    return _POOL.count


def set_num_threads(count: int) -> None:
    """Let kernels use up to `count` threads, the calling one included. Results do not depend on it."""
    count = check_integer("count", count, low=1)
    if count == _POOL.count:
        return
    old, _POOL.executor, _POOL.count = _POOL.executor, None, count
    if old is not None:
        old.shutdown(wait=False)


def run_parts(kernel: Callable[..., Any], total: int, *arguments: Any, threads: int | None = None) -> list[Any]:
    """Run ``kernel(counter, total, *arguments)`` on up to `threads` threads (default: all) and return their results.

    Each takes the numbers of parts, below `total`, one after the other from the shared `counter`, an int64 array of one
    element, with :func:`kvsketch.numba_cpu.simd.take_next`: a thread that starts late just does less.
    """
    count = max(1, min(_POOL.count if threads is None else threads, total))
    counter = np.zeros(1, np.int64)
    if count == 1:
        return [kernel(counter, total, *arguments)]
    if _POOL.executor is None:
        _POOL.executor = ThreadPoolExecutor(max(1, _POOL.count - 1), thread_name_prefix="kvsketch")
    others = [_POOL.executor.submit(kernel, counter, total, *arguments) for _ in range(count - 1)]
    results = [kernel(counter, total, *arguments)]
    # One that has not started by now has nothing left to do.
    return results + [other.result() for other in others if not other.cancel()]
