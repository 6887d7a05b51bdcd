"""CUDA graphs of the stand-in: while its stream captures, a launch is written down instead of run."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from kvsketch.tests.cuda_host.devices import devices
from kvsketch.tests.cuda_host.memory import owner
from kvsketch.tests.cuda_host.toolchain import CudaHostError

_recording: list[Graph | None] = [None]


class Graph:
    """Launches in their order, with their arguments as they were; run by :meth:`launch`.

    It keeps no memory alive, as a graph of CUDA does not: a launch says when some of it is gone.
    """

    def __init__(self) -> None:
        self._launches: list[tuple[str, int, Callable[..., None], list[Any]]] = []

    def record(self, kernel: str, run: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Write down that `run` is called with `args`, those of the kernel of that name."""
        kept = [Kept(arg) if hasattr(arg, "held") else np.array(arg)[()] for arg in args]
        self._launches.append((kernel, devices.current, run, kept))

    def launch(self, stream: Any = None) -> None:
        """Run all launches."""
        if recording() is not None:
            refuse("Graph.launch()")
        before = devices.current
        try:
            for kernel, device, run, kept in self._launches:
                devices.current = device
                run(
                    *(
                        arg.array(f"{kernel}: argument {i}") if isinstance(arg, Kept) else arg
                        for i, arg in enumerate(kept)
                    )
                )
        finally:
            devices.current = before


class Kept:
    """Where an array lies, without keeping it there."""

    def __init__(self, array: Any) -> None:
        held = array.held
        memory = owner(held)
        self._memory = weakref.ref(memory)
        self._offset = held.ctypes.data - memory.ctypes.data
        self._shape, self._dtype, self._strides = held.shape, held.dtype, held.strides
        self._kind, self._device = type(array), array.device_id

    def array(self, which: str) -> Any:
        """The array; CudaHostError, which says `which`, when its memory was freed."""
        memory = self._memory()
        if memory is None:
            raise CudaHostError(f"{which} lay in memory that was freed after the capture; keep it as long as the graph")
        held = np.ndarray(self._shape, self._dtype, memory, self._offset, self._strides)
        return self._kind(held, self._device)


def recording() -> Graph | None:
    """The graph that launches go to, None when they run."""
    return _recording[0]


def follow(graph: Graph | None) -> None:
    """From here on launches go to `graph`, the current stream's."""
    _recording[0] = graph


def refuse(what: str) -> NoReturn:
    """What a captured step should not do."""
    raise CudaHostError(
        f"{what} while the stream captures: it would run in memory that the graph does not keep, or not at all; a step "
        "that is captured should launch kernels and nothing else"
    )
