"""Memory that the stand-in takes from elsewhere: allocators of ``cupy.cuda``, and arrays that come by DLPack."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvsketch.tests.cuda_host import memory
from kvsketch.tests.cuda_host.arrays import CPU, CUDA, DLPACK_VERSION, ndarray
from kvsketch.tests.cuda_host.devices import devices
from kvsketch.tests.cuda_host.stand_in_cuda import Device, current_stream

#: How DLPack calls CUDA's legacy default stream, whose address is 0.
DEFAULT_STREAM = 1


class UnownedMemory:
    """Memory of `owner`, which lives as long as this does."""

    def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
        if device_id < 0 and not ptr:
            raise RuntimeError("UnownedMemory requires explicit device ID for a null pointer.")
        self.ptr, self.size, self.owner = ptr, size, owner
        self.device_id = devices.current if device_id < 0 else device_id


class MemoryPointer:
    """A place in memory."""

    def __init__(self, mem: UnownedMemory, offset: int) -> None:
        self.mem, self.ptr, self.device_id = mem, mem.ptr + offset, mem.device_id

    @property
    def device(self) -> Device:
        """Where it lies."""
        return Device(self.device_id)


@contextmanager
def using_allocator(allocator: Callable[[int], MemoryPointer] | None = None) -> Iterator[None]:
    """Inside, new arrays lie where `allocator` says, as ``allocator(bytes)``; None: where they lay at first."""
    before, memory.allocators[:] = memory.allocators[:], [] if allocator is None else [allocator]
    try:
        yield
    finally:
        memory.allocators[:] = before


def from_dlpack(array: Any, *, device: Any = None, copy: bool | None = None) -> ndarray:
    """A view of an array of another library that lies on a device."""
    if device is not None:
        raise NotImplementedError("from_dlpack() does not support device yet.")
    kind, number = array.__dlpack_device__()
    if kind == CPU:
        raise TypeError(
            "CPU arrays cannot be directly imported to CuPy. Use `cupy.array(numpy.from_dlpack(input))` instead."
        )
    if kind != CUDA:
        raise TypeError(f"Unsupported array type: {kind}")
    with Device(number):
        stream = current_stream().ptr or DEFAULT_STREAM
        capsule = array.__dlpack__(stream=stream, max_version=DLPACK_VERSION, copy=copy)
    try:
        held = np.from_dlpack(_OnHost(capsule))
    except (BufferError, RuntimeError) as error:
        raise NotImplementedError(
            f"CuPy has no dtype for this array, or does not take it by DLPack: {error}"
        ) from error
    return ndarray(held, number)


class _OnHost:
    """A capsule, as NumPy takes it."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU, 0
