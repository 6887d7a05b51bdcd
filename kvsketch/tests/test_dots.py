"""Integer dot products of packed codes against integer matrix products, coefficient for coefficient."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import numpy as np
import pytest

from kvsketch.layout import LANES, locate_codes, unit_bytes, unit_rows
from kvsketch.numba_cpu._compile import compile_address
from kvsketch.numba_cpu.dots import COEFFICIENT_BYTES, KEPT, QUERIES, make_mix_block, make_score_block
from kvsketch.numba_cpu.integers import TILE
from kvsketch.numba_cpu.unit_codes import MOST, bias_of, largest_code, make_limit, units_in_shorts
from kvsketch.testing import spacing

BITS = (1, 2, 3, 4, 8)
KINDS = ("int16", "int8")
#: Bytes between pages, queries' coefficients, their factors and their results: more than each takes.
PAGE_GAP, ROOM = 192, 64

per_format = pytest.mark.parametrize(("bits", "kind"), [(bits, kind) for bits in BITS for kind in KINDS])


@lru_cache
def block_kernel(bits, kind):
    """A function that calls what :mod:`kvsketch.numba_cpu.dots` makes for a number of queries.

    `which`: 0 for scores, 1 for values with the same coefficients for all planes, 2 for values with their own.
    """
    counts = [min(count, QUERIES) for count in range(1, 5)]
    score1, score2, score3, score4 = (make_score_block(bits, kind, count) for count in counts)
    all1, all2, all3, all4 = (make_mix_block(bits, kind, count, True) for count in counts)
    own1, own2, own3, own4 = (make_mix_block(bits, kind, count, False) for count in counts)

    def kernel(which, queries, codes, pages, page_step, units, n0, n1, n2, n3, pitch, factors, extra, target, row):
        if which == 0:
            score = (codes, 0, units, n0, pitch, factors, extra, target, row)
            if queries == 1:
                score1(*score)
            elif queries == 2:
                score2(*score)
            elif queries == 3:
                score3(*score)
            else:
                score4(*score)
        else:
            mix = (codes, 0, pages, page_step, units, (n0, n1, n2, n3), pitch, factors, target, row, extra, 1)
            if which == 1:
                if queries == 1:
                    all1(*mix)
                elif queries == 2:
                    all2(*mix)
                elif queries == 3:
                    all3(*mix)
                else:
                    all4(*mix)
            elif queries == 1:
                own1(*mix)
            elif queries == 2:
                own2(*mix)
            elif queries == 3:
                own3(*mix)
            else:
                own4(*mix)

    address = compile_address(kernel, f"{bits}-{kind}")
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 15)(address)


def pack(codes, bits):
    """Codes (32, rows) as units, by docs/layout.md."""
    rows = unit_rows(bits)
    packed = np.zeros((codes.shape[1] // rows, unit_bytes(bits)), np.uint8)
    for (lane, row, _), (byte, shift, width, code_shift) in zip(
        np.ndindex(LANES, rows, locate_codes(bits).shape[2]), locate_codes(bits).reshape(-1, 4), strict=True
    ):
        part = codes[lane, row::rows] >> code_shift & ((1 << width) - 1)
        packed[:, byte] |= (part << shift).astype(np.uint8)
    return packed


def store(coefficients, kind, bias):
    """Coefficients (queries, rows) as they lie in memory: uint8 (queries, pitch)."""
    count, rows = coefficients.shape
    if kind == "int16":
        turned = coefficients.reshape(count, rows // 8, 4, 2).swapaxes(2, 3).reshape(count, rows)
        stored = (turned - bias).astype(np.int16).view(np.uint8)
        assert (np.abs(turned - bias + 0.5) < 2**15).all()
    else:
        stored = coefficients.astype(np.int8).view(np.uint8)
    return np.concatenate([stored, np.full((count, ROOM), 99, np.uint8)], axis=1)


def score(codes, coefficients, bits, kind, factors, constants):
    """Scores (queries, 32) of codes (32, rows)."""
    queries, rows = coefficients.shape
    stored, target = store(coefficients, kind, bias_of(kind, signed=True)), np.full((queries + 1, 40), 7, np.float32)
    packed = pack(codes, bits)
    at = stored.ctypes.data
    block_kernel(bits, kind)(
        0, queries, packed.ctypes.data, 0, 0, rows // unit_rows(bits), at, at, at, at, stored.shape[1],
        factors.ctypes.data, constants.ctypes.data, target.ctypes.data, 4 * target.shape[1],
    )  # fmt: skip
    assert (target[:queries, 32:] == 7).all()
    assert (target[queries] == 7).all()
    return target[:queries, :32]


def mix(codes, coefficients, bits, kind, factors, *, shared, pages=1, start=0.0):
    """Sums (queries, 32, 2) of codes (32, rows): those of rows 0 to 3 and of rows 4 to 7 of each 8.

    Coefficients (4, queries, rows) of each plane of 8 lanes, factors (queries,).
    """
    _, queries, rows = coefficients.shape
    stored = [store(c, kind, bias_of(kind, signed=False)) for c in coefficients]
    kept = np.empty(KEPT, np.uint8)
    target = np.full((queries + 1, 80), start, np.float32)
    units = [pack(part, bits).reshape(-1) for part in np.split(codes, pages, axis=1)]
    packed = np.concatenate([np.concatenate([u, np.full(PAGE_GAP, 255, np.uint8)]) for u in units])
    block_kernel(bits, kind)(
        1 if shared else 2, queries, packed.ctypes.data, pages, units[0].size + PAGE_GAP,
        rows // pages // unit_rows(bits), *(s.ctypes.data for s in stored), stored[0].shape[1],
        factors.ctypes.data, kept.ctypes.data, target.ctypes.data, 4 * target.shape[1],
    )  # fmt: skip
    assert (target[:queries, 64:] == start).all()
    assert (target[queries] == start).all()
    return target[:queries, :64].reshape(queries, 32, 2)


def halves(codes, coefficients):
    """What :func:`mix` adds, as integers (queries, 32, 2); coefficients (4, queries, rows)."""
    per_lane = np.repeat(coefficients, 8, axis=0)
    products = codes[None] * per_lane.swapaxes(0, 1)
    rows = products.shape[-1]
    return products.reshape(*products.shape[:2], rows // 8, 2, 4).sum(axis=(2, 4))


def counts():
    return range(1, QUERIES + 1)


def small_enough(bits, rows, kind):
    """A limit of coefficients with which all sums are exact in float32."""
    return min(100 if kind == "int8" else 30000, 2**24 // ((2**bits - 1) * rows))


@per_format
def test_scores_are_integer_products(bits, kind):
    """Of sizes that float32 holds exactly, so that not a single unit may be missing."""
    rng = np.random.default_rng(bits)
    for rows in (unit_rows(bits), 48, 128, 512):
        most = small_enough(bits, rows, kind)
        codes = rng.integers(0, 2**bits, (32, rows))
        for queries in counts():
            coefficients = rng.integers(-most, most + 1, (queries, rows))
            coefficients[:, 0] = -most, *[most] * (queries - 1)
            factors = np.array([1, 0.25, 2, 8], np.float32)[:queries]
            constants = np.array([0, 11, -5, 3], np.float32)[:queries]
            found = score(codes, coefficients, bits, kind, factors, constants)
            wanted = coefficients @ codes.T * factors[:, None].astype(np.float64) + constants[:, None]
            np.testing.assert_array_equal(found, wanted.astype(np.float32))


@per_format
@pytest.mark.parametrize("shared", [True, False])
def test_mixes_are_integer_products(shared, bits, kind):
    """Over pages that lie apart, with coefficients of each plane's own or not."""
    rng = np.random.default_rng(bits)
    for rows, pages in ((32, 1), (96, 3), (TILE, TILE // 32)):
        most = small_enough(bits, rows, kind)
        codes = rng.integers(0, 2**bits, (32, rows))
        for queries in counts():
            coefficients = rng.integers(0, most + 1, (1 if shared else 4, queries, rows))
            coefficients[:, :, -1] = most
            coefficients = np.broadcast_to(coefficients, (4, queries, rows))
            factors = (2.0 ** rng.integers(-3, 3, queries)).astype(np.float32)
            found = mix(codes, coefficients, bits, kind, factors, shared=shared, pages=pages, start=0.0)
            wanted = halves(codes, coefficients) * factors[:, None, None]
            np.testing.assert_array_equal(found, wanted)


@per_format
def test_mixes_are_added_to_what_is_there(bits, kind):
    rng = np.random.default_rng(bits)
    codes, coefficients = rng.integers(0, 2**bits, (32, 32)), rng.integers(0, 100, (1, 2, 32))
    coefficients = np.broadcast_to(coefficients, (4, 2, 32))
    found = mix(codes, coefficients, bits, kind, np.full(2, 0.5, np.float32), shared=True, start=3.0)
    np.testing.assert_array_equal(found, halves(codes, coefficients) / 2 + 3)


def extremes(rng, limit, low, queries, rows):
    """Coefficients at their limits: all the highest, all the lowest, of changing sign, and at random."""
    signs = np.where(np.arange(rows) % 2, limit, low)
    chosen = rng.choice([low, limit], (queries, rows))
    return [np.full((queries, rows), limit), np.full((queries, rows), low), np.tile(signs, (queries, 1)), chosen]


@per_format
def test_scores_do_not_overflow(bits, kind):
    """Codes all at the maximum or at random, coefficients at the limit, 512 rows and fewer."""
    rng = np.random.default_rng(bits)
    for rows in (128, 256, 512):
        limit = int(make_limit(bits, kind, signed=True).py_func(rows))
        assert limit > 2**12 if kind == "int16" else limit == 127
        for codes in (np.full((32, rows), 2**bits - 1), rng.integers(0, 2**bits, (32, rows))):
            for coefficients in extremes(rng, limit, -limit, QUERIES, rows):
                ones, zeros = np.ones(QUERIES, np.float32), np.zeros(QUERIES, np.float32)
                found = score(codes, coefficients, bits, kind, ones, zeros)
                terms = np.abs(coefficients) @ codes.T
                assert (np.abs(found - coefficients @ codes.T) <= spacing(np.float32) * terms).all()


@per_format
def test_mixes_do_not_overflow(bits, kind):
    """As above for a whole tile of tokens; each sum is an int32, exact but for its rounding to float32."""
    rng = np.random.default_rng(bits)
    for rows in (32, TILE):
        limit = int(make_limit(bits, kind, signed=False).py_func(rows))
        assert limit > 2**14 if kind == "int16" else limit == 127
        for codes in (np.full((32, rows), 2**bits - 1), rng.integers(0, 2**bits, (32, rows))):
            for coefficients in extremes(rng, limit, 0, QUERIES, rows):
                four = np.broadcast_to(coefficients, (4, *coefficients.shape))
                ones = np.ones(QUERIES, np.float32)
                found = mix(codes, four, bits, kind, ones, shared=True, pages=rows // 32)
                np.testing.assert_array_equal(found, halves(codes, four).astype(np.float32))


@pytest.mark.parametrize("bits", BITS)
def test_scores_of_as_many_units_as_int16_holds(bits):
    """And of one fewer, one more and several times as many: all at their limits, so that one too many would show."""
    rng, most = np.random.default_rng(bits), max(units_in_shorts(bits), 1)
    for units in (1, most - 1, most, most + 1, 3 * most + 2):
        rows = unit_rows(bits) * units
        ones, zeros = np.ones(QUERIES, np.float32), np.zeros(QUERIES, np.float32)
        for codes in (np.full((32, rows), 2**bits - 1), rng.integers(0, 2**bits, (32, rows))):
            for coefficients in extremes(rng, MOST["int8"], -MOST["int8"], QUERIES, rows):
                found = score(codes, coefficients, bits, "int8", ones, zeros)
                np.testing.assert_array_equal(found, coefficients @ codes.T)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shared", [True, False])
def test_mixes_of_pages_of_any_number_of_units(shared, bits):
    """What int16 holds ends within a page, at its end, or after several; all at their limits."""
    rng = np.random.default_rng(bits)
    for page_rows, pages in ((16, 5), (32, 8), (96, 3), (160, 1), (384, 2)):
        rows = page_rows * pages
        for codes in (np.full((32, rows), 2**bits - 1), rng.integers(0, 2**bits, (32, rows))):
            for coefficients in extremes(rng, MOST["int8"], 0, QUERIES, rows):
                own = coefficients if shared else rng.permuted(np.stack([coefficients] * 4), axis=2)
                four = np.broadcast_to(own, (4, QUERIES, rows))
                found = mix(codes, four, bits, "int8", np.ones(QUERIES, np.float32), shared=shared, pages=pages)
                np.testing.assert_array_equal(found, halves(codes, four).astype(np.float32))


def test_int16_holds_no_more_units():
    """Two products of each 8 rows: :func:`units_in_shorts` says how many fit, and none of two 8-bit codes."""
    for bits in BITS:
        step = 2 * MOST["int8"] * largest_code(bits, "int8") * unit_rows(bits) // 8
        assert step * units_in_shorts(bits) < 2**15 <= step * (units_in_shorts(bits) + 1)
    assert units_in_shorts(8) == 0


def test_coefficients_have_the_bytes_of_their_kind():
    assert COEFFICIENT_BYTES == {"int16": 16, "int8": 8}
    assert (bias_of("int16", signed=False), bias_of("int16", signed=True)) == (32768, 0)
    assert (bias_of("int8", signed=False), bias_of("int8", signed=True)) == (0, 0)
