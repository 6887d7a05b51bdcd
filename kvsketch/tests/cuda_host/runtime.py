"""The runtime that executes launches (runtime/*.cpp), as Python calls it."""

from __future__ import annotations

import ctypes
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

from kvsketch.tests.cuda_host.modes import ORDERS, Execution
from kvsketch.tests.cuda_host.toolchain import built, compiler, include_folders, run

HERE = Path(__file__).resolve().parent
DEVICE_HEADERS = HERE / "device"
SOURCES = sorted(HERE.glob("runtime/*.cpp"))
FLAGS = ["-std=c++17", "-O2", "-g", "-fPIC", "-shared", "-fvisibility=hidden"]


class Launch(ctypes.Structure):
    """``cuda_host_launch`` of device/abi.hpp."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("arguments", ctypes.c_void_p),
    ]


class Options(ctypes.Structure):
    """``Options`` of runtime/state.hpp."""

    _fields_ = [
        ("order", ctypes.c_int),
        ("seed", ctypes.c_uint),
        ("preempt_ppm", ctypes.c_int),
        ("check", ctypes.c_int),
        ("blocks_race", ctypes.c_int),
        ("strict_exit", ctypes.c_int),
    ]


def options_of(execution: Execution) -> Options:
    """`execution` as the runtime reads it."""
    return Options(
        ORDERS[execution.order],
        execution.seed,
        execution.preempt_ppm,
        execution.mode == "check",
        execution.blocks_race,
        execution.strict_exit,
    )


@cache
def device_headers() -> str:
    """Text of all headers that kernels and runtime include."""
    return "".join(path.read_text() for path in sorted(DEVICE_HEADERS.glob("*.hpp")))


@cache
def runtime_library() -> tuple[Path, Any]:
    """The runtime's file, and the runtime."""
    headers = [path.read_text() for path in sorted(HERE.glob("runtime/*.hpp"))]
    sources = [path.read_text() for path in SOURCES]
    includes = [f"-I{folder}" for folder in include_folders()]

    def build(_: Path, target: Path) -> None:
        run([compiler(), *FLAGS, *includes, *SOURCES, "-o", target])

    path = built("runtime", [*sources, *headers, device_headers(), *FLAGS], build)
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    pointer, text = ctypes.c_void_p, ctypes.c_char_p
    library.cuda_host_message.restype = text
    library.cuda_host_set_options.argtypes = [ctypes.POINTER(Options)]
    library.cuda_host_set_image.argtypes = [pointer, pointer]
    library.cuda_host_add_argument.argtypes = [pointer, ctypes.c_size_t, text, ctypes.c_int, pointer, pointer]
    library.cuda_host_count_argument.argtypes = [pointer] * 4
    library.cuda_host_add_shared.argtypes = [pointer, ctypes.c_size_t, text]
    library.cuda_host_plant.argtypes = [ctypes.c_int]
    for name in ("set_options", "set_image", "add_argument", "count_argument", "add_shared", "plant"):
        getattr(library, f"cuda_host_{name}").restype = None
    return path, library


def located(message: str, library: Path) -> str:
    """A message of the runtime with the places in `library`, written ``@0x123@``, as file:line, and names demangled."""
    foreign = tuple(map(str, (DEVICE_HEADERS, *include_folders())))

    def place(found: re.Match[str]) -> str:
        lines = _filtered(["addr2line", "--inlines", f"--exe={library}", found[1]], "").splitlines()
        # The innermost line that is not in a header of the harness or of CUDA.
        own = [line for line in lines if not line.startswith(foreign)]
        return Path((own or lines or [found[1]])[0].partition(" (discriminator")[0]).name

    return _filtered(["c++filt"], re.sub(r"@(0x[0-9a-f]+|0)@", place, message))


def _filtered(command: list[str], text: str) -> str:
    """`text` after a program of binutils, or as it was where that fails."""
    try:
        return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return text
