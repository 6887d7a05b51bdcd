"""One decode step's attention over cached latents (Palu), with and without RoPE, against dense keys and KIVI."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from benchmarks.bandwidth import random_bytes, read_all
from benchmarks.dense_flash import dense_flash
from benchmarks.machine import set_threads
from benchmarks.names import DENSE_FLASH
from benchmarks.rows import Row, row_of
from benchmarks.subjects import (
    DRAWN_TOKENS,
    Shape,
    attend_stored,
    make_queries,
    make_tokens,
    parse_subject,
    repeat_tokens,
    store,
    to_bfloat16,
)
from benchmarks.timing import Entrant, run_race
from kvsketch._progress import Progress, no_progress
from kvsketch.cache import Cache
from kvsketch.codecs import Exact, TokenInts
from kvsketch.palu import Reconstruction, Rope, attend

#: What latents are compared with besides dense keys and values.
RIVAL = "kivi-2"


class Latents(NamedTuple):
    """How a layer's keys and values are kept: the share of their numbers, heads of a slice, and bits (None: exact)."""

    keep: float
    slice_heads: int
    bits: int | None = 3

    @property
    def name(self) -> str:
        stored = "exact" if self.bits is None else f"{self.bits} bits"
        return f"palu {self.keep:g}, {self.slice_heads} heads a slice, {stored}"

    def rank(self, d: int) -> int:
        """Numbers of a slice's latent: whole blocks of 32, as ranks are allocated."""
        return max(32, 32 * round(self.keep * self.slice_heads * d / 32))


class Layer(NamedTuple):
    """Caches and matrices of a layer's slices."""

    caches: list[Cache]
    matrices: list[Reconstruction]

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches)


def make_layer(shape: Shape, latents: Latents, *, seed: int = 0) -> Layer:
    """Random latents of n tokens, all encoded, and random matrices."""
    rng = np.random.default_rng(seed)
    rank, rows = latents.rank(shape.d), latents.slice_heads * shape.d
    codec = Exact() if latents.bits is None else TokenInts(latents.bits)
    caches, matrices = [], []
    for _ in range(shape.h // latents.slice_heads):
        cache = Cache(codec, codec, residual_length=0, sink_tokens=0, max_tokens=shape.n)
        size = (shape.b, 1, min(shape.n, DRAWN_TOKENS), rank)
        k, v = (repeat_tokens(rng.standard_normal(size, dtype=np.float32), shape.n) for _ in range(2))
        cache.append(k, v)
        cache.flush()
        caches.append(cache)
        up = (rng.standard_normal((rows, rank), dtype=np.float32) / np.float32(math.sqrt(rank)) for _ in range(2))
        matrices.append(Reconstruction(latents.slice_heads, *up))
    return Layer(caches, matrices)


def make_rope(shape: Shape, theta: float = 10000.0) -> Rope:
    """Tables of the usual RoPE."""
    angles = np.arange(shape.n)[:, None] * theta ** (-np.arange(0, shape.d, 2) / shape.d)
    angles = np.concatenate([angles, angles], axis=1)
    return Rope(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))


def measure_palu(
    shape: Shape,
    kinds: Sequence[Latents],
    *,
    rounds: int,
    threads: int = 1,
    flush: bool = True,
    progress: Progress = no_progress,
) -> list[Row]:
    """Rows of all kinds of latents, with and without RoPE, and of their rivals at a shape, in one race.

    Ratios: ``"dense bf16"``, ``"dense fp32"`` and ``"kivi-2"`` are the rival's time over that of latents, ``"product"``
    the time of the matrix product that rebuilds all keys, by NumPy, over it.
    """
    set_threads(threads)
    q, rope = make_queries(shape), make_rope(shape)
    k, v = (repeat_tokens(x, shape.n) for x in make_tokens(shape._replace(n=min(shape.n, DRAWN_TOKENS))))
    dense = {"fp32": (k, v), "bf16": (to_bfloat16(k), to_bfloat16(v))}
    subject = parse_subject(RIVAL)
    stored = store(RIVAL, shape)
    layers = {kind: make_layer(shape, kind) for kind in kinds}
    entrants = [Entrant(RIVAL, partial(attend_stored, q, stored, subject))]
    for dtype, tokens in dense.items():
        entrants.append(Entrant(DENSE_FLASH[dtype], partial(_dense_rows, q, *tokens, threads)))
    for kind, layer in layers.items():
        for with_rope in (True, False):
            run = partial(attend, q, *layer, rope=rope if with_rope else None)
            entrants.append(Entrant(entrant_name(kind, with_rope), run))
        entrants.append(Entrant(f"product of {kind.name}", partial(_rebuild_all, layer, shape)))
    room = random_bytes(k.nbytes)
    entrants.append(Entrant("read of fp32 keys", partial(read_all, room, threads=threads)))
    race = run_race(entrants, rounds=rounds, flush=flush, progress=progress, title=f"Latents at {shape}")
    rivals = {"dense bf16": DENSE_FLASH["bf16"], "dense fp32": DENSE_FLASH["fp32"], RIVAL: RIVAL}
    numbers = 2 * shape.b * shape.n * shape.h * shape.d
    rows = []
    for kind, layer in layers.items():
        for with_rope in (True, False):
            name = entrant_name(kind, with_rope)
            ratios = {rival: race.ratio(entrant, name) for rival, entrant in rivals.items()}
            if with_rope:
                ratios["product"] = race.ratio(f"product of {kind.name}", name)
            bits = 8 * layer.nbytes / numbers
            rows.append(row_of(race, "palu", name, shape, threads, nbytes=layer.nbytes, bits=bits, ratios=ratios))
    rows.append(row_of(race, "kvsketch", RIVAL, shape, threads, nbytes=stored.nbytes, bits=stored.bits()))
    for dtype, (keys, values) in dense.items():
        nbytes, bits = keys.nbytes + values.nbytes, 8.0 * keys.itemsize
        rows.append(row_of(race, "dense", DENSE_FLASH[dtype], shape, threads, nbytes=nbytes, bits=bits))
    rows.append(row_of(race, "memory", "read of fp32 keys", shape, threads, nbytes=k.nbytes))
    return rows


def entrant_name(kind: Latents, with_rope: bool) -> str:
    return f"{kind.name}, {'RoPE' if with_rope else 'no RoPE'}"


def _dense_rows(q: Any, k: Any, v: Any, threads: int) -> None:
    for row in range(len(q)):
        dense_flash(q[row, :, 0], k[row], v[row], threads=threads)


def _rebuild_all(layer: Layer, shape: Shape) -> None:
    """The floating-point work of keys alone: matrices times as many numbers as there are latents, a tile at a time."""
    for matrices in layer.matrices:
        tile = np.ones((matrices.up_k.shape[1], 512), np.float32)
        out = np.empty((len(matrices.up_k), 512), np.float32)
        for _ in range(shape.b * -(-shape.n // 512)):
            np.matmul(matrices.up_k, tile, out=out)


def break_even(sizes: Sequence[int], ratios: Sequence[float]) -> float | None:
    """The size from which on a ratio is at least 1, interpolated on logarithmic axes between measured sizes.

    None when it is below 1 at the largest size; the smallest size when it never is.
    """
    points = sorted(zip(sizes, ratios, strict=True))
    if points[-1][1] < 1:
        return None
    crossing = float(points[0][0])
    for (n, x), (m, y) in pairwise(points):
        if x < 1 <= y:
            share = math.log(1 / x) / math.log(y / x)
            crossing = math.exp(math.log(n) + share * math.log(m / n))
    return crossing
