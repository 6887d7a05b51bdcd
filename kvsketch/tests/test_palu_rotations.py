"""Rotations of latents: orthogonal, Hadamard where one exists, and without a trace in the product of factors."""

from __future__ import annotations

import numpy as np
import pytest

from kvsketch.palu import draw_rotation, has_hadamard, rotate

RANKS = (1, 2, 3, 7, 12, 20, 28, 32, 36, 64, 96, 100, 134, 160, 192, 224, 317, 512)


@pytest.mark.parametrize("rank", RANKS)
def test_rotations_are_orthogonal(rank):
    rotation = draw_rotation(rank)
    assert rotation.shape == (rank, rank)
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(rank), atol=1e-12)


def test_hadamard_matrices_spread_a_coordinate_evenly():
    for rank in (*range(32, 513, 32), 12, 20, 28, 36, 44, 1, 2, 4, 8):
        assert has_hadamard(rank), rank
        np.testing.assert_allclose(np.abs(draw_rotation(rank)), rank**-0.5, rtol=1e-12)
    for rank in (3, 6, 10, 30, 92, 134):
        assert not has_hadamard(rank), rank


@pytest.mark.parametrize("rank", [7, 100, 134])
def test_other_ranks_take_a_cosine_transform(rank):
    from scipy.fft import dct

    rotation = draw_rotation(rank, seed=5)
    signs = np.sign(rotation[0])
    np.testing.assert_allclose(rotation * signs, dct(np.eye(rank), axis=0, norm="ortho"), atol=1e-12)
    assert np.abs(rotation).max() <= np.sqrt(2 / rank) + 1e-12


@pytest.mark.parametrize("rank", [32, 50])
def test_signs_are_drawn_from_the_seed(rank):
    assert np.array_equal(draw_rotation(rank, seed=3), draw_rotation(rank, seed=3))
    assert not np.array_equal(draw_rotation(rank, seed=3), draw_rotation(rank, seed=4))
    assert len(np.unique(np.sign(draw_rotation(rank)[0]))) == 2


@pytest.mark.parametrize("rank", [1, 32, 33])
def test_fused_rotations_leave_the_product(rank):
    rng = np.random.default_rng(rank)
    down, up = rng.standard_normal((rank, 50)), rng.standard_normal((40, rank))
    rotation = draw_rotation(rank)
    turned_down, turned_up = rotate(down, up, rotation)
    np.testing.assert_allclose(turned_up @ turned_down, up @ down, atol=1e-11)
    np.testing.assert_allclose(turned_down, rotation @ down, atol=1e-12)


@pytest.mark.parametrize("rank", [96, 134])
def test_rotated_latents_are_more_even(rank):
    # Latents whose spread falls as singular values do: a token's group then spans what the largest needs.
    rng = np.random.default_rng(0)
    latents = rng.standard_normal((200, rank)) * np.exp(-np.arange(rank) / 10)
    turned = latents @ draw_rotation(rank).T
    span, turned_span = (np.ptp(x, axis=1).mean() for x in (latents, turned))
    assert turned_span < 0.6 * span


@pytest.mark.parametrize(
    ("down", "up", "rotation", "message"),
    [
        (np.ones((3, 4)), np.ones((5, 2)), np.eye(3), r"down \(rank, in\) and up \(out, rank\) must fit"),
        (np.ones((3, 4)), np.ones((5, 3)), np.eye(4), r"rotation must have shape \(3, 3\), got \(4, 4\)"),
        (np.ones((3, 4)), np.ones((5, 3)), 2 * np.eye(3), "rotation must be orthogonal"),
        (np.ones((3, 4)), np.ones((5, 3)), np.full((3, 3), np.nan), "rotation must be orthogonal"),
    ],
)
def test_bad_input_is_named(down, up, rotation, message):
    with pytest.raises(ValueError, match=message):
        rotate(down, up, rotation)


@pytest.mark.parametrize(("rank", "seed", "message"), [(0, 0, "rank must be >= 1"), (4, -1, "seed must be >= 0")])
def test_bad_sizes_are_named(rank, seed, message):
    with pytest.raises(ValueError, match=message):
        draw_rotation(rank, seed=seed)
