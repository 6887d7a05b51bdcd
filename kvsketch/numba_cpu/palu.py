"""Attention over latents in Numba: the fused loop of :mod:`kvsketch.numba_cpu.attention` with keys that are rebuilt.

Where nothing stands between the matrix and the query (no RoPE, no norm) and the queries are few, the matrix is
multiplied into them instead. Exact first tokens are left out of the loop and joined to its result by log-sum-exp.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from kvsketch._palu_inputs import FirstTokens, KeyNorm, Reconstruction, Rope
from kvsketch.attention import CacheView
from kvsketch.numba_cpu import attention
from kvsketch.numba_cpu._compile import address, compile_address
from kvsketch.numba_cpu.attention import FUSED_QUERIES, Prepared
from kvsketch.numba_cpu.attention import kernel_level as kernel_level
from kvsketch.numba_cpu.fused import EXTRA, Plan
from kvsketch.numba_cpu.latents import ROWS, pack_rows
from kvsketch.numba_cpu.rebuild import FIELDS, MATRICES_AT, make_rebuild_score, rebuild_scratch
from kvsketch.numba_cpu.softmax import LOG2E
from kvsketch.reference import palu as reference

_NO_ROWS = np.zeros((0, 0), np.float32)
#: Packed up_k and the biases of its rows, of matrices in use.
_PACKED: WeakKeyDictionary[Reconstruction, tuple[Any, Any]] = WeakKeyDictionary()


def _packed(matrices: Reconstruction) -> tuple[Any, Any]:
    """up_k packed head by head (heads, blocks, r, ROWS), and the bias of each of these rows (heads, blocks * ROWS)."""
    found = _PACKED.get(matrices)
    if found is None:
        heads, rank = matrices.heads, matrices.up_k.shape[1]
        packed = pack_rows(matrices.up_k.reshape(heads, -1, rank))
        bias = np.zeros((heads, packed.shape[1] * ROWS), np.float32)
        if matrices.key_bias is not None:
            bias[:, : len(matrices.up_k) // heads] = matrices.key_bias.reshape(heads, -1)
        found = _PACKED[matrices] = packed, bias
    return found


@lru_cache(maxsize=32)
def _kernel(kind: int, bits: int, paged: bool) -> int:
    return compile_address(make_rebuild_score(kind, bits, paged), f"{kind}-{bits}-{paged}")


def _prepare(
    view: CacheView,
    matrices: Reconstruction,
    count: int,
    rope: Rope | None,
    positions: Any,
    norm: KeyNorm | None,
    coefficients: str,
) -> tuple[Prepared, list[Any]]:
    """The plan of keys that are rebuilt, and the arrays that must outlive its use."""
    layout = view.layout
    keys, values = layout.keys.spec, layout.values.spec
    packed, bias = _packed(matrices)
    d = len(matrices.up_k) // matrices.heads
    given = dict.fromkeys(FIELDS, 0) | {
        "heads": matrices.heads,
        "d": d,
        "packed": address(packed),
        "bias": address(bias),
    }
    kept = [packed, bias]

    def keep(x: Any, dtype: Any) -> int:
        kept.append(np.ascontiguousarray(x, dtype))
        return address(kept[-1])

    if norm is not None:
        given |= {"norm": keep(norm.weight, np.float32), "eps": keep(np.full(1, norm.eps), np.float32)}
    if rope is not None:
        given |= {"cos": keep(rope.cos, np.float32), "sin": keep(rope.sin, np.float32)}
        given |= {"rotary": rope.cos.shape[1], "interleaved": int(rope.interleaved)}
        if positions is not None:
            given |= {"positions": keep(positions, np.int64), "longest": positions.shape[1]}
    extra = np.zeros(EXTRA, np.int64)
    extra[MATRICES_AT // 8] = keep([given[name] for name in FIELDS], np.int64)
    mix, work = attention.mix_plan(values, coefficients)
    value_pitch, mix_pitch = attention.value_pitches(values)
    work = max(work, rebuild_scratch(keys, d, given["rotary"]))
    paged, exact = (_kernel(keys.kind, keys.bits, which) for which in (True, False))
    plan = Plan(keys, values, paged, exact, mix, work, 0, 0, value_pitch, mix_pitch)
    return attention.finish_preparing(plan, layout, count, extra), kept


def attend(
    q: Any,
    view: CacheView,
    matrices: Reconstruction,
    *,
    rope: Rope | None,
    positions: Any,
    key_norm: KeyNorm | None,
    first: FirstTokens | None,
    limits: Any,
    bias: Any,
    scale: float,
    softcap: float | None,
    coefficients: str,
) -> Any:
    b, hq, s, d = q.shape
    count, heads, rank = hq * s, matrices.heads, view.layout.values.width
    if count > FUSED_QUERIES or b * count == 0:
        return reference.attend(
            q, view, matrices, rope=rope, positions=positions, key_norm=key_norm, first=first, limits=limits, bias=bias,
            scale=scale, softcap=softcap, coefficients=coefficients,
        )  # fmt: skip
    # In units of log2, or of the soft cap, which comes before those.
    unit = scale / softcap if softcap else scale * LOG2E
    queries = q.astype(np.float32).reshape(b, heads, count // heads, d)
    scaled, shift = queries * np.float32(unit), None
    folds = rope is None and key_norm is None and count // heads < d and not (softcap and matrices.key_bias is not None)
    kept: list[Any] = []
    if matrices.up_k is None or folds:
        if matrices.up_k is not None:
            scaled = scaled @ matrices.up_k.reshape(heads, d, -1)
            if matrices.key_bias is not None:
                shift = queries @ matrices.key_bias.reshape(heads, d, 1)
        scaled = np.ascontiguousarray(scaled.reshape(b, 1, count, -1))
        prepared, work = attention.prepare(view.layout, count, coefficients), 1
        packed = pack_rows(scaled) if prepared.plan.score else _NO_ROWS
    else:
        prepared, kept = _prepare(view, matrices, count, rope, positions, key_norm, coefficients)
        packed, work = pack_rows(scaled), max(1, len(matrices.up_k) // count)
    skip = None if first is None else np.ascontiguousarray(first.counts, np.int64)
    sums = np.empty((b, 1, count), np.float32)
    mixed = attention.attend_prepared(
        prepared, view, scaled, packed, 1.0, s, count, limits, bias, softcap, skip=skip, sums=sums, work=work
    )
    del kept  # what the kernels had addresses of
    out = mixed.reshape(b, heads, count // heads, rank)
    if matrices.up_v is not None:
        out = out @ np.swapaxes(matrices.up_v.reshape(heads, -1, rank), 1, 2)
    if first is not None:
        logs = sums.reshape(b, heads, -1) / np.float32(LOG2E)
        if shift is not None:
            logs = logs + shift[..., 0] * np.float32(scale)
        out = _join_first(
            out, logs, queries, first, view.causal_limits(s) if limits is None else limits, bias, scale, softcap
        )
    return out.reshape(b, hq, s, -1).astype(q.dtype, copy=False)


def _join_first(
    out: Any, logs: Any, q: Any, first: FirstTokens, limits: Any, bias: Any, scale: float, softcap: float | None
) -> Any:
    """What latents gave, out (b, h, Q, dv) with the logarithms (b, h, Q) of its sums, joined by exact first tokens."""
    b, h, count, _ = q.shape
    room, s = first.k.shape[2], limits.shape[1]
    scores = q @ np.swapaxes(first.k.astype(np.float32), -1, -2) * np.float32(scale)
    if softcap is not None:
        scores = np.float32(softcap) * np.tanh(scores / np.float32(softcap))
    scores = scores.reshape(b, h, count // s, s, room)
    held = np.arange(room) < np.asarray(first.counts)[:, None]
    seen = held[:, None] & (np.arange(room) < limits[:, :, None])
    if bias is not None:
        # A cache may hold fewer tokens than there is room for exact ones.
        part = np.full((*bias.shape[:3], room), -np.inf, np.float32)
        some = min(room, bias.shape[3])
        part[..., :some] = bias[..., :some]
        scores = scores + (part[:, :, None] if part.shape[1] == 1 else part.reshape(b, h, count // s, s, room))
    scores = np.where(seen[:, None, None], scores, -np.inf).reshape(b, h, count, room)
    highest = np.maximum(logs, scores.max(axis=-1, initial=-math.inf))
    highest = np.where(np.isfinite(highest), highest, np.float32(0))
    weights = np.exp(scores - highest[..., None])
    own = np.exp(logs - highest)
    total = own + weights.sum(axis=-1)
    values = np.where(held[:, None, :, None], first.v.astype(np.float32), np.float32(0))
    mixed = own[..., None] * out + weights @ values
    return mixed / np.where(total > 0, total, np.float32(1))[..., None]
