"""A module ``cupy`` for machines without a GPU: kernels run in the harness, everything else by NumPy on the host.

It is at least as strict as CuPy, so that what runs on it has one code path with a real device.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np

from kvsketch.tests.cuda_host import memory
from kvsketch.tests.cuda_host.arrays import call, ndarray, unwrap, wrap
from kvsketch.tests.cuda_host.devices import counts, devices, pretending
from kvsketch.tests.cuda_host.graphs import recording, refuse
from kvsketch.tests.cuda_host.module import HostModule
from kvsketch.tests.cuda_host.stand_in_cuda import CUDARuntimeError, Device, ExternalStream, Stream, current_stream
from kvsketch.tests.cuda_host.stand_in_memory import MemoryPointer, UnownedMemory, from_dlpack, using_allocator
from kvsketch.tests.cuda_host.toolchain import CompileError

CONSTANTS = ("inf", "nan", "pi", "e", "newaxis")
TYPES = (
    *("bool_", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32"),
    *("float64", "dtype", "iinfo", "finfo", "integer", "floating"),
)
#: Functions that CuPy offers with NumPy's meaning.
FUNCTIONS = (
    *("all", "any", "argmax", "argmin", "argsort", "argwhere", "broadcast_arrays", "broadcast_to", "clip"),
    *("concatenate", "count_nonzero", "cumsum", "diff", "dot", "einsum", "expand_dims", "flatnonzero", "flip"),
    *("max", "mean", "min", "moveaxis", "nonzero", "pad", "prod", "ravel", "repeat", "reshape", "roll", "sort"),
    *("split", "squeeze", "stack", "std", "sum", "swapaxes", "take", "take_along_axis", "tensordot", "tile"),
    *("transpose", "var", "where"),
)
#: Functions with a result whose shape depends on values: the host waits for it.
WAITING = ("argwhere", "flatnonzero", "nonzero")
UFUNCS = (
    *("absolute", "add", "bitwise_and", "bitwise_or", "bitwise_xor", "ceil", "copysign", "cos", "divide", "equal"),
    *("exp", "exp2", "expm1", "floor", "floor_divide", "fmax", "fmin", "frexp", "greater", "greater_equal"),
    *("invert", "isfinite", "isinf", "isnan", "ldexp", "left_shift", "less", "less_equal", "log", "log1p", "log2"),
    *("logical_and", "logical_not", "logical_or", "matmul", "maximum", "minimum", "multiply", "negative"),
    *("not_equal", "power", "remainder", "right_shift", "rint", "sign", "signbit", "sin", "sqrt", "square"),
    *("subtract", "tanh", "true_divide", "trunc"),
)
CREATIONS = ("arange", "eye", "full", "linspace", "ones", "zeros")
#: What ``ufunc.reduce`` does in CuPy, for the two that have it.
REDUCTIONS: dict[str, Callable[..., Any]] = {"add": np.sum, "multiply": np.prod}


class StandIn(ModuleType):
    """The module that stands in, and those in it."""


class UFunc:
    """``cupy.ufunc``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__name__ = function.__name__

    def __call__(self, *args: Any, **options: Any) -> Any:
        return call(self._function, *args, **options)

    def reduce(self, array: ndarray, axis: int | tuple[int, ...] = 0, dtype: Any = None, **options: Any) -> Any:
        """Sum or product along axes; CuPy has no other."""
        if self.__name__ not in REDUCTIONS:
            raise NotImplementedError(f"`cupy_{self.__name__}.reduce` is not supported yet")
        return call(REDUCTIONS[self.__name__], array, axis, dtype=dtype, **options)


class RawModule(HostModule):
    """``cupy.RawModule``: takes arrays of the stand-in alone, as CuPy passes NumPy arrays by value."""

    takes_numpy = False


def _function(name: str) -> Callable[..., Any]:
    function = getattr(np, name)

    def on_arrays(*args: Any, **options: Any) -> Any:
        if name in WAITING or (name == "where" and len(args) == 1):
            counts.synchronise(f"{name}()")
        return call(function, *args, **options)

    on_arrays.__name__ = name
    return on_arrays


# ---------------------------------------------------------------------- making arrays
def _creation(name: str) -> Callable[..., ndarray]:
    function = getattr(np, name)

    def create(*args: Any, **options: Any) -> ndarray:
        if recording() is not None:
            refuse(f"{name}()")
        return wrap(function(*map(unwrap, args), **options))

    create.__name__ = name
    return create


def _like(name: str) -> Callable[..., ndarray]:
    function = getattr(np, name)

    def create(array: ndarray, *args: Any, **options: Any) -> ndarray:
        if recording() is not None:
            refuse(f"{name}()")
        return wrap(function(unwrap(array), *map(unwrap, args), **options))

    create.__name__ = name
    return create


def empty(shape: Any, dtype: Any = np.float64) -> ndarray:
    """Memory that a checked kernel may not read before something wrote it."""
    return ndarray(memory.empty(shape, dtype))


def empty_like(array: ndarray, dtype: Any = None) -> ndarray:
    """:func:`empty` with the shape, and the dtype unless given, of `array`."""
    return empty(array.shape, array.dtype if dtype is None else dtype)


def array(value: Any, dtype: Any = None, copy: bool = True) -> ndarray:
    """A copy on the device of a NumPy array, a number or nested lists of numbers, or of an array of any device."""
    if isinstance(value, ndarray):
        same = dtype is None or np.dtype(dtype) == value.dtype
        if same and not copy:
            return value
        if recording() is not None:
            refuse("array() of an array")
        # Also of another device, as CuPy does here alone.
        return wrap(value.held.astype(value.dtype if same else dtype))
    counts.upload("array()")
    return wrap(np.array(value, dtype))


def asarray(value: Any, dtype: Any = None) -> ndarray:
    """`value` on the device: itself if it is there already."""
    return array(value, dtype, copy=False)


def ascontiguousarray(value: Any, dtype: Any = None) -> ndarray:
    """:func:`asarray`, copied unless its elements lie in order."""
    on_device = asarray(value, dtype)
    return on_device if on_device.flags.c_contiguous else call(np.ascontiguousarray, on_device)


def asnumpy(value: Any) -> np.ndarray:
    """`value` on the host."""
    return value.get() if isinstance(value, ndarray) else np.asarray(value)


# ---------------------------------------------------------------------- the module
def available() -> bool:
    """Whether a real CuPy with a device is there."""
    if isinstance(sys.modules.get("cupy"), StandIn) or importlib.util.find_spec("cupy") is None:
        return False
    import cupy

    try:
        return bool(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return False


def _module(name: str, contents: dict[str, Any]) -> StandIn:
    module = StandIn(name, __doc__)
    module.__spec__ = ModuleSpec(name, None)
    module.__dict__.update(contents)
    return module


def make() -> dict[str, StandIn]:
    """The module and those in it, by name as in ``sys.modules``."""
    properties = {"name": b"stand-in, kernels on the CPU"}
    runtime = _module(
        "cupy.cuda.runtime",
        {
            "CUDARuntimeError": CUDARuntimeError,
            "getDeviceCount": lambda: devices.count,
            "getDevice": lambda: devices.current,
            "getDeviceProperties": lambda _: properties | {"multiProcessorCount": devices.multiprocessors},
        },
    )
    compiler = _module("cupy.cuda.compiler", {"CompileException": CompileError})
    cuda = _module(
        "cupy.cuda",
        {
            "Device": Device,
            "Stream": Stream,
            "ExternalStream": ExternalStream,
            "get_current_stream": current_stream,
            "MemoryPointer": MemoryPointer,
            "UnownedMemory": UnownedMemory,
            "using_allocator": using_allocator,
            "is_available": lambda: True,
            "runtime": runtime,
            "compiler": compiler,
        },
    )
    likes = {name: _like(name) for name in ("full_like", "ones_like", "zeros_like")}
    own = (empty, empty_like, array, asarray, ascontiguousarray, asnumpy, from_dlpack)
    cupy = _module(
        "cupy",
        {name: getattr(np, name) for name in (*CONSTANTS, *TYPES)}
        | {name: _function(name) for name in FUNCTIONS}
        | {name: UFunc(getattr(np, name)) for name in UFUNCS}
        | {name: _creation(name) for name in CREATIONS}
        | likes
        | {function.__name__: function for function in own}
        | {"ndarray": ndarray, "ufunc": UFunc, "RawModule": RawModule, "cuda": cuda},
    )
    cupy.abs = cupy.absolute  # type: ignore[attr-defined]
    return {module.__name__: module for module in (cupy, cuda, runtime, compiler)}


@contextmanager
def installed(**pretended: Any) -> Iterator[Any]:
    """``import cupy`` inside: a real CuPy where it has a device, else a stand-in with devices as in `pretending`."""
    if available():
        import cupy

        yield cupy
        return
    with standing_in(**pretended) as module:
        yield module


@contextmanager
def standing_in(**pretended: Any) -> Iterator[Any]:
    """``import cupy`` inside: the stand-in, whatever is there, with devices as in `pretending`."""
    modules = make()
    before = {name: sys.modules.get(name) for name in modules}
    with pretending(**pretended):
        sys.modules.update(modules)
        try:
            yield modules["cupy"]
        finally:
            for name, module in before.items():
                if module is None:
                    del sys.modules[name]
                else:
                    sys.modules[name] = module
