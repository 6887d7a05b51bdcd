"""The C++ compiler, NVIDIA's headers, and shared libraries built once and kept."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path

CACHE_VARIABLE = "KVSKETCH_CUDA_HOST_CACHE"
#: The header that says where headers of CUDA lie, and the distributions that hold it, for CUDA 13 and 12.
HEADER = "cuda_fp16.h"
HEADER_DISTRIBUTIONS = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12")
#: The same for the C++ headers that cuda_fp16.h includes.
LIBRARY_HEADER = "nv/target"
LIBRARY_DISTRIBUTIONS = ("nvidia-cuda-cccl", "nvidia-cuda-cccl-cu12")


class CudaHostError(RuntimeError):
    """A kernel, or a launch of one, that is wrong."""


class CompileError(CudaHostError):
    """A kernel that does not compile."""


def missing() -> str | None:
    """What this machine lacks to execute kernels on its CPU, or None."""
    if not shutil.which(compiler()):
        return f"no C++ compiler {compiler()!r} was found; install g++ 10 or newer, or name one in CXX"
    for header, names in ((HEADER, HEADER_DISTRIBUTIONS), (LIBRARY_HEADER, LIBRARY_DISTRIBUTIONS)):
        if _folder_of(header, names) is None:
            return f"{header} of CUDA was not found; pip install {names[0]}"
    return None


def compiler() -> str:
    """The command of the C++ compiler."""
    return os.environ.get("CXX", "g++")


@cache
def _folder_of(header: str, distributions: tuple[str, ...]) -> Path | None:
    for name in distributions:
        try:
            found = metadata.files(name) or []
        except metadata.PackageNotFoundError:
            continue
        for file in found:
            if str(file).endswith(f"/{header}"):
                return Path(str(file.locate())).resolve().parents[header.count("/")]
    return None


def include_folders() -> tuple[Path, ...]:
    """Where NVIDIA's headers lie; CudaHostError when a wheel is not installed."""
    folders = (_folder_of(HEADER, HEADER_DISTRIBUTIONS), _folder_of(LIBRARY_HEADER, LIBRARY_DISTRIBUTIONS))
    if None in folders:
        raise CudaHostError(missing())
    return tuple(folder for folder in folders if folder is not None)


def run(command: Sequence[str | Path], error: type[Exception] = CudaHostError) -> str:
    """Output of a command; `error` with what it said when it fails."""
    ended = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if ended.returncode:
        raise error(f"{command[0]} failed:\n{ended.stdout}{ended.stderr}")
    return ended.stdout


@cache
def toolchain() -> str:
    """Versions of everything outside this package that a built library depends on."""
    return run([compiler(), "--version"]) + " ".join(map(str, include_folders()))


def cache_folder() -> Path:
    """Where built libraries are kept."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path(sys.prefix) / "cuda-host")


def built(name: str, ingredients: Sequence[str], build: Callable[[Path, Path], None]) -> Path:
    """The library `name` made from `ingredients`, by ``build(folder, target)`` unless it is kept already.

    Processes that build the same library at once do so in folders of their own, and the last one to finish wins.
    """
    text = "\0".join([*ingredients, toolchain(), platform.machine()])
    library = cache_folder() / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:24]}.so"
    if library.exists():
        return library
    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_folder(), prefix=f"{name}-") as folder:
        target = Path(folder) / library.name
        build(Path(folder), target)
        os.replace(target, library)
    return library
