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
    *("b", "h", "s", "ratio", "queries", "splits", "page_splits", "page_step", "sink_splits", "exact_step"),
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
    tokens: int  #: that a block takes at a time: splits are multiples of it


class Splits(NamedTuple):
    """How tokens are split at most, as fields of :data:`SHAPES`; each row's runs follow from its counts on the device.

    Runs are multiples of `page_step` pages, or of `exact_step` tokens.
    """

    splits: int
    page_splits: int
    page_step: int
    sink_splits: int
    exact_step: int


def _divide(n: int, step: int) -> int:
    return -(-n // step)


@lru_cache(maxsize=4096)
def plan_splits(
    layout: PageLayout,
    pages: int,
    sinks: int,
    window: int,
    *,
    held: int | None,
    heads: int,
    tiles: int,
    step: int,
    multiprocessors: int,
) -> Splits:
    """Splits for rows of at most so many pages, first tokens and tokens of the window.

    `held` is the pages of all rows and heads: rows are then cut into runs of one length, so that a long one among short
    ones is worked on by many blocks. Where it is not known (None) each row is cut into as many runs as the longest.
    `heads` is b * h, `tiles` the blocks that a split's queries take, `step` the tokens that a block takes at a time.
    """
    blocks = max(1, BLOCKS_A_MULTIPROCESSOR * multiprocessors)
    wanted = _divide(blocks, heads * tiles)
    page_step = _divide(step, layout.page_tokens)
    if held is None:
        of_pages = min(_divide(pages, page_step), wanted, MOST_PAGE_SPLITS)
    else:
        share = max(1, _divide(held * tiles, blocks), _divide(pages, MOST_PAGE_SPLITS))
        of_pages = _divide(pages, share)
        page_step *= max(1, _divide(_divide(pages, max(1, of_pages)), page_step))
        of_pages = _divide(pages, page_step)
    of_sinks, of_window = (min(_divide(n, step), wanted, MOST_EXACT_SPLITS) for n in (sinks, window))
    return Splits(of_pages + of_sinks + of_window, of_pages, page_step, of_sinks, step)


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
