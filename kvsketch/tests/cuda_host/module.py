"""Modules of kernels that run on the CPU, with the calls of ``cupy.RawModule``."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvsketch.tests.cuda_host import arguments
from kvsketch.tests.cuda_host.modes import execution
from kvsketch.tests.cuda_host.runtime import (
    HERE,
    Launch,
    device_headers,
    located,
    options_of,
    runtime_library,
)
from kvsketch.tests.cuda_host.toolchain import CompileError, CudaHostError, built, compiler, include_folders, run

COMMON_FLAGS = (
    *("-std=c++17", "-gdwarf-4", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique"),
    *("-ffp-contract=off", "-fno-strict-aliasing", "-Wno-unknown-pragmas", "-w"),
)
#: Instrumented for the thread and the undefined-behaviour sanitizer, but linked to the runtime's own hooks.
MODE_FLAGS = {
    "fast": ("-O2",),
    "check": (
        *("-O1", "-fsanitize=thread"),
        "-fsanitize=alignment,bounds,shift,integer-divide-by-zero,signed-integer-overflow,float-cast-overflow,null",
    ),
}
USUAL_SHARED_BYTES = 48 * 1024
MOST_SHARED_BYTES = 227 * 1024
MOST_THREADS = 1024
#: Largest grid along x, y and z, and block.
GRID_LIMITS = (2**31 - 1, 65535, 65535)
BLOCK_LIMITS = (1024, 1024, 64)

_EXTERN_SHARED = re.compile(
    r"extern\s+__shared__\s+(?:(?:__align__|alignas)\s*\([^)]*\)\s*)?([\w:<> ]+?)\s+"
    r"(?:(?:__align__|alignas)\s*\([^)]*\)\s*)?(\w+)\s*\[\s*\]\s*;"
)
#: One launch at a time: the runtime is one.
_launching = threading.Lock()


class HostModule:
    """Kernels of one source, built for each mode when one is first launched in it."""

    def __init__(
        self,
        *,
        code: str,
        options: Sequence[str] = (),
        name_expressions: Sequence[str] = (),
        backend: str = "nvrtc",
    ) -> None:
        if backend != "nvrtc":
            raise ValueError(f"backend={backend!r} is not known; the harness stands in for 'nvrtc' alone")
        if not name_expressions:
            raise ValueError("name_expressions is empty; name the kernels, as in ('pack_codes<2>',)")
        self.code = code
        self.options = tuple(options)
        self.names = tuple(name_expressions)
        self._images: dict[str, Image] = {}

    def get_function(self, name: str) -> HostFunction:
        """The kernel that was named so in `name_expressions`."""
        if name not in self.names:
            raise CudaHostError(f"{name!r} is not among the module's name_expressions {self.names}")
        return HostFunction(self, name)

    def image(self, mode: str) -> Image:
        """The module built for `mode`."""
        if mode not in self._images:
            self._images[mode] = Image(self, mode)
        return self._images[mode]


class Image:
    """A module built for one mode and loaded."""

    def __init__(self, module: HostModule, mode: str) -> None:
        runtime_path, _ = runtime_library()
        source = _source(module)
        flags = [*COMMON_FLAGS, *MODE_FLAGS[mode], *(f"-I{folder}" for folder in include_folders())]
        flags += _own_options(module.options)

        def build(folder: Path, target: Path) -> None:
            text, compiled = folder / "module.cpp", folder / "module.o"
            text.write_text(source)
            run([compiler(), *flags, "-c", text, "-o", compiled], CompileError)
            run([compiler(), "-shared", "-Wl,-Bsymbolic", compiled, runtime_path, "-o", target])

        self.path = built("kernels", [source, device_headers(), str(runtime_path), *flags], build)
        self.library = ctypes.CDLL(str(self.path))
        for name in ("image_start", "image_end", *(f"address_{i}" for i in range(len(module.names)))):
            getattr(self.library, f"cuda_host_{name}").restype = ctypes.c_void_p
        self.start: int = self.library.cuda_host_image_start()
        self.end: int = self.library.cuda_host_image_end()
        self.symbols = [
            (int(words[0], 16), int(words[1], 16), words[2], words[3])
            for words in map(str.split, run(["nm", "--print-size", "--defined-only", self.path]).splitlines())
            if len(words) == 4
        ]
        kernels = [self._symbol_at(getattr(self.library, f"cuda_host_address_{i}")()) for i in range(len(module.names))]
        self.kernels = [self._kernel(i, kernels) for i in range(len(module.names))]

    def _symbol_at(self, address: int) -> str:
        return next(name for start, _, _, name in self.symbols if start == address - self.start and name[:2] == "_Z")

    def _kernel(self, number: int, kernels: list[str]) -> Kernel:
        """Shared arrays are static variables of a kernel or of a function that it may call."""
        prefixes = [f"_ZZ{name[2:]}E" for name in kernels]
        variables, own = [], 0
        for offset, size, kind, name in self.symbols:
            if kind not in "bBuVv" or "cuda_host" in name or name.startswith("_ZGV"):
                continue
            owner = next((i for i, prefix in enumerate(prefixes) if name.startswith(prefix)), None)
            if owner in (None, number) and name.startswith("_ZZ"):
                variables.append((self.start + offset, size, name))
                own += size if owner == number else 0
        entry = getattr(self.library, f"cuda_host_launch_{number}")
        describe = getattr(self.library, f"cuda_host_parameters_{number}")
        describe.restype = ctypes.c_char_p
        return Kernel(entry, tuple(arguments.Parameter(text) for text in describe().decode().split()), variables, own)


class Kernel:
    """A kernel of an image: how to call it, its parameters, its shared arrays (address, bytes, name) and their bytes."""

    def __init__(
        self,
        entry: Any,
        parameters: tuple[arguments.Parameter, ...],
        shared: list[tuple[int, int, str]],
        shared_bytes: int,
    ) -> None:
        self.entry = entry
        self.parameters = parameters
        self.shared = shared
        self.shared_bytes = shared_bytes


class HostFunction:
    """A kernel to launch, as ``cupy.RawModule.get_function`` gives it."""

    def __init__(self, module: HostModule, name: str) -> None:
        self.module = module
        self.name = name
        self.max_dynamic_shared_size_bytes = USUAL_SHARED_BYTES

    @property
    def shared_size_bytes(self) -> int:
        """Bytes of the shared arrays that the kernel itself declares."""
        return self._kernel()[1].shared_bytes

    def _kernel(self) -> tuple[Image, Kernel]:
        image = self.module.image(execution().mode)
        return image, image.kernels[self.module.names.index(self.name)]

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], *, shared_mem: int = 0
    ) -> None:
        """Run the kernel to its end; CudaHostError says what was wrong and where."""
        image, kernel = self._kernel()
        grid, block = self._checked_sizes(grid, block, shared_mem + kernel.shared_bytes, shared_mem)
        passed = arguments.convert(self.name, kernel.parameters, args)
        runtime = runtime_library()[1]
        pointers = (ctypes.c_void_p * len(passed))(*[ctypes.addressof(value.value) for value in passed])
        launch = Launch((ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(*block), shared_mem, ctypes.addressof(pointers))
        with _launching:
            runtime.cuda_host_set_options(ctypes.byref(options_of(execution())))
            runtime.cuda_host_set_image(image.start, image.end)
            for address, size, name in kernel.shared:
                runtime.cuda_host_add_shared(address, size, name.encode())
            for value in passed:
                value.declare(runtime)
            failed = kernel.entry(ctypes.byref(launch))
            message = runtime.cuda_host_message().decode(errors="replace") if failed else ""
        if failed:
            raise CudaHostError(f"{self.name}: {located(message, image.path)}")
        if execution().mode == "fast":
            for value in passed:
                value.mark_written()

    def _checked_sizes(
        self, grid: tuple[int, ...], block: tuple[int, ...], shared_bytes: int, dynamic: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        full = []
        for what, sizes, limits in (("grid", grid, GRID_LIMITS), ("block", block, BLOCK_LIMITS)):
            sizes = tuple(int(size) for size in sizes) + (1,) * (3 - len(sizes))
            if len(sizes) != 3 or any(not 1 <= size <= most for size, most in zip(sizes, limits, strict=True)):
                raise CudaHostError(f"{self.name}: {what}={sizes} must lie between 1 and {limits}")
            full.append(sizes)
        threads = int(np.prod(full[1]))
        if threads > MOST_THREADS:
            raise CudaHostError(
                f"{self.name}: block={full[1]} has {threads} threads, at most {MOST_THREADS} are allowed"
            )
        if not 0 <= self.max_dynamic_shared_size_bytes <= MOST_SHARED_BYTES:
            raise CudaHostError(
                f"{self.name}: max_dynamic_shared_size_bytes={self.max_dynamic_shared_size_bytes} is not in "
                f"0..{MOST_SHARED_BYTES}"
            )
        limit = max(USUAL_SHARED_BYTES, self.max_dynamic_shared_size_bytes)
        if (
            dynamic > self.max_dynamic_shared_size_bytes
            or shared_bytes > max(limit, 0)
            or shared_bytes > MOST_SHARED_BYTES
        ):
            raise CudaHostError(
                f"{self.name}: shared_mem={dynamic} with {shared_bytes - dynamic} bytes of the kernel's own arrays is "
                f"more than {limit} bytes; raise max_dynamic_shared_size_bytes (to {MOST_SHARED_BYTES} at most)"
            )
        return full[0], full[1]


def _source(module: HostModule) -> str:
    body = _EXTERN_SHARED.sub(r"CUDA_HOST_DYNAMIC_SHARED(\1, \2);", module.code)
    kernels = "".join(f"CUDA_HOST_KERNEL({i}, {name})\n" for i, name in enumerate(module.names))
    return (
        f'#include "{HERE}/device/host.hpp"\n#line 1 "kernel.cu"\n{body}\n'
        f'#line 1 "name expressions"\n{kernels}CUDA_HOST_IMAGE\n'
    )


def _own_options(options: Sequence[str]) -> list[str]:
    """Those of NVRTC's options that g++ takes as they are; the standard is the harness's own."""
    taken = [option for option in options if option.startswith(("-D", "-I", "-U"))]
    others = [o for o in options if o not in taken and not o.startswith(("--std=", "-std=", "--use_fast_math"))]
    if others:
        raise CudaHostError(f"options={others} mean nothing to the harness; give -D, -I, -U or --std")
    return taken
