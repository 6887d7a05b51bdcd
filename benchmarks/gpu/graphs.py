"""Whether a call can be captured in a CUDA graph, and whether a replay does what the call did."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from benchmarks.gpu.device import Device
from benchmarks.gpu.findings import said

#: Sizes of uploads between replays: what a graph still reads from memory of the host is overwritten by them.
SPOILING_SIZES = tuple(1 << power for power in range(3, 17))


class Captured(NamedTuple):
    """Whether it could be captured and replayed, in words, and the microseconds of a replay where there is one."""

    text: str
    replay_us: float | None = None


def capture(device: Device, run: Callable[[], Any], *, repeatable: bool) -> Captured:
    """Capture `run`, and replay it twice; a `repeatable` call gives the same each time, and so has a replay.

    Kernels and memory are there before, since the capture follows calls on the same stream.
    """
    stream = device.cupy.cuda.Stream(non_blocking=True)
    device.wait()
    with stream:
        expected = [run() for _ in range(2)][-1].get()
        stream.synchronize()
        graph, out, reason = None, None, ""
        stream.begin_capture()
        try:
            out = run()
        except Exception as error:  # whatever cannot be captured says so in its own way
            reason = said(error)
        try:
            graph = stream.end_capture()
        except Exception as error:
            reason = reason or said(error)
        if reason:
            return Captured(f"no: {reason}")
        if graph is None:
            return Captured("yes; nothing here replays it")
        return _replay(device, stream, graph, out, expected if repeatable else None)


def _replay(device: Device, stream: Any, graph: Any, out: Any, expected: Any) -> Captured:
    """Replays over a spoilt result, which has to be `expected` or, without that, the same each time."""
    results = [] if expected is None else [expected]
    for _ in range(2):
        out.fill(0)
        for size in SPOILING_SIZES:
            device.cupy.asarray(np.full(size, 255, np.uint8))
        graph.launch(stream)
        stream.synchronize()
        results.append(out.get())
    if not results[0].any() or not all(np.array_equal(results[0], result) for result in results):
        return Captured("yes, but replays give other results")
    return Captured("yes", 1e6 * device.clock.seconds(partial(graph.launch, stream)))
