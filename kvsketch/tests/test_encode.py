"""Encoding is the reference's, byte for byte, on numbers that a fast encoder could get wrong."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from kvsketch import pages
from kvsketch.codecs import Exact, GroupedInts, SignSketch, TokenInts
from kvsketch.layout import side_layout
from kvsketch.numba_cpu import _threads, encode_hadamard
from kvsketch.rotation import draw_projection
from kvsketch.testing import CPU_ENGINES
from kvsketch.tests.page_cases import make_numbers

BITS = (1, 2, 3, 4, 8)
WIDTHS = (1, 5, 8, 24, 64, 80, 96, 128, 200)

SHORT = (np.float16, ml_dtypes.bfloat16)
#: All bits with float32, two of them with the others.
per_bits_and_dtype = pytest.mark.parametrize(
    ("bits", "dtype"), [*((bits, np.float32) for bits in BITS), *((bits, dtype) for bits in (2, 3) for dtype in SHORT)]
)
per_bits = pytest.mark.parametrize("bits", BITS)


def encode(x, side, engine):
    return (pages.encode_keys if side.side == "keys" else pages.encode_values)(x, side, engine=engine)


def assert_same_bytes(x, side, name=""):
    expected, saturated = encode(x, side, "reference")
    for engine in CPU_ENGINES[1:]:
        records, found = encode(x, side, engine)
        np.testing.assert_array_equal(records, expected, err_msg=f"{name}, {engine}")
        assert found == saturated, name


def hard_numbers(rng, shape, side):
    """Numbers (..., tokens, width) float32 by name: ties and their neighbours, all magnitudes, NaN and infinities."""
    codec, group, tokens_first = side.codec, side.spec.group, not side.by_token
    yield "normal", rng.standard_normal(shape).astype(np.float32)
    scales = np.array([1, 1e-3, 100, 3e-8, 1e-38, 1e-42, 6e4, 1e37], np.float32)
    sizes = rng.choice(scales, size=(*shape[:-2], 1, shape[-1]))
    yield "of all sizes", rng.standard_normal(shape).astype(np.float32) * sizes
    if isinstance(codec, (GroupedInts, TokenInts)):
        levels, steps = 2**codec.bits - 1, np.float16(2.0 ** rng.integers(-24, 8) * (1 + rng.integers(1024) / 1024))
        zero = np.float32(np.float16(rng.choice([0, 1, -0.37, 100])))
        place = np.arange(shape[-2 if tokens_first else -1])[(slice(None), None) if tokens_first else slice(None)]
        halves = rng.integers(0, 2 * levels + 1, size=shape).astype(np.float32) / 2
        halves = np.where(place % group == 0, 0, np.where(place % group == 1, levels, halves))
        ties = (zero + halves * np.float32(steps)).astype(np.float32)
        yield "halfway", ties
        yield "nearly halfway", (ties.view(np.int32) + rng.integers(-1, 2, size=shape, dtype=np.int32)).view(np.float32)
        yield "a small range far out", (6e4 + rng.standard_normal(shape) * 1e-2).astype(np.float32)
    else:
        yield "whole", np.round(2 * rng.standard_normal(shape)).astype(np.float32)
        yield "sparse", (rng.standard_normal(shape) * (rng.random(shape) < 0.05)).astype(np.float32)
        yield "equal", np.full(shape, rng.choice([1, -0.1]), np.float32)
    yield "zeros", np.where(rng.random(shape) < 0.5, np.float32(-0.0), np.float32(0))
    for bad in (np.nan, np.inf, -np.inf, 65520, -7e4, 1e38):
        x = rng.standard_normal(shape).astype(np.float32)
        x[rng.random(shape) < 0.02] = bad
        yield f"some {bad}", x
    # Of several NaN, which one a sum takes its bits from is for the machine to say.
    x = rng.integers(0, 2**32, size=shape, dtype=np.uint32).view(np.float32)
    yield "any bits", np.where(np.isnan(x), np.float32(np.nan), x)


def assert_same_on_hard_numbers(side, dtype, seed):
    for name, numbers in hard_numbers(np.random.default_rng(seed), (2, 2 * side.tokens, side.width), side):
        with np.errstate(over="ignore", invalid="ignore"):
            x = numbers.astype(dtype)
        assert_same_bytes(x, side, name)


@per_bits_and_dtype
@pytest.mark.parametrize("group", [32, 128])
def test_hard_integer_keys_have_the_same_bytes(group, bits, dtype):
    for width in np.random.default_rng(bits).choice(WIDTHS, size=3, replace=False):
        side = side_layout("keys", GroupedInts(bits, group), 2 * group, int(width), np.dtype(dtype).name)
        assert_same_on_hard_numbers(side, dtype, int(width))


@per_bits_and_dtype
@pytest.mark.parametrize("group", [8, 32, 40])
def test_hard_integer_values_have_the_same_bytes(group, bits, dtype):
    for width in np.random.default_rng(bits).choice(WIDTHS, size=3, replace=False):
        side = side_layout("values", GroupedInts(bits, group), 32, int(width), np.dtype(dtype).name)
        assert_same_on_hard_numbers(side, dtype, int(width))


@per_bits_and_dtype
@pytest.mark.parametrize("group", [None, 64])
def test_hard_latents_have_the_same_bytes(group, bits, dtype):
    """On the key side; on the other they are values."""
    for width in np.random.default_rng(bits).choice((*WIDTHS, 134, 640), size=3, replace=False):
        side = side_layout("keys", TokenInts(bits, group), 32, int(width), np.dtype(dtype).name)
        assert_same_on_hard_numbers(side, dtype, int(width))


@pytest.mark.parametrize("outliers", [0, 3])
@pytest.mark.parametrize("kind", ["gaussian", "orthogonal", "hadamard"])
@pytest.mark.parametrize(("d", "m"), [(3, 37), (8, 16), (37, 64), (64, 256), (80, 100), (128, 256), (200, 33)])
def test_hard_sketches_have_the_same_bytes(d, m, kind, outliers):
    codec = SignSketch(m, kind, outliers, 24 if outliers else 0, seed=d)
    assert_same_on_hard_numbers(side_layout("keys", codec, 32, d), np.float32, d)
    if d == 64:
        for dtype in SHORT:
            assert_same_on_hard_numbers(side_layout("keys", codec, 64, d, np.dtype(dtype).name), dtype, d)


@per_bits
def test_every_code_of_every_scale_rounds_at_its_middle(bits):
    """Numbers at the middle between two codes and next to it on both sides, for scales of all exponents."""
    levels = 2**bits - 1
    rng = np.random.default_rng(bits)
    scales = (2.0 ** np.arange(-24, 8) * (1 + rng.integers(0, 1024, size=(40, 32)) / 1024)).astype(np.float16)
    scales = np.unique(scales[scales > 0]).astype(np.float32)
    middles = (np.arange(levels, dtype=np.float32) + np.float32(0.5))[:, None] * scales
    around = np.stack([np.nextafter(middles, np.float32(0)), middles, np.nextafter(middles, np.float32(np.inf))])
    ends = np.zeros((2, len(scales)), np.float32)
    ends[1] = levels * scales
    numbers = np.concatenate([ends, around.reshape(-1, len(scales))])
    side = side_layout("keys", GroupedInts(bits, 128), 128, 256)
    for first in range(2, len(numbers), 126):
        group = np.concatenate([numbers[:2], numbers[first : first + 126]])
        group = np.concatenate([group, np.repeat(group[:1], 128 - len(group), axis=0)])
        columns = group[:, : 256 * (len(scales) // 256)].reshape(128, -1, 256)
        assert_same_bytes(columns.swapaxes(0, 1), side)


@pytest.mark.parametrize("codec", [GroupedInts(2), GroupedInts(3, 64), SignSketch(48, "hadamard", 3, 20), Exact()])
def test_threads_do_not_change_bytes(codec):
    side = side_layout("keys", codec, 64, 64)
    x = make_numbers((3, 16 * side.tokens, side.width), 11)
    count = _threads.get_num_threads()
    try:
        _threads.set_num_threads(1)
        expected, saturated = encode(x, side, "numba_cpu")
        _threads.set_num_threads(3)
        records, found = encode(x, side, "numba_cpu")
    finally:
        _threads.set_num_threads(count)
    np.testing.assert_array_equal(records, expected)
    assert found == saturated


@pytest.mark.parametrize(("d", "m"), [(2, 5), (8, 8), (37, 100), (64, 96), (100, 256), (128, 256), (512, 40)])
def test_hadamard_projections_are_the_transforms_that_they_were_drawn_as(d, m):
    """The bound says how far a transform's entry may be from the row's product; without it all rows are summed."""
    tables = encode_hadamard.hadamard_tables(draw_projection(m, d, kind="hadamard", seed=3))
    assert tables is not None
    assert tables.bound < 1e-5
    assert encode_hadamard.hadamard_tables(draw_projection(m, d, seed=3)) is None
    other = draw_projection(m, d, kind="hadamard", seed=4)
    strange = dataclasses.replace(other, seed=3)
    assert encode_hadamard.hadamard_tables(strange) is None
