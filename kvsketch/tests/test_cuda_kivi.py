"""KIVI on CuPy arrays: codes, scales and zeros of the CPU engines, and products as accurate as the reference's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvsketch import kivi
from kvsketch.testing import CPU_ENGINES, assert_accurate
from kvsketch.tests.cuda_host import nvrtc
from kvsketch.tests.cuda_host.fixtures import cupy  # noqa: F401
from kvsketch.tests.cuda_parity import assert_bits, assert_no_spills, executions, rough_numbers
from kvsketch.tests.page_cases import DTYPES, make_numbers
from kvsketch.tests.pairwise import pairwise

ENGINE: dict[str, Any] = {"engine": "cuda_raw"}
BITS = (1, 2, 3, 4, 8)
CASES = pairwise(
    {
        "bits": BITS,
        "axis": ("tokens", "channels"),
        "group": (1, 5, 32, 64, 300),
        "n": (1, 31, 32, 33, 257),
        "d": (1, 5, 8, 64, 80, 96, 128, 256),
        "dtype": DTYPES,
    }
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_quantize_and_dequantize(cupy, case):  # noqa: F811
    settings: dict[str, Any] = {name: case[name] for name in ("bits", "group", "axis")}
    x = rough_numbers((2, case["n"], case["d"]), case["n"], case["dtype"])
    expected = [kivi.quantize_groups(x, **settings, engine=engine) for engine in CPU_ENGINES]
    for _ in executions():
        actual = kivi.quantize_groups(cupy.asarray(x), **settings, **ENGINE)
        for other in expected:
            for name in ("codes", "scale", "zero"):
                assert_bits(getattr(actual, name), getattr(other, name))
            assert (actual.saturated, actual.shape, actual.group) == (other.saturated, other.shape, other.group)
        for dtype in DTYPES:
            back = kivi.dequantize_groups(actual, dtype=dtype, **ENGINE).get()
            other = kivi.dequantize_groups(expected[0], dtype=dtype, engine="reference")
            assert (back.dtype, back.shape) == (other.dtype, other.shape)
            np.testing.assert_array_equal(back.astype(np.float32), other.astype(np.float32))


def to_device(cupy: Any, codes: kivi.GroupedCodes) -> kivi.GroupedCodes:  # noqa: F811
    """Copy of codes on a device."""
    return replace(codes, **{name: cupy.asarray(getattr(codes, name)) for name in ("codes", "scale", "zero")})


def exact_product(x: Any, codes: kivi.GroupedCodes) -> Any:
    """Scores or sums in float64."""
    numbers = kivi.dequantize_groups(codes, engine="reference").astype(np.float64)
    b, hq, s, last = x.shape
    grouped = x.astype(np.float64).reshape(b, numbers.shape[1], -1, last)
    product = grouped @ (np.swapaxes(numbers, -1, -2) if codes.axis == "tokens" else numbers)
    return product.reshape(b, hq, s, -1)


@pytest.mark.parametrize("case", CASES[::2], ids=str)
@pytest.mark.parametrize(("hq", "h", "s"), [(3, 3, 1), (8, 2, 3)])
def test_products(cupy, case, hq, h, s):  # noqa: F811
    settings: dict[str, Any] = {name: case[name] for name in ("bits", "group", "axis")}
    n, d = case["n"], case["d"]
    codes = kivi.quantize_groups(make_numbers((2, h, n, d), 1), **settings, engine="reference")
    x = make_numbers((2, hq, s, d if case["axis"] == "tokens" else n), 2, case["dtype"])
    multiply = kivi.key_scores if case["axis"] == "tokens" else kivi.weighted_values
    expected, exact = multiply(x, codes, engine="reference"), exact_product(x, codes)
    numbers = abs(kivi.dequantize_groups(codes, engine="reference")).max()
    size = float(abs(x.astype(np.float64)).sum(-1).max() * numbers)
    on_device = to_device(cupy, codes)
    for _ in executions():
        assert_accurate(multiply(cupy.asarray(x), on_device, **ENGINE).get(), exact, expected, size=size)


def test_long_sums_are_split_and_stay_accurate(cupy):  # noqa: F811
    codes = kivi.quantize_groups(make_numbers((1, 1, 3000, 40), 1), bits=2, group=32, axis="channels")
    p = np.random.default_rng(0).dirichlet(np.ones(3000), (1, 1, 2)).astype(np.float32)
    on_device = to_device(cupy, codes)
    expected = kivi.weighted_values(p, codes, engine="reference")
    for _ in executions():
        actual = kivi.weighted_values(cupy.asarray(p), on_device, **ENGINE).get()
        assert_accurate(actual, exact_product(p, codes), expected)


def test_views_and_empty_arrays(cupy):  # noqa: F811
    x = make_numbers((3, 4, 50, 80), 1, "float16")
    on_device = cupy.asarray(x)
    for _ in executions():
        for axis in ("tokens", "channels"):
            for part in (np.s_[:, 1:3, 7:39, 40:], np.s_[::-1, ::2, ::-3, :40], np.s_[1, 1, :9, ::2], np.s_[:, :, :0]):
                actual = kivi.quantize_groups(on_device[part], bits=3, group=16, axis=axis, **ENGINE)
                expected = kivi.quantize_groups(x[part], bits=3, group=16, axis=axis, engine="reference")
                for name in ("codes", "scale", "zero"):
                    assert_bits(getattr(actual, name), getattr(expected, name))
                back = kivi.dequantize_groups(actual, **ENGINE)
                assert_bits(back, kivi.dequantize_groups(expected, engine="reference"))
    for axis, shape in (("tokens", (1, 2, 0, 8)), ("channels", (1, 2, 0, 8))):
        codes = kivi.quantize_groups(cupy.zeros(shape, np.float32), bits=2, group=4, axis=axis, **ENGINE)
        multiply, last = (kivi.key_scores, 8) if axis == "tokens" else (kivi.weighted_values, 0)
        expected = multiply(
            np.zeros((1, 2, 3, last), np.float32),
            kivi.quantize_groups(np.zeros(shape, np.float32), bits=2, group=4, axis=axis, engine="reference"),
            engine="reference",
        )
        assert_bits(multiply(cupy.zeros((1, 2, 3, last), np.float32), codes, **ENGINE), expected)


def test_groups_of_more_numbers_than_there_could_be(cupy):  # noqa: F811
    x = make_numbers((2, 37, 24), 1)
    for axis, count in (("tokens", 37), ("channels", 24)):
        huge, whole = (
            kivi.quantize_groups(cupy.asarray(x), bits=2, group=group, axis=axis, **ENGINE)
            for group in (1 << 40, count)
        )
        for name in ("codes", "scale", "zero"):
            assert_bits(getattr(huge, name), getattr(whole, name).get())
        assert_bits(kivi.dequantize_groups(huge, **ENGINE), kivi.dequantize_groups(whole, **ENGINE).get())


def quotients(distance: Any, scale: Any, inverse: Any) -> Any:
    """What ``Coder`` of quantize.cuh divides by, in NumPy: fused products are exact in float64 before they round."""
    wide = distance.astype(np.float64)
    first = (distance * inverse).astype(np.float32)
    rest = (wide - first.astype(np.float64) * scale).astype(np.float32)
    # The product has 48 bits at most and the sum rounds to 24: longdouble, of 64, does not round it twice.
    fused = rest.astype(np.longdouble) * inverse.astype(np.longdouble) + first.astype(np.longdouble)
    return fused.astype(np.float32)


@pytest.mark.skipif(np.finfo(np.longdouble).nmant < 63, reason="needs a longdouble of 64 bits to round once")
def test_quotients_are_correctly_rounded_whatever_the_reciprocal_rounds_to():
    """With an approximate 1/scale, as a GPU's: all mantissas of a scale, distances about every rounding of a code."""
    rng = np.random.default_rng(0)
    mantissas = np.arange(1024, 2048).astype(np.float32)
    for exponent in (-34, -24, -17, -10, 0, 5):
        scale = np.repeat(mantissas * np.float32(2.0**exponent), 600)
        scale = scale[scale <= 65504].astype(np.float32)
        near = (rng.integers(0, 511, scale.size) / 2).astype(np.float32) * scale
        distance = np.where(rng.random(scale.size) < 0.7, near, (scale * rng.uniform(0, 256, scale.size)))
        distance = distance.astype(np.float32)
        for _ in range(3):
            distance = np.nextafter(distance, rng.choice([-1, 1e9], scale.size).astype(np.float32))
        distance = np.maximum(distance, 0)
        inverse = (np.float32(1) / scale).astype(np.float32)
        for steps in (-3, -1, 0, 1, 3):
            other = (inverse.view(np.int32) + steps).view(np.float32)
            exact = (distance / scale).astype(np.float32)
            actual = quotients(distance, scale, other)
            normal = exact >= 2.0**-100
            np.testing.assert_array_equal(actual[normal], exact[normal])
            assert (actual[~normal] < 0.5).all()


@pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))
def test_kernels_do_not_spill():
    assert_no_spills("kivi.cu", ["scale_tokens", "scale_channels", "quantize", "dequantize"])
    assert_no_spills("kivi_products.cu", ["key_scores", "weighted_values", "join_splits"])
