"""Whether a call can be captured in a CUDA graph, and whether a replay does what the call did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from benchmarks.gpu.device import Device
from benchmarks.gpu.findings import said

#: Sizes of uploads between replays: what a graph still reads from memory of the host is overwritten by them.
SPOILING_SIZES = tuple(1 << power for power in range(3, 17))


#: How far a replay's float16 result may be from that of a twin which takes the same steps by ordinary calls.
TWIN_TOLERANCE = 5e-3


@dataclass(frozen=True, eq=False)
class Call:
    """A call to be captured.

    `prepare` is what the host does before each call and each replay. `twin` makes a call that from then on gives what
    replays have to give one after another; without it, they have to give the same.
    """

    run: Callable[[], Any]
    prepare: Callable[[], object] | None = None
    twin: Callable[[], Callable[[], Any]] | None = None

    def __call__(self) -> Any:
        if self.prepare is not None:
            self.prepare()
        return self.run()


class Captured(NamedTuple):
    """Whether it could be captured and replayed, in words, and the microseconds of a replay where there is one."""

    text: str
    replay_us: float | None = None


def capture(device: Device, call: Call, *, repeatable: bool) -> Captured:
    """Capture a call, and replay it twice; a `repeatable` call gives the same each time, and so has a replay.

    Kernels and memory are there before, since the capture follows calls on the same stream.
    """
    stream = device.cupy.cuda.Stream(non_blocking=True)
    device.wait()
    with stream:
        expected = [call() for _ in range(2)][-1].get()
        twin = None if call.twin is None else call.twin()
        if call.prepare is not None:
            call.prepare()
        stream.synchronize()
        graph, out, reason = None, None, ""
        stream.begin_capture()
        try:
            out = call.run()
        except Exception as error:  # whatever cannot be captured says so in its own way
            reason = said(error)
        try:
            graph = stream.end_capture()
        except Exception as error:
            reason = reason or said(error)
        if reason:
            return Captured(f"no: {reason}")
        try:
            return _replay(device, stream, graph, out, expected if repeatable else None, call, twin)
        except Exception as error:  # memory that is no longer there
            return Captured(f"no: {said(error)}")


def _replay(
    device: Device, stream: Any, graph: Any, out: Any, expected: Any, call: Call, twin: Callable[[], Any] | None
) -> Captured:
    """Replays over a spoilt result, which has to be its twin's or `expected` or, without these, the same each time."""
    results = [] if expected is None else [expected]
    twins = []
    for turn in range(2):
        if turn and call.prepare is not None:
            call.prepare()
        out.fill(0)
        for size in SPOILING_SIZES:
            device.cupy.asarray(np.full(size, 255, np.uint8))
        graph.launch(stream)
        stream.synchronize()
        results.append(out.get())
        if twin is not None:
            twins.append(twin().get())
    if twins:
        found, wanted = (np.stack(arrays).astype(np.float32) for arrays in (results, twins))
        same = np.allclose(found, wanted, atol=TWIN_TOLERANCE, rtol=0)
    else:
        same = all(np.array_equal(results[0], result) for result in results)
    if not results[0].any() or not same:
        return Captured("yes, but replays give other results")
    launch = partial(graph.launch, stream)
    return Captured("yes", 1e6 * device.clock.seconds(Call(launch, call.prepare)))
