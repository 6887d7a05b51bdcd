"""A module ``cupy`` for machines without a GPU: kernels run in the harness, everything else by NumPy on the host.

It is at least as strict as CuPy, so that what runs on it has one code path with a real device.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from kvsketch.tests.cuda_host import memory
from kvsketch.tests.cuda_host.arrays import call, ndarray, unwrap, wrap
from kvsketch.tests.cuda_host.devices import counts, devices
from kvsketch.tests.cuda_host.module import HostModule
from kvsketch.tests.cuda_host.toolchain import CompileError

CONSTANTS = ("inf", "nan", "pi", "e", "newaxis")
TYPES = (
    *("bool_", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32"),
    *("float64", "dtype", "iinfo", "finfo", "integer", "floating"),
)
#: Functions that CuPy offers with NumPy's meaning.
FUNCTIONS = (
    *("all", "any", "argmax", "argmin", "argsort", "argwhere", "atleast_1d", "average", "broadcast_to", "clip"),
    *("concatenate", "count_nonzero", "cumsum", "diff", "dot", "einsum", "expand_dims", "flatnonzero", "flip"),
    *("linalg", "max", "mean", "median", "min", "moveaxis", "nonzero", "packbits", "pad", "prod", "ravel", "repeat"),
    *("reshape", "roll", "searchsorted", "sort", "split", "squeeze", "stack", "std", "sum", "swapaxes", "take"),
    *("take_along_axis", "tensordot", "tile", "transpose", "unpackbits", "var", "where"),
    *("array_equal", "allclose", "zeros_like", "ones_like", "full_like", "broadcast_arrays", "copyto"),
)
UFUNCS = (
    *("abs", "absolute", "add", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "ceil", "copysign", "cos"),
    *("divide", "equal", "exp", "exp2", "expm1", "floor", "floor_divide", "fmax", "fmin", "frexp", "greater"),
    *("greater_equal", "invert", "isfinite", "isinf", "isnan", "ldexp", "left_shift", "less", "less_equal", "log"),
    *("log1p", "log2", "logical_and", "logical_not", "logical_or", "matmul", "maximum", "minimum", "mod", "multiply"),
    *("negative", "not_equal", "power", "remainder", "right_shift", "rint", "sign", "signbit", "sin", "sqrt"),
    *("square", "subtract", "tanh", "true_divide", "trunc"),
)
#: Functions whose result's shape depends on values: the host waits for it.
WAITING = ("argwhere", "flatnonzero", "nonzero", "array_equal", "allclose")


class Device:
    """``cupy.cuda.Device``: a device by number, the current one without; the current one inside ``with``."""

    def __init__(self, device: int | None = None) -> None:
        self.id = devices.current if device is None else int(device)
        if not 0 <= self.id < devices.count:
            raise CUDARuntimeError(f"cudaErrorInvalidDevice: invalid device ordinal {self.id}")
        self._before: list[int] = []

    @property
    def compute_capability(self) -> str:
        """Such as ``"90"``."""
        return devices.compute_capability

    def use(self) -> None:
        """Make it the current device."""
        devices.current = self.id

    def synchronize(self) -> None:
        """Wait for it."""
        counts.synchronisations += 1

    def __enter__(self) -> Device:
        self._before.append(devices.current)
        devices.current = self.id
        return self

    def __exit__(self, *_: object) -> None:
        devices.current = self._before.pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __int__(self) -> int:
        return self.id

    def __repr__(self) -> str:
        return f"<CUDA Device {self.id}>"


class Stream:
    """``cupy.cuda.Stream``: everything has been done when a call returns, so streams only have names."""

    null: Stream

    def __init__(self, null: bool = False, non_blocking: bool = False, ptr: int = 0) -> None:
        self.ptr = ptr
        self._before: list[Stream] = []

    def use(self) -> Stream:
        """Make it the current stream."""
        _streams[:] = [self]
        return self

    def synchronize(self) -> None:
        """Wait for it."""
        counts.synchronisations += 1

    def __enter__(self) -> Stream:
        self._before.append(_streams[0])
        return self.use()

    def __exit__(self, *_: object) -> None:
        _streams[:] = [self._before.pop()]


Stream.null = Stream()
_streams = [Stream.null]


class ExternalStream(Stream):
    """``cupy.cuda.ExternalStream``: a stream that another library made."""

    def __init__(self, ptr: int, device_id: int = -1) -> None:
        super().__init__(ptr=ptr)


class CUDARuntimeError(RuntimeError):
    """An error of CUDA's runtime."""


def available() -> bool:
    """Whether a real CuPy with a device is there."""
    if isinstance(sys.modules.get("cupy"), StandIn) or importlib.util.find_spec("cupy") is None:
        return False
    import cupy

    try:
        return bool(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return False


class StandIn(ModuleType):
    """The module that stands in."""


def _creation(function: Callable[..., np.ndarray]) -> Callable[..., ndarray]:
    def create(*args: Any, **options: Any) -> ndarray:
        return wrap(function(*map(unwrap, args), **options))

    return create


def _empty(shape: Any, dtype: Any = np.float64, order: str = "C") -> ndarray:
    return ndarray(memory.empty(shape, dtype))


def _empty_like(array: ndarray, dtype: Any = None) -> ndarray:
    return _empty(array.shape, array.dtype if dtype is None else dtype)


def _array(value: Any, dtype: Any = None, copy: bool = True) -> ndarray:
    """From the host, or a copy."""
    if isinstance(value, ndarray):
        held = unwrap(value)
        return wrap(held.astype(dtype or held.dtype)) if copy or dtype not in (None, held.dtype) else value
    counts.uploads += 1
    return wrap(np.array(unwrap(value) if isinstance(value, list | tuple) else value, dtype=dtype))


def _asarray(value: Any, dtype: Any = None) -> ndarray:
    return _array(value, dtype, copy=False)


def _ascontiguousarray(value: Any, dtype: Any = None) -> ndarray:
    array = _asarray(value, dtype)
    return array if array.flags.c_contiguous else wrap(np.ascontiguousarray(array._held))


def _asnumpy(value: Any) -> np.ndarray:
    return value.get() if isinstance(value, ndarray) else np.asarray(value)


def _function(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def on_arrays(*args: Any, **options: Any) -> Any:
        if name in WAITING or (name == "where" and len(args) == 1):
            counts.synchronisations += 1
        return call(function, *args, **options)

    on_arrays.__name__ = name
    return on_arrays


class UFunc:
    """``cupy.ufunc``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__name__ = function.__name__

    def __call__(self, *args: Any, **options: Any) -> Any:
        return call(self._function, *args, **options)

    def reduce(self, *args: Any, **options: Any) -> Any:
        """Fold along an axis."""
        return call(self._function.reduce, *args, **options)


def make() -> StandIn:
    """The module."""
    cupy = StandIn("cupy", __doc__)
    cupy.__dict__.update({name: getattr(np, name) for name in (*CONSTANTS, *TYPES)})
    cupy.__dict__.update({name: _function(name, getattr(np, name)) for name in FUNCTIONS if name != "linalg"})
    cupy.__dict__.update({name: UFunc(getattr(np, name)) for name in UFUNCS})
    created = {name: _creation(getattr(np, name)) for name in ("arange", "eye", "full", "linspace", "ones", "zeros")}
    runtime = SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError,
        getDeviceCount=lambda: devices.count,
        getDeviceProperties=lambda device: {"name": b"stand-in", "multiProcessorCount": 132},
        getDevice=lambda: devices.current,
    )
    cuda = SimpleNamespace(
        Device=Device,
        Stream=Stream,
        ExternalStream=ExternalStream,
        get_current_stream=lambda: _streams[0],
        runtime=runtime,
        compiler=SimpleNamespace(CompileException=CompileError),
        is_available=lambda: True,
    )
    cupy.__dict__.update(
        created,
        ndarray=ndarray,
        ufunc=UFunc,
        empty=_empty,
        empty_like=_empty_like,
        array=_array,
        asarray=_asarray,
        ascontiguousarray=_ascontiguousarray,
        asnumpy=_asnumpy,
        get_array_module=lambda *arrays: cupy if any(isinstance(a, ndarray) for a in arrays) else np,
        RawModule=HostModule,
        cuda=cuda,
    )
    return cupy


@contextmanager
def installed(*, count: int = 1, compute_capability: str = "90") -> Iterator[Any]:
    """``sys.modules["cupy"]`` inside: a real CuPy where it has a device, else a stand-in with these devices."""
    if available():
        import cupy

        yield cupy
        return
    before = sys.modules.get("cupy")
    kept = (devices.count, devices.compute_capability, devices.current)
    devices.count, devices.compute_capability, devices.current = count, compute_capability, 0
    sys.modules["cupy"] = module = make()
    try:
        yield module
    finally:
        devices.count, devices.compute_capability, devices.current = kept
        if before is None:
            del sys.modules["cupy"]
        else:
            sys.modules["cupy"] = before
