"""What the tests of attention over latents share: layers with caches of latents, and float64 attention over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvsketch.cache import Cache
from kvsketch.codecs import Codec, TokenInts
from kvsketch.palu import FirstTokens, KeyNorm, Reconstruction, Rope, attend


@dataclass
class Layer:
    """Caches of latents that were appended, the matrices, and the other inputs of :func:`kvsketch.palu.attend`."""

    caches: list[Cache]
    matrices: list[Reconstruction]
    d: int
    options: dict[str, Any]

    def attend(self, q: Any, **options: Any) -> Any:
        return attend(q, self.caches, self.matrices, **self.options, **options)

    @property
    def valid(self) -> Any:
        """(b, length) bool: positions that hold a token."""
        positions = self.caches[0]._held("a test").positions
        return np.ones((positions.b, positions.length), bool) if positions.valid is None else positions.map


def make_rope(length: int, rotary: int, *, interleaved: bool = False, theta: float = 100.0) -> Rope:
    angles = np.arange(length)[:, None] * theta ** (-np.arange(0, rotary, 2) / rotary)
    angles = np.repeat(angles, 2, axis=1) if interleaved else np.concatenate([angles, angles], axis=1)
    return Rope(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32), interleaved)


def make_layer(
    *,
    b: int = 1,
    slices: int = 1,
    heads: int = 2,
    d: int = 16,
    dv: int = 24,
    ranks: tuple[int, ...] = (20,),
    value_ranks: tuple[int, ...] = (28,),
    n: int = 200,
    keys: Codec | None = None,
    values: Codec | None = None,
    valid: Any = None,
    dtype: Any = np.float32,
    rotary: int = 0,
    interleaved: bool = False,
    positions: Any = None,
    bias: bool = False,
    norm: bool = False,
    first: int = 0,
    up_k: bool = True,
    up_v: bool = True,
    seed: int = 0,
    chunks: tuple[int, ...] = (),
) -> Layer:
    """A layer of `slices` slices of `heads` heads with random latents; `first` true tokens a row, where it has them."""
    rng = np.random.default_rng(seed)

    def numbers(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32)

    caches, matrices = [], []
    for i in range(slices):
        rank, value_rank = ranks[i % len(ranks)], value_ranks[i % len(value_ranks)]
        cache = Cache(keys or TokenInts(4), values or TokenInts(4), residual_length=0, sink_tokens=0)
        k, v = (numbers(b, 1, n, rank).astype(dtype), numbers(b, 1, n, value_rank).astype(dtype))
        done = 0
        for size in (*chunks, n - sum(chunks)):
            part = slice(done, done + size)
            cache.append(k[:, :, part], v[:, :, part], valid=None if valid is None else valid[:, part])
            done += size
        caches.append(cache)
        matrices.append(
            Reconstruction(
                heads,
                numbers(heads * d, rank) / np.float32(rank**0.5) if up_k else None,
                numbers(heads * dv, value_rank) / np.float32(value_rank**0.5) if up_v else None,
                numbers(heads * d) if bias else None,
            )
        )
    lengths = caches[0].lengths
    highest = int(lengths.max()) if positions is None else int(positions.max()) + 1
    options: dict[str, Any] = {"positions": positions}
    if rotary:
        options["rope"] = make_rope(highest, rotary, interleaved=interleaved)
    if norm:
        options["key_norm"] = KeyNorm(1 + numbers(d) / 4, 1e-5)
    if first:
        h = slices * heads
        options["first"] = FirstTokens(
            numbers(b, h, first, d).astype(dtype), numbers(b, h, first, dv).astype(dtype), np.minimum(lengths, first)
        )
    return Layer(caches, matrices, d, options)


def rebuilt(layer: Layer, row: int) -> tuple[Any, Any]:
    """Keys (h, n, d) and values (h, n, dv) of a row in float64, from its decoded latents."""
    all_keys, all_values = [], []
    rope, norm, first = (layer.options.get(name) for name in ("rope", "key_norm", "first"))
    positions = layer.options.get("positions")
    for cache, m in zip(layer.caches, layer.matrices, strict=True):
        z, zv = (x[0].astype(np.float64) for x in cache.decode(row))
        n = len(z)
        for head in range(m.heads):
            if m.up_k is None:
                all_keys.append(z)
            else:
                part = slice(head * layer.d, (head + 1) * layer.d)
                k = z @ m.up_k[part].astype(np.float64).T
                if m.key_bias is not None:
                    k = k + m.key_bias[part]
                if norm is not None:
                    k = k / np.sqrt(np.mean(k**2, axis=1, keepdims=True) + norm.eps) * norm.weight
                if rope is not None:
                    at = np.arange(n) if positions is None else positions[row, :n]
                    k = turned(k, rope, at)
                all_keys.append(k)
            dv = 0 if m.up_v is None else len(m.up_v) // m.heads
            all_values.append(zv if m.up_v is None else zv @ m.up_v[head * dv : (head + 1) * dv].astype(np.float64).T)
    k, v = np.stack(all_keys), np.stack(all_values)
    if first is not None:
        count = int(first.counts[row])
        k[:, :count], v[:, :count] = first.k[row, :, :count], first.v[row, :, :count]
    return k, v


def turned(k: Any, rope: Rope, at: Any) -> Any:
    """Keys (n, d) turned pair by pair, each a complex number, as RoPE's paper has it."""
    k, rotary = k.copy(), rope.cos.shape[1]
    for pair in range(rotary // 2):
        a, b = (2 * pair, 2 * pair + 1) if rope.interleaved else (pair, pair + rotary // 2)
        turn = rope.cos[at, a].astype(np.float64) + 1j * rope.sin[at, a]
        z = (k[:, a] + 1j * k[:, b]) * turn
        k[:, a], k[:, b] = z.real, z.imag
    return k


def attend_rebuilt(layer: Layer, q: Any, *, mask: Any = None, scale: Any = None, softcap: Any = None) -> Any:
    """Softmax attention in float64 over rebuilt keys and values, the queries at the newest positions."""
    b, hq, s, d = q.shape
    scale = d**-0.5 if scale is None else scale
    valid = layer.valid
    length = valid.shape[1]
    out = None
    for row in range(b):
        k, v = rebuilt(layer, row)
        out = np.zeros((b, hq, s, v.shape[2])) if out is None else out
        held = np.flatnonzero(valid[row])
        for head in range(hq):
            own = head // (hq // len(k))
            for i in range(s):
                seen = held <= length - s + i
                scores = scale * (k[own] @ q[row, head, i].astype(np.float64))
                if softcap is not None:
                    scores = softcap * np.tanh(scores / softcap)
                if mask is not None:
                    row_mask = np.broadcast_to(mask, (b, hq, s, length))[row, head, i, held]
                    hidden = ~row_mask if row_mask.dtype == np.bool_ else row_mask == -np.inf
                    scores = scores + (0 if row_mask.dtype == np.bool_ else np.where(hidden, 0, row_mask))
                    seen = seen & ~hidden
                if seen.any():
                    weights = np.exp(scores[seen] - scores[seen].max())
                    out[row, head, i] = weights @ v[own][seen] / weights.sum()
    return out
