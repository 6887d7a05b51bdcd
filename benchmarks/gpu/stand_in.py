"""A dry run's model: torch's tensors of the CPU reach caches as arrays of the stand-in for CuPy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvsketch.adapters import layers


@contextmanager
def tensors_as_device_arrays() -> Iterator[None]:
    """Inside, layers of a compressed cache give the stand-in a tensor's memory, and make tensors of its arrays."""
    from kvsketch.tests.cuda_host.arrays import ndarray

    before = layers.array_from_tensor, layers.tensor_from_array

    def array_from_tensor(name: str, x: torch.Tensor) -> Any:
        return ndarray(before[0](name, x))

    def tensor_from_array(x: Any) -> torch.Tensor:
        return before[1](x.get())

    layers.array_from_tensor, layers.tensor_from_array = array_from_tensor, tensor_from_array
    try:
        yield
    finally:
        layers.array_from_tensor, layers.tensor_from_array = before
