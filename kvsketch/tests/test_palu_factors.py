"""Factors of a weight: each method against what it claims to minimise, and against the textbook way to find it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvsketch.palu import Factors, factorise

OUT, IN = 24, 40


def make_weight(out: int = OUT, width: int = IN, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((out, width))


def make_gram(width: int, condition: float = 1e4, seed: int = 1, rank: int | None = None) -> Any:
    """A second moment with eigenvalues from 1 down to 1/condition, or with only `rank` of them."""
    rng = np.random.default_rng(seed)
    vectors, _ = np.linalg.qr(rng.standard_normal((width, width)))
    moments = condition ** -(np.arange(width) / (width - 1))
    moments[width if rank is None else rank :] = 0
    return (vectors * moments) @ vectors.T


def cut_product(factors: Factors, rank: int) -> Any:
    down, up = factors.cut(rank)
    assert (down.shape[0], up.shape[1]) == (rank, rank)
    return up @ down


def damped(error_weight: Any, damping: float = 1e-4) -> Any:
    return error_weight + damping * np.diag(error_weight).mean() * np.eye(len(error_weight))


def output_error(weight: Any, product: Any, gram: Any, error_weight: Any) -> float:
    difference = weight - product
    return float(np.trace(error_weight @ difference @ gram @ difference.T))


def make_inputs(method: str, gram: Any, error_weight: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"method": method}
    if method != "plain":
        given["gram"] = gram
    if method == "two-sided":
        given["error_weight"] = error_weight
    return given


METHODS = ("plain", "whitened", "two-sided")


def test_plain_is_the_best_approximation_of_eckart_and_young():
    weight = make_weight()
    u, s, v = np.linalg.svd(weight)
    factors = factorise(weight, method="plain")
    np.testing.assert_allclose(factors.spectrum, s, rtol=1e-12)
    for rank in (1, 7, OUT - 1):
        product = cut_product(factors, rank)
        np.testing.assert_allclose(product, (u[:, :rank] * s[:rank]) @ v[:rank], atol=1e-12)
        np.testing.assert_allclose(np.square(weight - product).sum(), np.square(s[rank:]).sum(), rtol=1e-10)


@pytest.mark.parametrize("condition", [1e2, 1e6, 2e9])
def test_whitened_equals_svd_llm_with_its_cholesky_factor(condition):
    weight, gram = make_weight(), make_gram(IN, condition)
    root = np.linalg.cholesky(gram)
    u, s, v = np.linalg.svd(weight @ root, full_matrices=False)
    factors = factorise(weight, gram, method="whitened")
    np.testing.assert_allclose(factors.spectrum, s, atol=1e-7 * s[0])
    for rank in (1, 9, OUT):
        textbook = np.linalg.solve(root.T, ((u[:, :rank] * s[:rank]) @ v[:rank]).T).T
        # The inverse of the Cholesky factor costs the textbook's way digits; its projector U U^T W is the same.
        np.testing.assert_allclose(cut_product(factors, rank), u[:, :rank] @ u[:, :rank].T @ weight, atol=1e-10)
        np.testing.assert_allclose(cut_product(factors, rank), textbook, atol=1e-13 * condition + 1e-11)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rank", [1, 6, 17])
def test_every_method_minimises_its_own_error(method, rank):
    weight, gram, error_weight = make_weight(), make_gram(IN, 1e3), make_gram(OUT, 1e2, seed=2)
    factors = factorise(weight, **make_inputs(method, gram, error_weight))
    g = np.eye(IN) if method == "plain" else gram
    h = damped(error_weight) if method == "two-sided" else np.eye(OUT)
    product = cut_product(factors, rank)
    least = output_error(weight, product, g, h)
    np.testing.assert_allclose(least, np.square(factors.spectrum[rank:]).sum(), rtol=1e-6)
    down, up = factors.cut(rank)
    rng = np.random.default_rng(rank)
    for size in (1e-3, 1e-2, 0.3):
        for _ in range(20):
            other_down = down + size * np.abs(down).mean() * rng.standard_normal(down.shape)
            other_up = up + size * np.abs(up).mean() * rng.standard_normal(up.shape)
            assert output_error(weight, other_up @ other_down, g, h) > least
    for other in METHODS:
        if other != method:
            product = cut_product(factorise(weight, **make_inputs(other, gram, error_weight)), rank)
            assert output_error(weight, product, g, h) > least * (1 + 1e-6), other


def test_two_sided_with_equal_gradients_is_whitened():
    weight, gram = make_weight(), make_gram(IN)
    whitened = factorise(weight, gram, method="whitened")
    two_sided = factorise(weight, gram, error_weight=3 * np.eye(OUT), method="two-sided")
    np.testing.assert_allclose(two_sided.spectrum, np.sqrt(3 * 1.0001) * whitened.spectrum, rtol=1e-9)
    for rank in (1, 8, OUT):
        np.testing.assert_allclose(cut_product(two_sided, rank), cut_product(whitened, rank), atol=1e-11)


@pytest.mark.parametrize("shape", [(OUT, IN), (IN, OUT), (16, 16), (1, 5), (5, 1)])
@pytest.mark.parametrize("seen", [None, 3])
@pytest.mark.parametrize("method", METHODS)
def test_full_rank_is_the_weight(method, shape, seen):
    weight = make_weight(*shape)
    gram = np.ones((1, 1)) if shape[1] == 1 else make_gram(shape[1], 2e9, rank=seen)
    error_weight = np.ones((1, 1)) if shape[0] == 1 else make_gram(shape[0], 2e9, seed=4, rank=seen)
    factors = factorise(weight, **make_inputs(method, gram, error_weight))
    assert factors.spectrum.shape == (min(shape),)
    assert (np.diff(factors.spectrum) <= 0).all()
    np.testing.assert_allclose(cut_product(factors, min(shape)), weight, atol=1e-10)


def test_directions_that_the_gram_does_not_see_are_ordered_by_the_weight():
    weight, gram = make_weight(), make_gram(IN, 10, rank=5)
    factors = factorise(weight, gram, method="whitened")
    assert (factors.spectrum[:5] > 0).all()
    assert not factors.spectrum[5:].any()
    product = cut_product(factors, 5)
    assert output_error(weight, product, gram, np.eye(OUT)) < 1e-12
    left = [float(np.square(weight - cut_product(factors, rank)).sum()) for rank in range(5, OUT + 1)]
    rest = np.linalg.svd(weight - product, compute_uv=False)
    np.testing.assert_allclose(left, [np.square(rest[i:]).sum() for i in range(OUT - 4)], atol=1e-9)


def test_latents_and_matrix_share_the_singular_values():
    weight, gram, error_weight = make_weight(), make_gram(IN, 100), make_gram(OUT, 100, seed=2)
    factors = factorise(weight, gram, error_weight=error_weight)
    down, up = factors.cut(10)
    s = factors.spectrum[:10]
    np.testing.assert_allclose(down @ gram @ down.T, np.diag(s), atol=1e-9 * s[0])
    np.testing.assert_allclose(up.T @ damped(error_weight) @ up, np.diag(s), atol=1e-9 * s[0])


@pytest.mark.parametrize("factor", [1e-20, 1e12])
def test_the_size_of_the_moments_does_not_matter(factor):
    weight, gram, error_weight = make_weight(), make_gram(IN), make_gram(OUT, seed=2)
    wanted = cut_product(factorise(weight, gram, error_weight=error_weight), 9)
    found = cut_product(factorise(weight, factor * gram, error_weight=error_weight / factor), 9)
    np.testing.assert_allclose(found, wanted, atol=1e-10)


def test_float32_weights_are_computed_in_float64():
    weight = make_weight().astype(np.float32)
    factors = factorise(weight, make_gram(IN).astype(np.float32), method="whitened")
    assert factors.down.dtype == factors.up.dtype == np.float64
    np.testing.assert_allclose(cut_product(factors, OUT), weight, atol=1e-12)


def test_a_cut_is_a_copy():
    factors = factorise(make_weight(), method="plain")
    down, up = factors.cut(3)
    down[:], up[:] = 0, 0
    assert factors.down[:3].all()
    assert factors.up[:, :3].all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": np.zeros(3)}, r"weight must be a matrix, got shape \(3,\)"),
        ({"weight": np.zeros((0, IN))}, "weight must have rows and columns"),
        ({"weight": np.full((OUT, IN), np.nan)}, "weight holds NaN"),
        ({"gram": None}, "method='two-sided' needs gram"),
        ({"error_weight": None}, "method='two-sided' needs error_weight"),
        ({"method": "whitened"}, "method='whitened' does not use error_weight"),
        ({"method": "plain", "error_weight": None}, "method='plain' does not use gram"),
        ({"method": "svd"}, "method must be one of"),
        ({"damping": 0.0}, "damping must be positive, got 0.0"),
        ({"damping": np.nan}, "damping must be positive, got nan"),
        ({"gram": np.eye(IN - 1)}, r"gram must have shape \(40, 40\) to fit the weight, got \(39, 39\)"),
        ({"gram": np.full((IN, IN), np.nan)}, "gram holds NaN or infinities; look at .* activations"),
        ({"gram": np.triu(np.ones((IN, IN)))}, "gram must be symmetric"),
        ({"gram": -np.eye(IN)}, "gram must be positive semidefinite"),
        ({"error_weight": np.eye(IN)}, r"error_weight must have shape \(24, 24\)"),
        ({"error_weight": np.full((OUT, OUT), np.inf)}, "error_weight holds NaN or infinities"),
        ({"error_weight": np.tril(np.ones((OUT, OUT)))}, "error_weight must be symmetric"),
        ({"error_weight": np.zeros((OUT, OUT))}, "error_weight must be positive semidefinite and not zero"),
        ({"error_weight": np.diag(np.arange(OUT) - 3.0)}, "error_weight must be positive semidefinite"),
    ],
)
def test_bad_input_is_named(change, message):
    given = {"weight": make_weight(), "gram": make_gram(IN), "error_weight": make_gram(OUT, seed=2)} | change
    with pytest.raises(ValueError, match=message):
        factorise(given.pop("weight"), given.pop("gram"), **given)


@pytest.mark.parametrize("rank", [0, OUT + 1])
def test_a_rank_that_there_is_not_is_refused(rank):
    with pytest.raises(ValueError, match=f"rank must be between 1 and {OUT}, got {rank}"):
        factorise(make_weight(), method="plain").cut(rank)


def test_a_weight_of_zeros_has_factors():
    factors = factorise(np.zeros((3, 4)), np.eye(4), method="whitened")
    assert not factors.spectrum.any()
    assert not cut_product(factors, 2).any()
