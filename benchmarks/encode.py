"""Encoding a prompt: each side's codecs, and a whole cache, against a copy of the same float32 numbers."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from benchmarks.bandwidth import copy_all
from benchmarks.machine import set_threads
from benchmarks.rivals import tensor
from benchmarks.rows import Row, row_of
from benchmarks.subjects import Shape, fill_cache, make_tokens, repeat_tokens
from benchmarks.timing import Entrant, Race, run_race
from kvsketch._progress import Progress, no_progress
from kvsketch.codecs import Codec, GroupedInts, Side, SignSketch
from kvsketch.layout import SideLayout, side_layout
from kvsketch.pages import encode_keys, encode_values

#: What is encoded, by name: the side and its codec.
SIDES: dict[str, tuple[Side, Codec]] = {
    "keys, 2 bits": ("keys", GroupedInts(bits=2)),
    "keys, 4 bits": ("keys", GroupedInts(bits=4)),
    "values, 2 bits": ("values", GroupedInts(bits=2)),
    "values, 4 bits": ("values", GroupedInts(bits=4)),
    "keys, Hadamard sketch m=256": ("keys", SignSketch(m=256, kind="hadamard")),
    "keys, orthogonal sketch m=256": ("keys", SignSketch(m=256)),
}
#: Whole caches, by method: an append of the prompt and a flush, against a copy of keys and values.
CACHES = ("kivi-2", "qjl-256")
COPIES = ("C library", "torch")


def measure_encode(
    shape: Shape,
    *,
    rounds: int,
    threads: int = 1,
    flush: bool = True,
    progress: Progress = no_progress,
) -> list[Row]:
    """Rows of encoders and of copies at a shape.

    The ratio ``"memcpy"`` is an encoder's speed relative to the faster copy of its input: a copy's time over its own.
    """
    set_threads(threads)
    drawn = make_tokens(shape._replace(n=min(shape.n, 4096)))
    k, v = (repeat_tokens(x, shape.n) for x in drawn)
    room = np.ones_like(k)
    source, target = tensor(k), tensor(room)
    entrants = [
        Entrant(f"copy by the {COPIES[0]}", partial(copy_all, k, room)),
        Entrant(f"copy by {COPIES[1]}", partial(target.copy_, source)),
    ]
    copies = [entrant.name for entrant in entrants]
    layouts = {name: side_layout(side, codec, 32, shape.d) for name, (side, codec) in SIDES.items()}
    records = {
        name: np.zeros((shape.b, shape.h, shape.n // 32, layout.nbytes), np.uint8) for name, layout in layouts.items()
    }
    for name, (side, _) in SIDES.items():
        entrants.append(Entrant(name, partial(_encode, k if side == "keys" else v, layouts[name], records[name])))
    filled = {method: f"cache {method}: append and flush" for method in CACHES}
    for method, name in filled.items():
        entrants.append(Entrant(name, partial(fill_cache, method, k, v)))
    race = run_race(entrants, rounds=rounds, flush=flush, progress=progress, title=f"Encode at {shape}")

    best = race.best(copies)
    rows = [row_of(race, "memory", name, shape, threads, nbytes=k.nbytes) for name in copies]
    numbers = shape.n * shape.d * shape.h * shape.b
    for name in SIDES:
        bits = 8 * records[name].nbytes / numbers
        ratios = {"memcpy": race.ratio(best, name)}
        rows.append(
            row_of(race, "kvsketch", name, shape, threads, nbytes=k.nbytes, bits=bits, ratios=ratios,
                   rivals={"memcpy": best})
        )  # fmt: skip
    for name in filled.values():
        # Keys and values are two copies.
        doubled = Race({best: [2 * s for s in race.seconds[best]], name: race.seconds[name]})
        ratios = {"memcpy": doubled.ratio(best, name)}
        rows.append(
            row_of(race, "kvsketch", name, shape, threads, nbytes=k.nbytes + v.nbytes, ratios=ratios,
                   rivals={"memcpy": best})
        )  # fmt: skip
    return rows


def _encode(x: Any, layout: SideLayout, out: Any) -> None:
    if layout.side == "keys":
        encode_keys(x, layout, out=out)
    else:
        encode_values(x, layout, out=out)
