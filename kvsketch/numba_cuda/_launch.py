"""How kernels are launched on CuPy's arrays, on its current device and stream."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
from numba import config, cuda

#: Whether Numba runs kernels as Python (``NUMBA_ENABLE_CUDASIM=1``), where each thread is one of Python's.
SIMULATED = bool(config.ENABLE_CUDASIM)
#: Whether NVIDIA's package is there: the copy inside Numba has the same simulator, but does not compile all kernels.
INSTALLED = importlib.util.find_spec("numba_cuda") is not None
#: Threads of a block. Kernels are right with any number of them.
THREADS = 4 if SIMULATED else 128
#: 16-bit floats go to kernels as their bits; see :mod:`kvsketch.numba_cuda.arithmetic`.
BITS_ONLY = ("float16", "bfloat16")


def launch(kernel: Any, items: int, *args: Any) -> None:
    """Run a kernel that has a thread for each of `items`, which are numbered by ``cuda.grid(1)``."""
    threads = min(THREADS, items)
    if items:
        start(kernel, -(-items // threads), threads, 0, args)


def launch_blocks(kernel: Any, blocks: int, *args: Any, shared: int = 0) -> None:
    """Run a kernel that has a block of :data:`THREADS` threads for each of `blocks`, with `shared` bytes of memory."""
    if blocks:
        start(kernel, blocks, THREADS, shared, args)


def start(kernel: Any, blocks: int, threads: int, shared: int, args: tuple[Any, ...]) -> None:
    """Run a kernel on arguments that are CuPy arrays, NumPy scalars, integers, and tuples of these."""
    if SIMULATED:
        kernel[blocks, threads, 0, shared](*map(to_numba, args))
        return
    if not INSTALLED:
        raise RuntimeError("the engine numba_cuda needs numba-cuda; install it with pip install 'kvsketch[cuda13]'")
    import cupy

    with cuda.gpus[cupy.cuda.Device().id]:
        stream = cuda.external_stream(cupy.cuda.get_current_stream().ptr)
        kernel[blocks, threads, stream, shared](*map(to_numba, args))


def to_numba(value: Any) -> Any:
    """An argument as Numba takes it: of an array a view, which does not wait for the array's stream."""
    if isinstance(value, tuple):
        items = [to_numba(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, int | np.generic):
        return value
    array = as_bits(value)
    return _simulated_array(array) if SIMULATED else cuda.as_cuda_array(array, sync=False)


def as_bits(array: Any) -> Any:
    """An array, those of 16-bit floats as uint16."""
    return array.view(np.uint16) if str(array.dtype) in BITS_ONLY else array


class _Memory:
    """What NumPy needs to see memory as an array."""

    def __init__(self, array: Any) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (array.data.ptr, False),
            "shape": array.shape,
            "strides": array.strides,
            "typestr": array.dtype.str,
        }


def _simulated_array(array: Any) -> Any:
    """An array whose memory the host can read, as the simulator's own kind of array; others would be copied."""
    from numba.cuda.cudadrv.devicearray import FakeCUDAArray

    return FakeCUDAArray(np.asarray(_Memory(array)))
