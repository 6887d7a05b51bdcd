"""Threads of the benchmarks' own kernels: plain ones that sleep between calls, like the library's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_OTHERS = ThreadPoolExecutor(thread_name_prefix="benchmark")


def run_shares(kernel: Callable[..., Any], total: int, *arguments: Any, threads: int) -> list[Any]:
    """Results of ``kernel(*arguments, first, last)`` on `threads` threads that share the range 0..total evenly.

    The kernel runs without the GIL; the calling thread takes the first share.
    """
    first, *shares = itertools.pairwise(total * i // threads for i in range(threads + 1))
    others = [_OTHERS.submit(kernel, *arguments, *share) for share in shares]
    return [kernel(*arguments, *first), *(other.result() for other in others)]
