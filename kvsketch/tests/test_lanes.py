"""The vector operations of the Numba engine, one by one, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from kvsketch.numba_cpu import lanes
from kvsketch.testing import spacing

RNG = np.random.default_rng(0)
BYTES = RNG.integers(0, 256, 200).astype(np.uint8)
FLOATS = RNG.standard_normal(200).astype(np.float32)


@njit
def unpack(packed, offset, shift, mask, out):
    lanes.store(out, 0, lanes.to_floats(lanes.take_bits(lanes.load_bytes(packed, offset), shift, mask)))


@njit
def join_parts(packed, low, high, out):
    codes = lanes.add_high_bit(lanes.load_bytes(packed, low), lanes.load_bytes(packed, high))
    lanes.store(out, 0, lanes.to_floats(codes))


@njit
def words(packed, out):
    for i in range(out.size):
        out[i] = lanes.load_word(packed, i)


@njit
def multiply(numbers, x, rows, z, out):
    product = lanes.multiply_add(lanes.load(numbers, x), lanes.load_rows(numbers, rows), lanes.splat(z))
    lanes.store(out, 1, product)


@njit
def reduce(numbers, offset, constant, out):
    vector = lanes.load(numbers, offset)
    lanes.store_lane_sums(out, 1, vector, constant)
    return lanes.sum_all(vector), lanes.max_all(vector)


@njit
def powers(x, out):
    for i in range(0, x.size, 64):
        lanes.store(out, i, lanes.exp2(lanes.load(x, i)))


@pytest.mark.parametrize(("shift", "mask"), [(0, 255), (0, 15), (4, 15), (0, 3), (6, 3), (0, 1), (5, 1), (7, 1)])
@pytest.mark.parametrize("offset", [0, 64, 3])
def test_bits_are_taken_from_each_byte(offset, shift, mask):
    out = np.full(64, -1, np.float32)
    unpack(BYTES, offset, np.uint8(shift), np.uint8(mask), out)
    np.testing.assert_array_equal(out, BYTES[offset : offset + 64] >> shift & mask)


def test_a_high_bit_joins_two_low_ones():
    parts = np.concatenate([RNG.integers(0, 4, 64), RNG.integers(0, 2, 64)]).astype(np.uint8)
    out = np.empty(64, np.float32)
    join_parts(parts, 0, 64, out)
    np.testing.assert_array_equal(out, parts[:64] + 4 * parts[64:])


def test_words_are_little_endian_at_any_byte():
    out = np.empty(199, np.uint16)
    words(BYTES, out)
    np.testing.assert_array_equal(out, BYTES[:-1] + 256 * BYTES[1:].astype(np.int64))


def test_arrays_of_any_number_of_axes_are_counted_in_c_order():
    out = np.empty(199, np.uint16)
    words(BYTES.reshape(5, 8, 5), out)
    np.testing.assert_array_equal(out, BYTES[:-1] + 256 * BYTES[1:].astype(np.int64))


def test_rows_are_multiplied_in_every_lane_and_nothing_else_is_written():
    out = np.full(66, 7, np.float32)
    multiply(FLOATS, 5, 81, np.float32(0.25), out)
    lane_by_row = FLOATS[5:69].astype(np.float64).reshape(8, 8)
    expected = (lane_by_row * FLOATS[81:89] + 0.25).reshape(-1)
    np.testing.assert_allclose(out[1:65], expected, rtol=0, atol=4 * spacing(np.float32))
    assert (out[0], out[65]) == (7, 7)


@pytest.mark.parametrize("offset", [0, 64, 7])
def test_sums_over_rows_and_over_all(offset):
    out = np.full(10, 7, np.float32)
    total, highest = reduce(FLOATS, offset, np.float32(3), out)
    vector = FLOATS[offset : offset + 64].astype(np.float64)
    step = spacing(np.float32) * np.abs(vector).sum()
    np.testing.assert_allclose(out[1:9], vector.reshape(8, 8).sum(axis=1) + 3, rtol=0, atol=step)
    assert (out[0], out[9]) == (7, 7)
    assert abs(total - vector.sum()) <= step
    assert highest == vector.max()


def test_the_largest_is_found_in_every_place():
    out = np.empty(10, np.float32)
    for place in range(64):
        numbers = np.full(64, -np.inf, np.float32)
        numbers[place] = -3
        assert reduce(numbers, 0, np.float32(0), out)[1] == -3
    assert reduce(np.full(64, -np.inf, np.float32), 0, np.float32(0), out)[1] == -np.inf


def test_powers_of_two():
    grid = -np.concatenate([np.arange(0, 126.01, 1 / 64), np.geomspace(1e-30, 126, 1000), np.arange(64) / 3])
    x = np.full(-(-grid.size // 64) * 64, 0, np.float32)
    x[: grid.size] = grid
    out = np.empty_like(x)
    powers(x, out)
    exact = np.exp2(np.maximum(x, -126).astype(np.float64))
    inside = x >= -126
    assert (np.abs(out - exact) / exact)[inside].max() < 2e-7
    whole = (x == np.rint(x)) & inside
    np.testing.assert_array_equal(out[whole], np.exp2(x[whole]))


def test_powers_of_what_is_too_small_or_not_a_number():
    x = np.full(64, -126.001, np.float32)
    x[:6] = [-127, -1000, -3e38, -np.inf, np.nan, 0]
    out = np.empty_like(x)
    powers(x, out)
    expected = np.zeros(64)
    expected[4:6] = [np.nan, 1]
    np.testing.assert_array_equal(out, expected)
