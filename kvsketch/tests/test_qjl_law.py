"""The law of the sketch's estimate over random projections: its mean and its exact variance."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvsketch.bounds import sketch_variance
from kvsketch.qjl import sketch_keys, sketch_scores
from kvsketch.rotation import draw_projection
from kvsketch.testing import assert_mean, mean_deviation

COSINES = np.array([-1, -0.5, 0, 0.5, 1])
SMALL_D = 16
DRAWS = 12000


def pair_of(d: int) -> tuple[np.ndarray, np.ndarray]:
    """A unit key (1, 1, 1, d) and unit queries (1, 1, 5, d) with the cosines above."""
    k, other = np.linalg.qr(np.random.default_rng(7).standard_normal((d, 2)))[0].T
    q = COSINES[:, None] * k + np.sqrt(1 - COSINES**2)[:, None] * other
    return k.reshape(1, 1, 1, d).astype(np.float32), q.reshape(1, 1, 5, d).astype(np.float32)


def estimates(m: int, kind: str, draws: int, *, d: int = SMALL_D) -> np.ndarray:
    """Estimates (draws, 5) over independent projections, by the public functions; |k| = 1 is exact in float16."""
    k, q = pair_of(d)
    out = np.empty((draws, 5))
    for seed in range(draws):
        projection = draw_projection(m, d, kind=kind, seed=seed)
        out[seed] = sketch_scores(q, sketch_keys(k, projection), projection)[0, 0, :, 0]
    return out


@pytest.mark.parametrize("kind", ["orthogonal", "gaussian"])
@pytest.mark.parametrize("m", [SMALL_D // 2, SMALL_D, 2 * SMALL_D, 4 * SMALL_D])
def test_estimate_is_unbiased_with_the_exact_variance(kind, m):
    """12000 draws, 5 cosines, 8 settings: the means by the exact variance, and the sample variances by their own
    standard errors, all with a false alarm of 1e-6 for the lot. The twins must be found out: the constant sqrt(pi/2)
    (with c_d for Gaussian rows), and the other kind's variance."""
    samples = estimates(m, kind, DRAWS)
    variance = sketch_variance(m, SMALL_D, COSINES, kind=kind)
    tests = 2 * 2 * 4 * len(COSINES)
    assert_mean(samples, COSINES, variance, tests=tests)
    squares = (samples - COSINES) ** 2
    assert_mean(squares, variance, tests=tests)
    np.testing.assert_allclose(squares.mean(axis=0), variance, rtol=0.1)

    published, exact = math.sqrt(math.pi / 2), draw_projection(m, SMALL_D).constant
    wrong = published / exact if kind == "orthogonal" else exact / published
    assert np.abs(mean_deviation(samples * wrong, COSINES, variance))[[0, -1]].min() > 6
    other = sketch_variance(m, SMALL_D, COSINES, kind="gaussian" if kind == "orthogonal" else "orthogonal")
    assert np.abs(mean_deviation(squares, other)).max() > 20


def test_estimate_of_a_hadamard_sketch_is_nearly_unbiased():
    """No theorem here: random signs are no Haar measure. Measured, and bounded with 2000 draws (standard errors of at
    most 0.0012 at d = 64, m = 128), for dense keys and for keys of one and two channels, where one round of signs and
    transform is off by 0.25 and 0.6."""
    d, m, draws = 64, 128, 2000
    k = np.zeros((1, 1, 3, d), dtype=np.float32)
    k[0, 0, 0, 1] = 1
    k[0, 0, 1, [1, 3]] = 0.8, 0.6
    k[0, 0, 2] = pair_of(d)[0][0, 0, 0]
    q = np.stack([k[0, 0, 0], k[0, 0, 1], np.eye(d, dtype=np.float32)[3], k[0, 0, 2]])[None, None]
    total = np.zeros((4, 3))
    for seed in range(draws):
        projection = draw_projection(m, d, kind="hadamard", seed=seed)
        total += sketch_scores(q, sketch_keys(k, projection), projection)[0, 0]
    bias = total / draws - q[0, 0] @ k[0, 0].T
    assert np.abs(bias).max() < 0.015
