"""KIVI and QJL once more, in plain torch: a dense cache that quantizes and dequantizes what kvsketch would store.

It shares no arithmetic with kvsketch: only a method's settings, and on request the projection matrices, come from
there. Attention over it is transformers' own, so what a model predicts with it is what the method should give, up to
rounding. Batches must be free of padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers.cache_utils import DynamicLayer

from kvsketch.codecs import Exact, GroupedInts, SignSketch
from kvsketch.methods import Method

FLOAT16_LARGEST = 65504.0

#: (m, d, codec, stream) to a projection (m, d): stream 0 is that of all channels, 1 that of the outliers.
Draw = Callable[[int, int, SignSketch, int], torch.Tensor]


def to_float16_and_back(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-FLOAT16_LARGEST, FLOAT16_LARGEST).to(torch.float16).float()


def quantize_last_axis(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x (..., g) after asymmetric `bits`-bit quantization, each row of the last axis one group."""
    levels = 2**bits - 1
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    zero, scale = to_float16_and_back(low), to_float16_and_back((high - low) / levels)
    codes = torch.where(scale > 0, ((x - zero) / scale).round().clamp(0, levels), 0.0)
    return codes * scale + zero


def dequantized_keys(k: torch.Tensor, codec: GroupedInts) -> torch.Tensor:
    """k (b, h, n, d), n a multiple of the group, in groups of tokens of one channel."""
    b, h, n, d = k.shape
    groups = k.reshape(b, h, n // codec.group, codec.group, d).transpose(-1, -2)
    return quantize_last_axis(groups, codec.bits).transpose(-1, -2).reshape(b, h, n, d)


def dequantized_values(v: torch.Tensor, codec: GroupedInts) -> torch.Tensor:
    """v (b, h, n, d) in groups of channels of one token, the last one shorter where d asks for it."""
    return torch.cat([quantize_last_axis(part, codec.bits) for part in v.split(codec.group, dim=-1)], dim=-1)


def draw_orthogonal(m: int, d: int, codec: SignSketch, stream: int) -> torch.Tensor:
    """A projection of its own: blocks of d orthogonal rows of norm sqrt(d)."""
    generator = torch.Generator().manual_seed(1000 * codec.seed + stream + 17)
    blocks = []
    for start in range(0, m, d):
        square = torch.randn(d, d, generator=generator, dtype=torch.float64)
        q, r = torch.linalg.qr(square)
        blocks.append((q * r.diagonal().sign())[: m - start] * math.sqrt(d))
    return torch.cat(blocks).float()


def draw_from_kvsketch(m: int, d: int, codec: SignSketch, stream: int) -> torch.Tensor:
    """The projection that kvsketch draws for the same settings."""
    from kvsketch.rotation import draw_projection

    matrix = draw_projection(m, d, kind=codec.kind, seed=codec.seed, stream=stream).matrix
    return torch.from_numpy(matrix.copy())


def sketched(k: torch.Tensor, projection: torch.Tensor, kind: str) -> torch.Tensor:
    """The vectors k^ whose products with a query are QJL's estimates: c/m |k| S^T sign(S k)."""
    m, d = projection.shape
    constant = math.sqrt(math.pi / 2)
    if kind != "gaussian":
        constant = math.sqrt(math.pi / d) * math.exp(math.lgamma((d + 1) / 2) - math.lgamma(d / 2))
    signs = torch.where(k @ projection.T >= 0, 1.0, -1.0)
    return constant / m * to_float16_and_back(k.norm(dim=-1, keepdim=True)) * (signs @ projection)


def sketched_keys(k: torch.Tensor, codec: SignSketch, page: int, draw: Draw) -> torch.Tensor:
    """k (b, h, n, d) sketched; outlier channels are the largest of each page of `page` tokens."""
    b, h, n, d = k.shape
    inner = draw(codec.m, d, codec, 0)
    if not codec.outliers:
        return sketched(k, inner, codec.kind)
    pages = k.reshape(b, h, n // page, page, d)
    largest = pages.square().sum(-2).topk(codec.outliers, dim=-1).indices
    is_outlier = torch.zeros(b, h, n // page, d, dtype=torch.bool).scatter_(-1, largest, True)[..., None, :]
    outer = draw(codec.outlier_m, d, codec, 1)
    # Each part counts on its own channels only, as the query is split in the same way.
    parts = torch.where(
        is_outlier,
        sketched(torch.where(is_outlier, pages, 0.0), outer, codec.kind),
        sketched(torch.where(is_outlier, 0.0, pages), inner, codec.kind),
    )
    return parts.reshape(b, h, n, d)


class SimulatedLayer(DynamicLayer):
    """A dense layer whose encoded pages are replaced by what their codes decode to."""

    def __init__(self, settings: Any, draw: Draw) -> None:
        super().__init__()
        self.keys: Any
        self.values: Any
        self.settings = settings
        self.draw = draw
        self.page = max(settings.keys.page_tokens("keys"), settings.values.page_tokens("values"))
        self.pages = 0

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Encode what was due before these tokens, then attend over all."""
        held = self.get_seq_length()
        sinks = self.settings.sink_tokens
        due = max(0, (held - sinks - self.settings.residual_length) // self.page)
        if due > self.pages:
            span = slice(sinks + self.pages * self.page, sinks + due * self.page)
            keys, values = self.keys.clone(), self.values.clone()
            keys[:, :, span] = self.decoded_keys(keys[:, :, span].float()).to(keys.dtype)
            values[:, :, span] = self.decoded_values(values[:, :, span].float()).to(values.dtype)
            self.keys, self.values = keys, values
            self.pages = due
        return super().update(key_states, value_states)

    def decoded_keys(self, k: torch.Tensor) -> torch.Tensor:
        codec = self.settings.keys
        if isinstance(codec, Exact):
            return k
        if isinstance(codec, GroupedInts):
            return dequantized_keys(k, codec)
        return sketched_keys(k, codec, self.page, self.draw)

    def decoded_values(self, v: torch.Tensor) -> torch.Tensor:
        codec = self.settings.values
        return v if isinstance(codec, Exact) else dequantized_values(v, codec)


def simulated_cache(layers: int, method: Method, *, draw: Draw = draw_orthogonal) -> transformers.Cache:
    """A transformers cache of `layers` full-attention layers that behaves as `method`, for a model with sdpa."""
    return transformers.Cache(layers=[SimulatedLayer(method.for_layer(i, layers), draw) for i in range(layers)])
