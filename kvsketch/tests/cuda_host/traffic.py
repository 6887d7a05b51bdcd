"""What launches read and write in global memory: counted byte for byte where accesses are checked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np


class Bytes(NamedTuple):
    """Bytes of an array that a launch accesses."""

    requested: int  #: by all threads: a byte as often as it is asked for
    by_block: int  #: a byte once for each block that asks for it, as where a block's caches held all
    distinct: int  #: a byte once


class ArrayTraffic(NamedTuple):
    """What a launch does with one of its arrays; what an atomic operation changes is read and written."""

    position: int  #: among the launch's arguments
    name: str
    read: Bytes
    written: Bytes


class LaunchTraffic(NamedTuple):
    """What a launch does with its arrays; accesses to memory that two of them share count for one of the two."""

    kernel: str
    arrays: tuple[ArrayTraffic, ...]


class Counter:
    """Memory that the runtime counts accesses of an array in, of `size` bytes from its first to its last one."""

    def __init__(self, size: int) -> None:
        self._counts = np.zeros((2, len(Bytes._fields)), np.uint64)
        self._blocks = np.zeros((2, size), np.uint32)

    def addresses(self) -> tuple[int, ...]:
        """Of the counts and the blocks of what is read, then of what is written."""
        return tuple(of[i].ctypes.data for i in (0, 1) for of in (self._counts, self._blocks))

    def found(self) -> tuple[Bytes, Bytes]:
        """What was read and what was written."""
        read, written = self._counts.tolist()
        return Bytes(*read), Bytes(*written)


_recorded: list[LaunchTraffic] | None = None


def recorded() -> list[LaunchTraffic] | None:
    """Where launches are to say what they did, or None."""
    return _recorded


@contextmanager
def counted() -> Iterator[list[LaunchTraffic]]:
    """The list that launches inside, which must be checked ones, add their traffic to, in their order.

    Accesses are those of the source: g++ does not optimise where they are checked.
    """
    global _recorded
    before, _recorded = _recorded, []
    try:
        yield _recorded
    finally:
        _recorded = before
