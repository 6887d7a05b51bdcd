"""Attention layers whose keys and values come from cached latents, and float64 attention to hold against them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvsketch import palu
from kvsketch.cache import Cache
from kvsketch.codecs import Codec
from kvsketch.layout import LANES
from kvsketch.palu import Reconstruction, Rope
from kvsketch.validation.claim import Setting
from kvsketch.validation.palu_problems import Problem, factors_of

HEADS, RATIO, SIZE, IN, TOKENS = 2, 3, 16, 40, 77
#: Base of the angles of RoPE, and places where tokens may stand.
THETA, PLACES = 100.0, 300


@dataclass(frozen=True, eq=False)
class Layer:
    """Weights of key and value projections, inputs (n, in), queries (1, hq, s, d), and where tokens stand.

    `rotary` channels of keys are turned by RoPE, 0 for none, in pairs of neighbours if `interleaved`.
    """

    weight_k: Any
    weight_v: Any
    inputs: Any
    q: Any
    rotary: int
    interleaved: bool
    positions: Any

    @property
    def rope(self) -> Rope | None:
        """The tables that a model would make; None without RoPE."""
        if not self.rotary:
            return None
        angles = np.arange(PLACES)[:, None] * self._rates
        angles = np.repeat(angles, 2, axis=1) if self.interleaved else np.concatenate([angles, angles], axis=1)
        return Rope(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32), self.interleaved)

    @property
    def _rates(self) -> Any:
        return THETA ** (-np.arange(0, self.rotary, 2) / self.rotary)

    def turned(self, keys: Any) -> Any:
        """(h, n, d) from the `keys` (n, h * d) of all tokens, turned by RoPE pair by pair as complex numbers."""
        k = split_heads(keys)
        if not self.rotary:
            return k
        pairs = np.arange(self.rotary).reshape(-1, 2)
        if not self.interleaved:
            pairs = np.arange(self.rotary).reshape(2, -1).T
        turns = np.exp(1j * self.positions[:, None] * self._rates)
        z = (k[..., pairs[:, 0]] + 1j * k[..., pairs[:, 1]]) * turns
        k = k.copy()
        k[..., pairs[:, 0]], k[..., pairs[:, 1]] = z.real, z.imag
        return k

    def weights(self, keys: Any) -> Any:
        """(hq, s, n) causal softmax weights of the queries, at the newest tokens, on keys (n, h * d) before RoPE."""
        s = self.q.shape[2]
        q = self.q[0].astype(np.float64).reshape(HEADS, RATIO * s, SIZE)
        scores = (q @ self.turned(keys).swapaxes(1, 2)).reshape(HEADS * RATIO, s, TOKENS) / np.sqrt(SIZE)
        seen = np.arange(TOKENS) <= np.arange(TOKENS - s, TOKENS)[:, None]
        powers = np.where(seen, np.exp(scores - scores.max(axis=-1, keepdims=True)), 0)
        return powers / powers.sum(axis=-1, keepdims=True)

    def attend_dense(self, keys: Any, values: Any) -> Any:
        """(hq, s, d) float64 attention over keys and values (n, h * d) of all tokens, keys before RoPE."""
        return mix(self.weights(keys), split_heads(values))

    def attend(self, setting: Setting, cache: Cache, up_k: Any, up_v: Any, *, shift: int = 0) -> Any:
        """(hq, s, dv) by :func:`kvsketch.palu.attend`; values stay latents where `up_v` is None.

        Keys are turned for places `shift` too far, for twins.
        """
        found = palu.attend(
            self.q,
            [cache],
            [Reconstruction(HEADS, up_k, up_v)],
            rope=self.rope,
            positions=(self.positions + shift)[None] if self.rotary else None,
            engine=setting.engine,
        )
        return found[0].astype(np.float64)


def cache_of(setting: Setting, keys: Any, values: Any, codec: Codec) -> Cache:
    """A cache of the latents (n, r) of keys and of values, whole pages of them encoded."""
    cache = Cache(codec, codec, residual_length=0, sink_tokens=0, engine=setting.engine)
    cache.append(keys.astype(np.float32)[None, None], values.astype(np.float32)[None, None])
    cache.flush()
    if int(cache.view().page_counts[0]) != len(keys) // LANES:
        raise RuntimeError(f"expected {len(keys) // LANES} pages of latents, got {cache.view().page_counts}")
    return cache


def stored(cache: Cache) -> tuple[Any, Any]:
    """Latents (n, r) of keys and of values as they come back, float64."""
    keys, values = (x[0].astype(np.float64) for x in cache.decode(0))
    return keys, values


def split_heads(x: Any) -> Any:
    """(h, n, d) from (n, h * d)."""
    return x.reshape(len(x), HEADS, -1).swapaxes(0, 1)


def mix(weights: Any, v: Any) -> Any:
    """(hq, s, dv) sums of values v (h, n, dv) by weights (hq, s, n)."""
    hq, s, n = weights.shape
    return (weights.reshape(len(v), -1, n) @ v).reshape(hq, s, -1)


def make_layer(rng: np.random.Generator, *, s: int = 1, rotary: int = SIZE, interleaved: bool = False) -> Layer:
    """Random weights and inputs; tokens stand at places with gaps."""
    weights = rng.standard_normal((2, HEADS * SIZE, IN)) / np.sqrt(IN)
    positions = np.sort(rng.choice(PLACES - 1, TOKENS, replace=False))
    q = rng.standard_normal((1, HEADS * RATIO, s, SIZE)).astype(np.float32)
    inputs = rng.standard_normal((TOKENS, IN))
    return Layer(weights[0], weights[1], inputs, 1.5 * q, rotary, interleaved, positions)


def cut(weight: Any, rank: int) -> tuple[Any, Any]:
    """(down, up) of a weight's plain factors."""
    return factors_of(Problem(weight)).cut(rank)


def distance(found: Any, exact: Any) -> float:
    """|found - exact| / |exact|, both norms over all entries."""
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))
