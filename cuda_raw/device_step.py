"""A decode step on a device: launches of kernels alone, whose arguments stay as they are while no buffer moves.

So it can be captured in a CUDA graph. What changes from step to step is the counts, which the kernels read, and count,
on the device; splits are planned for as many tokens as there is room for.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from kvsketch.attention import CacheView
from kvsketch.cuda_raw._compile import launch
from kvsketch.cuda_raw.attention import FUSED_QUERIES, Tokens, launch_attention, new_work, plan_attention
from kvsketch.layout import DTYPE_CODES

FILE, THREADS = "device_step.cu", 256
#: Query heads for a key/value head, at most.
MOST_RATIO = FUSED_QUERIES
#: struct Token there.
TOKEN = np.dtype(
    [
        *((name, np.int64) for name in ("sink_room", "window_room")),
        *((name, np.int32) for name in ("b", "h", "key_width", "key_given", "key_kept")),
        *((name, np.int32) for name in ("value_width", "value_given", "value_kept")),
    ]
)


class DeviceStep:
    """Steps of `hq` query heads over buffers that stay where they are, which it does not keep alive."""

    def __init__(self, view: CacheView, hq: int, coefficients: str) -> None:
        b, h, capacity, _ = view.pages.shape
        device, sizes = int(view.pages.device.id), (b, h, hq, 1)
        most = capacity, view.sink_k.shape[2], view.window_k.shape[2]
        self._plan = plan_attention(view.layout, sizes, most, coefficients, device)
        self._work = new_work(view.layout, sizes, self._plan, device)

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that it keeps."""
        return sum(int(x.nbytes) for x in self._work)

    def store(self, view: CacheView, k: Any, v: Any) -> None:
        """Store k (b, h, 1, d) and v (b, h, 1, dv), in C order, and count them."""
        append_token(_tokens(view), k, v)

    def attend(
        self, view: CacheView, q: Any, out: Any, *, scale: float, softcap: float | None, sink_logits: Any
    ) -> None:
        """Attend with q (b, hq, 1, d): out (b, hq, 1, dv); in C order."""
        launch_attention(
            q, _tokens(view), out, self._plan, self._work,
            limits=None, bias=None, scale=scale, softcap=softcap, sink_logits=sink_logits,
        )  # fmt: skip


def _tokens(view: CacheView) -> Tokens:
    arrays = (view.pages, view.sink_k, view.sink_v, view.window_k, view.window_v)
    return Tokens(view.layout, view.device_counts, *arrays)


def is_captured() -> bool:
    """Whether what is launched now is written down for a CUDA graph instead of run."""
    import cupy

    return bool(cupy.cuda.get_current_stream().is_capturing())


def make_device_step(view: CacheView, hq: int, coefficients: str) -> DeviceStep:
    """Steps over a cache that keeps its counts on the device; ValueError for more query heads than a kernel takes."""
    ratio = hq // view.pages.shape[1]
    if ratio > MOST_RATIO:
        raise ValueError(
            f"a step takes at most {MOST_RATIO} query heads for a key/value head, got {ratio}; append and attend"
        )
    return DeviceStep(view, hq, coefficients)


def append_token(tokens: Tokens, k: Any, v: Any) -> None:
    """Store k (b, h, 1, d) and v (b, h, 1, dv) at the end of each row, for which there is room, and count them."""
    b, h = k.shape[:2]
    rooms = tokens.sink_k.shape[2], tokens.window_k.shape[2]
    sides = ((x.shape[3], str(x.dtype), str(of.dtype)) for x, of in ((k, tokens.window_k), (v, tokens.window_v)))
    args = (k, v, tokens.sink_k, tokens.sink_v, tokens.window_k, tokens.window_v, tokens.counts)
    launch(FILE, "append_token", (b, 1, 1), (THREADS, 1, 1), (*args, _token(*rooms, b, h, *sides)))


@lru_cache(maxsize=256)
def _token(sink_room: int, window_room: int, b: int, h: int, *sides: tuple[int, str, str]) -> Any:
    """A 0-d array of :data:`TOKEN`, not to be written to; `sides` are width, given dtype and kept dtype."""
    numbers = (n for width, given, kept in sides for n in (width, DTYPE_CODES[given], DTYPE_CODES[kept]))
    return np.array((sink_room, window_room, b, h, *numbers), TOKEN)
