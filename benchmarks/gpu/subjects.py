"""Caches of a shape on the device, in float16, made quickly: the pages of one row of random tokens, repeated."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from benchmarks.gpu.device import Device
from benchmarks.gpu.findings import NotRun
from benchmarks.palu import Latents, Layer, make_rope
from benchmarks.subjects import DRAWN_TOKENS, Shape, Stored, fill_cache, lengthen, make_queries, make_tokens
from kvsketch._dispatch import engine_for
from kvsketch.attention import CacheView
from kvsketch.cache import Cache
from kvsketch.codecs import Exact, TokenInts
from kvsketch.palu import Reconstruction, Rope

#: What queries, exact tokens and dense caches are made of.
DTYPE = np.dtype(np.float16)
#: The engine whose speed is measured; others would take too long at the sizes that are.
ENGINE = "cuda_raw"


class Slices(NamedTuple):
    """A layer of latents with what attention over it needs."""

    layer: Layer
    rope: Rope

    @property
    def nbytes(self) -> int:
        return self.layer.nbytes


def device_queries(device: Device, shape: Shape) -> Any:
    """Queries (b, hq, 1, d)."""
    return device.cupy.asarray(make_queries(shape).astype(DTYPE))


def drawn_shape(shape: Shape) -> Shape:
    """One row of so many tokens as are drawn: first tokens and window are then those of n tokens."""
    return shape._replace(n=min(shape.n, DRAWN_TOKENS + shape.n % 128), b=1)


def store_on_device(device: Device, method: str, shape: Shape) -> Stored:
    """A cache of `method` with n tokens in each of b rows. NotRun where there is no room for it."""
    drawn = drawn_shape(shape)
    k, v = (device.cupy.asarray(x.astype(DTYPE)) for x in make_tokens(drawn))
    view = fill_cache(method, k, v).view()
    records = shape.b * shape.h * (shape.n // view.layout.page_tokens)
    device.check_room(records * view.layout.record_bytes)
    longer = lengthen(view, shape.n, shape.b)
    return Stored(longer, *held_bytes(longer))


def held_bytes(view: CacheView) -> tuple[int, int]:
    """Bytes of keys and of values that attention over a view has to read: pages, first tokens and window."""
    h = view.pages.shape[1]
    pages = int(view.page_counts.sum()) * h
    exact = int((view.sink_counts + view.window_counts).sum()) * h
    sides = ((view.layout.keys, view.sink_k), (view.layout.values, view.sink_v))
    keys, values = (pages * side.nbytes + exact * x.shape[-1] * x.itemsize for side, x in sides)
    return keys, values


def check_engine(device: Device, operation: str) -> None:
    """NotRun unless an operation of the device's arrays has kernels of this engine."""
    engine = engine_for(operation, device.cupy.zeros(1))
    if engine != ENGINE:
        raise NotRun(f"{ENGINE} has no {operation} yet, {engine} would run it")


def latents_on_device(device: Device, latents: Latents, shape: Shape, *, seed: int = 0) -> Slices:
    """Random latents of n tokens in each of b rows, all encoded, and random matrices. NotRun where there is no room."""
    rng = np.random.default_rng(seed)
    rank, rows = latents.rank(shape.d), latents.slice_heads * shape.d
    count = shape.h // latents.slice_heads
    bits = 16 if latents.bits is None else latents.bits + 1
    device.check_room(2 * count * shape.b * shape.n * rank * bits // 8)
    codec = Exact() if latents.bits is None else TokenInts(latents.bits)
    upload = device.cupy.asarray
    caches, matrices = [], []
    for _ in range(count):
        cache = Cache(codec, codec, residual_length=0, sink_tokens=0, max_tokens=shape.n)
        size = (1, 1, min(shape.n, DRAWN_TOKENS), rank)
        drawn = [upload(rng.standard_normal(size).astype(DTYPE)) for _ in range(2)]
        k, v = (device.cupy.broadcast_to(x, (shape.b, *size[1:])) for x in drawn)
        for start in range(0, shape.n, size[2]):
            part = min(size[2], shape.n - start)
            cache.append(k[:, :, :part], v[:, :, :part])
        cache.flush()
        caches.append(cache)
        up = (upload((rng.standard_normal((rows, rank)) / math.sqrt(rank)).astype(np.float32)) for _ in range(2))
        matrices.append(Reconstruction(latents.slice_heads, *up))
    rope = make_rope(shape)
    return Slices(Layer(caches, matrices), rope._replace(cos=upload(rope.cos), sin=upload(rope.sin)))
