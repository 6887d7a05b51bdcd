"""Devices and streams of the stand-in, as ``cupy.cuda`` has them."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from kvsketch.tests.cuda_host.devices import counts, devices, without_waiting
from kvsketch.tests.cuda_host.graphs import Graph, follow


class CUDARuntimeError(RuntimeError):
    """An error of CUDA's runtime."""


class Device:
    """A device by number, or without one the current device; the current one inside ``with``."""

    def __init__(self, device: int | None = None) -> None:
        self.id = devices.current if device is None else int(device)
        if not 0 <= self.id < devices.count:
            raise CUDARuntimeError(f"cudaErrorInvalidDevice: invalid device ordinal {self.id}")
        self._before: list[int] = []

    @property
    def compute_capability(self) -> str:
        """Such as ``"90"``."""
        return devices.compute_capability

    @property
    def attributes(self) -> dict[str, Any]:
        """Some of what CUDA tells about it."""
        return {
            "MultiProcessorCount": devices.multiprocessors,
            "MaxSharedMemoryPerBlockOptin": devices.most_shared_bytes,
            "WarpSize": 32,
        }

    def use(self) -> None:
        """Make it the current device."""
        devices.current = self.id

    def synchronize(self) -> None:
        """Wait for it."""
        counts.synchronise("Device.synchronize()")

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
    """Everything has been done when a call returns, so a stream is a name; but it captures."""

    null: Stream

    def __init__(self, null: bool = False, non_blocking: bool = False, ptr: int | None = None) -> None:
        self.ptr = 0 if null else id(self) if ptr is None else ptr
        self._before: list[Stream] = []
        self._capture = ExitStack()
        self.graph: Graph | None = None

    def use(self) -> Stream:
        """Make it the current stream."""
        _current[0] = self
        follow(self.graph)
        return self

    def synchronize(self) -> None:
        """Wait for it."""
        counts.synchronise("Stream.synchronize()")

    def begin_capture(self, mode: int | None = None) -> None:
        """From here to :meth:`end_capture`, launches on this stream are written down and not run.

        CudaHostError is raised where the host would wait, send data, or compute with arrays other than by a kernel of
        its own; matrix products too, as CuPy refuses cuBLAS while it captures.
        """
        if self.ptr == 0:
            raise RuntimeError("cannot capture on the default (legacy) stream")
        if self.graph is not None:
            raise CUDARuntimeError("cudaErrorIllegalState: the stream captures already")
        self._capture.enter_context(without_waiting())
        self.graph = Graph()
        follow(_current[0].graph)

    def is_capturing(self) -> bool:
        """Whether launches are written down."""
        return self.graph is not None

    def end_capture(self) -> Graph:
        """The graph of what was launched since :meth:`begin_capture`."""
        if self.graph is None:
            raise CUDARuntimeError("cudaErrorIllegalState: the stream does not capture")
        graph, self.graph = self.graph, None
        self._capture.close()
        follow(_current[0].graph)
        return graph

    def __enter__(self) -> Stream:
        self._before.append(_current[0])
        return self.use()

    def __exit__(self, *_: object) -> None:
        self._before.pop().use()


class ExternalStream(Stream):
    """A stream that another library made."""

    def __init__(self, ptr: int, device_id: int = -1) -> None:
        super().__init__(ptr=ptr)


Stream.null = Stream(null=True)
_current = [Stream.null]


def current_stream() -> Stream:
    """The stream that work goes to."""
    return _current[0]
