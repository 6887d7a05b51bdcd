"""The C++ compiler, NVIDIA's headers, and shared libraries built once and kept."""

from __future__ import annotations

import contextlib
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
    for program in (compiler(), "nm"):
        if not shutil.which(program):
            return f"{program!r} was not found; install g++ 10 or newer with binutils (CXX names another compiler)"
    return missing_headers()


def missing_headers() -> str | None:
    """The wheel of NVIDIA's headers that is not installed, or None."""
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
    if reason := missing_headers():
        raise CudaHostError(reason)
    folders = (_folder_of(HEADER, HEADER_DISTRIBUTIONS), _folder_of(LIBRARY_HEADER, LIBRARY_DISTRIBUTIONS))
    return tuple(folder for folder in folders if folder is not None)


@cache
def cuda_versions() -> str:
    """Versions of the wheels with NVIDIA's headers."""
    found = []
    for name in (*HEADER_DISTRIBUTIONS, *LIBRARY_DISTRIBUTIONS):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    return " ".join(found)


def run(command: Sequence[str | Path], error: type[Exception] = CudaHostError) -> str:
    """Output of a command; `error` with what it said when it fails."""
    ended = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if ended.returncode:
        raise error(f"{command[0]} failed:\n{ended.stdout}{ended.stderr}")
    return ended.stdout


@cache
def toolchain() -> str:
    """Versions of everything outside this package that a built library depends on."""
    return f"{run([compiler(), '--version'])} {platform.machine()} {cuda_versions()}"


def cache_folder() -> Path:
    """Where built files are kept."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path(sys.prefix) / "cuda-host")


def kept(name: str, suffix: str, ingredients: Sequence[str], build: Callable[[Path, Path], None]) -> Path:
    """The file made of `ingredients` by ``build(folder, target)``, unless it was made before.

    Processes that make the same file at once do so in folders of their own, and the last one to finish wins.
    """
    key = hashlib.sha256("\0".join(ingredients).encode()).hexdigest()[:24]
    file = cache_folder() / f"{name}-{key}{suffix}"
    if file.exists():
        return file
    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_folder(), prefix=f"{name}-") as folder:
        target = Path(folder) / file.name
        build(Path(folder), target)
        os.replace(target, file)
    return file


def built(name: str, ingredients: Sequence[str], build: Callable[[Path, Path], None]) -> Path:
    """A shared library, kept for as long as ingredients and toolchain are the same."""
    return kept(name, ".so", [*ingredients, toolchain()], build)
