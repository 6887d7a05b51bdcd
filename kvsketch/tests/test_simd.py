"""The vector operations of the Numba engine, one by one, against NumPy."""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numba import njit, types
from numba.extending import intrinsic

from kvsketch.numba_cpu import emit, simd
from kvsketch.numba_cpu._compile import compile_address
from kvsketch.numba_cpu.simd import (
    LANES,
    address_of,
    floats,
    ints,
    load_floats,
    operation,
    store_floats,
)
from kvsketch.testing import spacing

RNG = np.random.default_rng(0)
COUNT = 64 * LANES
NUMBERS = (RNG.standard_normal((3, COUNT)) * np.exp(RNG.standard_normal((3, COUNT)) * 4)).astype(np.float32)
SPECIAL = np.array([0, -0.0, 1, -1, 3.4e38, 1e-45, np.inf, -np.inf, np.nan, 1e-38], np.float32)


def run(function, name, *arguments):
    """Call a kernel of addresses and integers, which is kept on disk under `name`; arrays are given as addresses."""
    address = compile_address(function, name)
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(arguments))(address)
    call(*(x.ctypes.data if isinstance(x, np.ndarray) else x for x in arguments))


def apply(name, operate, *inputs):
    """What an operation on vectors gives for float32 inputs."""
    out = np.full(inputs[0].size, 7, np.float32)
    inline = njit(operate)

    def one(x, out, count):
        for i in range(0, 4 * count, 4 * LANES):
            store_floats(out + i, inline(load_floats(x + i)))

    def two(x, y, out, count):
        for i in range(0, 4 * count, 4 * LANES):
            store_floats(out + i, inline(load_floats(x + i), load_floats(y + i)))

    def three(x, y, z, out, count):
        for i in range(0, 4 * count, 4 * LANES):
            store_floats(out + i, inline(load_floats(x + i), load_floats(y + i), load_floats(z + i)))

    run((one, two, three)[len(inputs) - 1], name, *map(np.ascontiguousarray, inputs), out, out.size)
    return out


def pairs_of_special_numbers():
    x, y = (a.ravel() for a in np.meshgrid(SPECIAL, SPECIAL))
    room = -(-x.size // LANES) * LANES
    return np.resize(x, room), np.resize(y, room)


# ---- memory ----


def wide_bfloats(address, out, count):
    for i in range(0, count, LANES):
        store_floats(out + 4 * i, simd.load_bfloats(address + 2 * i))


def wide_halves(address, out, count):
    for i in range(0, count, LANES):
        store_floats(out + 4 * i, simd.load_halves(address + 2 * i))


@pytest.mark.parametrize(("load", "kind"), [(wide_halves, np.float16), (wide_bfloats, ml_dtypes.bfloat16)])
def test_every_16_bit_number_is_loaded_exactly(load, kind):
    """Subnormal numbers, infinities and NaN among them, in every lane."""
    patterns = np.concatenate([np.arange(2**16), np.arange(1, 2**16), [0]]).astype(np.uint16)
    out = np.empty(patterns.size, np.float32)
    run(load, "load", patterns, out, out.size)
    expected = patterns.view(kind).astype(np.float32)
    nan = np.isnan(expected)
    assert 0 < nan.sum() < patterns.size
    assert np.isnan(out[nan]).all()
    np.testing.assert_array_equal(out[~nan].view(np.uint32), expected[~nan].view(np.uint32))


def copy_at_any_byte(source, target):
    store_floats(target, load_floats(source))


@pytest.mark.parametrize("offset", [0, 1, 4, 63])
def test_vectors_lie_at_any_address(offset):
    source = RNG.integers(0, 120, 128).astype(np.uint8)
    target = np.full(128, 200, np.uint8)
    run(copy_at_any_byte, "", source.ctypes.data + offset, target.ctypes.data + offset + 1)
    np.testing.assert_array_equal(target[offset + 1 : offset + 1 + 4 * LANES], source[offset : offset + 4 * LANES])
    assert (target[: offset + 1] == 200).all()
    assert (target[offset + 1 + 4 * LANES :] == 200).all()


def move_numbers(source, target):
    """A long, a word, a byte and a float."""
    simd.store_word(target, simd.load_long(source) >> 40)
    simd.store_word(target + 2, simd.load_word(source + 1))
    simd.store_word(target + 4, simd.load_byte(source + 7))
    simd.store_float(target + 6, simd.load_float(source + 9))


def test_single_numbers_are_little_endian():
    source = RNG.integers(128, 256, 13).astype(np.uint8)
    target = np.full(12, 7, np.uint8)
    run(move_numbers, "", source, target)
    # The long is negative: its highest bits follow the three bytes that are left of it.
    expected = [*source[5:7], *source[1:3], source[7], 0, *source[9:13], 7, 7]
    np.testing.assert_array_equal(target, expected)


def test_the_address_of_an_array_is_that_of_its_first_number():
    @njit
    def find(x):
        return address_of(x)

    x = np.zeros((4, 6), np.float32)
    assert find(x) == x.ctypes.data
    assert find(x[1:, 2:]) == x.ctypes.data + 4 * 8


def test_each_taker_of_a_counter_gets_the_next_number():
    @njit
    def take(counter):
        return simd.take_next(counter), simd.take_next(counter)

    counter = np.array([5], np.int64)
    assert take(counter) == (5, 6)
    assert counter[0] == 7


def test_a_kernel_is_called_by_address():
    def write(target, number):
        simd.store_word(target, number)

    address = compile_address(write, "")

    @njit
    def call(kernel, target, number):
        simd.call_kernel(kernel, (target, number))

    target = np.zeros(2, np.uint16)
    call(address, target.ctypes.data + 2, 65535)
    np.testing.assert_array_equal(target, [0, 65535])


def ask(address, out):
    prefetch(address)
    prefetch(address + 63)
    simd.store_word(out, 1)


@intrinsic
def prefetch(_context, address):
    return operation(types.void(types.intp), lambda b, a: emit.emit_prefetch(b, a, 64))


@pytest.mark.parametrize("address", [0, 8, -1, -(2**63), 2**63 - 1, 2**47, 4096])
def test_prefetching_is_harmless_wherever_it_points(address):
    out = np.zeros(1, np.uint16)
    run(ask, "", address, out)
    assert out[0] == 1


# ---- arithmetic ----

BINARY: dict[str, Any] = {
    "add": (lambda x, y: x + y, np.add),
    "subtract": (lambda x, y: x - y, np.subtract),
    "multiply": (lambda x, y: x * y, np.multiply),
    "divide": (lambda x, y: simd.divide(x, y), np.divide),
    "maximum": (lambda x, y: simd.maximum(x, y), lambda x, y: np.where(x > y, x, y)),
    "minimum": (lambda x, y: simd.minimum(x, y), lambda x, y: np.where(x < y, x, y)),
}


@pytest.mark.parametrize("name", BINARY)
def test_operations_on_two_vectors_round_as_ieee_does(name):
    """maximum and minimum give the second number where one is not a number."""
    operate, expected = BINARY[name]
    for x, y in (NUMBERS[:2], pairs_of_special_numbers()):
        with np.errstate(all="ignore"):
            wanted = expected(x, y)
        np.testing.assert_array_equal(apply(name, operate, x, y), wanted)


def test_absolute_numbers():
    x = np.concatenate([NUMBERS[0], np.resize(SPECIAL, LANES)])
    found = apply("absolute", lambda x: simd.absolute(x), x)
    np.testing.assert_array_equal(found, np.abs(x))
    assert not np.signbit(found[~np.isnan(x)]).any()


def test_multiply_add_rounds_at_most_twice():
    x, y, z = NUMBERS
    found = apply("multiply-add", lambda x, y, z: simd.multiply_add(x, y, z), x, y, z)
    x, y, z = (a.astype(np.float64) for a in (x, y, z))
    assert (np.abs(found - (x * y + z)) <= spacing(np.float32) * (np.abs(x * y) + np.abs(z))).all()


def fill(number, out):
    store_floats(out, simd.splat(simd.load_float(number)))


def test_a_number_fills_a_vector():
    out = np.zeros(LANES + 1, np.float32)
    run(fill, "", np.array([-2.5], np.float32), out)
    np.testing.assert_array_equal(out, [-2.5] * LANES + [0])


def test_rounding_is_to_the_nearest_and_ties_to_even():
    halves = np.arange(-3000, 3000) / np.float32(2)
    near = [np.nextafter(halves, np.float32(side)) for side in (-np.inf, np.inf)]
    large = np.array([2.0**22 - 1, 2.0**22 - 0.5, 2.0**21 + 0.5, 65535.5, 32767.5, 32766.5], np.float32)
    x = np.concatenate([halves, *near, large, -large, 1e4 * NUMBERS[0][np.abs(NUMBERS[0]) < 400]]).astype(np.float32)
    x = np.concatenate([x, np.zeros(-x.size % LANES, np.float32)])
    np.testing.assert_array_equal(apply("round", lambda x: simd.to_floats(simd.round_to_ints(x)), x), np.rint(x))


def test_powers_of_two():
    grid = -np.concatenate([np.arange(0, 126.01, 1 / 64), np.geomspace(1e-30, 126, 4000), np.arange(300) / 3])
    x = np.zeros(-(-grid.size // LANES) * LANES, np.float32)
    x[: grid.size] = grid
    out = apply("exp2", lambda x: simd.exp2(x), x)
    inside = x >= -126
    exact = np.exp2(x[inside].astype(np.float64))
    assert (np.abs(out[inside] - exact) / exact).max() < 3e-7
    # A whole power moves nothing but the exponent.
    whole = np.arange(-125, 1, dtype=np.float32)
    whole = np.concatenate([whole, np.zeros(-whole.size % LANES, np.float32)])
    one = np.float32(out[x == 0][0])
    np.testing.assert_array_equal(apply("exp2", lambda x: simd.exp2(x), whole), np.exp2(whole) * one)


def test_powers_of_what_is_too_small_or_not_a_number():
    x = np.full(2 * LANES, -126.001, np.float32)
    x[:6] = [-127, -1000, -3e38, -np.inf, np.nan, 0]
    out = apply("exp2", lambda x: simd.exp2(x), x)
    assert np.isnan(out[4])
    assert abs(out[5] - 1) < 3e-7
    assert not np.delete(out, [4, 5]).any()


# ---- reductions and dot products ----


def reduce(x, out):
    simd.store_float(out, simd.sum_all(load_floats(x)))
    simd.store_float(out + 4, simd.max_all(load_floats(x)))
    simd.store_float(out + 8, np.float32(simd.sum_all(simd.round_to_ints(load_floats(x)))))


def test_sums_and_the_largest_of_all_lanes():
    out = np.empty(3, np.float32)
    for x in NUMBERS[0].reshape(-1, LANES):
        run(reduce, "", x, out)
        assert abs(out[0] - x.sum(dtype=np.float64)) <= np.log2(LANES) * spacing(np.float32) * np.abs(x).sum()
        assert out[1] == x.max()
    for place in range(LANES):
        x = np.full(LANES, -np.inf, np.float32)
        x[place] = -3
        run(reduce, "", x, out)
        assert out[1] == -3
        x = np.zeros(LANES, np.float32)
        x[place] = -(2**20)
        run(reduce, "", x, out)
        assert out[2] == -(2**20)


def sums_of(count):
    """A kernel that sums each of `count` vectors at once."""

    @intrinsic
    def reduce_each(_context, x, out):
        def write(b, x, out):
            vectors = [emit.emit_load(b, x, 4 * LANES * i, emit.VECTORS["float32"]) for i in range(count)]
            emit.emit_store(b, out, 0, emit.emit_reduce_each(b, vectors, lambda b, x, y: b.fadd(x, y)))

        return operation(types.void(types.intp, types.intp), write)

    def kernel(x, out):
        reduce_each(x, out)

    return kernel


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_several_vectors_are_summed_at_once(count):
    x = RNG.integers(-1000, 1000, (count, LANES)).astype(np.float32)
    out = np.zeros(4, np.float32)
    run(sums_of(count), str(count), x, out)
    np.testing.assert_array_equal(out[:count], x.sum(axis=1))


def dot(emit_dot, element):
    """A kernel that adds the products of vectors of `element` to a vector of int32."""

    @intrinsic
    def add_products(_context, total, x, y, out):
        def write(b, total, x, y, out):
            start = emit.emit_load(b, total, 0, emit.VECTORS["int32"])
            vectors = [emit.emit_load(b, a, 0, emit.VECTORS[element]) for a in (x, y)]
            emit.emit_store(b, out, 0, emit_dot(b, start, *vectors))

        return operation(types.void(*(types.intp,) * 4), write)

    def kernel(total, x, y, out):
        add_products(total, x, y, out)

    return kernel


DOTS = {
    "shorts": dot(emit.emit_dot_shorts, "int16"),
    "bytes": dot(emit.emit_dot_bytes, "uint8"),
    "sum of bytes": dot(lambda b, total, x, _y: emit.emit_sum_bytes(b, total, x), "uint8"),
}


def check_dot(name, total, x, y):
    """Each int32 gets the products of its own 4 bytes of x and y."""
    out = np.empty(LANES, np.int32)
    run(DOTS[name], name, total, x, y, out)
    products = (x.astype(np.int64) * y).reshape(LANES, -1).sum(axis=1)
    np.testing.assert_array_equal(out, (total + products).astype(np.int32))


def test_dot_products_of_shorts_at_extreme_values():
    totals = [np.zeros(LANES, np.int32), RNG.integers(-1000, 1000, LANES).astype(np.int32)]
    for total in totals:
        for a in (32767, -32768, 0, -1):
            for c in (32767, -32767, 1):
                check_dot("shorts", total, np.full(2 * LANES, a, np.int16), np.full(2 * LANES, c, np.int16))
        x, y = RNG.integers(-32768, 32767, (2, 2 * LANES)).astype(np.int16)
        check_dot("shorts", total, x, y)


def test_dot_products_of_bytes_at_extreme_values():
    """The first are unsigned, the others signed; no pair of products saturates."""
    for total in (np.zeros(LANES, np.int32), np.full(LANES, 2**31 - 1 - 4 * 255 * 127, np.int32)):
        for a in (255, 128, 1, 0):
            for c in (127, -128, -1):
                check_dot("bytes", total, np.full(4 * LANES, a, np.uint8), np.full(4 * LANES, c, np.int8))
        x = RNG.integers(0, 256, 4 * LANES).astype(np.uint8)
        check_dot("bytes", total, x, RNG.integers(-128, 128, 4 * LANES).astype(np.int8))
        for bytes_ in (x, np.full(4 * LANES, 255, np.uint8)):
            check_dot("sum of bytes", total, bytes_, np.ones(4 * LANES, np.int8))


def test_the_kinds_of_vectors_have_the_bytes_of_the_tier():
    assert (floats.element, ints.element) == ("float32", "int32")
    for kind in emit.VECTORS.values():
        bits = 32 if "float" in str(kind.element) else kind.element.width
        assert kind.count * bits == 8 * simd.VECTOR_BYTES
