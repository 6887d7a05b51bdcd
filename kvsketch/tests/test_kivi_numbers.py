"""KIVI on the numbers that broke other implementations: constants, tiny ranges, float16's limits, NaN and infinity."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from kvsketch import kivi
from kvsketch.bounds import quantizer_error_bound
from kvsketch.testing import CPU_ENGINES

AXES = ("tokens", "channels")
DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)

per_engine = pytest.mark.parametrize("engine", CPU_ENGINES)
per_bits = pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
per_axis = pytest.mark.parametrize("axis", AXES)


def random_array(shape, dtype=np.float32):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32).astype(dtype)


@per_engine
@per_axis
@per_bits
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("constant", [0.0, 3.0, -3.0, 100.0, 0.01])
def test_constant_groups_are_recovered(engine, axis, bits, dtype, constant):
    x = np.full((40, 16), constant).astype(dtype)
    codes = kivi.quantize_groups(x, bits=bits, group=32, axis=axis, engine=engine)
    assert not codes.codes.any()
    assert not codes.scale.any()
    expected = x.astype(np.float32).astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(kivi.dequantize_groups(codes, engine=engine), expected)


@per_engine
def test_a_zero_channel_among_random_ones_stays_zero(engine):
    k = random_array((64, 16))
    k[:, 5] = 0
    codes = kivi.quantize_groups(k, bits=2, group=32, axis="tokens", engine=engine)
    back = kivi.dequantize_groups(codes, engine=engine)
    assert np.isfinite(back).all()
    assert not back[:, 5].any()
    assert np.abs(back - k).max() <= quantizer_error_bound(k.min(), k.max(), 2)


@per_engine
def test_negative_zero_has_the_bytes_of_zero(engine):
    signs = np.array([[-0.0, 0.0, -0.0, 1.0], [0.0, 0.0, 0.0, 1.0], [-0.0, -1e-9, 0.0, 1.0]], np.float32)
    codes = kivi.quantize_groups(signs, bits=2, group=4, axis="channels", engine=engine)
    assert codes.zero.tobytes() == bytes(6)


@per_engine
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_small_noise_on_a_large_offset(engine, dtype):
    x = (100 + 1e-3 * random_array((64, 64))).astype(dtype)
    for axis in AXES:
        codes = kivi.quantize_groups(x, bits=2, group=64, axis=axis, engine=engine)
        bound = quantizer_error_bound(x.min(), x.max(), 2)
        assert np.abs(kivi.dequantize_groups(codes, engine=engine) - x.astype(np.float64)).max() <= bound < 0.04


@per_engine
@per_bits
def test_the_whole_range_of_float16(engine, bits):
    x = np.linspace(-60000, 60000, 32).astype(np.float16)[None]
    codes = kivi.quantize_groups(x, bits=bits, group=32, axis="channels", engine=engine)
    back = kivi.dequantize_groups(codes, dtype="float16", engine=engine)
    assert np.isfinite(back).all()
    if bits == 1:  # a range of 120000 in one step is beyond float16
        assert (codes.saturated, float(codes.scale[0, 0])) == (1, 65504)
    else:
        assert codes.saturated == 0
        assert np.abs(back.astype(np.float64) - x).max() <= quantizer_error_bound(-60000, 60000, bits) + 16
    ends = np.array([[-65504, 65504]], np.float16)
    codes = kivi.quantize_groups(ends, bits=2, group=2, axis="channels", engine=engine)
    assert kivi.dequantize_groups(codes, dtype="float16", engine=engine).tolist() == ends.tolist()


@per_engine
def test_saturation_is_counted_and_harms_no_other_group(engine):
    x = random_array((3, 8))
    plain = kivi.quantize_groups(x, bits=4, group=4, axis="channels", engine=engine)
    x[1, :4] = [-3e38, 1e6, 0, 3e38]
    x[2, 4:] = [-70000, -66000, -70000, -69000]
    codes = kivi.quantize_groups(x, bits=4, group=4, axis="channels", engine=engine)
    assert (plain.saturated, codes.saturated) == (0, 3)
    assert codes.scale[1, 0] == 65504
    assert codes.zero[1, 0] == codes.zero[2, 1] == -65504
    untouched = np.ones((3, 2), bool)
    untouched[[1, 2], [0, 1]] = False
    np.testing.assert_array_equal(codes.scale[untouched], plain.scale[untouched])
    back, before = (kivi.dequantize_groups(c, engine=engine).reshape(3, 2, 4) for c in (codes, plain))
    np.testing.assert_array_equal(back[untouched], before[untouched])
    assert np.isfinite(back).all()


@per_engine
@per_axis
@per_bits
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bad_number_stays_in_its_group(engine, axis, bits, bad, dtype):
    x = random_array((2, 64, 64), dtype)
    before = kivi.dequantize_groups(kivi.quantize_groups(x, bits=bits, group=32, axis=axis, engine=engine))
    x[1, 40, 33] = bad
    with np.errstate(all="raise"):
        codes = kivi.quantize_groups(x, bits=bits, group=32, axis=axis, engine=engine)
        back = kivi.dequantize_groups(codes, engine=engine)
    group = (1, slice(32, 64), 33) if axis == "tokens" else (1, 40, slice(32, 64))
    if np.isnan(bad):
        assert np.isnan(back[group]).all()
    else:
        assert np.isfinite(back[group]).all()
        assert codes.saturated > 0
    back[group] = before[group]
    np.testing.assert_array_equal(back, before)
