"""The Hadamard transform on CuPy arrays: the bits of the CPU engines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvsketch.rotation import hadamard_transform
from kvsketch.testing import CPU_ENGINES
from kvsketch.tests.cuda_host import nvrtc
from kvsketch.tests.cuda_host.fixtures import cupy  # noqa: F401
from kvsketch.tests.cuda_parity import assert_bits, assert_no_spills, executions
from kvsketch.tests.page_cases import DTYPES, make_numbers

ENGINE: dict[str, Any] = {"engine": "cuda_raw"}
#: Every way that a block takes: in registers, in a warp, through shared memory, in rounds of its own.
SHAPES = (
    (3, 1),
    (5, 6),
    (2, 3, 8),
    (3, 12),
    (7, 64),
    (2, 80),
    (5, 96),
    (3, 128),
    (9, 256),
    (2, 768),
    (3, 2048),
    (1, 8192),
)


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_as_on_the_cpu(cupy, dtype):  # noqa: F811
    for _ in executions():
        for shape in SHAPES:
            x = make_numbers(shape, len(shape), dtype)
            y = hadamard_transform(cupy.asarray(x), **ENGINE)
            for engine in CPU_ENGINES:
                assert_bits(y, hadamard_transform(x, engine=engine))


def test_blocks_larger_than_a_thread_block_holds(cupy):  # noqa: F811
    for _ in executions():
        for shape, dtype in (((2, 16384), "float16"), ((1, 65536), "float32")):
            x = make_numbers(shape, 1, dtype)
            assert_bits(hadamard_transform(cupy.asarray(x), **ENGINE), hadamard_transform(x, engine="reference"))


def test_subnormal_huge_and_infinite_numbers(cupy):  # noqa: F811
    x = make_numbers((8, 64), 2) * np.float32(1e-39)
    x[1] = make_numbers((64,), 3)
    x[2, :3], x[3] = (np.inf, 1, -2), np.float32(3e38)
    for _ in executions():
        with np.errstate(all="ignore"):
            expected = hadamard_transform(x, engine="reference")
        actual = hadamard_transform(cupy.asarray(x), **ENGINE).get()
        assert np.count_nonzero((abs(expected) < 1e-38) & (expected != 0)) > 100
        np.testing.assert_array_equal(actual, expected)


def test_other_axes_and_views(cupy):  # noqa: F811
    x = make_numbers((6, 33, 5))
    on_device = cupy.asarray(x)
    for _ in executions():
        for part, axis in ((np.s_[...], 0), (np.s_[:, 1:33, :], 1), (np.s_[::2, ::-2, :4], 2), (np.s_[0, 1:9, 0], 0)):
            y = hadamard_transform(on_device[part], axis=axis, **ENGINE)
            assert_bits(y, hadamard_transform(x[part], axis=axis, engine="reference"))
        assert hadamard_transform(on_device[:0], **ENGINE).shape == (0, 33, 5)


@pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))
def test_kernels_do_not_spill():
    assert_no_spills("rotation.cu", ["transform_blocks", "transform_round"])
