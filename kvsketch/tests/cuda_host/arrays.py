"""The stand-in for ``cupy.ndarray``: holds a NumPy array, and refuses what CuPy refuses, or more.

What CuPy does by sending an array of the host unasked, as in ``x[numpy_array]``, counts as an upload.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvsketch.tests.cuda_host.devices import counts, devices
from kvsketch.tests.cuda_host.graphs import recording, refuse
from kvsketch.tests.cuda_host.memory import allocate, mark_written, owner

#: Methods of numpy.ndarray that CuPy offers with the same meaning.
METHODS = (
    *("all", "any", "argmax", "argmin", "argsort", "astype", "clip", "copy", "cumsum", "diagonal", "dot", "flatten"),
    *("max", "mean", "min", "prod", "ravel", "repeat", "reshape", "round", "squeeze", "std", "sum", "swapaxes", "take"),
    *("transpose", "var", "view"),
)
#: What DLPack calls the kinds of devices, and the version of it that CuPy speaks.
CPU, CUDA, DLPACK_VERSION = 1, 2, (1, 0)
BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
UNARY = ("neg", "pos", "abs", "invert")


class ndarray:
    """An array on a stand-in device."""

    __array_priority__ = 100
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, held: np.ndarray, device_id: int | None = None) -> None:
        if held.dtype.kind not in "biufc" and held.dtype.name != "bfloat16":
            raise ValueError(f"Unsupported dtype {held.dtype}")
        self.held = held
        self.device_id = devices.current if device_id is None else device_id

    # ------------------------------------------------------------------ what it is
    shape = property(lambda self: self.held.shape)
    dtype = property(lambda self: self.held.dtype)
    ndim = property(lambda self: self.held.ndim)
    size = property(lambda self: self.held.size)
    itemsize = property(lambda self: self.held.itemsize)
    nbytes = property(lambda self: self.held.nbytes)
    strides = property(lambda self: self.held.strides)
    flags = property(lambda self: self.held.flags)
    T = property(lambda self: self.transpose())

    @property
    def device(self) -> Any:
        """Where it lies, as a ``cupy.cuda.Device``."""
        from kvsketch.tests.cuda_host.stand_in import Device

        return Device(self.device_id)

    @property
    def data(self) -> Any:
        """Its memory: ``data.ptr`` is the address."""
        return SimpleNamespace(ptr=self.held.ctypes.data, device_id=self.device_id)

    def __len__(self) -> int:
        return len(self.held)

    def __iter__(self) -> Iterator[ndarray]:
        if not self.ndim:
            raise TypeError("iteration over a 0-d array")
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return repr(self.get())

    # ------------------------------------------------------------------ to the host: all of these wait
    def get(self) -> np.ndarray:
        """A copy on the host."""
        counts.synchronise("get()")
        return self.held.copy()

    def item(self, *where: int) -> Any:
        """One element as a Python number."""
        counts.synchronise("item()")
        return self.held.item(*where)

    def tolist(self) -> Any:
        """All elements as Python numbers."""
        return self.get().tolist()

    def tobytes(self) -> bytes:
        """All bytes."""
        return self.get().tobytes()

    def __bool__(self) -> bool:
        return bool(self.get())

    def __int__(self) -> int:
        return int(self.get())

    def __float__(self) -> float:
        return float(self.get())

    def __index__(self) -> int:
        return operator.index(self.get())

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct a NumPy array "
            "explicitly."
        )

    # ------------------------------------------------------------------ to other libraries
    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, self.device_id

    def __dlpack__(self, *, stream: int | None = None, max_version: Any = None, **_: Any) -> Any:
        """A capsule of the memory, which another library shares. A copy to the host is not offered."""
        if self.dtype.kind not in "biufc":
            raise BufferError("dtype is not supported for dlpack export")
        return self.held.__dlpack__(max_version=max_version)

    # ------------------------------------------------------------------ parts of it
    def __getitem__(self, index: Any) -> ndarray:
        part = _device_of(self)[_with_view(_unwrap_index(index))]
        if recording() is not None and owner(part) is not owner(self.held):
            refuse("x[...] of an array as index")
        return wrap(part, self.device_id)

    def __setitem__(self, index: Any, value: Any) -> None:
        if recording() is not None:
            refuse("x[...] = y")
        if isinstance(value, np.ndarray) and value.ndim:
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        plain = _unwrap_index(index)
        _device_of(self)[plain] = unwrap(value)
        mark_written(self.held, plain)

    def set(self, value: np.ndarray) -> None:
        """Copy a NumPy array here."""
        if not isinstance(value, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if value.dtype != self.dtype:
            raise TypeError(f"{value.dtype} array cannot be set to {self.dtype} array")
        if value.shape != self.shape:
            raise ValueError(f"Shape mismatch. Old shape: {self.shape}, new shape: {value.shape}")
        if not self.flags.c_contiguous and not self.flags.f_contiguous:
            raise RuntimeError("Cannot set to non-contiguous array")
        counts.upload("set()")
        self.held[...] = value
        mark_written(self.held)

    def fill(self, value: Any) -> None:
        """Set all elements to a number."""
        self[...] = value

    def sort(self, axis: int = -1) -> None:
        """Sort in place."""
        if recording() is not None:
            refuse("sort()")
        _device_of(self).sort(axis)

    # ------------------------------------------------------------------ NumPy's functions and scalars with it
    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        if method != "__call__":
            raise TypeError(f"numpy.{ufunc.__name__}.{method} does not run on CuPy arrays")
        return call(ufunc, *inputs, **options)

    def __array_function__(self, function: Callable[..., Any], *_: Any) -> Any:
        raise TypeError(f"numpy.{function.__name__} was called on a CuPy array; call the array's own namespace")


ndarray.__module__ = "cupy"


# ---------------------------------------------------------------------- from NumPy and back
def wrap(result: Any, device_id: int | None = None) -> Any:
    """What a NumPy function gave, as CuPy gives it: an array also for a single number."""
    if isinstance(result, np.ndarray | np.generic):
        array = np.asarray(result)
        if array.base is None:  # made anew, so it may lie anywhere; CuPy's allocations are aligned
            aligned = allocate(array.shape, array.dtype)
            aligned[...] = array
            array = aligned
        return ndarray(array, device_id)
    if isinstance(result, tuple | list):
        return type(result)(wrap(part, device_id) for part in result)
    return result


def _device_of(array: ndarray) -> np.ndarray:
    """What `array` holds; ValueError unless it lies on the current device."""
    if array.device_id != devices.current:
        raise ValueError(
            f"The device where the array resides ({array.device_id}) is different from the current device "
            f"({devices.current})."
        )
    return array.held


def unwrap(value: Any) -> Any:
    """What NumPy works on; TypeError for a NumPy array among CuPy's, as for anything else that is no number."""
    if isinstance(value, ndarray):
        return _device_of(value)
    if isinstance(value, np.ndarray):
        raise TypeError(f"Unsupported type {type(value)}")
    if isinstance(value, tuple | list):
        return type(value)(map(unwrap, value))
    return value


def _unwrap_index(index: Any) -> tuple[Any, ...]:
    """An index for NumPy. The host waits for how many elements a mask takes, and sends lists and its own arrays."""
    plain = []
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, np.ndarray | list):
            counts.upload("an index of the host")
            part = np.asarray(part)
        else:
            part = unwrap(part)
        if isinstance(part, np.ndarray) and part.dtype == np.bool_:
            counts.synchronise("a mask as index")
        plain.append(part)
    return tuple(plain)


def _with_view(index: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same index, so that NumPy answers integers alone with a view of no axes rather than with a number."""
    return index if any(part is ... for part in index) else (*index, ...)


def call(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """A NumPy function on stand-in arrays and numbers; as silent about infinities and NaN as a GPU."""
    out = options.get("out")
    if out is not None and recording() is not None:
        refuse(f"{function.__name__}(out=...)")
    with np.errstate(all="ignore"):
        result = function(*map(unwrap, args), **{name: unwrap(value) for name, value in options.items()})
    if out is None:
        if recording() is not None and not _is_view(result, args):
            refuse(f"{function.__name__}()")
        return wrap(result)
    written = out[0] if isinstance(out, tuple) else out
    mark_written(written.held)
    return written


def _is_view(result: Any, args: tuple[Any, ...]) -> bool:
    """Whether what a function gave is in the memory of its arguments."""
    memory = [owner(arg.held) for arg in args if isinstance(arg, ndarray)]
    parts = result if isinstance(result, tuple | list) else [result]
    return all(isinstance(part, np.ndarray) and any(owner(part) is of for of in memory) for part in parts)


# ---------------------------------------------------------------------- methods and operators
def _method(name: str) -> Callable[..., Any]:
    function = getattr(np.ndarray, name)

    def method(self: ndarray, *args: Any, **options: Any) -> Any:
        return call(function, self, *args, **options)

    method.__name__ = name
    return method


def _binary(name: str, *, reflected: bool = False) -> Callable[[ndarray, Any], Any]:
    function = getattr(operator, f"{name}_" if name in ("and", "or") else name)

    def apply(self: ndarray, other: Any) -> Any:
        if not isinstance(other, ndarray | np.ndarray | np.generic | int | float | complex):
            return NotImplemented
        return call(function, other, self) if reflected else call(function, self, other)

    return apply


def _in_place(name: str) -> Callable[[ndarray, Any], ndarray]:
    function = getattr(operator, f"i{name}")

    def apply(self: ndarray, other: Any) -> ndarray:
        if recording() is not None:
            refuse(f"the operator {name}")
        call(function, self, other)
        mark_written(self.held)
        return self

    return apply


def _unary(name: str) -> Callable[[ndarray], Any]:
    function = getattr(operator, name)
    return lambda self: call(function, self)


for _name in METHODS:
    setattr(ndarray, _name, _method(_name))
for _name in BINARY:
    setattr(ndarray, f"__{_name}__", _binary(_name))
    setattr(ndarray, f"__r{_name}__", _binary(_name, reflected=True))
    setattr(ndarray, f"__i{_name}__", _in_place(_name))
for _name in COMPARISONS:
    setattr(ndarray, f"__{_name}__", _binary(_name))
for _name in UNARY:
    setattr(ndarray, f"__{_name}__", _unary(_name))
