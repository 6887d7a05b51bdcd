"""Whether what was timed is right: the last row of a batch, where offsets are largest, against torch in float32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu.device import Device
from benchmarks.rivals import attend_matmul
from benchmarks.subjects import relative_error
from kvsketch.attention import CacheView
from kvsketch.pages import decode_keys, decode_values

#: Largest relative L2 error by what coefficients are rounded to: attention's own, and float16 results.
LARGEST_ERRORS = {"int16": 5e-3, "int8": 0.1}


def last_row_error(device: Device, q: Any, view: CacheView, out: Any) -> float:
    """Relative L2 error of the last row of `out` (b, hq, 1, dv) against attention over the row's decoded tokens."""
    k, v = (_tensor(device, x)[None] for x in _row_tokens(device.cupy, view, len(q) - 1))
    exact = attend_matmul(_tensor(device, q[-1:].astype(device.cupy.float32)), k, v)
    return relative_error(out[-1:].get(), exact.double().cpu().numpy())


def _row_tokens(xp: Any, view: CacheView, row: int) -> Iterator[Any]:
    """Keys (h, n, d), then values (h, n, dv), of a row in float32; their order does not matter to attention."""
    pages = view.pages[row, :, : int(view.page_counts[row])]
    split, start = view.layout.value_offset, int(view.window_starts[row])
    first, newest = slice(int(view.sink_counts[row])), slice(start, start + int(view.window_counts[row]))
    keys = decode_keys(pages[..., :split], view.layout.keys), view.sink_k, view.window_k
    values = decode_values(pages[..., split:], view.layout.values), view.sink_v, view.window_v
    for decoded, sinks, window in (keys, values):
        exact = [x.astype(decoded.dtype) for x in (sinks[row, :, first], window[row, :, newest])]
        yield xp.concatenate([decoded, *exact], axis=1)


def _tensor(device: Device, x: Any) -> torch.Tensor:
    """An array of the device as a tensor there."""
    if device.dry_run:
        return torch.from_numpy(x.get())
    from kvsketch.adapters.torch_dlpack import tensor_from_array

    return tensor_from_array(x)
