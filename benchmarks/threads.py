"""What a second thread gives: each entrant with one thread and with two, in one race."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks.bandwidth import read_all
from benchmarks.dense_flash import dense_flash
from benchmarks.machine import set_threads
from benchmarks.names import DENSE_FLASH, READ
from benchmarks.rivals import rival, tensor
from benchmarks.rows import Row, row_of
from benchmarks.subjects import (
    Shape,
    Subject,
    attend_stored,
    make_queries,
    make_tokens,
    repeat_tokens,
    store,
    to_bfloat16,
)
from benchmarks.timing import Entrant, run_race
from kvsketch._progress import Progress, no_progress


def measure_threads(
    shape: Shape,
    subjects: Sequence[Subject],
    *,
    rounds: int,
    counts: tuple[int, int] = (1, 2),
    flush: bool = True,
    progress: Progress = no_progress,
) -> list[Row]:
    """Rows with few and with more threads; the ratio ``"one thread"`` of the latter is how many times faster it is."""
    q = make_queries(shape)
    drawn = make_tokens(shape._replace(n=min(shape.n, 4096)))
    k, v = (to_bfloat16(repeat_tokens(x, shape.n)) for x in drawn)
    tensors = {"bf16": (tensor(to_bfloat16(q)), tensor(k), tensor(v))}
    stored = {s.method: store(s.method, shape) for s in subjects}

    runs: dict[str, tuple[str, Callable[[int], Any]]] = {}
    for subject in subjects:
        runs[subject.name] = "kvsketch", partial(_ignore_count, attend_stored, q, stored[subject.method], subject)
    runs["torch matmul bf16"] = "torch", partial(_ignore_count, rival("torch matmul bf16", tensors))
    runs[DENSE_FLASH["bf16"]] = "dense", lambda count: dense_flash(q[0, :, 0], k[0], v[0], threads=count)
    runs[READ.format(dtype="bf16")] = "memory", lambda count: (read_all(k, threads=count), read_all(v, threads=count))

    labels = {(name, count): f"{name}, {count}" for name in runs for count in counts}
    entrants = [
        Entrant(label, partial(runs[name][1], count), prepare=partial(_wake, runs[name][1], count))
        for (name, count), label in labels.items()
    ]
    race = run_race(entrants, rounds=rounds, flush=flush, progress=progress, title=f"Threads at {shape}")
    rows = []
    for (name, count), label in labels.items():
        one = labels[name, counts[0]]
        ratios = {} if label == one else {"one thread": race.ratio(one, label)}
        rows.append(row_of(race, runs[name][0], name, shape, count, entrant=label, ratios=ratios))
    return rows


def _ignore_count(run: Callable[..., Any], *arguments: Any) -> Any:
    """Call `run` without the last argument, a number of threads that was set for all."""
    return run(*arguments[:-1])


def _wake(run: Callable[[int], Any], count: int) -> None:
    """Set the threads of all that computes, and start them: a thread's birth is not part of a step."""
    set_threads(count)
    run(count)
