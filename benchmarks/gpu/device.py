"""The device that a part measures on: CuPy's first one, or in a dry run a stand-in whose kernels run on the CPU."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.clock import Clock, EventClock, HostClock
from benchmarks.gpu.findings import NotRun

#: Device memory that is left to libraries, to what kernels allocate and to the check of results.
SPARE_BYTES = 4 << 30


@dataclass(frozen=True)
class Device:
    """CuPy, real or standing in, and how work on it is timed."""

    cupy: Any
    clock: Clock
    dry_run: bool

    def wait(self) -> None:
        """Wait until the device has done everything."""
        self.cupy.cuda.Device().synchronize()

    def free_bytes(self) -> int | None:
        """Bytes that may still be allocated; None in a dry run, where sizes are tiny."""
        if self.dry_run:
            return None
        self.free_unused()
        return int(self.cupy.cuda.runtime.memGetInfo()[0]) - SPARE_BYTES

    def free_unused(self) -> None:
        """Give back what the allocators of CuPy and torch keep for later."""
        if self.dry_run:
            return
        self.cupy.get_default_memory_pool().free_all_blocks()
        if "torch" in sys.modules:
            sys.modules["torch"].cuda.empty_cache()

    def check_room(self, nbytes: int) -> None:
        """NotRun unless so many bytes can be allocated."""
        free = self.free_bytes()
        if free is not None and nbytes > free:
            raise NotRun(f"takes {nbytes / 1e9:.1f} GB, {max(free, 0) / 1e9:.1f} GB are free")

    def torch_device(self) -> Any:
        """Where torch's tensors lie: on the GPU, or in a dry run on the CPU. NotRun where torch has no GPU."""
        import torch

        if not self.dry_run and not torch.cuda.is_available():
            raise NotRun(f"torch {torch.__version__} sees no GPU; install a build of it for CUDA")
        return torch.device("cpu" if self.dry_run else "cuda")

    def first_call(self, run: Callable[[], object]) -> float:
        """Seconds, by the host's clock, of a call and of all that it asks for, compilation included."""
        self.wait()
        start = time.perf_counter()
        run()
        self.wait()
        return time.perf_counter() - start


@contextmanager
def opened(dry_run: bool) -> Iterator[Device]:
    """The device. NotRun where CuPy has none, unless this is a dry run."""
    if dry_run:
        from kvsketch.tests.cuda_host import missing
        from kvsketch.tests.cuda_host.stand_in import installed

        if reason := missing():
            raise NotRun(reason)
        with installed() as stand_in:
            yield Device(stand_in, HostClock(), True)
        return
    try:
        import cupy
    except ImportError as error:
        raise NotRun(f"CuPy is not there ({error}); pip install 'kvsketch[cuda13]' or 'kvsketch[cuda12]'") from error
    with cupy.cuda.Device(0):
        yield Device(cupy, EventClock(cupy), False)
