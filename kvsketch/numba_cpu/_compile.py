"""How functions of this engine are compiled and where the results are kept.

Numba keeps compiled functions on disk under the time stamp of the file that defines them, and would go on using one
whose callees in another file have changed. Kernels here are kept under a fingerprint of all files that they are made
of.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from numba.core.caching import FunctionCache, IndexDataCacheFile


def _fingerprint() -> str:
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for path in (*sorted(here.glob("*.py")), here.parent / "layout.py"):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


#: Names the sources of all kernels; part of the file names of the kernel cache.
FINGERPRINT = _fingerprint()


class _KernelCache(FunctionCache):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file = IndexDataCacheFile(
            cache_path=self._cache_path,
            filename_base=f"{self._impl.filename_base}-{FINGERPRINT}",
            source_stamp=self._impl.locator.get_source_stamp(),
        )


def kernel(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function with Numba when it is first called, without the GIL, and keep the result on disk.

    `options` are those of :func:`numba.njit`.
    """

    def compile_kernel(function: Callable[..., Any]) -> Any:
        dispatcher = njit(nogil=True, **options)(function)
        dispatcher._cache = _KernelCache(function)
        return dispatcher

    return compile_kernel


def kernel_part(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """A :func:`kernel` that only other kernels call: what would make it callable from Python is not compiled."""
    return kernel(no_cpython_wrapper=True, no_cfunc_wrapper=True, **options)


class _Alias:
    """Another array over the memory of `x`, which it keeps alive."""

    def __init__(self, x: np.ndarray[Any, Any]) -> None:
        self._x = x
        interface = x.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def writable(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """`x`, or when it is read-only an alias that is not: Numba would compile a kernel once more for read-only inputs.

    Kernels write to nothing but their outputs.
    """
    return x if x.flags.writeable else np.asarray(_Alias(x))
