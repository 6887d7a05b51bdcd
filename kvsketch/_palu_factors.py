"""Low-rank factors of a projection's weight: what Palu (arXiv 2407.21118) makes of k_proj and v_proj.

A weight W (out, in) is replaced by up @ down, down (r, in) and up (out, r), so that a cache stores the r numbers
``down @ h`` of a token h instead of the `out` numbers ``W @ h``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvsketch._checks import check_choice, check_integer

METHODS = ("plain", "whitened", "two-sided")
#: A symmetric matrix may be this far from symmetric, or from having no negative eigenvalue, relative to its largest.
_TOLERANCE = 1e-6


@dataclass(frozen=True, eq=False)
class Factors:
    """All directions of a factored weight, the best first; :meth:`cut` keeps some of them.

    `spectrum` (k,) are the singular values in descending order, k = min(out, in): what a direction adds to the
    squared error that the method minimises, when it is left out, is the square of its singular value.
    """

    spectrum: np.ndarray
    down: np.ndarray  #: (k, in)
    up: np.ndarray  #: (out, k)

    def cut(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """(down (rank, in), up (out, rank)) in float64, the best of this rank; ``up @ down`` stands for the weight."""
        check_integer("rank", rank, low=1, high=len(self.spectrum))
        return self.down[:rank].copy(), self.up[:, :rank].copy()


def factorise(
    weight: Any, gram: Any = None, *, error_weight: Any = None, method: str = "two-sided", damping: float = 1e-4
) -> Factors:
    """Factor a weight W (out, in) so that every cut is the best of its rank.

    With G = `gram`, H = `error_weight` and E = W - up @ down, the error that is minimised is

    - ``"plain"``: sum of E^2, the singular value decomposition of W;
    - ``"whitened"``: trace(E G E^T), the mean squared error of the outputs for inputs of second moment G (what
      SVD-LLM, arXiv 2403.07378, finds with a Cholesky factor of G; none is needed here, nor an inverse of G);
    - ``"two-sided"``: trace(H' E G E^T), H' = H + damping mean(diag H) I: output errors count by what they do to the
      loss when H is the second moment of its gradient at the outputs.

    With P = H'^(1/2) (I where there is no H) and P W G W^T P = U S^2 U^T, a cut is A = S_r^(-1/2) U_r^T P W and
    B = P^-1 U_r S_r^(1/2): latents and matrix share the singular values evenly, which is the best split for latents
    that are quantized. Directions that G says nothing about come last, ordered by what they keep of P W, and scaled
    like the weakest of the others.

    Parameters
    ----------
    weight : (out, in)
    gram : (in, in), symmetric and positive semidefinite
        Second moment E[h h^T] of the inputs, for all methods but ``"plain"``; any factor cancels.
    error_weight : (out, out), symmetric and positive semidefinite
        Second moment E[g g^T] of the gradients at the outputs, for ``"two-sided"``.
    damping
        Positive; keeps directions without a gradient from being free.

    Returns
    -------
    Factors in float64

    Raises
    ------
    ValueError
        For shapes that do not fit, numbers that are not finite, matrices that are not symmetric or have negative
        eigenvalues, an `error_weight` of zeros, and arguments that the method lacks or does not use.
    """
    check_choice("method", method, METHODS)
    weight = _matrix("weight", weight)
    out, width = weight.shape
    if not out or not width:
        raise ValueError(f"weight must have rows and columns, got shape {weight.shape}")
    _check_use("gram", gram, method, method != "plain")
    _check_use("error_weight", error_weight, method, method == "two-sided")
    if not damping > 0:
        raise ValueError(f"damping must be positive, got {damping}")
    root = inverse = None
    if error_weight is not None:
        root, inverse = _roots(_symmetric("error_weight", error_weight, out), damping)
    scaled = weight if root is None else root @ weight
    count = min(out, width)
    if gram is None:
        basis, spectrum, _ = np.linalg.svd(scaled, full_matrices=False)
        seen = int(np.count_nonzero(spectrum > 0))
    else:
        # A tall weight's directions are sought in the span of its columns, so that all of them together are exact.
        span, square = np.linalg.qr(scaled) if out > width else (None, scaled)
        basis, spectrum, seen = _directions(square, _symmetric("gram", gram, width))
        basis = basis if span is None else span @ basis
    # What is not seen has no scale of its own.
    split = np.sqrt(np.where(np.arange(count) < seen, spectrum, spectrum[seen - 1] if seen else 1.0))
    up = basis if inverse is None else inverse @ basis
    return Factors(spectrum, (basis.T @ scaled) / split[:, None], up * split)


def _directions(scaled: np.ndarray, gram: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Directions (k, k) of scaled G scaled^T for `scaled` (k, in), their singular values, and how many G sees."""
    product = scaled @ gram @ scaled.T
    squares, vectors = np.linalg.eigh((product + product.T) / 2)
    squares, vectors = squares[::-1], vectors[:, ::-1]
    largest = max(float(squares[0]), 0.0)
    if squares[-1] < -_TOLERANCE * largest:
        raise ValueError(
            f"gram must be positive semidefinite, but it gives a direction of the outputs the second moment "
            f"{squares[-1]:.3g}; compute it as a mean of h h^T"
        )
    seen = int(np.count_nonzero(squares > largest * len(squares) * np.finfo(np.float64).eps))
    spectrum = np.sqrt(np.maximum(squares, 0.0))
    if seen < len(squares):
        rest, _, _ = np.linalg.svd(vectors[:, seen:].T @ scaled)
        vectors = np.concatenate([vectors[:, :seen], vectors[:, seen:] @ rest], axis=1)
        spectrum[seen:] = 0.0
    return vectors, spectrum, seen


def _roots(error_weight: np.ndarray, damping: float) -> tuple[np.ndarray, np.ndarray]:
    """Symmetric square root of the damped matrix, and the inverse of that."""
    moments, vectors = np.linalg.eigh(error_weight)
    if moments[0] < -_TOLERANCE * max(float(moments[-1]), 0.0) or moments[-1] <= 0:
        raise ValueError(
            f"error_weight must be positive semidefinite and not zero, its eigenvalues go from {moments[0]:.3g} to "
            f"{moments[-1]:.3g}; compute it as a mean of g g^T over gradients"
        )
    moments = np.sqrt(np.maximum(moments, 0.0) + damping * float(np.trace(error_weight)) / len(moments))
    return (vectors * moments) @ vectors.T, (vectors / moments) @ vectors.T


def _check_use(name: str, matrix: Any, method: str, used: bool) -> None:
    if used and matrix is None:
        raise ValueError(f"method={method!r} needs {name}; give it, or take another of {list(METHODS)}")
    if not used and matrix is not None:
        raise ValueError(f"method={method!r} does not use {name}; leave it out, or take another of {list(METHODS)}")


def _matrix(name: str, x: Any) -> np.ndarray:
    matrix = np.asarray(x)
    if matrix.ndim != 2:
        raise ValueError(f"{name} must be a matrix, got shape {matrix.shape}")
    matrix = matrix.astype(np.float64)
    if not np.isfinite(matrix).all():
        raise ValueError(f"{name} holds NaN or infinities; look at the weights and at the activations it was made of")
    return matrix


def _symmetric(name: str, x: Any, size: int) -> np.ndarray:
    matrix = _matrix(name, x)
    if matrix.shape != (size, size):
        raise ValueError(f"{name} must have shape {(size, size)} to fit the weight, got {matrix.shape}")
    apart = float(np.abs(matrix - matrix.T).max())
    if apart > _TOLERANCE * float(np.abs(matrix).max()):
        raise ValueError(f"{name} must be symmetric, but entries differ by {apart:.3g} from their mirror images")
    return (matrix + matrix.T) / 2
