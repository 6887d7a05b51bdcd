"""Bit packing on CuPy arrays: the bytes of the CPU engines."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvsketch import bitpack
from kvsketch.testing import CPU_ENGINES
from kvsketch.tests.cuda_host import nvrtc
from kvsketch.tests.cuda_host.fixtures import cupy  # noqa: F401
from kvsketch.tests.cuda_parity import SPECIAL, assert_bits, assert_no_spills, executions

BITS = (1, 2, 3, 4, 8)
DTYPES = (
    *(np.float16, ml_dtypes.bfloat16, np.float32, np.float64),
    *(np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64),
)
ENGINE: dict[str, Any] = {"engine": "cuda_raw"}


@pytest.mark.parametrize("bits", BITS)
def test_codes(cupy, bits):  # noqa: F811
    rng = np.random.default_rng(bits)
    for _ in executions():
        for shape in ((1,), (7,), (2, 8), (3, 31), (2, 2, 32), (3, 33), (257,), (0, 5), (3, 0)):
            codes = rng.integers(0, 1 << bits, shape).astype(np.uint8)
            packed = bitpack.pack_codes(cupy.asarray(codes), bits=bits, **ENGINE)
            for engine in CPU_ENGINES:
                assert_bits(packed, bitpack.pack_codes(codes, bits=bits, engine=engine))
            assert_bits(bitpack.unpack_codes(packed, shape[-1], bits=bits, **ENGINE), codes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_signs(cupy, dtype):  # noqa: F811
    rng = np.random.default_rng(0)
    for _ in executions():
        for shape in ((1,), (2, 8), (3, 33), (2, 2, 64), (257,), (3, 0)):
            with np.errstate(all="ignore"):
                x = (rng.standard_normal(shape) * 3).astype(dtype)
                if x.dtype.kind not in "iu":
                    special = rng.random(shape) < 0.3
                    x[special] = rng.choice([*SPECIAL, -np.nan], size=int(special.sum())).astype(dtype)
            packed = bitpack.pack_signs(cupy.asarray(x), **ENGINE)
            for engine in CPU_ENGINES:
                assert_bits(packed, bitpack.pack_signs(x, engine=engine))
            signs = bitpack.unpack_signs(packed, shape[-1], **ENGINE)
            assert_bits(signs, bitpack.unpack_signs(packed.get(), shape[-1], engine="reference"))


def test_extreme_integers(cupy):  # noqa: F811
    for dtype in (np.int8, np.int64, np.uint64):
        limits = np.iinfo(dtype)
        x = np.array([limits.min, limits.max, 0, 1, limits.min], dtype)
        for _ in executions():
            packed = bitpack.pack_signs(cupy.asarray(x), **ENGINE)
            assert_bits(packed, bitpack.pack_signs(x, engine="reference"))


def test_views_that_are_not_contiguous_or_aligned(cupy):  # noqa: F811
    codes = np.random.default_rng(0).integers(0, 8, (5, 6, 67)).astype(np.uint8)
    on_device = cupy.asarray(codes)
    for _ in executions():
        for part in (np.s_[:, ::2, 3:35], np.s_[::-1, 0, ::2], np.s_[1, 1, 1:65]):
            packed = bitpack.pack_codes(on_device[part], bits=3, **ENGINE)
            assert_bits(packed, bitpack.pack_codes(codes[part], bits=3, engine="reference"))
            n = codes[part].shape[-1]
            spread = cupy.zeros((*packed.shape, 2), np.uint8)
            spread[..., 0] = packed
            assert_bits(bitpack.unpack_codes(spread[..., 0], n, bits=3, **ENGINE), np.ascontiguousarray(codes[part]))


@pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))
def test_kernels_do_not_spill():
    assert_no_spills("bitpack.cu", ["pack_codes", "unpack_codes", "pack_signs"])
