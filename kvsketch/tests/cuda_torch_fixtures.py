"""What tests of models on a CUDA device share, which torch and CuPy both pretend. Needs torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvsketch.tests.cuda_host.torch_double import on_cuda


@pytest.fixture
def cuda() -> Iterator[Any]:
    """torch and CuPy with a device."""
    with on_cuda() as module:
        yield module


@pytest.fixture
def plain_attention() -> Iterator[None]:
    """Prompts attended by the same operations of torch on both sides."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


def host(x: Any) -> np.ndarray:
    """An array of either library as NumPy's."""
    return x if isinstance(x, np.ndarray) else x.get()
