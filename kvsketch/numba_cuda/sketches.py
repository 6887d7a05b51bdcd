"""Sign sketches as kernels: projected vectors, norms, and the outlier channels that are split off.

A vector has two parts, its channels that are outliers and the others; `chosen` (rows, pages, d) uint8 says which, and
`part`, 1 or 0, which part a kernel is to see. Sums run over the channels in order, each product rounded, so that every
engine finds the same bits.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numba import cuda

from kvsketch._dispatch import namespace
from kvsketch.numba_cuda._launch import launch
from kvsketch.numba_cuda.arithmetic import INFINITY, LARGEST_HALF, READ, product, write_half


def sketch_rows(x: Any, matrix: Any, chosen: Any, part: int, page: int, norms: Any) -> tuple[Any, int]:
    """Signs of a part of vectors `x` (rows, n, d): 1 or 0 in uint8 (rows, n, m); and how many norms saturated.

    `norms` (rows, n) of float16 is filled; `chosen` is of pages of `page` tokens.
    """
    xp = namespace(x)
    signs = xp.empty((*x.shape[:2], matrix.shape[0]), dtype=xp.uint8)
    saturated = xp.zeros(1, dtype=xp.int64)
    launch(_sign_kernel(str(x.dtype)), signs.size, x, matrix, chosen, part, page, signs)
    launch(_norm_kernel(str(x.dtype)), norms.size, x, chosen, part, page, norms, saturated)
    return signs, int(saturated[0])


def project(q: Any, matrix: Any, chosen: Any, part: int) -> Any:
    """A part of queries `q` (rows, x, d) as each page sees it, projected: float32 (rows, pages, x, m)."""
    shape = (len(q), chosen.shape[1], q.shape[1], matrix.shape[0])
    projected = namespace(q).empty(shape, dtype=np.float32)
    launch(_project_kernel(str(q.dtype)), projected.size, q, matrix, chosen, part, projected)
    return projected


def largest_channels(k: Any, outliers: int, page: int) -> Any:
    """Channels of largest norm in each page of `page` tokens of `k` (rows, n, d): int64 (rows, pages, outliers)."""
    xp = namespace(k)
    rows, n, d = k.shape
    squares = xp.empty((rows, -(-n // page), d), dtype=xp.float32)
    launch(_square_kernel(str(k.dtype)), squares.size, k, page, squares)
    channels = xp.empty((*squares.shape[:2], outliers), dtype=xp.int64)
    launch(_rank_channels, squares.size, squares, channels)
    return xp.sort(channels, axis=-1)


def chosen_channels(channels: Any, d: int) -> Any:
    """`chosen` of `channels` (rows, pages, outliers)."""
    chosen = namespace(channels).zeros((*channels.shape[:2], d), dtype=np.uint8)
    launch(_mark_channels, channels.size, channels, chosen)
    return chosen


def nothing_chosen(like: Any, rows: int, d: int) -> Any:
    """`chosen` where no channel is an outlier, as one page that all tokens share."""
    return namespace(like).zeros((rows, 1, d), dtype=np.uint8)


@cache
def _sign_kernel(dtype: str) -> Any:
    projected = _projection(READ[dtype])

    @cuda.jit
    def sign_rows(x, matrix, chosen, part, page, signs):
        """A thread to each sign."""
        rows, n, m = signs.shape
        index, i = divmod(cuda.grid(1), m)
        row, token = divmod(index, n)
        if row < rows:
            signs[row, token, i] = projected(x, row, token, matrix, i, chosen, token // page, part) >= 0

    return sign_rows


@cache
def _project_kernel(dtype: str) -> Any:
    projected = _projection(READ[dtype])

    @cuda.jit
    def project_queries(q, matrix, chosen, part, out):
        """A thread to each row of the sketch of each query in each page."""
        rows, pages, count, m = out.shape
        index, i = divmod(cuda.grid(1), m)
        index, x = divmod(index, count)
        row, page = divmod(index, pages)
        if row < rows:
            out[row, page, x, i] = projected(q, row, x, matrix, i, chosen, page, part)

    return project_queries


def _projection(read: Any) -> Any:
    """Product of row i of `matrix` (m, d) with a part of a vector of `x` (rows, n, d)."""

    @cuda.jit(device=True)
    def projected(x, row, token, matrix, i, chosen, page, part):
        total = np.float32(0)
        for c in range(x.shape[2]):
            if chosen[row, page, c] == part:
                total += product(read(x[row, token, c]), matrix[i, c])
        return total

    return projected


@cache
def _norm_kernel(dtype: str) -> Any:
    read = READ[dtype]

    @cuda.jit
    def norm_rows(x, chosen, part, page, norms, saturated):
        """A thread to each norm."""
        row, token = divmod(cuda.grid(1), norms.shape[1])
        if row < norms.shape[0]:
            square = np.float32(0)
            for c in range(x.shape[2]):
                if chosen[row, token // page, c] == part:
                    number = read(x[row, token, c])
                    square += product(number, number)
            norm = np.float32(math.sqrt(square))
            if norm > LARGEST_HALF:
                cuda.atomic.add(saturated, 0, 1)
                norm = LARGEST_HALF
            norms[row, token] = write_half(norm)

    return norm_rows


@cache
def _square_kernel(dtype: str) -> Any:
    read = READ[dtype]

    @cuda.jit
    def sum_squares(k, page, squares):
        """A thread to each channel of each page: the squares of its tokens, in order."""
        rows, pages, d = squares.shape
        index, c = divmod(cuda.grid(1), d)
        row, first = divmod(index, pages)
        if row < rows:
            total = np.float32(0)
            for token in range(first * page, min(k.shape[1], (first + 1) * page)):
                number = read(k[row, token, c])
                total += product(number, number)
            squares[row, first, c] = total

    return sum_squares


@cuda.jit
def _rank_channels(squares, channels):
    """A thread to each channel: it is taken when few enough are larger, or as large and before it."""
    rows, pages, d = squares.shape
    index, c = divmod(cuda.grid(1), d)
    row, page = divmod(index, pages)
    if row < rows:
        own, rank = or_infinity(squares[row, page, c]), 0
        for other in range(d):
            square = or_infinity(squares[row, page, other])
            if square > own or (square == own and other < c):
                rank += 1
        if rank < channels.shape[2]:
            channels[row, page, rank] = c


@cuda.jit(device=True)
def or_infinity(square):
    """A channel that holds NaN counts as infinite."""
    return INFINITY if square != square else square


@cuda.jit
def _mark_channels(channels, chosen):
    """A thread to each outlier channel."""
    rows, pages, outliers = channels.shape
    index, i = divmod(cuda.grid(1), outliers)
    row, page = divmod(index, pages)
    if row < rows:
        chosen[row, page, np.int64(channels[row, page, i])] = 1
