"""PyTorch tensors as NumPy arrays and back, without copying.

Only CPU tensors: the engines of this version run there. bfloat16, which NumPy itself lacks, crosses as its bits
(uint16) and is named by ml_dtypes on the NumPy side.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def array_from_tensor(name: str, x: torch.Tensor) -> np.ndarray[Any, Any]:
    """View of tensor `x` as a NumPy array that shares its memory; any strides, detached from autograd.

    Raises
    ------
    TypeError
        `x` is no tensor; the message says `name`.
    ValueError
        `x` does not live on the CPU.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.device.type != "cpu":
        raise ValueError(
            f"{name} lives on {x.device}, but kvsketch's engines run on the CPU; move the model there: model.to('cpu')"
        )
    if x.requires_grad:
        x = x.detach()
    if x.dtype is torch.bfloat16:
        return x.view(torch.uint16).numpy().view(_BFLOAT16)
    return x.numpy()


def tensor_from_array(x: np.ndarray[Any, Any]) -> torch.Tensor:
    """Tensor that shares the memory of NumPy array `x`.

    Where torch cannot share it (negative strides, read-only, foreign byte order) the tensor is a copy.
    """
    if not isinstance(x, np.ndarray):
        raise TypeError(f"x must be a numpy.ndarray, got {type(x).__name__}")
    if not x.flags.writeable or not x.dtype.isnative or any(stride < 0 for stride in x.strides):
        x = np.array(x, dtype=x.dtype.newbyteorder("="), order="C")
    if x.dtype == _BFLOAT16:
        return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def dtype_name(dtype: torch.dtype | str) -> str:
    """Name of a torch dtype as NumPy and this package write it: ``"float32"``, ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def match_thread_counts() -> None:
    """Let the CPU engine's kernels use as many threads as torch does.

    Imports Numba: call it only where one of its kernels is about to run.
    """
    from kvsketch.numba_cpu import _threads

    _threads.set_num_threads(torch.get_num_threads())
