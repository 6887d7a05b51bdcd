"""The devices that the stand-in for CuPy pretends to have, and counts of what would make a real one wait."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Devices:
    """`count` devices of one compute capability, such as ``"90"``; `current` is where arrays are made and used."""

    count: int = 1
    compute_capability: str = "90"
    current: int = 0


@dataclass
class Counts:
    """How often the host waited for a device, and sent it data: neither may happen in a captured graph."""

    synchronisations: int = 0
    uploads: int = 0
    launches: int = 0

    def reset(self) -> None:
        """Start again from zero."""
        self.synchronisations = self.uploads = self.launches = 0


devices = Devices()
counts = Counts()
