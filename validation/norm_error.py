"""A score's error is proportional to the key's norm, whatever its size; keys too large, or zero, harm no other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from kvsketch.bitpack import pack_signs, unpack_signs
from kvsketch.bounds import sketch_variance
from kvsketch.qjl import SketchedKeys, sketch_keys, sketch_scores
from kvsketch.rotation import Projection, draw_projection
from kvsketch.statistical_tests import check_at_least, check_at_most, check_mean
from kvsketch.validation.claim import HOLDS, Claim, Figure, Outcome, Setting, Twin
from kvsketch.validation.draws import pairs

#: Norms of keys within float16's range, and beyond it.
NORMS = np.array([1e-3, 0.03, 1, 17, 300, 6e3, 6e4])
BEYOND = np.array([7e4, 1e6, 1e25])
HALF_MAX = 65504.0
D, M = 16, 24
#: Columns of the queries: at right angles to all keys, and along them.
COSINES = (0.0, 1.0)
DRAWS, FULL_DRAWS = 600, 20_000
#: Half a spacing of float16: a norm's rounding, which both numbers of a comparison carry.
HALF_ROUNDING = 2.0**-11

Sketch = Callable[[Any, Projection, str], SketchedKeys]


def sketch(k: Any, projection: Projection, engine: str) -> SketchedKeys:
    return sketch_keys(k, projection, engine=engine)


def check_shares(setting: Setting, outcome: Outcome, sketch: Sketch) -> None:
    """Keys of one direction and all norms: the same estimate over the norm, which scatters by the same variance."""
    q, direction = pairs(D, COSINES, setting.generator("direction"))
    direction = direction / np.linalg.norm(direction)
    q = q / np.linalg.norm(q[0, 0, 0])
    k = (NORMS[:, None] * direction[0, 0]).astype(np.float32)[None, None]
    seeds = setting.seeds(setting.draws(DRAWS, FULL_DRAWS), "norms")
    shares = np.empty((len(seeds), len(COSINES), len(NORMS)))
    for i, seed in enumerate(seeds):
        projection = draw_projection(M, D, seed=seed)
        with np.errstate(over="ignore", invalid="ignore"):
            keys = sketch(k, projection, setting.engine)
            shares[i] = sketch_scores(q, keys, projection, engine=setting.engine)[0, 0] / NORMS
    one = list(NORMS).index(1)
    # Norm and direction are rounded to float32 as well: a few of its spacings.
    limit = HALF_ROUNDING * 1.01
    spread = np.abs(shares / shares[:, :, one : one + 1] - 1).max() if np.isfinite(shares).all() else np.inf
    what = f"estimate over norm, largest relative difference between norms {NORMS[0]:g} and {NORMS[-1]:g} and norm 1"
    outcome.checks.append(check_at_most(what, spread, limit, n=len(seeds)))
    squares = shares[:, 0] ** 2
    variance = sketch_variance(M, D, 0.0)
    what = f"mean squared error over norm^2, {len(NORMS)} norms, cosine 0, d = {D}, m = {M}"
    tolerance = 3 * HALF_ROUNDING * variance
    outcome.checks.append(check_mean(what, squares, variance, tolerance=tolerance, level=setting.level))
    root = np.sqrt(squares.mean(axis=0))
    measured = f"{root.min():.4f} to {root.max():.4f}"
    what = f"root mean square error over |q||k|, norms {NORMS[0]:g} to {NORMS[-1]:g}"
    outcome.figures.append(Figure(what, "constant", f"{variance**0.5:.4f}", measured))


def check_extremes(setting: Setting, outcome: Outcome, sketch: Sketch) -> None:
    """Keys beyond float16's range are stored as 65504, counted, and change no other key; zero keys give zero."""
    rng = setting.generator("extremes")
    k = rng.standard_normal((1, 2, 12, D)).astype(np.float32)
    mixed = k.copy()
    direction = k[0, 0, 0] / np.linalg.norm(k[0, 0, 0])
    large, zero = [1, 5, 9], [3, 8]
    mixed[0, 0, large] = (BEYOND[:, None] * direction).astype(np.float32)
    mixed[0, 1, zero] = 0
    mixed[0, 1, zero[0]] = np.float32(-0.0)
    q = rng.standard_normal((1, 2, 5, D)).astype(np.float32)
    projection = draw_projection(M, D, seed=setting.seeds(1, "extremes")[0])
    with np.errstate(over="ignore", invalid="ignore"):
        keys, plain = (sketch(x, projection, setting.engine) for x in (mixed, k))
        scores, plain_scores = (sketch_scores(q, x, projection, engine=setting.engine) for x in (keys, plain))
    others = np.ones((1, 2, 12), dtype=bool)
    others[0, 0, large] = others[0, 1, zero] = False
    signs = unpack_signs(keys.signs, M, engine=setting.engine)
    outcome.checks += [
        check_at_most(
            "stored norms of keys beyond 65504, distance from it", np.abs(keys.norms[0, 0, large] - HALF_MAX).max(), 0
        ),
        check_at_most("saturated norms counted, less those there are", abs(keys.saturated - len(BEYOND)), 0),
        check_at_most(
            "scores of other keys that differ", np.sum((scores != plain_scores)[others[:, :, None].repeat(5, 2)]), 0
        ),
        check_at_most("bytes of other keys that differ", np.sum((keys.signs != plain.signs)[others]), 0),
        check_at_most("largest score of a zero key", np.abs(scores[0, 1][:, zero]).max(), 0),
        check_at_least("least sign of a zero key", signs[0, 1, zero].min(), 1),
        check_at_least("least score of ordinary keys, by size", np.abs(scores[0, 1][:, 4]).min(), 1e-30),
    ]


def run_with(setting: Setting, sketch: Sketch) -> Outcome:
    outcome = Outcome()
    check_shares(setting, outcome, sketch)
    check_extremes(setting, outcome, sketch)
    return outcome


def square_in_float16(k: Any, projection: Projection, engine: str) -> SketchedKeys:
    """Norms from squares in float16, as a kernel in half precision would find them: infinite from 256 on."""
    keys = sketch(k, projection, engine)
    squares = k.astype(np.float16) ** 2
    return replace(keys, norms=np.sqrt(squares.sum(axis=-1)).astype(np.float16))


def overflow_norms(k: Any, projection: Projection, engine: str) -> SketchedKeys:
    """Norms rounded to float16 without saturation."""
    keys = sketch(k, projection, engine)
    norms = np.linalg.norm(k.astype(np.float64), axis=-1)
    return replace(keys, norms=norms.astype(np.float16), saturated=0)


def negate_zero_signs(k: Any, projection: Projection, engine: str) -> SketchedKeys:
    """sign(0) = -1."""
    keys = sketch(k, projection, engine)
    signs = unpack_signs(keys.signs, projection.m).astype(np.float32)
    signs[~k.any(axis=-1)] = -1
    return replace(keys, signs=pack_signs(signs))


CLAIM = Claim(
    name="norm_error",
    title="A score's error grows in proportion to the key's length, and extreme keys harm no other",
    source="QJL, Lemma 3.5 (the error is eps |q||k|)",
    published="the error is proportional to |q||k|",
    proved="the estimate over |k| does not depend on |k| but for its float16 rounding, at most 2^-11; beyond 65504 the "
    "norm saturates; sign(0) = +1",
    finding="True for lengths from 0.001 to 60,000: the error as a share of the length is always the same. Longer keys "
    "are stored as 65,504 long and counted, keys of zeros give exactly zero, and their neighbours are not touched.",
    verdict=HOLDS,
    run=lambda setting: run_with(setting, sketch),
    twins=(
        Twin("squares of norms in float16", lambda setting: run_with(setting, square_in_float16)),
        Twin("norms in float16 without saturation", lambda setting: run_with(setting, overflow_norms)),
        Twin("sign(0) = -1", lambda setting: run_with(setting, negate_zero_signs)),
    ),
)
