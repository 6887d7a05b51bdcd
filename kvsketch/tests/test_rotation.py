"""Projections and the Walsh-Hadamard transform: against scipy.linalg.hadamard and the laws of orthogonal matrices."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from scipy.linalg import hadamard

from kvsketch.bounds import sketch_constant
from kvsketch.rotation import KINDS, draw_projection, hadamard_block, hadamard_transform
from kvsketch.testing import CPU_ENGINES, assert_accurate, assert_mean, assert_same, mean_deviation

SIZES = (1, 2, 3, 4, 7, 16, 31, 64, 80, 96, 100, 128, 192, 256, 320, 500, 511, 512)
DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)

every_engine = pytest.mark.parametrize("engine", CPU_ENGINES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_kind = pytest.mark.parametrize("kind", KINDS)


def block_diagonal_hadamard(d: int) -> np.ndarray:
    block = max(size for size in (2**e for e in range(10)) if d % size == 0)
    return np.kron(np.eye(d // block), hadamard(block) / math.sqrt(block))


# The transform.


def test_blocks():
    sizes = {1: 1, 2: 2, 3: 1, 64: 64, 80: 16, 96: 32, 100: 4, 128: 128, 192: 64, 320: 64}
    assert {d: hadamard_block(d) for d in sizes} == sizes


@every_engine
@every_dtype
@pytest.mark.parametrize("d", SIZES)
def test_transform_matches_scipy(engine, dtype, d):
    x = np.random.default_rng(d).standard_normal((3, 2, d)).astype(dtype)
    exact = x.astype(np.float64) @ block_diagonal_hadamard(d).T
    reference = hadamard_transform(x, engine="reference")
    rounded = exact.astype(dtype)  # so that the reference is judged too
    assert_accurate(reference, exact, rounded)
    assert_accurate(hadamard_transform(x, engine=engine), exact, reference)


@every_engine
@pytest.mark.parametrize("d", SIZES)
def test_transform_is_its_own_inverse_and_keeps_norms(engine, d):
    x = np.random.default_rng(d).standard_normal((5, d)).astype(np.float32)
    y = hadamard_transform(x, engine=engine)
    np.testing.assert_allclose(hadamard_transform(y, engine=engine), x, rtol=0, atol=2e-6)
    np.testing.assert_allclose(np.linalg.norm(y, axis=1), np.linalg.norm(x, axis=1), rtol=1e-6)


@every_engine
def test_transform_along_any_axis_strided_and_read_only(engine):
    x = np.random.default_rng(0).standard_normal((4, 12, 6)).astype(np.float32)
    expected = np.moveaxis(hadamard_transform(np.moveaxis(x, 1, -1).copy(), engine=engine), -1, 1)
    before = x.copy()
    x.flags.writeable = False
    assert_same(hadamard_transform(x, axis=1, engine=engine), expected)
    assert_same(hadamard_transform(x, axis=-2, engine=engine), expected)
    assert_same(
        hadamard_transform(x[::2, ::-1], axis=2, engine=engine), hadamard_transform(x, engine=engine)[::2, ::-1]
    )
    assert_same(x, before)
    assert hadamard_transform(x[:0], engine=engine).shape == (0, 12, 6)


@every_engine
def test_transform_confines_nan_to_its_block(engine):
    x = np.ones((2, 96), dtype=np.float32)
    x[0, 40] = np.nan
    wrong = np.isnan(hadamard_transform(x, engine=engine))
    assert wrong[0, 32:64].all()
    assert wrong.sum() == 32


def test_transform_bad_arguments():
    x = np.ones((2, 8), dtype=np.float32)
    with pytest.raises(TypeError, match="x has dtype float64; cast it"):
        hadamard_transform(x.astype(np.float64))
    for axis in (2, -3):
        with pytest.raises(ValueError, match=f"axis={axis} is not an axis of x"):
            hadamard_transform(x, axis=axis)
    with pytest.raises(ValueError, match=r"x has shape \(2, 0\): axis -1 is empty"):
        hadamard_transform(x[:, :0])
    with pytest.raises(TypeError, match=r"expected a NumPy or CuPy array, got builtins\.list"):
        hadamard_transform([1.0, 2.0])
    with pytest.raises(ValueError, match="d must be >= 1, got 0"):
        hadamard_block(0)


# Projections.


@every_kind
@pytest.mark.parametrize("d", [1, 2, 3, 64, 96, 100, 511, 512])
def test_projection_describes_itself(kind, d):
    for m in (1, max(1, d // 2), d, d + 3):
        projection = draw_projection(m, d, kind=kind, seed=5)
        assert projection.matrix.shape == (m, d)
        assert projection.matrix.dtype == np.float32
        assert not projection.matrix.flags.writeable
        assert (projection.kind, projection.m, projection.d) == (kind, m, d)
        assert (projection.seed, projection.stream) == (5, 0)
        assert projection.constant == sketch_constant(d, kind)


@every_kind
def test_projection_is_fixed_by_its_arguments(kind):
    first = draw_projection(40, 16, kind=kind, seed=1)
    assert draw_projection(40, 16, kind=kind, seed=1) is first
    assert_same(draw_projection(24, 16, kind=kind, seed=1).matrix, first.matrix[:24])
    for other in ({"seed": 2}, {"seed": 1, "stream": 1}):
        matrix = draw_projection(40, 16, kind=kind, **other).matrix
        assert not np.isclose(matrix, first.matrix).all(axis=1).any()


@pytest.mark.parametrize("kind", ["orthogonal", "hadamard"])
@pytest.mark.parametrize("d", SIZES)
def test_blocks_are_orthogonal_with_rows_of_norm_sqrt_d(kind, d):
    m = 2 * d + max(1, d // 3)
    matrix = draw_projection(m, d, kind=kind, seed=3).matrix.astype(np.float64)
    for start in range(0, m, d):
        block = matrix[start : start + d]
        np.testing.assert_allclose(block @ block.T / d, np.eye(len(block)), rtol=0, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(matrix, axis=1), math.sqrt(d), rtol=1e-6)
    if d > 3:  # other blocks are others
        cosines = np.abs(matrix[:d] @ matrix[d : 2 * d].T) / d
        assert cosines.max() < 0.9999


@pytest.mark.parametrize("d", [31, 64, 80, 96, 100, 192, 320, 511])
def test_hadamard_rows_reach_all_channels(d):
    """No row rests on few channels, no channel on few rows: 4th moments near the Gaussian 3, where a row confined to a
    block of B channels has d/B times as much, and half of the energy of every row lies in each half of the channels."""
    matrix = draw_projection(d, d, kind="hadamard").matrix.astype(np.float64)
    assert abs((matrix**4).mean() - 3) < 0.5
    share = (matrix[:, : d // 2] ** 2).sum(axis=1) / d
    assert share.min() > 0.1
    assert share.max() < 0.9


@pytest.mark.parametrize("d", [2, 3, 8])
def test_orthogonal_blocks_are_haar(d):
    """Haar: E S_11 = 0, E S_11^2 = 1, E S_11^4 = 3d/(d+2), and no correlation of diagonal entries, which a QR without
    sign fix has (N = 4000, means by known or sample variance, false alarm 1e-6; the twin without it must fail)."""
    draws, twin = [], []
    for seed in range(4000):
        draws.append(draw_projection(d, d, seed=seed).matrix.astype(np.float64))
        q = np.linalg.qr(np.random.default_rng(seed).standard_normal((d, d)))[0]
        twin.append(q.T * math.sqrt(d))
    samples = np.array(draws)
    first, diagonal = samples[:, 0, 0], samples[:, 0, 0] * samples[:, -1, -1]
    assert_mean(first, 0, 1.0, tests=4)
    assert_mean(first**2, 1, tests=4)
    assert_mean(first**4, 3 * d / (d + 2), tests=4)
    assert_mean(diagonal, 0, tests=4)
    assert abs(mean_deviation(np.array(twin)[:, 0, 0], 0, 1.0)) > 10


def test_gaussian_moments():
    """512 x 512 entries of N(0, 1): mean, square and fourth power (variances 1, 2, 96), false alarm 1e-6."""
    numbers = draw_projection(512, 512, kind="gaussian").matrix.astype(np.float64).ravel()
    assert_mean(numbers, 0, 1, tests=3)
    assert_mean(numbers**2, 1, 2, tests=3)
    assert_mean(numbers**4, 3, 96, tests=3)


def test_projection_bad_arguments():
    not_an_integer: Any = 8.0
    with pytest.raises(ValueError, match="m must be >= 1, got 0"):
        draw_projection(0, 8)
    with pytest.raises(ValueError, match="d must be >= 1, got -2"):
        draw_projection(8, -2)
    with pytest.raises(TypeError, match=r"m must be an integer, got 8\.0"):
        draw_projection(not_an_integer, 8)
    with pytest.raises(ValueError, match="kind must be one of"):
        draw_projection(8, 8, kind="haar")
    with pytest.raises(ValueError, match="seed must be >= 0, got -1"):
        draw_projection(8, 8, seed=-1)
    with pytest.raises(ValueError, match="stream must be >= 0, got -1"):
        draw_projection(8, 8, stream=-1)
