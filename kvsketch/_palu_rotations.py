"""Rotations of latents: they spread what few directions hold over all of them, so that few bits lose less.

A rotation R is fused into both factors of a weight, (up R^T)(R down), and costs nothing afterwards.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from kvsketch._checks import check_integer

#: How far a rotation times its transpose may be from the identity.
_TOLERANCE = 1e-5


def draw_rotation(rank: int, *, seed: int = 0) -> np.ndarray:
    """An orthogonal matrix (rank, rank) in float64 that mixes all coordinates, with random signs.

    A Hadamard matrix where one is known here (:func:`has_hadamard`: among others every multiple of 32 up to 512), all
    of whose entries have the same size; for any other rank the discrete cosine transform (DCT-II). The signs of the
    coordinates that are mixed are drawn from `seed`; the same arguments give the same matrix.
    """
    rank = check_integer("rank", rank, low=1)
    seed = check_integer("seed", seed, low=0)
    signs = np.random.Generator(np.random.PCG64(seed)).choice((-1.0, 1.0), size=rank)
    return _transform(rank) * signs


def has_hadamard(rank: int) -> bool:
    """Whether a Hadamard matrix of this size is known here: powers of two times the sizes q + 1 and 2(q + 1) of Paley.

    These are for primes q with q mod 4 = 3 and q mod 4 = 1: 12, 20, 28, 36, 44, 60, 68, ...
    """
    return _hadamard(check_integer("rank", rank, low=1)) is not None


def rotate(down: Any, up: Any, rotation: Any) -> tuple[np.ndarray, np.ndarray]:
    """Factors with a rotation fused into both: (R down, up R^T), whose product is that of `down` and `up`.

    Parameters
    ----------
    down : (rank, in)
    up : (out, rank)
    rotation : (rank, rank), orthogonal
    """
    down, up, rotation = (np.asarray(x, np.float64) for x in (down, up, rotation))
    if down.ndim != 2 or up.ndim != 2 or up.shape[1] != down.shape[0]:
        raise ValueError(f"down (rank, in) and up (out, rank) must fit, got shapes {down.shape} and {up.shape}")
    rank = down.shape[0]
    if rotation.shape != (rank, rank):
        raise ValueError(f"rotation must have shape {(rank, rank)}, got {rotation.shape}")
    if not np.abs(rotation @ rotation.T - np.eye(rank)).max(initial=0) <= _TOLERANCE:
        raise ValueError("rotation must be orthogonal; draw it with draw_rotation")
    return rotation @ down, up @ rotation.T


@lru_cache(maxsize=64)
def _transform(size: int) -> np.ndarray:
    matrix = _hadamard(size)
    if matrix is not None:
        return matrix / math.sqrt(size)
    order = np.arange(size)
    matrix = np.cos(math.pi / (2 * size) * np.outer(order, 2 * order + 1)) * math.sqrt(2 / size)
    matrix[0] = 1 / math.sqrt(size)
    return matrix


def _hadamard(size: int) -> np.ndarray | None:
    """A matrix of 1 and -1 with orthogonal rows, or None where neither Sylvester nor Paley gives one."""
    if size <= 2:
        return np.array([[1.0, 1.0], [1.0, -1.0]])[:size, :size]
    if size % 4:
        return None
    half = _hadamard(size // 2)
    if half is not None:
        return np.block([[half, half], [half, -half]])
    if _is_prime(size - 1):
        return _paley(size - 1)
    if _is_prime(size // 2 - 1) and (size // 2 - 1) % 4 == 1:
        return _paley_doubled(size // 2 - 1)
    return None


def _is_prime(q: int) -> bool:
    return q > 1 and all(q % factor for factor in range(2, math.isqrt(q) + 1))


def _residues(q: int) -> np.ndarray:
    """Jacobsthal's matrix (q, q): 1 where i - j is a square modulo q, -1 where it is none, 0 on the diagonal."""
    character = np.full(q, -1.0)
    character[np.square(np.arange(1, q)) % q] = 1
    character[0] = 0
    order = np.arange(q)
    return character[(order[:, None] - order) % q]


def _paley(q: int) -> np.ndarray:
    """Paley's first construction, for a prime q with q mod 4 = 3: size q + 1."""
    matrix = np.ones((q + 1, q + 1))
    matrix[1:, 0] = -1
    matrix[1:, 1:] = _residues(q) + np.eye(q)
    return matrix


def _paley_doubled(q: int) -> np.ndarray:
    """Paley's second construction, for a prime q with q mod 4 = 1: size 2(q + 1)."""
    core = np.ones((q + 1, q + 1))
    core[0, 0] = 0
    core[1:, 1:] = _residues(q)
    return np.kron(core, [[1.0, 1.0], [1.0, -1.0]]) + np.kron(np.eye(q + 1), [[1.0, -1.0], [-1.0, -1.0]])
