"""Random projections of sign sketches (QJL, arXiv 2406.03482) and the fast Walsh-Hadamard transform."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np

from kvsketch._checks import check_choice, check_float, check_integer
from kvsketch._dispatch import implementation, namespace

__all__ = ["KINDS", "Projection", "draw_projection", "hadamard_block", "hadamard_transform"]

KINDS = ("gaussian", "orthogonal", "hadamard")

#: Rounds of order, signs and transform in a Hadamard projection.
_ROUNDS = 3


@dataclass(frozen=True, eq=False)
class Projection:
    """A random matrix S (m, d) that sketches d-vectors, and what it was drawn from.

    `matrix` is a read-only float32 NumPy array; `constant` is the c that makes sign(S k) an unbiased sketch
    (:func:`kvsketch.bounds.sketch_constant`).
    """

    kind: str
    m: int
    d: int
    seed: int
    stream: int
    matrix: np.ndarray
    constant: float

    def matrix_beside(self, x: Any) -> Any:
        """The matrix in the library and on the device of array `x`, sent there once."""
        return self.matrix if isinstance(x, np.ndarray) else _on_device(self, namespace(x), int(x.device.id))


@lru_cache(maxsize=64)
def _on_device(projection: Projection, xp: ModuleType, device: int) -> Any:
    with xp.cuda.Device(device):
        matrix = xp.asarray(projection.matrix)
        # Whatever stream uses it later finds it complete.
        xp.cuda.get_current_stream().synchronize()
        return matrix


def draw_projection(m: int, d: int, *, kind: str = "orthogonal", seed: int = 0, stream: int = 0) -> Projection:
    """Draw a projection S (m, d); the same arguments give the same object.

    Parameters
    ----------
    m, d : int
        Rows and columns, both at least 1.
    kind : {"orthogonal", "gaussian", "hadamard"}
        - ``"gaussian"``: independent N(0, 1) numbers.
        - ``"orthogonal"``: independent blocks of d rows, each a Haar-distributed orthogonal matrix times sqrt(d); the
          last block keeps m mod d of its rows. What the experiments of the paper use.
        - ``"hadamard"``: blocks as before, but each block is built from fast transforms: three rounds, each a random
          order and random signs of the coordinates, then an orthonormal Hadamard matrix on the first D coordinates and,
          after new signs, on the last D, with D the largest power of two <= d (once, if D = d); at last random row
          order. Rows are orthogonal, have norm sqrt(d) and reach all channels for every d, which block-diagonal rows
          would not. One round, the H diag(signs) of the literature, fails on keys of few channels: for a key (0.8, 0.6)
          on two channels it estimates the query's product with the second as 0, and with a one-channel key as 25 % too
          large; with three rounds the bias measured is at most about 0.01 |q||k| for d >= 64, 0.02 |q||k| at d = 16.

        Gaussian and orthogonal sketches are exactly unbiased; Hadamard ones only nearly so.
    seed, stream : int
        Both at least 0. Streams of one seed are independent: 0 is S, 1 is the projection of outlier channels.

    Returns
    -------
    Projection
        Drawn in float64 on the host, then rounded to float32, so that every engine uses the same numbers. The first
        rows of a larger m are the rows of a smaller one.

    References
    ----------
    QJL, arXiv 2406.03482, Definition 3.1 and section 4 (orthogonal rows).
    """
    m = check_integer("m", m, low=1)
    d = check_integer("d", d, low=1)
    check_choice("kind", kind, KINDS)
    seed = check_integer("seed", seed, low=0)
    stream = check_integer("stream", stream, low=0)
    return _draw(m, d, kind, seed, stream)


@lru_cache(maxsize=64)
def _draw(m: int, d: int, kind: str, seed: int, stream: int) -> Projection:
    from kvsketch.bounds import sketch_constant

    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(stream,))))
    if kind == "gaussian":
        rows = rng.standard_normal((m, d))
    else:
        block = _orthogonal_block if kind == "orthogonal" else _hadamard_block
        rows = np.concatenate([block(rng, d) for _ in range(-(-m // d))])[:m]
    matrix = rows.astype(np.float32)
    matrix.flags.writeable = False
    return Projection(kind, m, d, seed, stream, matrix, sketch_constant(d, kind))


def _orthogonal_block(rng: np.random.Generator, d: int) -> np.ndarray:
    """A Haar orthogonal matrix (d, d) times sqrt(d): QR of a Gaussian matrix with the signs of diag(R) taken out."""
    q, r = np.linalg.qr(rng.standard_normal((d, d)))
    return (q * np.copysign(math.sqrt(d), np.diagonal(r))).T


def _hadamard_block(rng: np.random.Generator, d: int) -> np.ndarray:
    """An orthogonal matrix (d, d) times sqrt(d): rounds of random order, random signs and Hadamard matrices."""
    size = 1 << (d.bit_length() - 1)
    transform = np.ones((1, 1))
    while len(transform) < size:
        transform = np.block([[transform, transform], [transform, -transform]])
    transform /= math.sqrt(size)
    parts = (slice(0, size),) if size == d else (slice(0, size), slice(d - size, d))
    rows = np.eye(d)
    for _ in range(_ROUNDS):
        rows = rng.permutation(rows)
        for part in parts:
            rows *= rng.choice((-1.0, 1.0), size=(d, 1))
            rows[part] = transform @ rows[part]
    return rng.permutation(rows) * math.sqrt(d)


def hadamard_block(d: int) -> int:
    """Size of the blocks of :func:`hadamard_transform`: the largest power of two that divides `d` >= 1."""
    d = check_integer("d", d, low=1)
    return d & -d


def hadamard_transform(x: Any, *, axis: int = -1, engine: str | None = None) -> Any:
    """Orthonormal Walsh-Hadamard transform along one axis, its own inverse.

    The axis, of size d, is cut into blocks of :func:`hadamard_block` (d) numbers and each block is multiplied by the
    Sylvester-ordered Hadamard matrix of that size over the square root of the size: d = 96 has three blocks of 32,
    d = 100 has blocks of 4, and an odd d is left as it is.

    Parameters
    ----------
    x : array of float32, float16 or bfloat16, any shape, at least one axis
    axis : int
        The axis to transform; it must not be empty.
    engine : str, optional
        Engine to use; the fastest by default.

    Returns
    -------
    array
        As `x` in shape and dtype; sums are kept in float32.
    """
    run = implementation("rotation.hadamard_transform", x, engine=engine)
    check_float("x", x)
    if x.ndim == 0 or not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis={axis} is not an axis of x with shape {tuple(x.shape)}")
    if x.shape[axis] == 0:
        raise ValueError(f"x has shape {tuple(x.shape)}: axis {axis} is empty, there is nothing to transform")
    if axis in (-1, x.ndim - 1):
        return run(x)
    return run(x.swapaxes(axis, -1)).swapaxes(axis, -1)
