"""One token a row on torch tensors: stored and attended by :mod:`kvsketch._step`, without arrays in between."""

from __future__ import annotations

import torch

from kvsketch._checks import FLOAT_DTYPES
from kvsketch._step import prepared_step, take_step
from kvsketch.cache import Cache

_DTYPES = {getattr(torch, name): dtype for name, dtype in FLOAT_DTYPES.items()}


def take_usual_step(
    store: Cache,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    softcap: float | None,
) -> torch.Tensor | None:
    """Append a token and attend with query (b, hq, 1, d): (b, 1, hq, dv), the same bits as by the ordinary calls.

    None, and nothing done, where those have to take the step or to say what is wrong with it.
    """
    step = prepared_step(store, query.shape[1])
    if (
        step is None
        or (query.shape, key.shape, value.shape) != step.shapes
        or _DTYPES.get(query.dtype) != step.dtype
        or not (query.dtype is key.dtype is value.dtype)
        or not (_is_plain(query) and _is_plain(key) and _is_plain(value))
        or type(scale) is not float
        or not (softcap is None or softcap > 0)
    ):
        return None
    (b, hq, _, _), dv = query.shape, value.shape[3]
    out = torch.empty((b, 1, hq, dv), dtype=torch.float32, device="cpu")
    addresses = (query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr())
    if not take_step(store, step, *addresses, scale, softcap):
        return None
    return out if query.dtype is torch.float32 else out.to(query.dtype)


def _is_plain(x: torch.Tensor) -> bool:
    """Whether the numbers lie in the CPU's memory as they are, in C order."""
    return type(x) is torch.Tensor and x.is_cpu and x.is_contiguous() and not x.is_neg()
