"""Attention of one query a head with torch, in every way that could be the fastest.

torch's own function is slow on a CPU when key/value heads are shared (``enable_gqa``), so it is also given the query
heads of a key/value head as rows of one, and two matrix products stand beside it. Tensors are made from NumPy arrays,
whose memory is in large pages where the system has them: torch's own are slower to read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

Attention = Callable[[Any, Any, Any], Any]


def tensor(x: Any) -> torch.Tensor:
    """A tensor over the memory of a float32 or bfloat16 array."""
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def attend_sdpa(q: Any, k: Any, v: Any) -> Any:
    """q (b, hq, 1, d), k and v (b, h, n, d), by scaled_dot_product_attention."""
    return scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])


def attend_sdpa_rows(q: Any, k: Any, v: Any) -> Any:
    """The same with the query heads of a key/value head as its queries."""
    b, hq, _, d = q.shape
    h = k.shape[1]
    return scaled_dot_product_attention(q.view(b, h, hq // h, d), k, v).reshape(b, hq, 1, d)


def attend_matmul(q: Any, k: Any, v: Any) -> Any:
    """The same by two matrix products and a softmax."""
    b, hq, _, d = q.shape
    h = k.shape[1]
    scores = torch.matmul(q.view(b, h, hq // h, d) * d**-0.5, k.transpose(-1, -2))
    return torch.matmul(torch.softmax(scores, -1), v).reshape(b, hq, 1, d)


#: By name; the first is left out where heads are not shared, being the second then.
TORCH: dict[str, Attention] = {
    "SDPA": attend_sdpa,
    "SDPA, heads as rows": attend_sdpa_rows,
    "matmul": attend_matmul,
}
DTYPES = ("fp32", "bf16")


def rival_names(gqa: int) -> list[str]:
    """Names of torch's ways at so many query heads a key/value head: ``torch matmul bf16``, ..."""
    ways = list(TORCH)[gqa == 1 :]
    return [f"torch {way} {dtype}" for dtype in DTYPES for way in ways]


def rival(name: str, tensors: dict[str, tuple[Any, Any, Any]]) -> Callable[[], Any]:
    """A call of the way called `name` on the q, k, v of its dtype."""
    way, dtype = name.removeprefix("torch ").rsplit(" ", 1)
    run, arguments = TORCH[way], tensors[dtype]
    return lambda: run(*arguments)
