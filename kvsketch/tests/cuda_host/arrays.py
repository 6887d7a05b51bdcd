"""The stand-in for ``cupy.ndarray``: holds a NumPy array, and refuses what CuPy refuses."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvsketch.tests.cuda_host.devices import counts, devices
from kvsketch.tests.cuda_host.memory import allocate, mark_written

#: Methods of numpy.ndarray that CuPy offers with the same meaning, and whose arrays are arrays again.
METHODS = (
    *("all", "any", "argmax", "argmin", "argsort", "astype", "clip", "copy", "cumsum", "diagonal", "dot", "flatten"),
    *("max", "mean", "min", "prod", "ravel", "repeat", "reshape", "round", "squeeze", "std", "sum", "swapaxes", "take"),
    *("transpose", "var", "view"),
)
BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
UNARY = ("neg", "pos", "abs", "invert")


class ndarray:
    """An array on a stand-in device."""

    __array_priority__ = 100
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, held: np.ndarray) -> None:
        self._held = held
        self._device_id = devices.current

    # ------------------------------------------------------------------ what it is
    shape = property(lambda self: self._held.shape)
    dtype = property(lambda self: self._held.dtype)
    ndim = property(lambda self: self._held.ndim)
    size = property(lambda self: self._held.size)
    itemsize = property(lambda self: self._held.itemsize)
    nbytes = property(lambda self: self._held.nbytes)
    strides = property(lambda self: self._held.strides)
    flags = property(lambda self: self._held.flags)
    T = property(lambda self: wrap(self._held.T))

    @property
    def device(self) -> Any:
        """Where it lies, as a ``cupy.cuda.Device``."""
        from kvsketch.tests.cuda_host.stand_in import Device

        return Device(self._device_id)

    @property
    def base(self) -> ndarray | None:
        """The array that this one is a view of, or None."""
        return None if self._held.base is None else wrap(self._held.base)

    @property
    def data(self) -> Any:
        """Its memory; ``data.ptr`` is the address."""
        from types import SimpleNamespace

        return SimpleNamespace(ptr=self._held.ctypes.data, device_id=self._device_id)

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[ndarray]:
        if not self.ndim:
            raise TypeError("iteration over a 0-d array")
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return repr(self.get())

    # ------------------------------------------------------------------ to the host: every one of these waits
    def get(self) -> np.ndarray:
        """A copy on the host."""
        counts.synchronisations += 1
        return self._held.copy()

    def item(self, *where: int) -> Any:
        """One element as a Python number."""
        counts.synchronisations += 1
        return self._held.item(*where)

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

    # ------------------------------------------------------------------ parts
    def __getitem__(self, index: Any) -> ndarray:
        plain = unwrap_index(index)
        # Ending in ..., an index of integers gives a view with no axes rather than a number.
        ending = () if any(part is ... for part in plain) else (...,)
        return wrap(self._held[(*plain, *ending)])

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(value, np.ndarray) and value.ndim:
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        plain = unwrap_index(index)
        self._held[plain] = unwrap(value)
        ending = () if any(part is ... for part in plain) else (...,)
        if not any(isinstance(part, np.ndarray | list) for part in plain):
            mark_written(self._held[(*plain, *ending)])
        elif all(isinstance(part, np.ndarray | list) for part in plain):
            mark_written(self._held)

    def set(self, value: np.ndarray) -> None:
        """Copy a NumPy array here."""
        if not isinstance(value, np.ndarray) or value.shape != self.shape or value.dtype != self.dtype:
            raise ValueError(f"set() needs a NumPy array of shape {self.shape} and dtype {self.dtype}")
        counts.uploads += 1
        self._held[...] = value
        mark_written(self._held)

    def fill(self, value: Any) -> None:
        """Set all elements to a number."""
        self[...] = value

    def sort(self, axis: int = -1) -> None:
        """Sort in place."""
        self._held.sort(axis)

    # ------------------------------------------------------------------ NumPy's functions and scalars on it
    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        if method != "__call__":
            raise TypeError(f"numpy.{ufunc.__name__}.{method} does not run on CuPy arrays")
        return call(ufunc, *inputs, **options)

    def __array_function__(self, function: Callable[..., Any], *_: Any) -> Any:
        raise TypeError(f"numpy.{function.__name__} was called on a CuPy array; call the array's own namespace")


ndarray.__module__ = "cupy"


def _method(name: str) -> Callable[..., Any]:
    function = getattr(np.ndarray, name)

    def method(self: ndarray, *args: Any, **options: Any) -> Any:
        return call(function, self, *args, **options)

    method.__name__ = name
    return method


def _operator(name: str, *, reflected: bool = False, in_place: bool = False) -> Callable[..., Any]:
    function = getattr(operator, f"i{name}" if in_place else f"{name}_" if name in ("and", "or") else name)

    def apply(self: ndarray, other: Any) -> Any:
        if not isinstance(other, ndarray | np.ndarray | np.generic | int | float | complex):
            return NotImplemented
        return call(function, other, self) if reflected else call(function, self, other)

    def apply_in_place(self: ndarray, other: Any) -> ndarray:
        call(function, self, other)
        mark_written(self._held)
        return self

    return apply_in_place if in_place else apply


for _name in METHODS:
    setattr(ndarray, _name, _method(_name))
for _name in BINARY:
    setattr(ndarray, f"__{_name}__", _operator(_name))
    setattr(ndarray, f"__r{_name}__", _operator(_name, reflected=True))
    if _name != "matmul":
        setattr(ndarray, f"__i{_name}__", _operator(_name, in_place=True))
for _name in COMPARISONS:
    setattr(ndarray, f"__{_name}__", _operator(_name))
for _name in UNARY:
    setattr(ndarray, f"__{_name}__", (lambda function: lambda self: call(function, self))(getattr(operator, _name)))


# ---------------------------------------------------------------------- from NumPy and back
def wrap(result: Any) -> Any:
    """`result` of a NumPy function as CuPy would give it: arrays, also for single numbers."""
    if isinstance(result, np.ndarray | np.generic):
        array = np.asarray(result)
        # What NumPy made anew may lie anywhere; CuPy's allocations are aligned.
        if array.base is None and not isinstance(result, ndarray):
            aligned = allocate(array.shape, array.dtype)
            aligned[...] = array
            array = aligned
        return ndarray(array)
    if isinstance(result, tuple | list):
        return type(result)(map(wrap, result))
    return result


def unwrap(value: Any) -> Any:
    """What NumPy works on; TypeError for a NumPy array among CuPy's, ValueError for one of another device."""
    if isinstance(value, ndarray):
        if value._device_id != devices.current:
            raise ValueError(
                "Array device must be same as the current device: "
                f"array device = {value._device_id} while current = {devices.current}"
            )
        return value._held
    if isinstance(value, np.ndarray) and value.ndim:
        raise TypeError(f"Unsupported type {type(value)}")
    if isinstance(value, tuple | list):
        return type(value)(map(unwrap, value))
    return value


def unwrap_index(index: Any) -> tuple[Any, ...]:
    """An index as a tuple for NumPy. Masks make the host wait for their count."""
    parts = index if isinstance(index, tuple) else (index,)
    plain = tuple(unwrap(part) for part in parts)
    if any(isinstance(part, np.ndarray) and part.dtype == np.bool_ for part in plain):
        counts.synchronisations += 1
    return plain


def call(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """A NumPy function on stand-in arrays and scalars."""
    out = options.get("out")
    result = function(*map(unwrap, args), **{name: unwrap(value) for name, value in options.items()})
    if out is None:
        return wrap(result)
    written = out[0] if isinstance(out, tuple) else out
    mark_written(written._held)
    return written
