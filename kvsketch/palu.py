"""Palu (arXiv 2407.21118): caches of latents, the low-rank halves of key and value projections.

A projection's weight is factored once (:func:`factorise`), cut to a rank (:func:`allocate_ranks`) and perhaps rotated
(:func:`draw_rotation`, :func:`rotate`). A cache then holds latents instead of keys and values, the heads of a slice
together as one head of a :class:`kvsketch.Cache`, with the codec :class:`kvsketch.codecs.TokenInts` or ``Exact``; and
:func:`attend` reads them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kvsketch._attend import COEFFICIENTS
from kvsketch._checks import check_choice, check_float, check_gqa, check_ndim
from kvsketch._dispatch import implementation, namespace, on_device_of
from kvsketch._palu_factors import Factors, factorise
from kvsketch._palu_inputs import FirstTokens, KeyNorm, Reconstruction, Rope
from kvsketch._palu_ranks import allocate_ranks
from kvsketch._palu_rotations import draw_rotation, has_hadamard, rotate
from kvsketch.cache import Cache
from kvsketch.codecs import Codec, Exact, SignSketch, TokenInts

__all__ = [
    "Factors",
    "FirstTokens",
    "KeyNorm",
    "Reconstruction",
    "Rope",
    "allocate_ranks",
    "attend",
    "check_latent_codec",
    "draw_rotation",
    "factorise",
    "has_hadamard",
    "rotate",
]


def check_latent_codec(codec: Codec) -> None:
    """Raise ValueError unless `codec` can hold latents that keys are rebuilt from."""
    if isinstance(codec, SignSketch):
        raise ValueError(
            "a SignSketch cannot hold latents: it estimates products with one query and nothing else, while keys are "
            "rebuilt from latents, turned by RoPE and only then multiplied; take TokenInts or Exact"
        )
    if not isinstance(codec, (Exact, TokenInts)):
        raise ValueError(
            f"{codec} does not fit latents, which rotations even out over the channels of a token; take TokenInts, "
            "whose groups lie along them, or Exact"
        )


def attend(
    q: Any,
    caches: Sequence[Cache],
    matrices: Sequence[Reconstruction],
    *,
    rope: Rope | None = None,
    positions: Any = None,
    key_norm: KeyNorm | None = None,
    first: FirstTokens | None = None,
    mask: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    coefficients: str = "int16",
    check_positions: bool = True,
    engine: str | None = None,
) -> Any:
    """Softmax attention of the newest s positions over cached latents.

    Keys are ``up_k @ latent + key_bias``, normed and turned by RoPE at their tokens' positions, rebuilt a tile at a
    time; values are mixed as latents and multiplied by up_v once. No keys or values of the whole cache are built. A
    prompt of many queries is taken in float32 matrix products.

    Parameters
    ----------
    q : (b, hq, s, d) float32, float16 or bfloat16
        Queries, turned by RoPE already. Query i stands at position ``length - s + i`` and sees no later one, and no
        padding. Their heads share the key/value heads in runs, and these belong to the slices in order.
    caches
        One for each slice, with one head: latents of keys and of values of all tokens, appended before.
    matrices
        One for each slice, of the same number of heads. Where their up_k is None, q are queries for latents.
    rope
        None for keys that are not turned.
    positions : (b, n) integers, n the longest row
        Where each token of a row stands, padding left out; by default token i of a row at position i.
    key_norm
        Of keys, before RoPE.
    first
        True keys and values that are used in place of the latents of rows' first tokens.
    mask : (b or 1, hq or 1, s, length), optional
        As in :meth:`kvsketch.Cache.attend`.
    scale : default 1/sqrt(d)
    softcap : positive, optional
    coefficients
        What an engine may round the weights of quantized value latents to; see :func:`kvsketch.attention.attend`.
    check_positions
        Look whether positions lie within the tables of `rope`, for which the host waits where they lie on a device.
        Leave that out only where it is known: kernels read at whatever positions they are given.
    engine
        By default that of the caches.

    Returns
    -------
    (b, hq, s, dv) in the dtype of `q`; zeros for a query that sees nothing. dv is the rank where up_v is None.
    """
    check_float("q", q)
    check_ndim("q", q, "(b, hq, s, d)")
    b, hq, s, d = q.shape
    if not caches or len(caches) != len(matrices):
        raise ValueError(f"caches and matrices must be of the same slices, got {len(caches)} and {len(matrices)}")
    heads = _check_slices(caches, matrices, b, d, rope is not None or key_norm is not None)
    check_gqa(hq, heads * len(caches))
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, got {softcap}; leave it out for none")
    check_choice("coefficients", coefficients, COEFFICIENTS)
    held = caches[0]._held("attend")
    if s > held.positions.length:
        raise ValueError(f"q has {s} positions but the caches hold {held.positions.length}; append their latents first")
    longest = int(held.lengths.max())
    widths = {
        int(cache.dv if m.up_v is None else m.up_v.shape[0] // heads) for cache, m in zip(caches, matrices, strict=True)
    }
    if len(widths) != 1:
        raise ValueError(f"slices have values of {sorted(widths)} numbers; give up_v, or attend to each slice alone")
    with on_device_of(q):
        _check_rest(q, heads * len(caches), widths.pop(), longest, rope, positions, key_norm, first, check_positions)
        limits = held.positions.limits(s, held.lengths)
        limits = None if limits is None else namespace(q).asarray(limits)
        bias = None if mask is None else held.positions.bias(mask, s, hq)
        run = implementation("palu.attend", q, engine=caches[0].engine if engine is None else engine)
        share, out = hq // len(caches), []
        for i, (cache, slice_matrices) in enumerate(zip(caches, matrices, strict=True)):
            own, kept = slice(i * share, (i + 1) * share), slice(i * heads, (i + 1) * heads)
            out.append(
                run(
                    q[:, own],
                    cache._view(cache._held("attend")),
                    slice_matrices,
                    rope=rope,
                    positions=positions,
                    key_norm=key_norm,
                    first=None if first is None else FirstTokens(first.k[:, kept], first.v[:, kept], first.counts),
                    limits=limits,
                    bias=bias if bias is None or bias.shape[1] == 1 else bias[:, own],
                    scale=1 / math.sqrt(d) if scale is None else scale,
                    softcap=softcap,
                    coefficients=coefficients,
                )
            )
        return out[0] if len(out) == 1 else namespace(q).concatenate(out, axis=1)


def _check_slices(caches: Sequence[Cache], matrices: Sequence[Reconstruction], b: int, d: int, finished: bool) -> int:
    """Key/value heads of a slice, after checking that caches and matrices fit together and hold the same tokens."""
    heads = set()
    for i, (cache, m) in enumerate(zip(caches, matrices, strict=True)):
        check_latent_codec(cache.settings.keys)
        check_latent_codec(cache.settings.values)
        if cache.heads != 1 or cache.batch != b:
            raise ValueError(
                f"caches[{i}] must hold latents of {b} rows as one head, got {cache.batch} rows of {cache.heads}"
            )
        if (cache.lengths != caches[0].lengths).any() or cache.length != caches[0].length:
            raise ValueError(f"caches[{i}] holds {cache.length} positions, caches[0] holds {caches[0].length}")
        heads.add(m.heads)
        if m.up_k is None:
            if finished:
                raise ValueError(f"matrices[{i}] has no up_k, but RoPE and norms are of keys, not of latents; give it")
            if d != cache.d:
                raise ValueError(f"q must have {cache.d} channels, those of latents, without up_k; got {d}")
        elif tuple(m.up_k.shape) != (m.heads * d, cache.d):
            raise ValueError(
                f"matrices[{i}].up_k must have shape ({m.heads * d}, {cache.d}), got {tuple(m.up_k.shape)}"
            )
        if m.up_v is not None and m.up_v.shape[1] != cache.dv:
            raise ValueError(f"matrices[{i}].up_v must have {cache.dv} columns, got {tuple(m.up_v.shape)}")
    if len(heads) != 1:
        raise ValueError(f"slices must have the same number of heads, got {sorted(heads)}")
    return heads.pop()


def _check_rest(
    q: Any,
    h: int,
    dv: int,
    longest: int,
    rope: Rope | None,
    positions: Any,
    key_norm: KeyNorm | None,
    first: FirstTokens | None,
    check_positions: bool,
) -> None:
    b, _, _, d = q.shape
    if positions is not None and (positions.dtype.kind not in "iu" or tuple(positions.shape) != (b, longest)):
        raise ValueError(
            f"positions must be integers of shape ({b}, {longest}), got {positions.dtype} of {tuple(positions.shape)}"
        )
    if rope is not None:
        rotary = rope.cos.shape[-1]
        if rope.cos.shape != rope.sin.shape or rope.cos.ndim != 2 or rotary % 2 or not 0 < rotary <= d:
            raise ValueError(
                f"rope must hold cos and sin (positions, rotary) with an even rotary up to {d}, got shapes "
                f"{tuple(rope.cos.shape)} and {tuple(rope.sin.shape)}"
            )
        low, high = 0, longest - 1
        if positions is not None:
            looks = check_positions and positions.size
            low, high = (int(positions.min()), int(positions.max())) if looks else (0, -1)
        if low < 0 or high >= len(rope.cos):
            raise ValueError(f"tokens stand at positions {low} to {high}, but rope has tables for {len(rope.cos)}")
    if key_norm is not None and tuple(key_norm.weight.shape) != (d,):
        raise ValueError(f"key_norm.weight must have shape ({d},), got {tuple(key_norm.weight.shape)}")
    if first is not None:
        room = first.k.shape[2] if first.k.ndim == 4 else 0
        if tuple(first.k.shape) != (b, h, room, d) or tuple(first.v.shape) != (b, h, room, dv):
            raise ValueError(
                f"first must hold k ({b}, {h}, F, {d}) and v ({b}, {h}, F, {dv}), got {tuple(first.k.shape)} and "
                f"{tuple(first.v.shape)}; with up_v None there are no true values to mix in"
            )
        counts = first.counts
        if tuple(counts.shape) != (b,) or (b and (int(counts.min()) < 0 or int(counts.max()) > room)):
            raise ValueError(f"first.counts must be {b} numbers from 0 to {room}, got {counts.tolist()}")
