"""One decode step's attention on the device: each codec against a copy of the device's memory and torch's flash."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from benchmarks.gpu.clock import run_gpu_race
from benchmarks.gpu.device import Device
from benchmarks.gpu.errors import LARGEST_ERRORS, last_row_error
from benchmarks.gpu.findings import Findings, Mark, NotRun, said
from benchmarks.gpu.launches import recorded
from benchmarks.gpu.rivals import FLASH, dense_bytes, dense_tensors, usable_ways
from benchmarks.gpu.subjects import check_engine, device_queries, latents_on_device, store_on_device
from benchmarks.palu import Latents, entrant_name
from benchmarks.rows import Row, row_of
from benchmarks.subjects import Shape, attend_stored, parse_subject
from benchmarks.table import number_cell, ratio_cell
from benchmarks.timing import FEW_ROUNDS, Entrant, Race, Ratio
from kvsketch.palu import attend

#: Methods, `` int8`` behind one for 8-bit coefficients; qjl-256 has values of 2 bits.
SUBJECTS = ("kivi-2", "kivi-2 int8", "kivi-4", "kivi-4 int8", "qjl-256", "qjl-256 int8")
#: Latents: half of the numbers, four heads a slice as in the paper, 3 bits.
LATENTS = Latents(0.5, 4, 3)
#: In the order in which they are measured, as the time may be used up.
SHAPES = tuple(Shape(n, b=b) for n in (32768, 131072, 4096) for b in (16, 1, 64))
DRY_SHAPES = (Shape(200, 64, 8, 4, 1), Shape(300, 64, 8, 4, 2))
DRY_SUBJECTS = ("kivi-2", "qjl-256 int8")
ROUNDS, DRY_ROUNDS = 15, 3
#: A call that takes longer takes part in few rounds, or in none.
SLOW_SECONDS, MOST_SECONDS = 0.05, 1.0
#: What is copied to know the bandwidth of the device's memory.
COPY = "copy"
COPY_BYTES, DRY_COPY_BYTES = 1 << 30, 1 << 16
#: The least share of a copy's bandwidth from that many rows on, and how many times faster than flash, at that length.
LEAST_SHARE, SHARE_ROWS = 0.6, 16
LEAST_SPEED_UP, SPEED_UP_TOKENS = 3.0, 32768

COLUMNS = (
    *("what", "n", "rows", "bits", "GB", "us (quartiles)", "share of copy", "times flash", "times torch's best"),
    *("relative error", "host us", "compile s", "reason"),
)


class Subject(NamedTuple):
    """What is raced: a call, the bytes of the compressed cache that it has to read, and how wrong its result is."""

    name: str
    run: Callable[[], Any]
    nbytes: int
    bits: float
    error: Callable[[Any], float] | None = None
    largest_error: float = 0.0


def measure(findings: Findings, device: Device) -> None:
    """All shapes, one after the other."""
    shapes = DRY_SHAPES if device.dry_run else SHAPES
    subjects = DRY_SUBJECTS if device.dry_run else SUBJECTS
    for shape in shapes:
        try:
            rows = measure_shape(findings, device, shape, subjects)
        except Exception as error:  # the other shapes are still measured
            findings.failures.append(f"{shape}: {said(error)}")
            continue
        findings.rows += rows
        findings.marks += [mark for row in rows for mark in marks_of(row)]
        missed = {mark.what for mark in findings.marks if not mark.met}
        lines = [_line(row, missed) for row in findings.rows]
        findings.table("A decode step's attention, caches flushed", COLUMNS, lines)
        device.free_unused()
    findings.notes += [
        "share of copy: bytes of the compressed cache a second over those that a copy of device memory reads and "
        "writes a second, within rounds: median (quartiles). times flash, times torch's best: torch's time over this "
        "one's. relative error: of the last row, in L2, against torch in float32 over the decoded tokens. host us: "
        "what Python takes to ask for the call. compile s: its kernels, by NVRTC or from where "
        "CuPy keeps them, before all timing.",
        f"Targets: a share of {LEAST_SHARE:.0%} from {SHARE_ROWS} rows on, {LEAST_SPEED_UP:g} times flash at "
        f"{SPEED_UP_TOKENS} tokens.",
    ]


def measure_shape(findings: Findings, device: Device, shape: Shape, names: Sequence[str]) -> list[Row]:
    """Rows of a copy, torch's ways and all subjects at a shape, in one race; what there is no room for is absent."""
    subjects = list(_subjects(findings, device, shape, names))
    rivals, absent = _rivals(device, shape)
    findings.absent |= {f"{name} at {shape}": reason for name, reason in absent.items()}
    size = DRY_COPY_BYTES if device.dry_run else COPY_BYTES
    source, target = (device.cupy.ones(size // 4, dtype=device.cupy.float32) for _ in range(2))
    calls: dict[str, Callable[[], object]] = {COPY: partial(_copy, target, source)}
    calls |= {subject.name: subject.run for subject in subjects} | rivals
    first, compiled, host, entrants = {}, {}, {}, []
    for name, run in calls.items():
        try:
            with recorded() as launches:
                first[name] = device.first_call(run)
        except Exception as error:  # the others still race
            findings.failures.append(f"{name} at {shape}: {said(error)}")
            continue
        compiled[name] = launches.preparing_seconds
        if launches.counts:
            findings.details.setdefault("kernels", {})[f"{name} at {shape}"] = launches.names()
        seconds = 0.0 if device.dry_run else device.first_call(run)
        if seconds > MOST_SECONDS:
            findings.absent[f"{name} at {shape}"] = f"takes {seconds:.1f} s a call"
            continue
        host[name] = _host_seconds(device, run)
        entrants.append(Entrant(name, run, rounds=FEW_ROUNDS if seconds > SLOW_SECONDS else None))
    subjects = [subject for subject in subjects if subject.name in host]
    race = run_gpu_race(
        device.clock, entrants, rounds=DRY_ROUNDS if device.dry_run else ROUNDS, steady=COPY, title=f"Decode at {shape}"
    )
    extra = {"first_s": first, "compile_s": compiled, "host_s": host, "error": _errors(findings, shape, subjects)}
    return _rows(race, shape, subjects, [name for name in rivals if name in host], 2 * size, extra)


def _subjects(findings: Findings, device: Device, shape: Shape, names: Sequence[str]) -> Iterator[Subject]:
    """The caches that there is room for."""
    q, held = device_queries(device, shape), {}
    for subject in map(parse_subject, names):
        try:
            if subject.method not in held:
                held[subject.method] = store_on_device(device, subject.method, shape)
        except NotRun as reason:
            findings.absent[f"{subject.name} at {shape}"] = str(reason)
            continue
        stored = held[subject.method]
        yield Subject(
            subject.name, partial(attend_stored, q, stored, subject), stored.nbytes, stored.bits(),
            partial(last_row_error, device, q, stored.view), LARGEST_ERRORS[subject.coefficients],
        )  # fmt: skip
    try:
        check_engine(device, "palu.attend")
        slices = latents_on_device(device, LATENTS, shape)
    except NotRun as reason:
        findings.absent[f"{LATENTS.name} at {shape}"] = str(reason)
        return
    bits = 8 * slices.nbytes / (2 * shape.b * shape.n * shape.h * shape.d)
    for rope in (slices.rope, None):
        run = partial(attend, q, *slices.layer, rope=rope)
        yield Subject(entrant_name(LATENTS, rope is not None), run, slices.nbytes, bits)


def _rivals(device: Device, shape: Shape) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    try:
        return usable_ways(dense_tensors(device, shape))
    except NotRun as reason:
        return {}, {"torch": str(reason)}


def _errors(findings: Findings, shape: Shape, subjects: Sequence[Subject]) -> dict[str, float]:
    """Relative L2 errors of the subjects that can tell; one that is too large makes the part fail."""
    errors = {subject.name: subject.error(subject.run()) for subject in subjects if subject.error is not None}
    for subject in subjects:
        error = errors.get(subject.name)
        if error is not None and not error <= subject.largest_error:
            findings.failures.append(
                f"{subject.name} at {shape} is wrong: relative L2 error {error:.1e}, limit {subject.largest_error:.0e}"
            )
    return errors


def _copy(target: Any, source: Any) -> None:
    target[...] = source


def _host_seconds(device: Device, run: Callable[[], object]) -> float:
    """What the host takes to ask for a call, the device having nothing to do before."""
    device.wait()
    start = time.perf_counter()
    run()
    elapsed = time.perf_counter() - start
    device.wait()
    return elapsed


def _rows(
    race: Race, shape: Shape, subjects: Sequence[Subject], rivals: Sequence[str], moved: int, extra: Any
) -> list[Row]:
    def row(kind: str, name: str, nbytes: int, bits: float | None, ratios: dict[str, Ratio], best: str = "") -> Row:
        return row_of(
            race, kind, name, shape, 0, nbytes=nbytes, bits=bits, ratios=ratios,
            extra={what: numbers.get(name) for what, numbers in extra.items()},
            rivals={"best torch": best} if best else {},
        )  # fmt: skip

    rows = [row("memory", COPY, moved, None, {})]
    best = race.best(rivals) if rivals else ""
    dense = dense_bytes(shape)
    rows += [row("torch", name, dense, 16.0, {"copy": share(race, name, dense, moved)}) for name in rivals]
    for subject in subjects:
        ratios = {"copy": share(race, subject.name, subject.nbytes, moved)}
        if FLASH in rivals:
            ratios["flash"] = race.ratio(FLASH, subject.name)
        if best:
            ratios["best torch"] = race.ratio(best, subject.name)
        rows.append(row("kvsketch", subject.name, subject.nbytes, subject.bits, ratios, best))
    return rows


def share(race: Race, name: str, nbytes: int, moved: int) -> Ratio:
    """Quartiles of the bytes that `name` reads a second over the `moved` ones that the copy reads and writes."""
    return Ratio(*(nbytes / moved * ratio for ratio in race.ratio(COPY, name)))


def marks_of(row: Row) -> list[Mark]:
    """The targets of a row."""
    marks = []
    if row.kind == "kvsketch" and row.shape.b >= SHARE_ROWS:
        marks.append(Mark(f"share of a copy's bandwidth, {_place(row)}", row.ratios["copy"].median, LEAST_SHARE))
    if "flash" in row.ratios and row.shape.n == SPEED_UP_TOKENS:
        marks.append(Mark(f"times faster than flash, {_place(row)}", row.ratios["flash"].median, LEAST_SPEED_UP))
    return marks


def _place(row: Row) -> str:
    return f"{row.name} at {row.shape}"


def _line(row: Row, missed: set[str]) -> tuple[str, ...]:
    """A line of the table; a ratio that misses its target has an exclamation mark."""
    low, median, high = (f"{1e3 * x:.1f}" for x in row.time)
    marks = {mark.what.partition(",")[0]: "!" for mark in marks_of(row) if mark.what in missed}
    return (
        *(row.name, f"{row.shape.n}", f"{row.shape.b}", number_cell(row.bits), number_cell(row.nbytes / 1e9, 3)),
        f"{median} ({low} - {high})",
        ratio_cell(row.ratios.get("copy")) + marks.get("share of a copy's bandwidth", ""),
        ratio_cell(row.ratios.get("flash")) + marks.get("times faster than flash", ""),
        ratio_cell(row.ratios.get("best torch")),
        "" if row.extra["error"] is None else f"{row.extra['error']:.1e}",
        *(number_cell(1e6 * (row.extra["host_s"] or 0), 0), number_cell(row.extra["compile_s"], 1)),
        row.contended,
    )
