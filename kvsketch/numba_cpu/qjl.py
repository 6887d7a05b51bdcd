"""Sign sketches of keys in Numba."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvsketch.numba_cpu._compile import kernel
from kvsketch.reference.qjl import largest_channels, round_norms, split_outliers


def sketch_vectors(x: Any, matrix: Any) -> tuple[Any, Any, int]:
    """Signs (..., ceil(m/8)) and float16 norms (...) of vectors `x` (..., d), and how many norms saturated."""
    *lead, d = x.shape
    m = matrix.shape[0]
    signs = np.zeros((*lead, -(-m // 8)), dtype=np.uint8)
    squares = np.empty(lead, dtype=np.float32)
    rows = np.array(x, dtype=np.float32, order="C").reshape(-1, d)
    _sketch_rows(rows, _columns(matrix), signs.reshape(-1, signs.shape[-1]), squares.reshape(-1))
    return signs, *round_norms(squares)


def select_outlier_channels(k: Any, outliers: int, page: int) -> Any:
    b, h, n, d = k.shape
    squares = np.zeros((b, h, -(-n // page), d), dtype=np.float32)
    if squares.size:
        rows = np.array(k, dtype=np.float32, order="C").reshape(b * h, n, d)
        _sum_page_squares(rows, page, squares.reshape(b * h, -1, d))
    return largest_channels(squares, outliers)


def sketch_keys(k: Any, matrix: Any, channels: Any, outlier_matrix: Any, page: int) -> tuple[Any, ...]:
    if channels is None:
        signs, norms, saturated = sketch_vectors(k, matrix)
        return signs, norms, None, None, saturated
    inner, outer = split_outliers(k, channels, page)
    signs, norms, saturated = sketch_vectors(inner, matrix)
    outlier_signs, outlier_norms, outlier_saturated = sketch_vectors(outer, outlier_matrix)
    return signs, norms, outlier_signs, outlier_norms, saturated + outlier_saturated


def sketch_scores(q: Any, keys: Any, matrix: Any, constant: float, outlier_matrix: Any, outlier_constant: float) -> Any:
    b, hq, s, d = q.shape
    h, n = keys.norms.shape[1:]
    grouped = np.array(q, dtype=np.float32, order="C").reshape(b * h, hq // h * s, d)
    scores = np.zeros((b * h, hq // h * s, n), dtype=np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        if scores.size:
            channels = keys.channels
            if channels is None:
                channels = np.empty((b, h, -(-n // keys.page), 0), dtype=np.uint16)
            else:
                base = np.zeros((*grouped.shape[:2], outlier_matrix.shape[0]), dtype=np.float32)
                signs, norms = keys.outlier_signs, keys.outlier_norms
                _add(scores, base, 1.0, grouped, outlier_matrix, outlier_constant, signs, norms, channels, keys.page)
            base = grouped @ matrix.T
            _add(scores, base, -1.0, grouped, matrix, constant, keys.signs, keys.norms, channels, keys.page)
        return scores.reshape(b, hq, s, n).astype(q.dtype)


def _add(
    scores: Any,
    base: Any,
    step: float,
    q: Any,
    matrix: Any,
    constant: float,
    signs: Any,
    norms: Any,
    channels: Any,
    page: int,
) -> None:
    """Arrays of :func:`_add_estimates` in the one form that it is compiled for."""
    rows, m = len(q), matrix.shape[0]
    _add_estimates(
        scores,
        base,
        np.float32(step),
        q,
        _columns(matrix),
        np.array(signs, order="C").reshape(rows, -1, signs.shape[-1]),
        np.array(norms, dtype=np.float32, order="C").reshape(rows, -1) * np.float32(constant / m),
        np.array(channels, dtype=np.uint16, order="C").reshape(rows, channels.shape[2], channels.shape[3]),
        page,
    )


def _columns(matrix: Any) -> Any:
    """`matrix` (m, d) as a new contiguous (d, m) array: a kernel then runs along the rows of the sketch."""
    return np.array(matrix.T, order="C")


@kernel()
def _sketch_rows(x: np.ndarray, columns: np.ndarray, signs: np.ndarray, squares: np.ndarray) -> None:
    """Bits into `signs` (rows, ceil(m/8)), zeros before, and sums of squares of `x` (rows, d); S is `columns` (d, m).

    A zero channel is skipped: adding its products would change no sum.
    """
    d, m = columns.shape
    projected = np.empty(m, dtype=np.float32)
    for row in range(x.shape[0]):
        projected[:] = 0
        square = np.float32(0)
        for c in range(d):
            number = x[row, c]
            square += number * number
            if number != 0:
                for i in range(m):
                    projected[i] += number * columns[c, i]
        squares[row] = square
        for i in range(m):
            if projected[i] >= 0:
                signs[row, i >> 3] |= np.uint8(1 << (i & 7))


@kernel()
def _sum_page_squares(k: np.ndarray, page: int, squares: np.ndarray) -> None:
    """Add the squares of `k` (rows, n, d) over the tokens of each page to `squares` (rows, ceil(n/page), d)."""
    for row in range(k.shape[0]):
        for token in range(k.shape[1]):
            for c in range(k.shape[2]):
                squares[row, token // page, c] += k[row, token, c] * k[row, token, c]


@kernel(fastmath={"reassoc", "contract"})
def _add_estimates(
    scores: np.ndarray,
    base: np.ndarray,
    step: np.float32,
    q: np.ndarray,
    columns: np.ndarray,
    signs: np.ndarray,
    factors: np.ndarray,
    channels: np.ndarray,
    page: int,
) -> None:
    """Add estimates to `scores` (rows, x, n).

    The projected query of a page is `base` (rows, x, m) plus `step` times the columns of S of the page's `channels`
    (rows, pages, outliers) times `q` (rows, x, d) there: S q less the outliers' part, or that part alone. `factors`
    (rows, n) are c/m times the norms.
    """
    rows, queries, n = scores.shape
    m = columns.shape[1]
    projected = np.empty((queries, m), dtype=np.float32)
    sign = np.empty(m, dtype=np.float32)
    for row in range(rows):
        for index in range(channels.shape[1]):
            projected[:] = base[row]
            for channel in channels[row, index]:
                for x in range(queries):
                    weight = step * q[row, x, channel]
                    for i in range(m):
                        projected[x, i] += weight * columns[channel, i]
            for token in range(index * page, min(n, (index + 1) * page)):
                for i in range(m):
                    bit = (signs[row, token, i >> 3] >> (i & 7)) & 1
                    sign[i] = np.float32(2) * np.float32(bit) - np.float32(1)
                for x in range(queries):
                    total = np.float32(0)
                    for i in range(m):
                        total += projected[x, i] * sign[i]
                    scores[row, x, token] += total * factors[row, token]
