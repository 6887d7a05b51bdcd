"""Queries and weights rounded to integer coefficients: their size, their order in memory and their constants."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import numpy as np
import pytest

from kvsketch.numba_cpu._compile import compile_address
from kvsketch.numba_cpu.coefficients import largest_of_groups, largest_of_pages, make_fold, make_scale, padded
from kvsketch.numba_cpu.dots import COEFFICIENT_BYTES, QUERIES
from kvsketch.numba_cpu.large import HEAD, KEY_SHARE, NUMBERS, ROW, VALUE_SHARE, large_bytes
from kvsketch.numba_cpu.simd import LANES, load_float, store_float, store_long
from kvsketch.numba_cpu.unit_codes import bias_of, make_limit

#: The middle of 3-bit codes: not a whole number, as for every number of bits.
MIDPOINT = 3.5
FORMATS = [("int16", True), ("int16", False), ("int8", True), ("int8", False)]

per_format = pytest.mark.parametrize(("kind", "signed"), FORMATS)


@lru_cache
def fold_kernel(kind, signed):
    """A function that makes coefficients for a number of queries, with pages of one group of scales and zeros."""
    counts = [min(count, QUERIES) for count in range(1, 5)]
    scale1, scale2, scale3, scale4 = (make_scale(count, signed=signed) for count in counts)
    fold1, fold2, fold3, fold4 = (make_fold(count, kind, MIDPOINT, signed=signed) for count in counts)

    def kernel(queries, numbers, pitch, scales, zeros, pages, step, count, limit, target, row, results, room):
        total = pages * count
        scaled = room + 4 * total
        largest_of_groups(scales, 1, pages, step, count, room)
        rows = scaled + 4 * total * queries
        first = (numbers, pitch, room, total, limit, np.float32(0), scaled, 4 * total, results, rows)
        rest = (
            numbers, pitch, scaled, 4 * total, scales, zeros, 0, pages, step, count, target, row, results, results + 32
        )  # fmt: skip
        if queries == 1:
            scale1(*first)
            fold1(*rest)
        elif queries == 2:
            scale2(*first)
            fold2(*rest)
        elif queries == 3:
            scale3(*first)
            fold3(*rest)
        else:
            scale4(*first)
            fold4(*rest)

    address = compile_address(kernel, f"{kind}-{signed}")
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 13)(address)


def fold(numbers, scales, zeros, kind, signed, limit):
    """Coefficients (queries, n), factors, inverses and constants (queries,), of numbers (queries, n), n in pages."""
    queries, n = numbers.shape
    pages, count = scales.shape
    size = COEFFICIENT_BYTES[kind] // 8
    rows = np.full((queries, n + 8), 1e9, np.float32)
    rows[:, :n] = numbers
    # A page: its scales, its zeros, and something else.
    page = np.full((pages, 2 * count + 24), np.nan, np.float16)
    page[:, :count], page[:, count : 2 * count] = scales, zeros
    target = np.full((queries, size * n + 16), 99, np.uint8)
    results, room = np.full((3, 4), np.nan, np.float32), np.empty(5 * n + 4, np.float32)
    fold_kernel(kind, signed)(
        queries, rows.ctypes.data, rows.strides[0], page.ctypes.data, page.ctypes.data + 2 * count, pages,
        page.strides[0], count, limit, target.ctypes.data, target.strides[0], results.ctypes.data,
        room.ctypes.data,
    )  # fmt: skip
    assert (target[:, size * n :] == 99).all()
    stored = np.ascontiguousarray(target[:, : size * n])
    if kind == "int8":
        found = stored.view(np.int8).astype(np.int64)
    else:
        found = stored.view(np.int16).astype(np.int64) + bias_of(kind, signed)
        found = found.reshape(queries, n // 8, 2, 4).swapaxes(2, 3).reshape(queries, n)
    return found, *results[:, :queries]


def make_case(seed, queries, pages, count, signed):
    """Numbers (queries, pages*count) and what they are multiplied by, scales and zeros (pages, count)."""
    rng = np.random.default_rng(seed)
    numbers = rng.standard_normal((queries, pages * count)).astype(np.float32) * 10.0 ** rng.integers(-6, 6)
    scales = np.exp(rng.standard_normal((pages, count))).astype(np.float16)
    scales[0, 3] = 2.0**-24  # a subnormal number
    zeros = rng.standard_normal((pages, count)).astype(np.float16)
    return (numbers if signed else np.abs(numbers)).astype(np.float32), scales, zeros


@per_format
@pytest.mark.parametrize("queries", range(1, QUERIES + 1))
def test_products_are_rounded_to_the_nearest_multiple_of_a_factor(queries, kind, signed):
    for seed, (pages, count) in enumerate([(1, 32), (1, 96), (1, 512), (3, 32), (2, 128)]):
        numbers, scales, zeros = make_case(seed, queries, pages, count, signed)
        for limit in (int(make_limit(3, kind, signed=signed).py_func(count)), 100):
            found, factors, inverses, constants = fold(numbers, scales, zeros, kind, signed, limit)
            products = numbers.astype(np.float64) * scales.reshape(-1)
            top = np.abs(products).max(axis=1)
            np.testing.assert_allclose(factors, top / limit, rtol=1e-6)
            np.testing.assert_allclose(inverses, limit / top, rtol=1e-6)
            assert (np.abs(found).max(axis=1) == limit).all()
            assert signed or (found >= 0).all()
            # Half a step, and what a float32 number of the size of the largest one is off by.
            slack = (limit + bias_of(kind, signed)) * 2.0**-21
            assert (np.abs(found - products / factors[:, None]) <= 0.5 + slack).all()
            # Codes at the midpoint are exact: there, rounding must not show.
            middle = numbers * (MIDPOINT * scales.astype(np.float64) + zeros).reshape(-1)
            step = 2.0**-20 * (np.abs(numbers) @ (np.abs(zeros) + MIDPOINT * scales.astype(np.float64)).reshape(-1))
            at_midpoint = factors * MIDPOINT * found.sum(axis=1) + constants
            assert (np.abs(at_midpoint - middle.sum(axis=1)) <= step).all()


@per_format
def test_numbers_of_little_size_count_as_zero(kind, signed):
    """Where the inverse of the largest product would not be finite; that of others does not matter."""
    numbers, scales, zeros = make_case(1, 2, 1, 64, signed)
    numbers[0] = 0 if kind == "int8" else 1e-33
    found, factors, inverses, constants = fold(numbers, scales, zeros, kind, signed, 100)
    assert not found[0].any()
    assert (factors[0], inverses[0]) == (0, 0)
    assert abs(constants[0]) < 1e-29
    assert np.isfinite(constants).all()
    assert np.abs(found[1]).max() == 100
    found, factors, _, constants = fold(numbers, 0 * scales, zeros, kind, signed, 100)
    assert not found.any()
    assert not factors.any()
    np.testing.assert_allclose(constants[1], (numbers * zeros.reshape(-1).astype(np.float64)).sum(axis=1)[1], rtol=1e-4)


@per_format
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_a_number_spoils_its_own_query_alone(bad, kind, signed):
    numbers, scales, zeros = make_case(2, QUERIES, 1, 64, signed)
    clean = fold(numbers, scales, zeros, kind, signed, 100)
    for place in (0, LANES - 1, 63):
        spoilt = numbers.copy()
        spoilt[1, place] = bad
        found, factors, _, constants = fold(spoilt, scales, zeros, kind, signed, 100)
        # A score is factor*sum + constant: one of the two carries it.
        assert not np.isfinite([factors[1], constants[1]]).all()
        for q in set(range(QUERIES)) - {1}:
            np.testing.assert_array_equal(found[q], clean[0][q])
            assert (factors[q], constants[q]) == (clean[1][q], clean[3][q])
    for which in (scales, zeros):
        kept = which[0, 40]
        which[0, 40] = bad
        _, factors, _, constants = fold(numbers, scales, zeros, kind, signed, 100)
        which[0, 40] = kept
        assert not (np.isfinite(factors) & np.isfinite(constants)).any()


@lru_cache
def scale_kernel(share):
    """A function that scales the numbers of QUERIES queries and lists those that the sums leave out."""
    scale = make_scale(QUERIES, signed=True, share=share)

    def kernel(numbers, pitch, scales, count, limit, floor, target, results, rows, found):
        store_long(found, scale(numbers, pitch, scales, count, limit, load_float(floor), target, pitch, results, rows))

    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 10)(compile_address(kernel, f"scale-{share}"))


def leave_out(numbers, scales, share, floor, limit=32767):
    """Scaled numbers, factors, and the rows that are left out: {index: numbers of the queries}."""
    scaled, results, found = np.full_like(numbers, 7), np.empty(8, np.float32), np.zeros(1, np.int64)
    rows, floors = np.zeros(large_bytes(share), np.uint8), np.array([floor], np.float32)
    scale_kernel(share)(
        numbers.ctypes.data, numbers.strides[0], scales.ctypes.data, numbers.shape[1], limit, floors.ctypes.data,
        scaled.ctypes.data, results.ctypes.data, rows.ctypes.data, found.ctypes.data,
    )  # fmt: skip
    listed = {}
    for i in range(found[0]):
        row = rows[HEAD + ROW * i :]
        listed[int(row[:8].view(np.int64)[0])] = row[NUMBERS : NUMBERS + 4 * QUERIES].view(np.float32)
    return scaled, results[:QUERIES], listed


LARGE_CASES: dict[str, tuple[dict[int, float], float]] = {
    "ordinary": ({}, 1.0),
    "one": ({5: 1e4}, 1.0),
    "some": ({0: 20, 17: -30, 66: 25, 127: 50}, 1.0),
    "of all sizes": ({i: 3.0**i for i in range(12)}, 1.0),
    "more than the share": (dict.fromkeys(range(40), 100), 1.0),
    "as many as the share": (dict.fromkeys(range(KEY_SHARE), 100), 0.0),
    "alone": ({9: 1e4}, 0.0),
    "zeros": ({}, 0.0),
}


@pytest.mark.parametrize("share", [KEY_SHARE, VALUE_SHARE])
@pytest.mark.parametrize("case", LARGE_CASES)
def test_large_numbers_are_left_out_and_listed(case, share):
    """What is listed and what is scaled are all numbers, and what is scaled is not far above its root mean square."""
    large, rest = LARGE_CASES[case]
    rng = np.random.default_rng(3)
    numbers = rest * rng.standard_normal((QUERIES, 128)).astype(np.float32)
    scales = rng.uniform(0.5, 2, 128).astype(np.float32)
    for i, size in large.items():
        numbers[1:, i] = size
    numbers *= 10.0 ** np.arange(-3, QUERIES - 3, dtype=np.float32)[:, None]  # queries of different sizes
    floor = np.float32(1e-4)
    scaled, factors, listed = leave_out(numbers, scales, share, floor)
    assert np.isfinite(scaled).all()
    products = np.abs(numbers * scales)
    for query in range(QUERIES):
        out = [i for i, row in listed.items() if row[query] != 0]
        kept = np.setdiff1d(np.arange(128), out)
        assert len(out) < share
        assert [listed[i][query] for i in out] == numbers[query, out].tolist()
        assert not scaled[query, out].any()
        top, highest = 32767 * float(factors[query]), products[query].max()
        np.testing.assert_allclose(scaled[query, kept] * factors[query], numbers[query, kept], rtol=1e-5)
        assert products[query, kept].max() <= top * 1.00001
        assert (products[query, out] > top).all()
        least = np.sqrt(np.square(products[query, kept], dtype=np.float64).sum() / (share - len(out)))
        if top > floor:
            assert top <= 1.2 * max(least, floor)
        if not out:
            assert top == pytest.approx(highest, rel=1e-6) or highest == 0
        else:
            assert top < highest


def test_nothing_is_left_out_below_the_floor_nor_what_is_not_a_number():
    scales, numbers = np.ones(128, np.float32), np.random.default_rng(4).standard_normal((QUERIES, 128), np.float32)
    numbers[:, 7] = 30
    assert leave_out(numbers, scales, KEY_SHARE, 31)[2] == {}
    assert list(leave_out(numbers, scales, KEY_SHARE, 29)[2]) == [7]
    for bad in (np.nan, np.inf, -np.inf):
        spoilt = numbers.copy()
        spoilt[0, 100] = bad
        listed = leave_out(spoilt, scales, KEY_SHARE, 5)[2]
        assert listed[7][1:].tolist() == [30] * (QUERIES - 1)
        assert listed[7][0] in (0, 30)


def test_rows_are_padded_to_whole_blocks():
    assert [padded(count) for count in (0, 1, 32, 33, 512)] == [0, 32, 32, 64, 512]


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_limits_use_the_range_of_their_kind_where_sums_allow_it(bits):
    for rows in (8, 64, 128):
        assert make_limit(bits, "int16", signed=True).py_func(rows) == 32767
        assert make_limit(bits, "int16", signed=False).py_func(rows) == 65535
    for rows in (8, 512):
        assert {make_limit(bits, "int8", signed=s).py_func(rows) for s in (True, False)} == {127}


def test_coefficients_are_bounded_by_the_largest_scale_that_a_number_meets():
    """A token's weight meets those of all groups, a query's channel those of all pages of a tile."""
    page = np.exp(np.random.default_rng(5).standard_normal((3, 2, 32))).astype(np.float16)  # pages, groups, tokens
    groups, pages, highest = np.empty(96, np.float32), np.empty(64, np.float32), np.empty(1, np.float32)

    def kernel(scales, of_groups, of_pages, of_all):
        store_float(of_all, largest_of_groups(scales, 2, 3, 128, 32, of_groups))
        largest_of_pages(scales, 3, 128, 64, of_pages)

    run = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(compile_address(kernel, "largest"))
    run(page.ctypes.data, groups.ctypes.data, pages.ctypes.data, highest.ctypes.data)
    assert highest[0] == page.max()
    np.testing.assert_array_equal(groups, page.max(axis=1).reshape(-1))
    np.testing.assert_array_equal(pages, page.max(axis=0).reshape(-1))
