"""One decode step's attention: each codec against torch, a dense flash decode and plain reads, in one race."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.bandwidth import copy_all, random_bytes, read_all
from benchmarks.dense_flash import dense_flash
from benchmarks.machine import set_threads
from benchmarks.names import DENSE_FLASH, READ
from benchmarks.rivals import rival, rival_names, tensor
from benchmarks.rows import Row, row_of
from benchmarks.subjects import (
    DATA,
    Shape,
    Stored,
    Subject,
    attend_exactly,
    attend_stored,
    fill_cache,
    make_queries,
    make_tokens,
    relative_error,
    repeat_tokens,
    store,
    to_bfloat16,
)
from benchmarks.timing import FEW_ROUNDS, Entrant, run_race
from kvsketch._progress import Progress, no_progress

#: Where errors are measured.
ERRORS = Shape(4096)


def measure_decode(
    shape: Shape,
    subjects: Sequence[Subject],
    *,
    rounds: int,
    threads: int = 1,
    flush: bool = True,
    progress: Progress = no_progress,
) -> list[Row]:
    """Rows of kvsketch's `subjects` and of all rivals at a shape, raced against each other.

    Ratios of a subject: ``"best torch"`` to torch's fastest way, whatever it is; ``"dense bf16"`` and ``"dense fp32"``
    to the dense Numba kernel; ``"read"``, its time over that of a plain read of its bytes.
    """
    set_threads(threads)
    q = make_queries(shape)
    drawn = make_tokens(shape._replace(n=min(shape.n, 4096)))
    dense = {"fp32": tuple(repeat_tokens(x, shape.n) for x in drawn)}
    dense["bf16"] = tuple(map(to_bfloat16, dense["fp32"]))
    queries = {"fp32": q, "bf16": to_bfloat16(q)}
    tensors = {dtype: tuple(map(tensor, (queries[dtype], *dense[dtype]))) for dtype in dense}
    stored = {s.method: store(s.method, shape) for s in subjects}

    torch_names = rival_names(shape.gqa)
    entrants = [Entrant(s.name, partial(attend_stored, q, stored[s.method], s)) for s in subjects]
    for name in torch_names:
        slow = "SDPA" in name and "rows" not in name and shape.gqa > 1
        entrants.append(Entrant(name, rival(name, tensors), rounds=FEW_ROUNDS if slow else None))
    for dtype, (k, v) in dense.items():
        entrants.append(Entrant(DENSE_FLASH[dtype], partial(_dense_rows, q, k, v, threads)))
    sizes = {f"read of {method}": s.nbytes for method, s in stored.items()}
    sizes |= {READ.format(dtype=dtype): k.nbytes + v.nbytes for dtype, (k, v) in dense.items()}
    room = random_bytes(max(sizes.values()))
    for name, size in sizes.items():
        entrants.append(Entrant(name, partial(read_all, room[:size], threads=threads)))
    k, v = dense["fp32"]
    copied = "copy of fp32 keys"
    entrants.append(Entrant(copied, partial(copy_all, k, room)))

    race = run_race(entrants, rounds=rounds, flush=flush, progress=progress, title=f"Decode at {shape}")
    best = race.best(torch_names)
    rows = []
    for subject in subjects:
        held = stored[subject.method]
        ratios = {"best torch": race.ratio(best, subject.name)}
        ratios |= {f"dense {dtype}": race.ratio(name, subject.name) for dtype, name in DENSE_FLASH.items()}
        ratios["read"] = race.ratio(subject.name, f"read of {subject.method}")
        rows.append(
            row_of(
                race, "kvsketch", subject.name, shape, threads, nbytes=held.nbytes, bits=held.bits(), ratios=ratios,
                rivals={"best torch": best},
            )
        )  # fmt: skip
    for kind, names in (("torch", torch_names), ("dense", DENSE_FLASH.values())):
        for name in names:
            dtype = name.rpartition(" ")[2]
            read = READ.format(dtype=dtype)
            nbytes, floor = sizes[read], race.ratio(name, read)
            bits = 32.0 if dtype == "fp32" else 16.0
            rows.append(row_of(race, kind, name, shape, threads, nbytes=nbytes, bits=bits, ratios={"read": floor}))
    for name, size in (*sizes.items(), (copied, k.nbytes)):
        rows.append(row_of(race, "memory", name, shape, threads, nbytes=size))
    return rows


def _dense_rows(q: Any, k: Any, v: Any, threads: int) -> None:
    for row in range(len(q)):
        dense_flash(q[row, :, 0], k[row], v[row], threads=threads)


def measure_errors(subjects: Sequence[Subject], shape: Shape = ERRORS) -> list[dict[str, Any]]:
    """Relative L2 error of each subject's output against float64 attention over its decoded cache, by kind of data."""
    q = make_queries(shape)
    rows = []
    for kind in DATA:
        k, v = make_tokens(shape, kind)
        for method in dict.fromkeys(s.method for s in subjects):
            cache = fill_cache(method, k, v)
            decoded = (x[None] for x in cache.decode(0))
            exact = attend_exactly(q, *decoded)
            held = Stored(cache.view(), cache.key_nbytes, cache.value_nbytes)
            for s in subjects:
                if s.method == method:
                    error = relative_error(attend_stored(q, held, s), exact)
                    rows.append({"name": s.name, "data": kind, "shape": shape._asdict(), "error": error})
    return rows
