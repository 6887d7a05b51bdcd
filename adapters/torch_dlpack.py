"""PyTorch tensors as arrays and back, without copying: NumPy's for the CPU, CuPy's (by DLPack) for CUDA.

bfloat16, which NumPy itself lacks, crosses as its bits and is named by ml_dtypes on the array's side.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import torch

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def lies_on_cuda(x: torch.Tensor) -> bool:
    return x.device.type == "cuda"


def array_from_tensor(name: str, x: torch.Tensor) -> Any:
    """View of tensor `x` as a NumPy or CuPy array that shares its memory; any strides, detached from autograd.

    Raises
    ------
    TypeError
        `x` is no tensor; the message says `name`.
    ValueError
        `x` lives neither on the CPU nor on a CUDA device.
    ModuleNotFoundError
        `x` lives on a CUDA device and CuPy is not installed.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.requires_grad:
        x = x.detach()
    if lies_on_cuda(x):
        if x.dtype is torch.bfloat16:
            return _cupy(name).from_dlpack(x.view(torch.int16)).view(_BFLOAT16)
        return _cupy(name).from_dlpack(x)
    if x.device.type != "cpu":
        raise ValueError(
            f"{name} lives on {x.device}, but kvsketch's engines run on CPUs and CUDA devices; move the model there: "
            "model.to('cpu')"
        )
    if x.dtype is torch.bfloat16:
        return x.view(torch.uint16).numpy().view(_BFLOAT16)
    return x.numpy()


def tensor_from_array(x: Any) -> torch.Tensor:
    """Tensor that shares the memory of NumPy or CuPy array `x`.

    Where torch cannot share it (negative strides, read-only, foreign byte order) the tensor is a copy.
    """
    if not isinstance(x, np.ndarray):
        if type(x).__module__.partition(".")[0] != "cupy":
            raise TypeError(f"x must be a NumPy or CuPy array, got {type(x).__name__}")
        if x.dtype == _BFLOAT16:
            return torch.from_dlpack(x.view(np.int16)).view(torch.bfloat16)
        return torch.from_dlpack(x)
    if not x.flags.writeable or not x.dtype.isnative or any(stride < 0 for stride in x.strides):
        x = np.array(x, dtype=x.dtype.newbyteorder("="), order="C")
    if x.dtype == _BFLOAT16:
        return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(x)


@contextmanager
def beside_torch(place: torch.Tensor | torch.device) -> Iterator[None]:
    """Where array operations run as torch's on a tensor, or on a device: there, in torch's current stream and memory.

    Nothing changes for the CPU.
    """
    device = place.device if isinstance(place, torch.Tensor) else place
    if device.type != "cuda":
        yield
        return
    cuda = _cupy("the model").cuda
    stream = torch.cuda.current_stream(device)
    with (
        cuda.Device(stream.device_index),
        cuda.ExternalStream(stream.cuda_stream, stream.device_index),
        cuda.using_allocator(_allocate),
    ):
        yield


def _allocate(nbytes: int) -> Any:
    """Memory of CuPy's current device, held by a torch tensor: one caching allocator serves both libraries."""
    cuda = _cupy("the model").cuda
    device = cuda.runtime.getDevice()
    room = torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", device))
    # CuPy finds a device by the address unless told, and there is none where no bytes are asked for.
    return cuda.MemoryPointer(cuda.UnownedMemory(room.data_ptr(), nbytes, room, device), 0)


def _cupy(name: str) -> Any:
    try:
        import cupy
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{name} lives on a CUDA device, which needs CuPy: pip install 'kvsketch[cuda13]', or move the model: "
            "model.to('cpu')",
            name=error.name,
        ) from error
    return cupy


def dtype_name(dtype: torch.dtype | str) -> str:
    """Name of a torch dtype as NumPy and this package write it: ``"float32"``, ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def match_thread_counts() -> None:
    """Let the CPU engine's kernels use as many threads as torch does.

    Imports Numba: call it only where one of its kernels is about to run.
    """
    from kvsketch.numba_cpu import _threads

    _threads.set_num_threads(torch.get_num_threads())
