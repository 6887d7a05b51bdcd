"""The counts of a cache's rows where its tokens are: kernels read them there."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np


class DeviceCounts:
    """Counts (4, b) int64 on the current device, in one place for as long as this object lives.

    They are sent when they are not what the device holds already. A step of :mod:`kvsketch._prepared_step` counts its
    token on the device itself.
    """

    def __init__(self, xp: ModuleType, b: int) -> None:
        self.array = xp.zeros((4, b), dtype=xp.int64)
        self._xp, self._held = xp, np.zeros((4, b), np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return int(self.array.nbytes)

    def send(self, counts: Any) -> Any:
        """The device's array, which holds `counts`, a new array of the host."""
        if not np.array_equal(counts, self._held):
            # By way of another array, which is sent in the order of the stream: kernels may still read the old ones.
            self.array[...] = self._xp.asarray(counts)
            self._held = counts
        return self.array

    def forget(self) -> None:
        """What the device holds is not known any more."""
        self._held = np.full_like(self._held, -1)

    def expect(self, counts: Any) -> None:
        """The next step leaves `counts` on the device."""
        self._held = counts
