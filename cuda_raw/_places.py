"""Where numbers and records lie, as kernels are told: ``Places`` and ``SideSpec`` of pages.cuh."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache, wraps
from typing import Any

import numpy as np

from kvsketch._dispatch import namespace
from kvsketch.layout import DTYPE_CODES, SideLayout, SideSpec

PLACES = np.dtype(
    [
        *((name, np.int64) for name in ("x_row", "x_head", "x_token", "record_row", "record_head", "record_page")),
        *((name, np.int32) for name in ("rows", "heads", "pages", "dtype", "aligned", "unused")),
    ]
)
SIDE_SPEC = np.dtype([(name, np.int32) for name in SideSpec._fields])
#: Bytes that kernels read and write at a time.
VECTOR_BYTES = 16
#: Blocks of a grid along its second axis, at most; kernels loop over more heads.
MOST_HEADS = 65535
#: Items of a head that a kernel counts in 32 bits.
MOST_ITEMS = 2**31 - 1


@lru_cache(maxsize=256)
def side_numbers(side: SideLayout) -> Any:
    """The numbers of a side, to be passed by value."""
    return np.array(tuple(side.spec), SIDE_SPEC)


def on_its_device(operation: Callable[..., Any]) -> Callable[..., Any]:
    """`operation` run on the device of its first argument, an array or codes of one."""

    @wraps(operation)
    def run(x: Any, *args: Any, **options: Any) -> Any:
        with getattr(x, "codes", x).device:
            return operation(x, *args, **options)

    return run


def dtype_code(x: Any) -> int:
    """What kernels call the dtype of `x`."""
    return DTYPE_CODES[str(x.dtype)]


def blocks_of(count: int, size: int) -> int:
    """Blocks of `size` that `count` things take."""
    return -(-count // size)


def aligned(x: Any, axes: int | None = None) -> bool:
    """Whether `x` begins at a multiple of :data:`VECTOR_BYTES` at every index of its first `axes` axes, or of all but
    the last."""
    steps = x.strides[: x.ndim - 1 if axes is None else axes]
    return not any(number % VECTOR_BYTES for number in (x.data.ptr, *steps))


def in_order(x: Any) -> bool:
    """Whether elements along the last axis are neighbours."""
    return x.shape[-1] <= 1 or x.strides[-1] == x.itemsize


def locate(x: Any, records: Any, side: SideLayout) -> Any:
    """``Places`` of numbers (..., P*p, width) and records (..., P, bytes), or None when there is no such thing.

    That is when leading axes do not merge into two, channels or bytes are not neighbours, or records are not aligned.
    """
    steps = zip(x.shape[:-2], x.strides[:-2], records.strides[:-2], strict=True)
    axes = merge_axes([axis for axis in steps if axis[0] != 1])
    if len(axes) > 2 or not (in_order(x) and in_order(records) and aligned(records)):
        return None
    (rows, x_row, record_row), (heads, x_head, record_head) = [(1, 0, 0)] * (2 - len(axes)) + axes
    size = x.itemsize
    places = (x_row // size, x_head // size, x.strides[-2] // size, record_row, record_head, records.strides[-2])
    return np.array((*places, rows, heads, records.shape[-2], dtype_code(x), aligned(x), 0), PLACES)


def locate_vectors(x: Any) -> tuple[Any, Any]:
    """`x` (..., n, d), copied where kernels could not read it, and ``Places`` of its numbers."""
    axes = merge_axes([axis for axis in zip(x.shape[:-2], x.strides[:-2], strict=True) if axis[0] != 1])
    if len(axes) > 2 or not in_order(x):
        return locate_vectors(namespace(x).ascontiguousarray(x))
    (rows, x_row), (heads, x_head) = [(1, 0)] * (2 - len(axes)) + axes
    steps = (step // x.itemsize for step in (x_row, x_head, x.strides[-2]))
    return x, np.array((*steps, 0, 0, 0, rows, heads, 0, dtype_code(x), aligned(x), 0), PLACES)


def grid_heads(x: Any) -> int:
    """Blocks along the second axis of a grid for `x` (..., n, d)."""
    return min(math.prod(x.shape[:-2]), MOST_HEADS)


def merge_axes(axes: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Axes (size, steps...) with neighbours joined where all their steps allow it."""
    merged: list[tuple[int, ...]] = []
    for size, *steps in axes:
        if merged and all(outer == inner * size for outer, inner in zip(merged[-1][1:], steps, strict=True)):
            merged[-1] = (merged[-1][0] * size, *steps)
        else:
            merged.append((size, *steps))
    return merged


def page_parts(pages: int, items: int) -> Iterator[slice]:
    """Runs of pages of `items` items each that a kernel can count."""
    most = max(1, MOST_ITEMS // max(items, 1))
    return (slice(first, min(first + most, pages)) for first in range(0, pages, most))
