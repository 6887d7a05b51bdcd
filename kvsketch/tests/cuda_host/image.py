"""A module of kernels built by g++ for one mode, loaded, and taken apart: kernels, parameters, shared arrays."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsketch.tests.cuda_host.arguments import Parameter
from kvsketch.tests.cuda_host.runtime import DEVICE_HEADERS, device_headers, runtime_library
from kvsketch.tests.cuda_host.toolchain import (
    CompileError,
    CudaHostError,
    built,
    compiler,
    include_folders,
    kept,
    run,
    toolchain,
)

COMMON_FLAGS = (
    # Lines and inlined calls are what failures name; where variables lie would take g++ as long as all else.
    *("-std=c++17", "-gdwarf-4", "-g1", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique"),
    # NVRTC fuses multiply-add where it pleases; here nothing is fused, so that rounding is the reference's.
    *("-ffp-contract=off", "-fno-strict-aliasing", "-w"),
)
#: Tests run kernels for moments and build many: what is quick to build is quick.
MODE_FLAGS = {
    "fast": ("-O1",),
    # Instrumented for two sanitizers, but linked to the runtime's hooks instead of their libraries. As nothing is
    # optimised, every access of the source is made, also those whose result nobody uses.
    "check": (
        *("-O0", "-DCUDA_HOST_CHECKED", "-fsanitize=thread"),
        "-fsanitize=alignment,bounds,shift,integer-divide-by-zero,signed-integer-overflow,float-cast-overflow,null",
    ),
}
#: ``extern __shared__ T name[];``, with an alignment or without.
_ALIGNED = r"(?:(?:__align__|alignas)\s*\([^)]*\)\s*)?"
EXTERN_SHARED = re.compile(
    rf"extern\s+__shared__\s+{_ALIGNED}([\w:<> ]+?)\s+{_ALIGNED}(\w+)\s*\[\s*\]\s*;|extern\s+__shared__"
)


@dataclass(frozen=True)
class Kernel:
    """How to call a kernel, its parameters, shared arrays it may use (address, bytes, name), bytes of its own ones."""

    entry: Any
    parameters: tuple[Parameter, ...]
    shared: tuple[tuple[int, int, str], ...]
    own_shared_bytes: int


class Image:
    """A module built for one mode."""

    def __init__(self, code: str, names: Sequence[str], options: Sequence[str], mode: str) -> None:
        self.path = _build(code, names, options, mode)
        self._library = ctypes.CDLL(str(self.path))
        self.start = self._pointer("image_start")
        self.end = self._pointer("image_end")
        # Address, bytes, kind of storage, name.
        self._symbols = [
            (int(words[0], 16), int(words[1], 16), words[2], words[3])
            for words in map(str.split, run(["nm", "--print-size", "--defined-only", self.path]).splitlines())
            if len(words) == 4
        ]
        symbols = [self._symbol_at(self._pointer(f"address_{i}")) for i in range(len(names))]
        self.kernels = {name: self._kernel(i, symbols) for i, name in enumerate(names)}

    def _pointer(self, name: str) -> int:
        function = getattr(self._library, f"cuda_host_{name}")
        function.restype = ctypes.c_void_p
        return function()

    def _symbol_at(self, address: int) -> str:
        at = address - self.start
        return next(name for start, _, kind, name in self._symbols if start == at and kind in "tTwW")

    def _kernel(self, number: int, symbols: Sequence[str]) -> Kernel:
        """Shared arrays are static variables of the kernel itself, or of a device function that it may call."""
        shared, own = [], 0
        for offset, size, kind, name in self._symbols:
            if kind not in "bBuVv" or not name.startswith("_ZZ") or "cuda_host" in name:
                continue
            owners = [i for i, symbol in enumerate(symbols) if name.startswith(f"_ZZ{symbol.removeprefix('_Z')}E")]
            if owners in ([], [number]):
                shared.append((self.start + offset, size, name))
                own += size * len(owners)
        describe = getattr(self._library, f"cuda_host_parameters_{number}")
        describe.restype = ctypes.c_char_p
        parameters = tuple(map(Parameter, describe().decode().split()))
        return Kernel(getattr(self._library, f"cuda_host_launch_{number}"), parameters, tuple(shared), own)


def _build(code: str, names: Sequence[str], options: Sequence[str], mode: str) -> Path:
    runtime, _ = runtime_library()
    source = _source(code, names)
    own = _own_options(options)
    includes = [f"-I{folder}" for folder in (DEVICE_HEADERS, *include_folders())]
    flags = [*COMMON_FLAGS, *MODE_FLAGS[mode], *own]
    headers = f"-I{_compiled_headers(mode, includes)}"

    def build(folder: Path, target: Path) -> None:
        text, compiled = folder / "module.cpp", folder / "module.o"
        text.write_text(source)
        run([compiler(), *flags, headers, *includes, "-c", text, "-o", compiled], CompileError)
        run([compiler(), "-shared", "-Wl,-Bsymbolic", compiled, runtime, "-o", target])

    return built("kernels", [source, device_headers(), str(runtime), *flags], build)


def _compiled_headers(mode: str, includes: Sequence[str]) -> Path:
    """A folder with host.hpp, and so CUDA's own headers, compiled ahead: most of what a module takes to build."""
    flags = [*COMMON_FLAGS, *MODE_FLAGS[mode]]

    def build(_: Path, target: Path) -> None:
        header = DEVICE_HEADERS / "host.hpp"
        run([compiler(), *flags, *includes, "-x", "c++-header", header, "-o", target], CompileError)

    file = kept("headers", ".gch", [device_headers(), toolchain(), *flags], build)
    folder = file.with_suffix("")
    folder.mkdir(exist_ok=True)
    with suppress(FileExistsError):
        (folder / "host.hpp.gch").symlink_to(file)
    return folder


def _source(code: str, names: Sequence[str]) -> str:
    def dynamic(found: re.Match[str]) -> str:
        if found[2] is None:
            line = code.count("\n", 0, found.start()) + 1
            raise CompileError(
                f"line {line} of the source: write dynamic shared memory as `extern __shared__ T name[];`"
            )
        return f"CUDA_HOST_DYNAMIC_SHARED({found[1]}, {found[2]});"

    body = EXTERN_SHARED.sub(dynamic, code)
    kernels = "".join(f"CUDA_HOST_KERNEL({i}, {name})\n" for i, name in enumerate(names))
    return f'#include "host.hpp"\n#line 1 "kernel.cu"\n{body}\n#line 1 "name expressions"\n{kernels}CUDA_HOST_IMAGE\n'


def _own_options(options: Sequence[str]) -> list[str]:
    """Those of NVRTC's options that g++ takes as they are; the standard is the harness's own."""
    taken = [option for option in options if option.startswith(("-D", "-I", "-U"))]
    unknown = [option for option in options if option not in taken and not option.startswith(("--std=", "-std="))]
    if unknown:
        raise CudaHostError(f"options={unknown} mean nothing to the harness; give -D, -I, -U and --std alone")
    return taken
