"""Attention over latents: keys and values are rebuilt for a run of tokens at a time, then attended to as exact ones."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from kvsketch._dispatch import namespace
from kvsketch._palu_inputs import FirstTokens, KeyNorm, Reconstruction, Rope
from kvsketch.attention import CacheView
from kvsketch.numba_cuda._launch import launch
from kvsketch.numba_cuda.attention import Softmax, cache_parts, causal_limits, exact_part
from kvsketch.numba_cuda.palu_kernels import finish_keys, finish_values

#: Tokens of a row whose keys and values are there at a time.
RUN_TOKENS = 1024


class _Finish(NamedTuple):
    """What keys need besides their matrix, as arguments of :func:`finish_keys`; what is not there is one number."""

    bias: Any  #: (heads * d,)
    biased: int
    norm: Any  #: (d,)
    eps: Any  #: 0 for no norm
    normed: int
    cos: Any  #: (positions, rotary)
    sin: Any
    rotary: int  #: 0 for no RoPE
    interleaved: int
    positions: Any  #: (b, n)
    placed: int


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
    """See :func:`kvsketch.palu.attend`, for one slice; `coefficients` may be rounded to, but are not here."""
    xp = namespace(q)
    b, hq, s, d = q.shape
    heads = matrices.heads
    dv = view.layout.values.width if matrices.up_v is None else matrices.up_v.shape[0] // heads
    if not q.size:
        return xp.zeros((b, hq, s, dv), dtype=q.dtype)
    parts = cache_parts(view)
    softmax = Softmax(
        q.astype(xp.float32).reshape(b, heads, hq // heads * s, d),
        dv,
        RUN_TOKENS,
        limits=causal_limits(view, s) if limits is None else xp.asarray(limits),
        bias=bias,
        scale=scale,
        softcap=softcap,
    )
    finish = _finish(xp, matrices, key_norm, rope, positions)
    true_k, true_v, true_counts = _first_tokens(xp, b, heads, d, dv, first)
    for part in parts:
        for start in range(0, part.room, RUN_TOKENS):
            run = min(RUN_TOKENS, part.room - start)
            counts, firsts = xp.clip(part.counts - start, 0, run), part.firsts + start
            plan = xp.stack([counts, part.starts + start, firsts])
            key_latents, value_latents = (
                _read_latents(records, number, part.capacity, plan, run, side.width)
                for records, number, side in (
                    (part.keys, part.key_number, view.layout.keys),
                    (part.values, part.value_number, view.layout.values),
                )
            )
            k, v = (xp.empty((b, heads, run, width), dtype=xp.float32) for width in (d, dv))
            built = _times(key_latents, matrices.up_k, heads)
            launch(finish_keys, b * heads * run, built, plan, finish, true_k, true_counts, k)
            built = _times(value_latents, matrices.up_v, heads)
            launch(finish_values, v.size, built, plan, true_v, true_counts, v)
            softmax.add(exact_part(k, v, counts, xp.zeros_like(counts), firsts))
    return softmax.result(s).astype(q.dtype)


def _finish(xp: Any, matrices: Reconstruction, key_norm: KeyNorm | None, rope: Rope | None, positions: Any) -> _Finish:
    nothing = xp.zeros((1, 1), dtype=xp.float32)
    return _Finish(
        nothing[0] if matrices.key_bias is None else matrices.key_bias.astype(xp.float32, copy=False),
        int(matrices.key_bias is not None),
        nothing[0] if key_norm is None else key_norm.weight.astype(xp.float32, copy=False),
        np.float32(0 if key_norm is None else key_norm.eps),
        int(key_norm is not None),
        nothing if rope is None else rope.cos.astype(xp.float32, copy=False),
        nothing if rope is None else rope.sin.astype(xp.float32, copy=False),
        0 if rope is None else rope.cos.shape[1],
        int(rope is not None and rope.interleaved),
        xp.zeros((1, 1), dtype=xp.int64) if positions is None else xp.asarray(positions, dtype=xp.int64),
        int(positions is not None),
    )


def _first_tokens(xp: Any, b: int, heads: int, d: int, dv: int, first: FirstTokens | None) -> tuple[Any, Any, Any]:
    """True keys and values of the first tokens in float32, and how many each row has."""
    if first is None:
        k, v = (xp.zeros((b, heads, 1, width), dtype=xp.float32) for width in (d, dv))
        return k, v, xp.zeros(b, dtype=xp.int64)
    k, v = (x.astype(xp.float32, copy=False) for x in (first.k, first.v))
    return k, v, xp.asarray(first.counts, dtype=xp.int64)


def _read_latents(records: Any, number: Any, capacity: int, plan: Any, run: int, width: int) -> Any:
    """Latents float32 (b, run, width) of a part, zeros behind the last token of a row; `plan` as kernels take it."""
    latents = namespace(plan).empty((plan.shape[1], run, width), dtype=np.float32)
    launch(_latent_kernel(number), latents.size, records, capacity, plan, latents)
    return latents


@cache
def _latent_kernel(number: Any) -> Any:
    """The kernel for sides whose numbers `number` reads."""

    @cuda.jit
    def read_latents(records, capacity, plan, latents):
        """A thread to each number of `latents` (b, t, width)."""
        b, tokens, width = latents.shape
        index, c = divmod(cuda.grid(1), width)
        row, t = divmod(index, tokens)
        if row < b:
            latent = np.float32(0)
            if t < plan[0, row]:
                page, token = divmod(plan[1, row] + t, records.spec.tokens)
                latent = number(records, row * capacity + page, token, c)
            latents[row, t, c] = latent

    return read_latents


def _times(latents: Any, matrix: Any, heads: int) -> Any:
    """`matrix` (heads * width, r) times latents (b, t, r), as (b, t, heads, width); without one the latents of each."""
    xp = namespace(latents)
    b, t, r = latents.shape
    if matrix is None:
        return xp.broadcast_to(latents[:, :, None], (b, t, heads, r))
    return xp.matmul(latents, matrix.astype(xp.float32, copy=False).T).reshape(b, t, heads, -1)
