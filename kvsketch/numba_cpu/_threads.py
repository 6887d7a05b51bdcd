"""Threads of this engine: plain ones that sleep between calls.

Kernels run without the GIL, so ordinary threads do. Those of an OpenMP runtime, Numba's parallel loops among them, spin
for a while after each call and take the cores from torch's own, which spin too: on two cores a decode step of a model
then takes many times longer.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

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


def run_ranges(kernel: Callable[..., Any], total: int, *arguments: Any, threads: int | None = None) -> list[Any]:
    """Call ``kernel(first, last, *arguments)`` on ranges that make up 0..total, on `threads` threads (default: all)."""
    count = max(1, min(get_num_threads() if threads is None else threads, total))
    if count == 1:
        return [kernel(0, total, *arguments)]
    if _POOL.executor is None:
        _POOL.executor = ThreadPoolExecutor(max(1, _POOL.count - 1), thread_name_prefix="kvsketch")
    bounds = [total * part // count for part in range(count + 1)]
    submit = _POOL.executor.submit
    others = [submit(kernel, first, last, *arguments) for first, last in pairwise(bounds[1:])]
    results = [kernel(bounds[0], bounds[1], *arguments)]
    return results + [other.result() for other in others]
