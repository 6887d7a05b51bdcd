"""How functions of this engine are compiled and where the results are kept.

Numba keeps compiled functions on disk under the time stamp of the file that defines them, and would go on using one
whose callees in another file have changed. Kernels here are kept under a fingerprint of all files that they are made
of.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from ctypes import addressof, c_char
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
from numba import njit, types
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.ccallback import CFunc


def _fingerprint() -> str:
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for path in (*sorted(here.glob("*.py")), here.parent / "layout.py"):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


#: Names the sources of all kernels; part of the file names of the kernel cache.
FINGERPRINT = _fingerprint()


class _KernelCache(FunctionCache):
    """Results of one function; `variant` tells those apart that one piece of source makes."""

    def __init__(self, function: Callable[..., Any], variant: str = "") -> None:
        super().__init__(function)
        self._variant = variant
        self._cache_file = IndexDataCacheFile(
            cache_path=self._cache_path,
            filename_base=f"{self._impl.filename_base}{variant and '-' + variant}-{FINGERPRINT}",
            source_stamp=self._impl.locator.get_source_stamp(),
        )

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        """Without what a function closes over: the fingerprint and the variant say it, its pickle changes each time."""
        return sig, codegen.magic_tuple(), self._variant


def kernel(variant: str = "", **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function with Numba when it is first called, without the GIL, and keep the result on disk.

    `variant` tells kernels apart that one piece of source makes; `options` are those of :func:`numba.njit`.
    """

    def compile_kernel(function: Callable[..., Any]) -> Any:
        cache = _KernelCache(function, variant)
        _name_apart(function, variant)
        dispatcher = njit(nogil=True, **options)(function)
        dispatcher._cache = cache
        return dispatcher

    return compile_kernel


def kernel_part(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """A :func:`kernel` that only other kernels call: what would make it callable from Python is not compiled."""
    return kernel(no_cpython_wrapper=True, no_cfunc_wrapper=True, **options)


def _describe(thing: Any) -> str:
    """What tells one value that a function closes over from another, the same in every process."""
    if hasattr(thing, "py_func"):
        return str(thing.py_func.__qualname__)
    definition = getattr(thing, "_defn", thing)
    if isinstance(definition, FunctionType):
        cells = [_describe(cell.cell_contents) for cell in definition.__closure__ or ()]
        return f"{definition.__qualname__}({', '.join(cells)})"
    return repr(thing)


def _name_apart(function: Callable[..., Any], variant: str = "") -> None:
    """Put what a function closes over into its name.

    Compiled code is found by name, and code from the disk may have come from several processes: functions that one
    piece of source makes must not share a name.
    """
    if variant or function.__closure__:
        plain = function.__dict__.setdefault("_plain_name", function.__qualname__)
        digest = hashlib.sha256(f"{_describe(function)} {variant}".encode()).hexdigest()[:16]
        function.__qualname__ = f"{plain}_{digest}"


def compile_address(function: Callable[..., Any], variant: str) -> int:
    """Compile a function of addresses and integers that returns nothing; where in memory the result starts.

    Such a kernel is called by another with :func:`kvsketch.numba_cpu.simd.call_kernel`: each is compiled once, not
    every combination of them. `variant` tells kernels apart that one piece of source makes.
    """
    count = function.__code__.co_argcount
    cache = _KernelCache(function, variant)
    _name_apart(function, variant)
    kernel: Any = CFunc(
        function, (types.UniTuple(types.intp, count).types, types.void), {}, {"nopython": True, "error_model": "numpy"}
    )
    kernel._cache = cache
    kernel.compile()
    _KEPT.append(kernel)
    return int(kernel.address)


#: Compiled functions whose addresses were given out: they must not be freed.
_KEPT: list[CFunc] = []


def inner(function: Callable[..., Any]) -> Any:
    """Compile a function that only kernels call for what they are given, and keep it with them."""
    _name_apart(function)
    return njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)


def address(x: Any) -> int:
    """Where the first number of an array lies."""
    try:
        return addressof(c_char.from_buffer(x))  # four times faster than what NumPy offers
    except (TypeError, ValueError, BufferError):  # empty, read-only, or bfloat16
        return int(x.__array_interface__["data"][0])


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
