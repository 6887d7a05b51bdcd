"""Attention of arrays that are known to fit together: what :mod:`kvsketch.attention` and caches share."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from kvsketch._checks import check_choice
from kvsketch._dispatch import implementation

if TYPE_CHECKING:
    from kvsketch.attention import CacheView

#: What coefficients of codes may be rounded to.
COEFFICIENTS = ("int16", "int8")


def attend_checked(
    q: Any,
    view: CacheView,
    limits: Any,
    bias: Any,
    scale: float | None,
    softcap: float | None,
    sink_logits: Any,
    coefficients: str,
    engine: str | None,
) -> Any:
    """:func:`kvsketch.attention.attend` without a look at its arrays; the other arguments are still checked."""
    scale = softmax_scale(q, scale, softcap, sink_logits)
    if coefficients not in COEFFICIENTS:
        check_choice("coefficients", coefficients, COEFFICIENTS)
    run = implementation("attention.attend", q, engine=engine)
    return run(
        q,
        view,
        limits=limits,
        bias=bias,
        scale=scale,
        softcap=softcap,
        sink_logits=sink_logits,
        coefficients=coefficients,
    )


def softmax_scale(q: Any, scale: float | None, softcap: float | None, sink_logits: Any) -> float:
    """The scale for queries (b, hq, s, d); ValueError for a wrong cap, or learned logits of another shape."""
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, got {softcap}; leave it out for none")
    if sink_logits is not None and tuple(sink_logits.shape) != (q.shape[1],):
        raise ValueError(f"sink_logits must have shape ({q.shape[1]},), got {tuple(sink_logits.shape)}")
    return 1 / math.sqrt(q.shape[3]) if scale is None else scale
