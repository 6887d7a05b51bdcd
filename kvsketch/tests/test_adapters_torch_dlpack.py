"""Tensors and arrays share memory in both directions, for every dtype and stride that a model produces."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvsketch[hf]'")

from kvsketch.adapters.torch_dlpack import (  # noqa: E402
    array_from_tensor,
    dtype_name,
    match_thread_counts,
    tensor_from_array,
)
from kvsketch.numba_cpu import _threads  # noqa: E402

DTYPES = ["float32", "float16", "bfloat16"]


@pytest.mark.parametrize("name", DTYPES)
def test_array_shares_memory_with_the_tensor(name: str) -> None:
    x = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4).to(getattr(torch, name))
    a = array_from_tensor("x", x)
    assert a.dtype.name == name
    assert a.shape == (2, 3, 4)
    np.testing.assert_array_equal(a.astype(np.float32), np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    x[1, 2, 3] = -7.0
    assert float(a[1, 2, 3]) == -7.0


@pytest.mark.parametrize("name", DTYPES)
def test_strided_expanded_and_grad_tensors_are_views(name: str) -> None:
    base = torch.randn(2, 5, 3, 8).to(getattr(torch, name))
    for x in (base.transpose(1, 2), base[:, ::2], base[:1].expand(4, 5, 3, 8), base[:, 1:, :, 2:4]):
        a = array_from_tensor("x", x)
        assert a.__array_interface__["data"][0] == x.data_ptr()
        np.testing.assert_array_equal(a.astype(np.float32), x.float().numpy())
    grad = base.float().requires_grad_()
    assert array_from_tensor("x", grad * 1).shape == base.shape


@pytest.mark.parametrize("name", DTYPES)
def test_tensor_shares_memory_with_the_array(name: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name)) if name == "bfloat16" else np.dtype(name)
    a = np.arange(12, dtype=np.float32).reshape(3, 4).astype(dtype)
    x = tensor_from_array(a)
    assert x.dtype is getattr(torch, name)
    a[2, 1] = 5
    assert float(x[2, 1]) == 5.0
    assert tensor_from_array(a.T).stride() == (1, 4)


def test_arrays_that_torch_cannot_share_are_copied() -> None:
    a = np.arange(6, dtype=np.float32)
    np.testing.assert_array_equal(tensor_from_array(a[::-1]).numpy(), a[::-1])
    fixed = a.copy()
    fixed.flags.writeable = False
    copy = tensor_from_array(fixed)
    copy[0] = 9
    assert fixed[0] == 0
    np.testing.assert_array_equal(tensor_from_array(a.astype(">f4")).numpy(), a)


@pytest.mark.parametrize("name", DTYPES)
def test_round_trip_keeps_every_bit(name: str) -> None:
    bits = torch.arange(0, 2**16, 7, dtype=torch.int32).to(torch.uint16)
    x = bits.view(getattr(torch, name)) if name != "float32" else bits.float()
    back = tensor_from_array(array_from_tensor("x", x))
    raw = torch.int32 if name == "float32" else torch.int16
    assert torch.equal(back.view(raw), x.view(raw))


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(TypeError, match=r"q must be a torch\.Tensor, got ndarray"):
        array_from_tensor("q", np.zeros(3))
    with pytest.raises(ValueError, match="q lives on meta"):
        array_from_tensor("q", torch.zeros(3, device="meta"))
    with pytest.raises(TypeError, match=r"x must be a NumPy or CuPy array, got Tensor"):
        tensor_from_array(torch.zeros(3))


def test_dtype_names() -> None:
    assert dtype_name(torch.bfloat16) == "bfloat16"
    assert dtype_name("float16") == "float16"


def test_the_engine_takes_torch_thread_count() -> None:
    before = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            match_thread_counts()
            assert _threads.get_num_threads() == count
    finally:
        torch.set_num_threads(before)
        match_thread_counts()
