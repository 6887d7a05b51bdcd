"""Attention over a compressed cache, without decoding more than a tile of it at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvsketch._attend import attend_checked
from kvsketch._checks import FLOAT_DTYPES, check_float, check_gqa, check_ndim
from kvsketch._dispatch import namespace
from kvsketch.layout import PageLayout


class CacheView(NamedTuple):
    """One layer's cache as arrays. A row's tokens are its sinks, then its pages, then its window.

    Row r has ``sink_counts[r]`` exact first tokens, ``page_counts[r]`` pages, and the exact tokens
    ``window_starts[r] .. window_starts[r] + window_counts[r]`` of the window arrays. The three dimensions of exact
    arrays before the last are rows, key/value heads and a capacity; what lies beyond a row's counts is never read.
    Counts and starts are NumPy arrays, wherever the tokens are: how work is divided follows from them.
    """

    layout: PageLayout
    pages: Any  #: (b, h, capacity, record_bytes) uint8, C order
    page_counts: Any  #: (b,) int64
    sink_k: Any  #: (b, h, S, d)
    sink_v: Any  #: (b, h, S, dv)
    sink_counts: Any  #: (b,) int64
    window_k: Any  #: (b, h, W, d)
    window_v: Any  #: (b, h, W, dv)
    window_starts: Any  #: (b,) int64
    window_counts: Any  #: (b,) int64

    @property
    def counts(self) -> Any:
        """(4, b) int64: pages, first tokens, starts of the windows and their tokens."""
        return np.array((self.page_counts, self.sink_counts, self.window_starts, self.window_counts), np.int64)

    @property
    def device_counts(self) -> Any:
        """The counts beside the tokens, if somebody keeps them there; None: whoever attends has to send them."""
        return None

    @property
    def lengths(self) -> Any:
        """(b,) int64: tokens of each row."""
        return self.sink_counts + self.page_counts * self.layout.page_tokens + self.window_counts

    def causal_limits(self, s: int) -> Any:
        """(b, s) int64: how many tokens each of the newest s tokens of a row sees, itself included."""
        return namespace(self.pages).asarray(np.maximum(self.lengths[:, None] + np.arange(1 - s, 1), 0))

    def check_queries(self, q: Any) -> None:
        """Raise unless queries (b, hq, s, d) fit."""
        check_float("q", q)
        check_ndim("q", q, "(b, hq, s, d)")
        b, hq, _, d = q.shape
        rows, h = self.pages.shape[:2]
        if d != self.layout.keys.width or b != rows:
            raise ValueError(f"q must have shape ({rows}, hq, s, {self.layout.keys.width}), got {tuple(q.shape)}")
        check_gqa(hq, h)


class HeldView(CacheView):
    """A cache's own view, which knows its counts on the device; what ``_replace`` makes of it does not."""

    _device_counts: Any = None

    @property
    def device_counts(self) -> Any:
        return self._device_counts

    def with_counts(self, device_counts: Any) -> HeldView:
        """The same view; `device_counts` are its counts, (4, b) int64, or None."""
        self._device_counts = device_counts
        return self


def attend(
    q: Any,
    view: CacheView,
    *,
    limits: Any = None,
    bias: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: Any = None,
    coefficients: str = "int16",
    engine: str | None = None,
) -> Any:
    """Softmax attention of queries over a compressed cache.

    Scores are ``scale * <q, k^>``, soft-capped as ``softcap * tanh(score / softcap)``, plus `bias`; keys and values are
    those that :func:`kvsketch.pages.decode_keys` and ``decode_values`` would give, exact ones as they are.

    Parameters
    ----------
    q : (b, hq, s, d) float32, float16 or bfloat16
        Queries; the `hq` heads share the `h` key/value heads in runs of hq/h.
    limits : (b, s) int64, optional
        Query i of row r sees the first ``limits[r, i]`` tokens of its row. By default the queries are the row's last s
        tokens and see themselves and what came before.
    bias : (b, 1 or hq, s, n) float32, optional
        Added to the scores of token positions 0..n-1 of each row, n at least the longest row; -inf hides a token.
    scale : default 1/sqrt(d)
    softcap : positive, optional
    sink_logits : (hq,) float32, optional
        A learned logit of each head that joins the softmax's denominator only.
    coefficients : {"int16", "int8"}
        What an engine may round queries and softmax weights to, once they are multiplied by a page's scales. The
        relative L2 error that this adds to the output is measured on data of several kinds by ``python -m benchmarks
        decode``: with int16 about 5e-5, up to 1.3e-4 where attention rests on few tokens and 3e-4 for keys with outlier
        channels (values without a mean, which is the worst case); with int8 0.01 to 0.06. The reference rounds neither.

    Returns
    -------
    (b, hq, s, dv) in the dtype of `q`; zeros for a query that sees nothing.
    """
    view.check_queries(q)
    b, hq, s, _ = q.shape
    for side, arrays in ((view.layout.keys, ("sink_k", "window_k")), (view.layout.values, ("sink_v", "window_v"))):
        for name in arrays:
            if getattr(view, name).dtype != FLOAT_DTYPES[side.dtype]:
                raise TypeError(
                    f"view.{name} has dtype {getattr(view, name).dtype}, but the layout is for {side.dtype}; make the "
                    "layout with the dtype of the exact tokens"
                )
    if limits is not None and tuple(limits.shape) != (b, s):
        raise ValueError(f"limits must have shape ({b}, {s}), got {tuple(limits.shape)}")
    if bias is not None:
        longest = int(view.lengths.max()) if b else 0
        if (
            bias.ndim != 4
            or bias.shape[0] != b
            or bias.shape[1] not in (1, hq)
            or bias.shape[2] != s
            or bias.shape[3] < longest
        ):
            raise ValueError(f"bias must have shape ({b}, 1 or {hq}, {s}, n >= {longest}), got {tuple(bias.shape)}")
    return attend_checked(q, view, limits, bias, scale, softcap, sink_logits, coefficients, engine)
