"""Estimates of scores over many independent projections, by the library's public functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvsketch.qjl import sketch_keys, sketch_scores
from kvsketch.rotation import Projection, draw_projection
from kvsketch.validation.claim import Setting

#: A function that changes a projection, or the estimates: how a twin is broken.
Change = Callable[[Any], Any]


def orthonormal_pair(d: int, rng: np.random.Generator) -> tuple[Any, Any]:
    """Two orthogonal unit vectors (d,); for d = 1 the second is 0."""
    if d == 1:
        return np.ones(1), np.zeros(1)
    first, second = np.linalg.qr(rng.standard_normal((d, 2)))[0].T
    return first, second


def pairs(d: int, cosines: Any, rng: np.random.Generator) -> tuple[Any, Any]:
    """A unit key (1, 1, 1, d) and unit queries (1, 1, c, d) at the given `cosines` (c,) with it, float32."""
    cosines = np.asarray(cosines, dtype=np.float64)
    k, other = orthonormal_pair(d, rng)
    q = cosines[:, None] * k + np.sqrt(1 - cosines**2)[:, None] * other
    return k.reshape(1, 1, 1, d).astype(np.float32), q.reshape(1, 1, -1, d).astype(np.float32)


def draw_estimates(
    setting: Setting,
    q: Any,
    k: Any,
    *,
    m: int,
    kind: str,
    seeds: Sequence[int],
    change: Callable[[Projection], Projection] | None = None,
) -> Any:
    """Estimates (draws, s, n) of the scores of q (1, 1, s, d) on k (1, 1, n, d), one draw a seed, float64.

    `change` makes another projection of each, for twins.
    """
    out = np.empty((len(seeds), q.shape[2], k.shape[2]))
    for i, seed in enumerate(seeds):
        projection = draw_projection(m, k.shape[3], kind=kind, seed=seed)
        if change is not None:
            projection = change(projection)
        keys = sketch_keys(k, projection, engine=setting.engine)
        out[i] = sketch_scores(q, keys, projection, engine=setting.engine)[0, 0]
    return out
