"""Arrays as device memory: aligned as CUDA's allocations are, and remembering which bytes were never written."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from kvsketch.tests.cuda_host.devices import devices
from kvsketch.tests.cuda_host.toolchain import CudaHostError

#: CUDA's allocations start at multiples of this.
ALIGNMENT = 256
#: What unwritten memory holds: NaN in every float type.
UNWRITTEN = 0xFF

#: The last of these allocates, as ``cupy.cuda.using_allocator`` says: from bytes to a pointer.
allocators: list[Callable[[int], Any]] = []

_flags: dict[int, tuple[weakref.ref[np.ndarray], np.ndarray]] = {}


class _Borrowed:
    """Memory at a pointer, as NumPy takes it; keeps the pointer, and with it the memory's owner."""

    def __init__(self, pointer: Any, size: int) -> None:
        self.pointer = pointer
        self.__array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (pointer.ptr, False), "version": 3}


def aligned_bytes(size: int) -> np.ndarray:
    """New memory of the host, aligned as a device's is."""
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size]


def allocate(shape: Any, dtype: Any = np.float32) -> np.ndarray:
    """An aligned array, whatever it holds."""
    dtype = np.dtype(dtype)
    shape = (int(shape),) if np.ndim(shape) == 0 else tuple(int(n) for n in shape)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if not allocators:
        return aligned_bytes(size).view(dtype).reshape(shape)
    pointer = allocators[-1](size)
    if pointer.device_id != devices.current:
        raise CudaHostError(f"the allocator gave memory of device {pointer.device_id} on device {devices.current}")
    memory = np.asarray(_Borrowed(pointer, size)) if size else aligned_bytes(0)
    return memory.view(dtype).reshape(shape)


def empty(shape: Any, dtype: Any = np.float32) -> np.ndarray:
    """An array whose bytes a checked kernel may not read before something wrote them."""
    array = allocate(shape, dtype)
    memory = owner(array)
    memory[...] = UNWRITTEN
    key = id(memory)
    _flags[key] = (weakref.ref(memory, lambda _: _flags.pop(key, None)), np.zeros(len(memory), np.uint8))
    return array


def owner(array: np.ndarray) -> np.ndarray:
    """The array whose memory `array` is a part of."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def extent(array: np.ndarray) -> tuple[int, int]:
    """Where an array's memory starts and ends, gaps between its elements included."""
    start, end = np.lib.array_utils.byte_bounds(array) if array.size else (array.ctypes.data, array.ctypes.data)
    return int(start), int(end)


def written_flags(array: np.ndarray) -> np.ndarray | None:
    """A flag for each byte of `array`'s extent, set where something was written; None: everywhere."""
    memory = owner(array)
    kept = _flags.get(id(memory))
    if kept is None or kept[0]() is not memory:
        return None
    start, end = extent(array)
    return kept[1][start - memory.ctypes.data : end - memory.ctypes.data]


def mark_written(array: np.ndarray, index: tuple[Any, ...] = ()) -> None:
    """Something wrote ``array[index]``, by default all of it."""
    flags = written_flags(array)
    if flags is not None and array.size:
        # Of the last axis, the bytes of an element, all.
        _bytes_of(array, flags)[(*index, slice(None)) if any(part is ... for part in index) else index] = 1


def footprint(array: np.ndarray) -> np.ndarray | None:
    """A flag for each byte of `array`'s extent, set where an element lies; None: everywhere."""
    if array.flags.c_contiguous or array.flags.f_contiguous:
        return None
    start, end = extent(array)
    if end - start == array.nbytes:
        return None
    flags = np.zeros(end - start, np.uint8)
    _bytes_of(array, flags)[...] = 1
    return flags


def _bytes_of(array: np.ndarray, flags: np.ndarray) -> np.ndarray:
    """View of `flags`, one for each byte of the extent, with `array`'s shape and an axis of an element's bytes."""
    first = array.ctypes.data - extent(array)[0]
    return np.ndarray(
        (*array.shape, array.itemsize), np.uint8, buffer=flags.data, offset=first, strides=(*array.strides, 1)
    )
