"""How the cost of a decode step grows with tokens, sketch rows, head size and rows: a power law through each sweep."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from benchmarks.machine import set_threads
from benchmarks.rows import Row, row_of
from benchmarks.subjects import Shape, Subject, attend_stored, make_queries, store
from benchmarks.timing import Entrant, Fit, fit_power, run_race
from kvsketch._progress import Progress, no_progress

SKETCH = "keys=sketch:m={m};values=ints:bits=2,group=32"


class Sweep(NamedTuple):
    """One axis along which cost is measured: sizes, and a subject and a shape for each."""

    axis: str
    name: str
    sizes: tuple[int, ...]
    subjects: tuple[Subject, ...]
    shapes: tuple[Shape, ...]


def sweeps(quick: bool = False) -> list[Sweep]:
    """Tokens for integers and sketches, then rows of the sketch, channels, rows of the batch, at 32 heads on 8."""
    base = Shape(8192 if quick else 32768)
    tokens = (4096, 8192, 16384, 32768, *(() if quick else (65536, 131072)))
    rows = (64, 128, 256, 512) if quick else (64, 128, 256, 512, 1024)
    channels, batch = (64, 128, 256), (1, 2, 4) if quick else (1, 2, 4, 8)
    found = [
        Sweep("n", name, tokens, (Subject(name),) * len(tokens), tuple(base._replace(n=n) for n in tokens))
        for name in ("kivi-2", "qjl-256")
    ]
    found.append(
        Sweep(
            *("m", "sketch + 2-bit values", rows),
            *(tuple(Subject(SKETCH.format(m=m)) for m in rows), (base,) * len(rows)),
        )
    )
    for axis, sizes in (("d", channels), ("b", batch)):
        shapes = tuple((base if axis == "d" else base._replace(n=8192))._replace(**{axis: x}) for x in sizes)
        found.append(Sweep(axis, "kivi-2", sizes, (Subject("kivi-2"),) * len(sizes), shapes))
    return found


def measure_sweep(
    sweep: Sweep, *, rounds: int, threads: int = 1, flush: bool = True, progress: Progress = no_progress
) -> tuple[list[Row], Fit]:
    """A row a size, all in one race, and the power law through the medians.

    A row's name is the sweep's, its ratio ``"first"`` the time over that of the first size, within rounds.
    """
    set_threads(threads)
    names = [f"{sweep.axis}={size}" for size in sweep.sizes]
    stored = [store(s.method, shape) for s, shape in zip(sweep.subjects, sweep.shapes, strict=True)]
    entrants = [
        Entrant(name, partial(attend_stored, make_queries(shape), held, subject))
        for name, shape, held, subject in zip(names, sweep.shapes, stored, sweep.subjects, strict=True)
    ]
    race = run_race(entrants, rounds=rounds, flush=flush, progress=progress, title=f"{sweep.name} along {sweep.axis}")
    rows = [
        row_of(
            race, "kvsketch", name, shape, threads, nbytes=held.nbytes, bits=held.bits(),
            ratios={"first": race.ratio(name, names[0])},
        )
        for name, shape, held in zip(names, sweep.shapes, stored, strict=True)
    ]  # fmt: skip
    return rows, fit_power(sweep.sizes, [race.timing(name).median for name in names])


def parse_axes(text: str, among: Sequence[Sweep]) -> list[Sweep]:
    """The sweeps along the axes named in `text`, with commas between. ValueError names one that there is not."""
    axes = [part.strip() for part in text.split(",")]
    known = list(dict.fromkeys(s.axis for s in among))
    for axis in axes:
        if axis not in known:
            raise ValueError(f"there is no axis {axis!r}; the axes are {known}")
    return [s for s in among if s.axis in axes]
