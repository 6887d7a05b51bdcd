"""What Python takes for a decode step, and whether the step can be captured in a CUDA graph."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.gpu.device import Device
from benchmarks.gpu.findings import Findings, said
from benchmarks.gpu.graphs import Call, capture
from benchmarks.gpu.launches import recorded
from benchmarks.gpu.subjects import device_queries, drawn_shape
from benchmarks.subjects import Shape, fill_cache, make_tokens
from benchmarks.timing import quartiles
from kvsketch.cache import Cache

METHODS, DRY_METHODS = ("kivi-2", "kivi-4", "qjl-256"), ("kivi-2",)
#: After whole pages, first tokens and window, so that the next 32 steps encode nothing.
SHAPE, DRY_SHAPE = Shape(4 + 127 * 32 + 32), Shape(4 + 5 * 32 + 32, 64, 4, 2)
#: Steps that are timed by the host's clock and by the device's, and that come before; all of them fewer than a page.
STEPS, DRY_STEPS = 16, 4
DEVICE_STEPS, WARM_UP = 3, 2
COLUMNS = ("what", "host us (quartiles)", "device us", "kernels of the engine", "captured in a graph", "replay us")
ATTENTION = "attention"
#: A step in two halves, of which the device's can be captured.
PREPARED = "prepare_step and step"


def measure(findings: Findings, device: Device) -> None:
    """Time everything first: a capture that fails may leave CuPy with an event that it cannot ask any more."""
    shape = DRY_SHAPE if device.dry_run else SHAPE
    title = f"A step at {shape}"
    calls: dict[str, Call] = {}
    for method in DRY_METHODS if device.dry_run else METHODS:
        calls |= {f"{method}, {name}": run for name, run in _calls(device, method, shape).items()}
    lines: dict[str, list[str]] = {}
    for name, run in calls.items():
        try:
            lines[name] = [name, *_times(findings, device, name, run), "", ""]
        except Exception as error:  # the others are still measured
            findings.failures.append(f"{name}: {said(error)}")
        findings.table(title, COLUMNS, list(lines.values()))
    for name in lines:
        captured = capture(device, calls[name], repeatable=name.endswith(ATTENTION))
        findings.details[name] |= captured._asdict()
        lines[name][-2:] = captured.text, "" if captured.replay_us is None else f"{captured.replay_us:.1f}"
        findings.table(title, COLUMNS, list(lines.values()))
    findings.notes.append(
        "host: until the call returns, the device idle before. unchecked: a cache that does not look for NaN and "
        f"infinity, for which it waits; so is that of {PREPARED}, whose replays include the host's half and go on from "
        "token to token. Only these are a decode loop: a graph of any other call repeats it at the same positions, in "
        "memory that the call has given back."
    )


def _calls(device: Device, method: str, shape: Shape) -> dict[str, Call]:
    """Attention over a cache alone, a step of one that appends a token and attends, and one in two halves."""
    checked = fill_cache(method, *(device.cupy.asarray(x.astype(np.float16)) for x in make_tokens(drawn_shape(shape))))
    checked.reserve(2 * shape.n)
    unchecked = checked.copy()
    checked.checked, unchecked.checked = True, False
    stepped = unchecked.copy()
    q = device_queries(device, shape)
    token = device.cupy.asarray(np.ones((1, shape.h, 1, shape.d), np.float16))
    out = device.cupy.empty(q.shape, q.dtype)
    step = partial(stepped.step, q, token, token, out=out)
    return {
        ATTENTION: Call(partial(checked.copy().attend, q)),
        "append and attend": Call(partial(_step, checked, token, q)),
        "the same, unchecked": Call(partial(_step, unchecked, token, q)),
        PREPARED: Call(step, stepped.prepare_step, lambda: partial(_step, stepped.copy(), token, q)),
    }


def _step(cache: Cache, token: Any, q: Any) -> Any:
    cache.append(token, token)
    return cache.attend(q)


def _times(findings: Findings, device: Device, name: str, run: Callable[[], Any]) -> list[str]:
    """The cells of a call's times and launches."""
    for _ in range(WARM_UP):
        run()
    host = []
    for _ in range(DRY_STEPS if device.dry_run else STEPS):
        device.wait()
        start = time.perf_counter()
        run()
        host.append(1e6 * (time.perf_counter() - start))
    with recorded() as launches:
        run()
    elapsed = 1e6 * statistics.median(device.clock.seconds(run) for _ in range(DEVICE_STEPS))
    count = sum(launches.counts.values())
    findings.details[name] = {"host_us": host, "device_us": elapsed, "kernels": launches.names(), "launches": count}
    low, median, high = quartiles(host)
    return [f"{median:.0f} ({low:.0f} - {high:.0f})", f"{elapsed:.1f}", f"{count}"]
