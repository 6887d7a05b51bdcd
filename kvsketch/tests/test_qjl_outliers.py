"""Sign sketches with outlier channels: which are chosen, and what they save."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvsketch.qjl import select_outlier_channels, sketch_keys, sketch_scores
from kvsketch.rotation import draw_projection
from kvsketch.testing import CPU_ENGINES, assert_accurate, assert_same

DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)

every_engine = pytest.mark.parametrize("engine", CPU_ENGINES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def draw(shape: tuple[int, ...], dtype=np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@every_engine
@every_dtype
@pytest.mark.parametrize("page", [1, 32, 50])
def test_outlier_choice(engine, dtype, page):
    k = draw((2, 2, 45, 24), dtype)
    chosen = select_outlier_channels(k, 6, page=page, engine=engine)
    assert chosen.shape == (2, 2, -(-45 // page), 6)
    for index in range(chosen.shape[2]):
        energy = (k[:, :, index * page : (index + 1) * page].astype(np.float64) ** 2).sum(axis=2)
        expected = np.sort(np.argsort(-energy, axis=-1, kind="stable")[..., :6], axis=-1)
        np.testing.assert_array_equal(chosen[:, :, index], expected)


@every_engine
def test_outlier_ties_go_to_the_lowest_channel(engine):
    k = np.ones((1, 1, 32, 12), dtype=np.float32)
    assert select_outlier_channels(k, 4, engine=engine)[0, 0, 0].tolist() == [0, 1, 2, 3]
    k[..., 9] = -2
    assert select_outlier_channels(k, 4, engine=engine)[0, 0, 0].tolist() == [0, 1, 2, 9]
    k[0, 0, 0, 7] = np.nan
    k[0, 0, 0, 8] = np.inf
    assert select_outlier_channels(k, 3, engine=engine)[0, 0, 0].tolist() == [7, 8, 9]
    assert select_outlier_channels(k, 12, engine=engine)[0, 0, 0].tolist() == list(range(12))
    assert select_outlier_channels(k, 0, engine=engine).shape == (1, 1, 1, 0)
    assert select_outlier_channels(k[:, :, :0], 3, engine=engine).shape == (1, 1, 0, 3)


@every_engine
def test_fixed_channels(engine):
    """Channels given once serve all pages: as a page over all tokens has them."""
    k, q = draw((2, 2, 70, 32)), draw((2, 2, 3, 32), seed=1)
    first, second = draw_projection(64, 32), draw_projection(16, 32, stream=1)
    options: dict[str, Any] = {"outlier_projection": second, "engine": engine}
    whole = sketch_keys(k, first, outliers=5, page=100, **options)
    channels = select_outlier_channels(k, 5, page=100, engine=engine)[:, :, 0]
    keys = sketch_keys(k, first, channels=channels, **options)
    assert_same(keys.channels, np.repeat(whole.channels, 3, axis=2))
    for name in ("signs", "norms", "outlier_signs", "outlier_norms"):
        assert_same(getattr(keys, name), getattr(whole, name))
    scores = sketch_scores(q, keys, first, **options)
    assert_accurate(scores, sketch_scores(q, whole, first, **options).astype(np.float64), scores)


@every_engine
def test_splitting_off_bias_channels_saves_the_scores(engine):
    """Keys N(0, 1) with +-600 on 3 channels, as some models have: the differences between the scores of a query, all
    that a softmax sees, drown without outlier channels and survive when just the loud ones are split off. Splitting 8
    helps less: the error of the loud part is proportional to |q_out|, and 5 ordinary channels join it."""
    d, n = 128, 96
    k, q = draw((1, 1, n, d)), draw((1, 1, 8, d), seed=1)
    k[..., [3, 77, 120]] += np.array([600, -600, 600], dtype=np.float32)
    q[..., [3, 77, 120]] *= 0.1
    true = (q @ k.swapaxes(-1, -2)).astype(np.float64)
    first, second = draw_projection(256, d), draw_projection(128, d, stream=1)

    def spread(scores: np.ndarray) -> float:
        return float((scores - scores.mean(axis=-1, keepdims=True)).std())

    def error(outliers: int) -> float:
        options: dict[str, Any] = {"outlier_projection": second} if outliers else {}
        keys = sketch_keys(k, first, outliers=outliers, engine=engine, **options)
        return spread(sketch_scores(q, keys, first, engine=engine, **options) - true)

    assert error(0) > 5 * spread(true)
    assert error(3) < 0.6 * spread(true)
    assert error(3) < error(8) < error(0)


def test_bad_channels():
    k, first, second = draw((1, 2, 5, 8)), draw_projection(16, 8), draw_projection(8, 8, stream=1)

    def sketch(channels, **options):
        return sketch_keys(k, first, outlier_projection=second, channels=np.asarray(channels), **options)

    for channels in ([[[1, 8], [0, 1]]], [[[-1, 2], [0, 1]]], [[[2, 2], [0, 1]]], [[[2, 1], [0, 1]]]):
        with pytest.raises(ValueError, match="channels must be strictly increasing numbers from 0 to 7"):
            sketch(channels)
    with pytest.raises(ValueError, match=r"channels has shape \(1, 1, 2\), but k has shape"):
        sketch([[[1, 2]]])
    with pytest.raises(ValueError, match=r"channels must have shape \(b, h, outliers\)"):
        sketch([1, 2])
    with pytest.raises(TypeError, match="channels has dtype float64"):
        sketch([[[1.0], [2.0]]])
    with pytest.raises(ValueError, match="outliers=3, but channels holds 2"):
        sketch([[[1, 2], [0, 1]]], outliers=3)
    assert sketch([[[1, 2], [0, 1]]], outliers=2).channels.shape == (1, 2, 1, 2)
