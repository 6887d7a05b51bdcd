"""Sign sketches on CuPy arrays: the bits of the CPU engines, and scores as accurate as the reference's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvsketch import qjl
from kvsketch.bitpack import unpack_signs
from kvsketch.reference import qjl as reference
from kvsketch.rotation import draw_projection
from kvsketch.testing import CPU_ENGINES, assert_accurate
from kvsketch.tests.cuda_host import nvrtc
from kvsketch.tests.cuda_host.fixtures import cupy  # noqa: F401
from kvsketch.tests.cuda_parity import (
    assert_bits,
    assert_no_spills,
    assert_subnormals_kept,
    executions,
    rough_numbers,
)
from kvsketch.tests.page_cases import DTYPES, make_numbers
from kvsketch.tests.pairwise import pairwise

ENGINE: dict[str, Any] = {"engine": "cuda_raw"}
CASES = pairwise(
    {
        "n": (1, 31, 32, 33, 70),
        "d": (5, 8, 64, 80, 128),
        "m": (1, 31, 64, 100, 256, 300),
        "outliers": (0, 2, 5),
        "page": (1, 20, 32, 45, 1000),
        "dtype": DTYPES,
    }
)


def sketch(k: Any, case: dict[str, Any], **options: Any) -> tuple[Any, dict[str, Any]]:
    """Sketched keys of a case, and the projections that made them, as arguments of the scores."""
    d, m = case["d"], case["m"]
    projections: dict[str, Any] = {"projection": draw_projection(m, d, kind="gaussian", seed=m)}
    if not case["outliers"]:
        return qjl.sketch_keys(k, **projections, page=case["page"], **options), projections
    projections["outlier_projection"] = draw_projection(17, d, kind="gaussian", seed=m, stream=1)
    return qjl.sketch_keys(k, **projections, page=case["page"], outliers=case["outliers"], **options), projections


def exact_scores(q: Any, keys: qjl.SketchedKeys, projection: Any, outlier_projection: Any = None) -> Any:
    """Scores in float64 of queries (b, hq, s, d): products with what the sketches stand for."""

    def numbers(signs: Any, norms: Any, projection: Any) -> Any:
        factor = norms.astype(np.float64)[..., None] * (projection.constant / projection.m)
        signs = unpack_signs(signs, projection.m, engine="reference").astype(np.float64)
        return factor * (signs @ projection.matrix.astype(np.float64))

    k = numbers(keys.signs, keys.norms, projection)
    if keys.channels is not None:
        outlying = (keys.channels[..., None] == np.arange(k.shape[-1])).any(axis=-2)
        outlying = np.repeat(outlying, keys.page, axis=2)[:, :, : k.shape[2]]
        k = np.where(outlying, numbers(keys.outlier_signs, keys.outlier_norms, outlier_projection), k)
    b, hq, s, d = q.shape
    return (q.astype(np.float64).reshape(b, k.shape[1], -1, d) @ np.swapaxes(k, -1, -2)).reshape(b, hq, s, -1)


ARRAYS = ("signs", "norms", "outlier_signs", "outlier_norms", "channels")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sketches_and_scores(cupy, case):  # noqa: F811
    k = rough_numbers((2, 2, case["n"], case["d"]), case["m"], case["dtype"])
    q = make_numbers((2, 6, 3, case["d"]), 1, case["dtype"])
    usual = make_numbers(k.shape, 2, case["dtype"])
    with np.errstate(all="ignore"):
        expected = [sketch(k, case, engine=engine)[0] for engine in CPU_ENGINES]
    keys, projections = sketch(usual, case, engine="reference")
    scores = qjl.sketch_scores(q, keys, **projections, engine="reference")
    exact = exact_scores(q, keys, **projections)
    # Products with the rows of a sketch cancel, and those with the outlier channels are taken off.
    size = float(np.prod([np.linalg.norm(x.astype(np.float64), axis=-1).max() for x in (q, usual)]))
    for _ in executions():
        actual = sketch(cupy.asarray(k), case, **ENGINE)[0]
        for other in expected:
            assert actual.saturated == other.saturated
            for name in ARRAYS:
                assert (getattr(actual, name) is None) == (getattr(other, name) is None)
                if getattr(other, name) is not None:
                    assert_bits(getattr(actual, name), getattr(other, name))
        on_device = sketch(cupy.asarray(usual), case, **ENGINE)[0]
        found = qjl.sketch_scores(cupy.asarray(q), on_device, **projections, **ENGINE).get()
        assert found.dtype == q.dtype
        assert_accurate(found, exact, scores, size=size)


def test_operations_that_others_are_made_of(cupy):  # noqa: F811
    from kvsketch.cuda_raw import qjl as engine

    k = rough_numbers((2, 3, 45, 40), 3, "float16")
    squares = np.abs(rough_numbers((3, 2, 300), 4))
    squares[0, 0, 5:9] = squares[0, 0, 200]
    matrix = draw_projection(50, 40).matrix
    for _ in executions():
        for outliers in (0, 1, 7, 300):
            chosen = engine.largest_channels(cupy.asarray(squares), outliers)
            assert_bits(chosen, reference.largest_channels(squares, outliers))
        with np.errstate(all="ignore"):
            norms, saturated = reference.round_norms(squares)
        found, count = engine.round_norms(cupy.asarray(squares))
        assert_bits(found, norms)
        assert count == saturated
        for page in (1, 16, 100):
            channels = engine.select_outlier_channels(cupy.asarray(k), 3, page)
            assert_bits(channels, reference.select_outlier_channels(k, 3, page))
            parts = engine.split_outliers(cupy.asarray(k), channels, page)
            for part, other in zip(parts, reference.split_outliers(k, channels.get(), page), strict=True):
                assert_bits(part, other)
        for x in (k[0, 0, 0], k[0], k[:, :0]):
            with np.errstate(all="ignore"):
                signs, norms, saturated = reference.sketch_vectors(x, matrix)
            on_device = engine.sketch_vectors(cupy.asarray(x), cupy.asarray(matrix))
            assert_bits(on_device[0], signs)
            assert_bits(on_device[1], norms)
            assert on_device[2] == saturated


def test_views(cupy):  # noqa: F811
    k = make_numbers((3, 4, 50, 80), 1)
    on_device = cupy.asarray(k)
    case = {"d": 40, "m": 70, "outliers": 3, "page": 16}
    for _ in executions():
        for part in (np.s_[:, 1:3, 7:39, 40:], np.s_[::-1, ::2, ::-3, :40], np.s_[:1, :1, :9, ::2]):
            actual, expected = sketch(on_device[part], case, **ENGINE)[0], sketch(k[part], case, engine="reference")[0]
            for name in ARRAYS:
                assert_bits(getattr(actual, name), getattr(expected, name))


def test_subnormal_products_are_summed(cupy):  # noqa: F811
    """What CuPy would flush to zero decides signs and outlier channels here."""
    k = (make_numbers((1, 1, 40, 24), 1) * np.float32(1e-39)).astype(np.float32)
    small = make_numbers((1, 1, 40, 24), 2) * np.float32(1e-21)
    case = {"d": 24, "m": 64, "outliers": 3, "page": 8}
    for _ in executions():
        for x in (k, small):
            actual, expected = sketch(cupy.asarray(x), case, **ENGINE)[0], sketch(x, case, engine="reference")[0]
            for name in ARRAYS:
                assert_bits(getattr(actual, name), getattr(expected, name))


@pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))
def test_kernels_do_not_spill():
    assert_no_spills("qjl.cu", ["sketch_pages", "sketch_vectors", "project_vectors", "round_norms"])
    assert_no_spills("qjl_scores.cu", ["sketch_scores"])
    assert_no_spills("outliers.cu", ["sum_squares", "largest_channels", "split_outliers"])


@pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))
@pytest.mark.parametrize("file", ["qjl.cu", "outliers.cu", "rotation.cu"])
def test_no_sum_is_flushed_or_fused_under_the_options_of_cupy(file):
    assert_subnormals_kept(file)
