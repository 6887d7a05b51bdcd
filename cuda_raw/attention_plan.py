"""What the kernels of decode attention are launched with: their sizes, and how tokens are split over blocks."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from kvsketch.layout import PageLayout, SideSpec

#: Splits of a head's pages, and of its first tokens and its window each, that combine_splits has room for.
MOST_PAGE_SPLITS, MOST_EXACT_SPLITS = 768, 128
#: Blocks of threads that a multiprocessor gets, where there are tokens enough to split.
BLOCKS_A_MULTIPROCESSOR = 4
#: Dynamic shared memory that a block may ask for, of each architecture: that of 7.5 where it is not known.
SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
USUAL_SHARED_BYTES = 64 << 10
#: Bytes of that which are left to the arrays that kernels declare themselves.
STATIC_BYTES = 1 << 10

_SIDE = np.dtype([(name, np.int32) for name in SideSpec._fields], align=True)
_LONG = ("capacity", "record_bytes", "bias_tokens", "sink_room", "window_room")
_INT = (
    *("b", "h", "s", "ratio", "queries", "splits", "page_splits", "pages_per_split", "sink_splits", "exact_per_split"),
    *("has_limits", "bias_heads", "sketch_width", "outlier_width"),
)
_FLOAT = ("cap", "factor", "outlier_factor")
#: struct Shapes of attention.cuh.
SHAPES = np.dtype(
    [
        *((name, np.int64) for name in _LONG),
        *((name, np.int32) for name in _INT),
        *((name, np.float32) for name in _FLOAT),
        ("keys", _SIDE),
        ("values", _SIDE),
    ],
    align=True,
)


class PageKernel(NamedTuple):
    """A kernel over pages, with the signature that attention.cuh shows, and how it is launched."""

    level: str  #: ``"simt"``, or ``"mma"`` for tensor cores
    file: str
    expression: str
    queries: int  #: rows of Q that a block takes
    threads: int
    shared: int  #: bytes of dynamic shared memory
    tokens: int  #: splits of more than that many are a multiple of it


class Splits(NamedTuple):
    """How the tokens of all rows are split, as fields of :data:`SHAPES`."""

    splits: int
    page_splits: int
    pages_per_split: int
    sink_splits: int
    exact_per_split: int


def _divide(n: int, step: int) -> int:
    return -(-n // step)


def _run(n: int, wanted: int, step: int, most: int) -> int:
    """Length of runs that `n` is cut into: about `wanted` runs, at most `most`, in multiples of `step`."""
    return _divide(max(_divide(n, max(1, wanted)), _divide(n, most), 1), step) * step


@lru_cache(maxsize=4096)
def plan_splits(
    layout: PageLayout, pages: int, sinks: int, window: int, *, heads: int, tiles: int, step: int, multiprocessors: int
) -> Splits:
    """Splits for rows of at most so many pages and exact tokens.

    `heads` is b * h, `tiles` the blocks that a split's queries take, `step` the tokens that a block takes at a time.
    """
    wanted = _divide(BLOCKS_A_MULTIPROCESSOR * multiprocessors, heads * tiles)
    page_run = _run(pages, wanted, _divide(step, layout.page_tokens), MOST_PAGE_SPLITS)
    exact_run = _run(max(sinks, window), wanted, step, MOST_EXACT_SPLITS)
    counts = (_divide(pages, page_run), _divide(sinks, exact_run), _divide(window, exact_run))
    return Splits(sum(counts), counts[0], page_run, counts[1], exact_run)


@cache
def multiprocessors(device: int) -> int:
    """Multiprocessors of a device."""
    import cupy

    return int(cupy.cuda.runtime.getDeviceProperties(device)["multiProcessorCount"])


def shared_limit(architecture: int) -> int:
    """Bytes of dynamic shared memory that a kernel of this engine may ask for."""
    return SHARED_BYTES.get(architecture, USUAL_SHARED_BYTES) - STATIC_BYTES


@lru_cache(maxsize=4096)
def make_shapes(layout: PageLayout, splits: Splits, numbers: tuple[tuple[str, int | float], ...]) -> Any:
    """A 0-d array of :data:`SHAPES`, not to be written to; `numbers` are those that layout and splits do not give."""
    shapes = np.zeros((), SHAPES)
    shapes["record_bytes"] = layout.record_bytes
    shapes["keys"], shapes["values"] = tuple(layout.keys.spec), tuple(layout.values.spec)
    for name, number in (*splits._asdict().items(), *numbers):
        shapes[name] = number
    return shapes
