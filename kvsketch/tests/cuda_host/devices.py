"""The devices that the stand-in for CuPy pretends to have, and counts of what would make a real one wait."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from kvsketch.tests.cuda_host.toolchain import CudaHostError

HERE = Path(__file__).parent
#: Kilobytes of shared memory that one block may have, by compute capability.
SHARED_KILOBYTES = {"75": 64, "80": 163, "86": 99, "87": 163, "89": 99, "90": 227, "100": 227, "103": 227, "120": 99}
#: What a kernel gets without asking for more.
USUAL_SHARED_BYTES = 48 * 1024


@dataclass
class Devices:
    """`count` devices of one compute capability, such as ``"90"``; `current` is where arrays are made and used."""

    count: int = 1
    compute_capability: str = "90"
    multiprocessors: int = 132
    current: int = 0

    @property
    def most_shared_bytes(self) -> int:
        """Shared memory that one block may have at most."""
        return 1024 * SHARED_KILOBYTES[self.compute_capability]


@dataclass
class Counts:
    """What was done since the last :meth:`reset`.

    synchronisations
        How often the host waited for a device: for a value, a copy, or a shape that depends on values.
    uploads
        How often data of the host was sent.
    launches
        How many kernels ran in the harness.
    places
        What waited or sent, and from where: ``"get() at kvsketch/cache.py:301"``.
    """

    synchronisations: int = 0
    uploads: int = 0
    launches: int = 0
    places: list[str] = field(default_factory=list)
    waiting_allowed: bool = True

    def reset(self) -> None:
        """Start again from zero."""
        self.synchronisations = self.uploads = self.launches = 0
        self.places.clear()

    def synchronise(self, what: str) -> None:
        """The host waits, for `what`."""
        if not self.waiting_allowed:
            raise CudaHostError(f"{what} makes the host wait for the device, which a captured graph cannot")
        self.synchronisations += 1
        self.places.append(f"{what} at {_caller()}")

    def upload(self, what: str) -> None:
        """Data of the host is sent, by `what`."""
        if not self.waiting_allowed:
            raise CudaHostError(f"{what} sends data of the host, which a captured graph would send again as it was")
        self.uploads += 1
        self.places.append(f"{what} at {_caller()}")


def _caller() -> str:
    """File and line of the code that uses the stand-in, or torch on it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_ours(Path(frame.f_code.co_filename)):
        frame = frame.f_back
    if frame is None:
        return "an unknown place"
    return f"{'/'.join(Path(frame.f_code.co_filename).parts[-2:])}:{frame.f_lineno}"


def _is_ours(file: Path) -> bool:
    return file.parent == HERE or "torch" in file.parts


devices = Devices()
counts = Counts()


@contextmanager
def without_waiting() -> Iterator[None]:
    """Inside, whatever could not be captured in a CUDA graph raises CudaHostError: waiting, and sending host data."""
    before, counts.waiting_allowed = counts.waiting_allowed, False
    try:
        yield
    finally:
        counts.waiting_allowed = before


@contextmanager
def pretending(*, count: int = 1, compute_capability: str = "90", multiprocessors: int = 132) -> Iterator[None]:
    """Inside, the stand-in has these devices, the first one current."""
    if compute_capability not in SHARED_KILOBYTES:
        raise ValueError(f"compute_capability={compute_capability!r} is not known; choose from {[*SHARED_KILOBYTES]}")
    before = vars(devices).copy()
    vars(devices).update(count=count, compute_capability=compute_capability, multiprocessors=multiprocessors, current=0)
    try:
        yield
    finally:
        vars(devices).update(before)
