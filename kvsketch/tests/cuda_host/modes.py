"""How kernels are executed: checked or fast, in which order threads take turns. Ambient, as library code launches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

MODES = ("check", "fast")
#: Numbers as in runtime/state.hpp.
ORDERS = {"round-robin": 0, "reverse": 1, "random": 2}


@dataclass(frozen=True)
class Execution:
    """How launches run; :func:`running` says what the fields mean."""

    mode: str = "fast"
    order: str = "round-robin"
    seed: int = 1
    preempt_ppm: int = 0
    blocks_race: bool = True
    strict_exit: bool = False


_current = Execution()


def execution() -> Execution:
    """How launches run now."""
    return _current


@contextmanager
def running(
    mode: str = "fast",
    order: str = "round-robin",
    *,
    seed: int = 1,
    preempt_ppm: int = 0,
    blocks_race: bool = True,
    strict_exit: bool = False,
) -> Iterator[None]:
    """Launches inside run so.

    mode
        ``"check"`` stops at the first access out of bounds, uninitialised, misaligned or racing, and at undefined
        behaviour. ``"fast"`` only computes: what is out of bounds there damages this process, so check first.
    order
        Which ready thread goes on: the one that waited longest (``"round-robin"``), the last one to become ready
        (``"reverse"``), or any, by `seed` (``"random"``).
    preempt_ppm
        Of a million checked accesses, how many give way to another thread. For ``"check"`` alone.
    blocks_race
        Whether accesses by two blocks race; ``False`` where blocks wait for one another through atomics.
    strict_exit
        Whether a warp operation may not name lanes that have returned.
    """
    global _current
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} is not known; choose from {MODES}")
    if order not in ORDERS:
        raise ValueError(f"order={order!r} is not known; choose from {tuple(ORDERS)}")
    if preempt_ppm and mode != "check":
        raise ValueError(f'preempt_ppm={preempt_ppm} needs mode="check"; use order="random" for mode={mode!r}')
    before, _current = _current, Execution(mode, order, seed, preempt_ppm, blocks_race, strict_exit)
    try:
        yield
    finally:
        _current = before
