"""Estimates of scores over many independent projections."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvsketch.qjl import sketch_keys, sketch_scores
from kvsketch.rotation import Projection, draw_projection
from kvsketch.validation.claim import Setting

#: Norms of keys and queries, exact in every float dtype; not 1, so that a norm left out is seen.
KEY_NORM, QUERY_NORM = 1.5, 0.75
#: Numbers of a projection that is drawn at once.
CHUNK = 1 << 21

#: From q (1, h, s, d), k (1, h, n, d), a projection and an engine to estimates (1, h, s, n); twins bring their own.
Estimate = Callable[[Any, Any, Projection, str], Any]


def estimate_scores(q: Any, k: Any, projection: Projection, engine: str) -> Any:
    """Estimates of the scores, by the library's public functions."""
    return sketch_scores(q, sketch_keys(k, projection, engine=engine), projection, engine=engine)


def with_projection(change: Callable[[Projection], Projection]) -> Estimate:
    """Estimates by the library with another projection than it is given: for twins."""
    return lambda q, k, projection, engine: estimate_scores(q, k, change(projection), engine)


def with_constant(factor: float) -> Estimate:
    """Estimates by the library with a constant c that is off by `factor`: for twins."""
    return with_projection(lambda projection: replace(projection, constant=factor * projection.constant))


def orthonormal_pair(d: int, rng: np.random.Generator) -> tuple[Any, Any]:
    """Two orthogonal unit vectors (d,), d >= 2."""
    first, second = np.linalg.qr(rng.standard_normal((d, 2)))[0].T
    return first, second


def pairs(d: int, cosines: Any, rng: np.random.Generator, *, heads: int = 1) -> tuple[Any, Any]:
    """Queries (1, h, c, d) of QUERY_NORM and in each head a key (1, h, 1, d) of KEY_NORM with which they have the
    `cosines` (c,), float32."""
    cosines = np.asarray(cosines, dtype=np.float64)[:, None]
    axes = [orthonormal_pair(d, rng) for _ in range(heads)]
    k = KEY_NORM * np.stack([first for first, _ in axes])[None, :, None]
    q = QUERY_NORM * np.stack([cosines * first + np.sqrt(1 - cosines**2) * second for first, second in axes])[None]
    return q.astype(np.float32), k.astype(np.float32)


def exact_scores(q: Any, k: Any) -> Any:
    """Products (1, h, s, n) of queries (1, h, s, d) and keys (1, h, n, d) in float64."""
    return np.asarray(q, dtype=np.float64) @ np.asarray(k, dtype=np.float64).swapaxes(-1, -2)


def draw_estimates(
    setting: Setting,
    q: Any,
    k: Any,
    *,
    m: int,
    kind: str,
    seeds: Sequence[int],
    estimate: Estimate = estimate_scores,
) -> Any:
    """Estimates (draws, h, s, n) of the scores of q (1, h, s, d) on k (1, h, n, d), one draw a seed, float64."""
    out = np.empty((len(seeds), k.shape[1], q.shape[2], k.shape[2]))
    for i, seed in enumerate(seeds):
        projection = draw_projection(m, k.shape[3], kind=kind, seed=seed)
        out[i] = estimate(q, k, projection, setting.engine)[0]
    return out


def row_estimates(
    setting: Setting, q: Any, k: Any, *, m: int, kind: str, draws: int, stream: str = ""
) -> Iterator[Any]:
    """The estimates of `draws` sketches of q (s, d) and k (n, d) by their formula, in arrays (some draws, s, n).

    For claims on the formula, where the engine has no part: many sketches are the rows of one tall projection, whose
    blocks are independent.
    """
    d = k.shape[1]
    stride = m if kind == "gaussian" else -(-m // d) * d
    step = max(1, CHUNK // (stride * max(d, len(q) + len(k))))
    norms = np.linalg.norm(k, axis=1)
    seeds = setting.seeds(-(-draws // step), "rows", kind, d, m, stream)
    for i, seed in enumerate(seeds):
        count = min(step, draws - i * step)
        projection = draw_projection(count * stride, d, kind=kind, seed=seed)
        rows = projection.matrix.reshape(count, stride, d)[:, :m]
        signs = np.where(rows @ k.T.astype(np.float32) >= 0, np.float32(1), np.float32(-1))
        sums = (rows @ q.T.astype(np.float32)).swapaxes(1, 2) @ signs
        yield projection.constant / m * norms * sums.astype(np.float64)


def count_failures(setting: Setting, q: Any, k: Any, limit: float, **sketch: Any) -> int:
    """Sketches, as in :func:`row_estimates`, of which any score of q (s, d) on k (n, d) is off by more than `limit`."""
    exact = q @ k.T
    return sum(
        int((np.abs(found - exact) > limit).any(axis=(1, 2)).sum()) for found in row_estimates(setting, q, k, **sketch)
    )
