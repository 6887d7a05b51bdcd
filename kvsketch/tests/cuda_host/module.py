"""Modules of kernels that run on the CPU, with the calls of ``cupy.RawModule``."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Sequence
from typing import Any

from kvsketch.tests.cuda_host import tally
from kvsketch.tests.cuda_host.arguments import convert
from kvsketch.tests.cuda_host.devices import USUAL_SHARED_BYTES, counts, devices
from kvsketch.tests.cuda_host.graphs import recording
from kvsketch.tests.cuda_host.image import Image, Kernel
from kvsketch.tests.cuda_host.modes import execution
from kvsketch.tests.cuda_host.runtime import Launch, located, options_of, runtime_library
from kvsketch.tests.cuda_host.toolchain import CudaHostError
from kvsketch.tests.cuda_host.traffic import ArrayTraffic, LaunchTraffic, recorded

#: The largest grid along x, y and z, the largest block, and the most threads of a block.
GRID_LIMITS = (2**31 - 1, 65535, 65535)
BLOCK_LIMITS = (1024, 1024, 64)
MOST_THREADS = 1024

#: One launch at a time, as there is one runtime.
_launching = threading.Lock()


class HostModule:
    """Kernels of one source, built for a mode when one of them is first launched in it."""

    #: Whether arrays may be NumPy's, as a test of a kernel alone likes them.
    takes_numpy = True

    def __init__(
        self,
        code: str,
        *,
        options: Sequence[str] = (),
        name_expressions: Sequence[str] = (),
        backend: str = "nvrtc",
    ) -> None:
        if backend != "nvrtc":
            raise ValueError(f"backend={backend!r} is not known; choose 'nvrtc'")
        if not name_expressions:
            raise ValueError("name_expressions is empty; name the kernels, as in ('pack_codes<2>',)")
        self.code = code
        self.options = tuple(options)
        self.names = tuple(name_expressions)
        self._images: dict[str, Image] = {}

    def get_function(self, name: str) -> HostFunction:
        """The kernel of that name expression."""
        if name not in self.names:
            raise CudaHostError(f"{name!r} is not among the module's name_expressions {self.names}")
        return HostFunction(self, name)

    def image(self) -> Image:
        """The module built for the present mode."""
        mode = execution().mode
        if mode not in self._images:
            self._images[mode] = Image(self.code, self.names, self.options, mode)
        return self._images[mode]


class HostFunction:
    """A kernel to launch, as ``cupy.RawModule.get_function`` gives it."""

    def __init__(self, module: HostModule, name: str) -> None:
        self._module = module
        self._name = name
        self._most_dynamic_bytes = USUAL_SHARED_BYTES

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        """The largest `shared_mem` that a launch may ask for."""
        return self._most_dynamic_bytes

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, size: int) -> None:
        most = devices.most_shared_bytes - self.shared_size_bytes
        if not 0 <= size <= most:
            raise CudaHostError(
                f"{self._name}: max_dynamic_shared_size_bytes={size} must lie in 0..{most} on compute capability "
                f"{devices.compute_capability}"
            )
        self._most_dynamic_bytes = size

    @property
    def shared_size_bytes(self) -> int:
        """Bytes of the shared arrays that the kernel itself declares."""
        return self._kernel().own_shared_bytes

    def _kernel(self) -> Kernel:
        return self._module.image().kernels[self._name]

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], *, shared_mem: int = 0
    ) -> None:
        """Run the kernel to its end; CudaHostError says what was wrong, and where.

        While the current stream captures, the launch is checked and written down instead.
        """
        traffic = recorded()
        if traffic is not None and execution().mode != "check":
            raise CudaHostError(f'{self._name}: traffic is counted where accesses are checked; use running("check")')
        kernel = self._kernel()
        sizes = self._checked_sizes(grid, block, kernel.own_shared_bytes, shared_mem)
        passed = convert(self._name, kernel.parameters, args, takes_numpy=self._module.takes_numpy)
        graph = recording()
        if graph is not None:
            graph.record(self._name, lambda *kept: self(grid, block, kept, shared_mem=shared_mem), args)
            return
        image = self._module.image()
        runtime = runtime_library()[1]
        pointers = (ctypes.c_void_p * len(passed))(*[ctypes.addressof(each.value) for each in passed])
        triples = [(ctypes.c_uint * 3)(*size) for size in sizes]
        launch = Launch(*triples, shared_mem, ctypes.addressof(pointers))
        with _launching:
            runtime.cuda_host_set_options(ctypes.byref(options_of(execution())))
            runtime.cuda_host_set_image(image.start, image.end)
            for address, size, name in kernel.shared:
                runtime.cuda_host_add_shared(address, size, name.encode())
            for each in passed:
                each.declare(runtime, counted=traffic is not None)
            failed = kernel.entry(ctypes.byref(launch))
            message = runtime.cuda_host_message().decode(errors="replace") if failed else ""
        counts.launches += 1
        if failed:
            raise CudaHostError(f"{self._name}: {located(message, image.path)}")
        tally.executed.add((self._name, execution().mode))
        if execution().mode == "fast":
            for each in passed:
                each.mark_written()
        if traffic is not None:
            arrays = (
                ArrayTraffic(position, each.name, *each.counter.found())
                for position, each in enumerate(passed)
                if each.counter is not None
            )
            traffic.append(LaunchTraffic(self._name, tuple(arrays)))

    def _checked_sizes(
        self, grid: tuple[int, ...], block: tuple[int, ...], own_shared: int, dynamic_shared: int
    ) -> list[tuple[int, ...]]:
        full = []
        for what, size, limits in (("grid", grid, GRID_LIMITS), ("block", block, BLOCK_LIMITS)):
            if not isinstance(size, tuple) or not 1 <= len(size) <= 3:
                raise TypeError(f"{what}={size!r} must be a tuple of one to three integers")
            size = size + (1,) * (3 - len(size))
            if any(not 1 <= n <= most for n, most in zip(size, limits, strict=True)):
                raise CudaHostError(f"{self._name}: {what}={size} must lie between 1 and {limits}")
            full.append(size)
        if math.prod(full[1]) > MOST_THREADS:
            raise CudaHostError(f"{self._name}: block={full[1]} has more than {MOST_THREADS} threads")
        raised = self._most_dynamic_bytes > USUAL_SHARED_BYTES
        most = min(self._most_dynamic_bytes, (devices.most_shared_bytes if raised else USUAL_SHARED_BYTES) - own_shared)
        if not 0 <= dynamic_shared <= most:
            raise CudaHostError(
                f"{self._name}: shared_mem={dynamic_shared} must lie in 0..{most}, the kernel's own shared arrays "
                f"taking {own_shared} bytes; max_dynamic_shared_size_bytes raises it"
            )
        return full
