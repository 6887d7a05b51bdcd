"""float16 conversions of Numba code against NumPy's, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from kvsketch.numba_cpu import float16

CONVERSIONS = {
    "chosen": (float16.half_to_float, float16.float_to_half),
    "portable": (float16.portable_half_to_float, float16.portable_float_to_half),
}


def convert_all(convert, numbers, dtype):
    @njit
    def loop(numbers, out):
        for i in range(numbers.size):
            out[i] = convert(numbers[i])

    out = np.empty(numbers.size, dtype)
    loop(numbers, out)
    return out


@pytest.mark.parametrize("form", CONVERSIONS)
def test_every_half_widens_exactly(form):
    halves = np.arange(2**16, dtype=np.uint16)
    expected = halves.view(np.float16).astype(np.float32)
    found = convert_all(CONVERSIONS[form][0], halves, np.float32)
    nan = np.isnan(expected)
    assert nan.sum() == 2 * 1023
    assert np.isnan(found[nan]).all()
    np.testing.assert_array_equal(found[~nan].view(np.uint32), expected[~nan].view(np.uint32))


def floats_around_every_half():
    """Each half, each midpoint of two neighbours (ties), and the floats right next to a midpoint; both signs."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    middle = ((halves + np.append(halves[1:], 65536.0)) / 2).astype(np.float32)
    near = [np.nextafter(middle, np.float32(side)) for side in (0, np.inf)]
    edges = np.array([65519.996, 65520, 1e6, 3.4e38, np.inf, 1e-45, 1e-38, 2.0**-25, 2.0**-24], np.float32)
    numbers = np.concatenate([halves.astype(np.float32), middle, *near, edges])
    return np.concatenate([numbers, -numbers])


def random_floats():
    return np.random.default_rng(0).integers(0, 2**32, 500_000, dtype=np.uint32).view(np.float32)


@pytest.mark.parametrize("numbers", [floats_around_every_half, random_floats])
@pytest.mark.parametrize("form", CONVERSIONS)
def test_floats_round_to_the_nearest_half_and_ties_to_even(form, numbers):
    numbers = numbers()
    with np.errstate(all="ignore"):
        expected = numbers.astype(np.float16)
    found = convert_all(CONVERSIONS[form][1], numbers, np.uint16)
    nan = np.isnan(numbers)
    assert np.isnan(found[nan].view(np.float16)).all()
    np.testing.assert_array_equal(found[~nan], expected[~nan].view(np.uint16))
