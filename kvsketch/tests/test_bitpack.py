"""Bit packing: against numpy.packbits and Python integers, over engines."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvsketch.bitpack import pack_codes, pack_signs, packed_bytes, unpack_codes, unpack_signs
from kvsketch.testing import CPU_ENGINES, assert_same

WIDTHS = (1, 2, 3, 4, 8)
LENGTHS = (0, 1, 2, 3, 7, 8, 9, 31, 32, 33, 129)

every_engine = pytest.mark.parametrize("engine", CPU_ENGINES)
every_width = pytest.mark.parametrize("bits", WIDTHS)


def draw_codes(bits: int, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**bits, shape, dtype=np.uint8)


def stream_of(codes: np.ndarray, bits: int) -> np.ndarray:
    """The bytes of one row of codes, read off a Python integer."""
    number = sum(int(code) << (j * bits) for j, code in enumerate(codes))
    return np.frombuffer(number.to_bytes(-(-len(codes) * bits // 8), "little"), dtype=np.uint8)


@every_engine
@pytest.mark.parametrize("m", LENGTHS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64, np.int32])
def test_signs_match_packbits(engine, m, dtype):
    x = np.random.default_rng(m).integers(-2, 3, (3, 4, m)).astype(dtype)
    packed = pack_signs(x, engine=engine)
    expected = np.packbits(x.astype(np.float64) >= 0, axis=-1, bitorder="little")
    assert_same(packed, expected)
    signs = unpack_signs(packed, m, engine=engine)
    assert_same(signs, np.where(x.astype(np.float64) >= 0, 1, -1).astype(np.int8))


@every_engine
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_sign_of_special_numbers(engine, dtype):
    tiny = float(ml_dtypes.finfo(dtype).smallest_subnormal)
    x = np.array([0.0, -0.0, tiny, -tiny, np.inf, -np.inf, np.nan, -np.nan], dtype=dtype)
    assert pack_signs(x, engine=engine).tolist() == [0b00010111]


@every_engine
@every_width
@pytest.mark.parametrize("n", LENGTHS)
def test_codes_round_trip_and_stream(engine, bits, n):
    codes = draw_codes(bits, (2, 3, n), seed=n)
    packed = pack_codes(codes, bits=bits, engine=engine)
    assert packed.shape == (2, 3, packed_bytes(n, bits))
    assert packed.dtype == np.uint8
    for row, bytes_of_row in zip(codes.reshape(6, n), packed.reshape(6, -1), strict=True):
        assert_same(bytes_of_row, stream_of(row, bits))
    assert_same(unpack_codes(packed, n, bits=bits, engine=engine), codes)


def test_golden_stream():
    assert pack_codes(np.array([1, 2, 3, 4, 5, 6, 7, 0], dtype=np.uint8), bits=3).tolist() == [0xD1, 0x58, 0x1F]
    assert pack_codes(np.array([1, 2, 3, 0, 2], dtype=np.uint8), bits=2).tolist() == [0b00111001, 0b10]


@every_engine
@every_width
def test_any_shape(engine, bits):
    for shape in [(5,), (0, 5), (4, 0, 5), (1, 1, 1, 1, 5), (0,)]:
        codes = draw_codes(bits, shape)
        packed = pack_codes(codes, bits=bits, engine=engine)
        assert packed.shape == (*shape[:-1], packed_bytes(shape[-1], bits))
        assert_same(unpack_codes(packed, shape[-1], bits=bits, engine=engine), codes)


@every_engine
def test_strided_and_read_only(engine):
    codes = draw_codes(3, (10, 8, 2))[::2, ::-1].transpose(2, 0, 1)
    plain = np.ascontiguousarray(codes)
    plain.flags.writeable = False
    packed = pack_codes(plain, bits=3, engine=engine)
    assert_same(pack_codes(codes, bits=3, engine=engine), packed)
    spread = np.zeros((*packed.shape, 2), dtype=np.uint8)
    spread[..., 0] = packed
    spread.flags.writeable = False
    assert_same(unpack_codes(spread[..., 0], 8, bits=3, engine=engine), plain)
    x = codes.astype(np.float32) - 3
    assert_same(pack_signs(x, engine=engine), pack_signs(np.ascontiguousarray(x), engine=engine))


@every_engine
def test_input_is_not_changed(engine):
    codes = draw_codes(4, (3, 9))
    before = codes.copy()
    packed = pack_codes(codes, bits=4, engine=engine)
    packed_before = packed.copy()
    unpack_codes(packed, 9, bits=4, engine=engine)
    unpack_signs(packed, 33, engine=engine)
    assert_same(codes, before)
    assert_same(packed, packed_before)


def test_bad_arguments():
    codes = np.zeros((2, 4), dtype=np.uint8)
    bits: Any
    not_an_integer: Any = 32.0
    for bits in (0, 5, 6, 7, 9, -1, True, None, "2"):
        with pytest.raises(ValueError, match="bits must be one of"):
            pack_codes(codes, bits=bits)
        with pytest.raises(ValueError, match="bits must be one of"):
            unpack_codes(codes, 4, bits=bits)
    with pytest.raises(ValueError, match="codes holds 4, which does not fit bits=2"):
        pack_codes(np.array([0, 4], dtype=np.uint8), bits=2)
    with pytest.raises(TypeError, match="codes has dtype int64; it must be uint8"):
        pack_codes(codes.astype(np.int64), bits=2)
    with pytest.raises(ValueError, match=r"packed has shape \(2, 4\), but n=17 codes of 2 bits take 5 bytes"):
        unpack_codes(codes, 17, bits=2)
    with pytest.raises(ValueError, match=r"packed has shape \(2, 4\), but m=33"):
        unpack_signs(codes, 33)
    with pytest.raises(ValueError, match="n must be >= 0, got -1"):
        unpack_codes(codes, -1, bits=2)
    with pytest.raises(TypeError, match="m must be an integer"):
        unpack_signs(codes, not_an_integer)
    with pytest.raises(TypeError, match="x has dtype complex64"):
        pack_signs(np.zeros(3, dtype=np.complex64))
    with pytest.raises(TypeError, match="x has dtype bool"):
        pack_signs(np.zeros(3, dtype=bool))
    with pytest.raises(ValueError, match="x must have at least one axis"):
        pack_signs(np.float32(1) + np.zeros((), dtype=np.float32))
    with pytest.raises(TypeError, match="NumPy or CuPy"):
        pack_codes([1, 2], bits=2)
    with pytest.raises(ValueError, match="engine='cuda_raw' does not run on numpy"):
        pack_codes(codes, bits=2, engine="cuda_raw")
