"""Keys with outlier channels, and estimates of their scores with those channels split off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvsketch.qjl import sketch_keys, sketch_scores
from kvsketch.rotation import Projection, draw_projection
from kvsketch.validation.claim import Setting

#: Tokens, which share outlier channels.
PAGE = 32

#: From q, k, the two projections, the number of outlier channels and an engine to estimates; twins bring their own.
SplitEstimate = Callable[[Any, Any, Projection, Projection, int, str], Any]


def planted_outliers(d: int, outliers: int, rng: np.random.Generator) -> tuple[Any, Any, Any]:
    """Queries (1, 1, 3, d), keys (1, 1, PAGE, d), float32, and the `outliers` channels where keys are 20 times larger.

    Keys scatter around one direction; the queries lie along it, against it and anywhere.
    """
    channels = np.sort(rng.choice(d, outliers, replace=False))
    direction = np.sign(rng.standard_normal(d))
    k = direction + 0.3 * rng.standard_normal((PAGE, d))
    k[:, channels] *= 20
    q = np.stack([direction, 0.3 * rng.standard_normal(d) - direction, rng.standard_normal(d)])
    return q[None, None].astype(np.float32), k[None, None].astype(np.float32), channels


def biased_keys(d: int, rng: np.random.Generator) -> tuple[Any, Any, Any]:
    """Queries, keys and channels as above: keys of unit numbers with 600 added on three channels, as Qwen2.5's."""
    channels = np.sort(rng.choice(d, 3, replace=False))
    k = rng.standard_normal((PAGE, d))
    k[:, channels] += 600
    q = rng.standard_normal((3, d))
    return q[None, None].astype(np.float32), k[None, None].astype(np.float32), channels


def split(x: Any, channels: Any) -> tuple[Any, Any]:
    """x_in and x_out (..., d) in float64: `x` with zeros on the channels, and the rest."""
    x = np.asarray(x, dtype=np.float64)
    outlying = np.isin(np.arange(x.shape[-1]), channels)
    return np.where(outlying, 0, x), np.where(outlying, x, 0)


def estimate_split(q: Any, k: Any, projection: Projection, outer: Projection, outliers: int, engine: str) -> Any:
    """Estimates of the scores with outlier channels, by the library's public functions."""
    keys = sketch_keys(k, projection, outliers=outliers, outlier_projection=outer, page=PAGE, engine=engine)
    return sketch_scores(q, keys, projection, outlier_projection=outer, engine=engine)


def draw_split_estimates(
    setting: Setting,
    q: Any,
    k: Any,
    *,
    m: int,
    outlier_m: int,
    kind: str,
    outliers: int,
    draws: int,
    estimate: SplitEstimate = estimate_split,
) -> Any:
    """Estimates (draws, s, n) of the scores of q (1, 1, s, d) on k (1, 1, n, d), new projections in each draw."""
    d = k.shape[3]
    out = np.empty((draws, q.shape[2], k.shape[2]))
    for i, seed in enumerate(setting.seeds(draws, "split", m, outlier_m, kind, d)):
        inner = draw_projection(m, d, kind=kind, seed=seed)
        outer = draw_projection(outlier_m, d, kind=kind, seed=seed, stream=1)
        out[i] = estimate(q, k, inner, outer, outliers, setting.engine)[0, 0]
    return out
