"""Dense attention with torch on the GPU: scaled_dot_product_attention in float16, each way that may be fastest."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.device import Device
from benchmarks.rivals import attend_sdpa, attend_sdpa_rows
from benchmarks.subjects import DRAWN_TOKENS, Shape, make_queries, make_tokens

#: The rival that targets are about.
FLASH = "torch flash, enable_gqa"


def _by_flash(attend: Callable[[Any, Any, Any], Any], *tensors: Any) -> Any:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return attend(*tensors)


#: Ways by name: shared heads by torch itself or as queries of their key/value head; flash, or whatever torch chooses.
WAYS: dict[str, Callable[[Any, Any, Any], Any]] = {
    FLASH: partial(_by_flash, attend_sdpa),
    "torch flash, heads as rows": partial(_by_flash, attend_sdpa_rows),
    "torch's choice, enable_gqa": attend_sdpa,
}


def dense_bytes(shape: Shape) -> int:
    """Bytes of keys and values."""
    return 2 * 2 * shape.b * shape.h * shape.n * shape.d


def dense_tensors(device: Device, shape: Shape) -> tuple[Any, Any, Any]:
    """q (b, hq, 1, d), k and v (b, h, n, d) float16, random tokens of one row repeated. NotRun without room."""
    device.check_room(dense_bytes(shape))
    where, drawn = device.torch_device(), min(shape.n, DRAWN_TOKENS)
    tensors = [torch.from_numpy(make_queries(shape)).to(where, torch.float16)]
    for x in make_tokens(shape._replace(n=drawn, b=1)):
        piece = torch.from_numpy(x).to(where, torch.float16)
        whole = torch.empty((shape.b, shape.h, shape.n, shape.d), dtype=torch.float16, device=where)
        for start in range(0, shape.n, drawn):
            whole[:, :, start : start + drawn] = piece[:, :, : min(drawn, shape.n - start)]
        tensors.append(whole)
    q, k, v = tensors
    return q, k, v


def usable_ways(tensors: tuple[Any, Any, Any]) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """The ways that work here as calls, and why the others do not."""
    calls: dict[str, Callable[[], Any]] = {}
    absent = {}
    for name, way in WAYS.items():
        call = partial(way, *tensors)
        try:
            call()
            calls[name] = call
        except RuntimeError as error:
            absent[name] = str(error).strip().splitlines()[0]
    return calls, absent
