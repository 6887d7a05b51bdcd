"""The attention module of a model converted by Palu: it makes latents instead of keys and values.

Without a cache, or with one of transformers' own, keys and values are rebuilt and attention is the model's usual one;
with a :class:`~kvsketch.adapters.palu_cache.PaluCache` only latents are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvsketch.adapters.attention_function import check_supported
from kvsketch.adapters.palu_cache import PaluCache
from kvsketch.adapters.palu_models import AttentionLayer
from kvsketch.adapters.palu_plan import LayerFactors, LayerPlan
from kvsketch.adapters.torch_dlpack import array_from_tensor
from kvsketch.palu import KeyNorm, Reconstruction


@dataclass(frozen=True)
class NewTokens:
    """What a forward brings to one layer.

    `hidden` (b, s, in); `queries` (b, hq, s, d), or with folded keys one (b, heads, s, r) a slice; latents of each
    slice (b, s, r); `rope` the cosines and sines (b or 1, s, rotary) and `position_ids` (b or 1, s), or None.
    """

    hidden: torch.Tensor
    queries: list[torch.Tensor]
    key_latents: list[torch.Tensor]
    value_latents: list[torch.Tensor]
    rope: tuple[torch.Tensor, torch.Tensor] | None
    position_ids: torch.Tensor | None


class FirstTokens(NamedTuple):
    """First tokens among new ones: (t,) rows, columns and places in their rows, true keys and values (t, h, d).

    All on the device of the new tokens.
    """

    rows: torch.Tensor
    columns: torch.Tensor
    places: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


class PaluAttention(torch.nn.Module):
    """Attention with low-rank keys and values, in place of the layer's own module."""

    is_causal = True

    def __init__(self, layer: AttentionLayer, plan: LayerPlan, first_tokens: int, config: Any) -> None:
        super().__init__()
        self.plan, self.first_tokens, self.config = plan, first_tokens, config
        self.layer_idx, self.scaling = layer.index, layer.scaling
        self.hq, self.h, self.d = layer.hq, layer.h, layer.d
        self.num_key_value_groups = layer.hq // layer.h
        self.has_rope = layer.rope
        width, dtype, device = layer.q.weight.shape[1], layer.q.weight.dtype, layer.q.weight.device

        def new_linear(inputs: int, outputs: int, bias: bool) -> torch.nn.Linear:
            return torch.nn.Linear(inputs, outputs, bias=bias, dtype=dtype, device=device)

        heads = self.slice_query_heads
        if plan.fold_keys:
            self.q_proj = new_linear(width, heads * sum(plan.key_ranks), layer.q.bias is not None)
        else:
            self.q_proj = layer.q.linear()
        self.q_norm, self.k_norm = layer.q_norm, layer.k_norm
        self.k_down = new_linear(width, sum(plan.key_ranks), False)
        self.v_down = new_linear(width, sum(plan.value_ranks), False)
        rows = plan.slice_heads * layer.d
        for side, ranks, folded in (("k", plan.key_ranks, plan.fold_keys), ("v", plan.value_ranks, plan.fold_values)):
            for number, rank in enumerate(() if folded else ranks):
                self.register_buffer(f"{side}_up_{number}", torch.zeros(rows, rank, dtype=dtype, device=device))
        # Without RoPE a bias adds the same to a query's scores of all tokens, which softmax takes out again.
        key_bias = layer.k.bias if layer.rope else None
        self.register_buffer("key_bias", None if key_bias is None else key_bias.clone())
        outputs = heads * sum(plan.value_ranks) if plan.fold_values else layer.hq * layer.d
        self.o_proj = new_linear(outputs, layer.o.weight.shape[0], layer.o.bias is not None or layer.v.bias is not None)
        if first_tokens:
            self.k_proj = layer.k.linear(bias=layer.rope)
            self.v_proj = layer.v.linear(bias=False)

    @property
    def slice_query_heads(self) -> int:
        """Query heads that read one slice."""
        return self.plan.slice_heads * self.num_key_value_groups

    def up(self, side: str, number: int) -> torch.Tensor:
        """(heads of the slice * d, r): what rebuilds keys (`side` "k") or values ("v") of slice `number`."""
        return getattr(self, f"{side}_up_{number}")

    @torch.no_grad()
    def fill(self, layer: AttentionLayer, factors: LayerFactors) -> None:
        """Take the weights of `layer` and `factors`; products of folds are computed in float64."""
        plan, group, device = self.plan, self.num_key_value_groups, layer.q.weight.device
        for name, side in (("k", factors.keys), ("v", factors.values)):
            down = getattr(self, f"{name}_down")
            down.weight.copy_(torch.cat([torch.from_numpy(f.down) for f in side]))
            folded = plan.fold_keys if name == "k" else plan.fold_values
            for number, f in enumerate(() if folded else side):
                self.up(name, number).copy_(torch.from_numpy(f.up))
        if plan.fold_keys:
            weight = layer.q.weight.double().unflatten(0, (layer.hq, layer.d))
            ups = _by_query_head([torch.from_numpy(f.up).to(device) for f in factors.keys], layer.d, group)
            self.q_proj.weight.copy_(torch.cat([up.T @ w for up, w in zip(ups, weight, strict=True)]))
            if layer.q.bias is not None:
                bias = layer.q.bias.double().unflatten(0, (layer.hq, layer.d))
                self.q_proj.bias.copy_(torch.cat([up.T @ x for up, x in zip(ups, bias, strict=True)]))
        weight = layer.o.weight.double()
        if self.o_proj.bias is not None:
            bias = weight.new_zeros(len(weight)) if layer.o.bias is None else layer.o.bias.double()
            if layer.v.bias is not None:
                # A query's weights sum to one: the values' bias passes attention unchanged.
                values = layer.v.bias.double().unflatten(0, (layer.h, layer.d)).repeat_interleave(group, 0)
                bias = bias + weight @ values.flatten()
            self.o_proj.bias.copy_(bias)
        if plan.fold_values:
            ups = _by_query_head([torch.from_numpy(f.up).to(device) for f in factors.values], layer.d, group)
            heads = weight.unflatten(1, (layer.hq, layer.d)).unbind(1)
            weight = torch.cat([w @ up for w, up in zip(heads, ups, strict=True)], 1)
        self.o_proj.weight.copy_(weight)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """As the module that it replaces; attention weights are never given."""
        cache = past_key_values if cache is None else cache
        new = self._read(hidden_states, position_embeddings, position_ids)
        if isinstance(cache, PaluCache):
            check_supported(self, **kwargs)
            layer: Any = cache.latent_layer(self.layer_idx)
            context = layer.attend_latents(self, new, attention_mask)
        else:
            context = self._attend_rebuilt(new, attention_mask, cache, kwargs)
        return self.o_proj(context), None

    def _read(
        self,
        hidden: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor] | None,
        position_ids: torch.Tensor | None,
    ) -> NewTokens:
        q = self.q_proj(hidden)
        if self.plan.fold_keys:
            heads = self.slice_query_heads
            split = q.split([heads * rank for rank in self.plan.key_ranks], -1)
            queries = [x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in split]
        else:
            q = q.unflatten(-1, (self.hq, self.d))
            q = q if self.q_norm is None else self.q_norm(q)
            queries = [(q if rope is None else apply_rope(q, rope)).transpose(1, 2)]
        return NewTokens(
            hidden,
            queries,
            list(self.k_down(hidden).split(self.plan.key_ranks, -1)),
            list(self.v_down(hidden).split(self.plan.value_ranks, -1)),
            rope,
            position_ids,
        )

    def first_tokens_of(self, new: NewTokens, places: torch.Tensor | None) -> FirstTokens | None:
        """The true keys and values of new tokens whose place in their row, `places` (b, s), is below `first_tokens`.

        Padding has a place below 0; None counts every row's tokens from 0. With places on the host nothing waits.
        """
        if not self.first_tokens:
            return None
        b, s = new.hidden.shape[:2]
        places = (torch.arange(s, device=new.hidden.device) if places is None else places).expand(b, s)
        rows, columns = ((places >= 0) & (places < self.first_tokens)).nonzero(as_tuple=True)
        if not len(rows):
            return None
        rows, columns, places = (x.to(new.hidden.device) for x in (rows, columns, places[rows, columns]))
        hidden = new.hidden[rows, columns]
        keys = self.k_proj(hidden).unflatten(-1, (self.h, self.d))
        rope = None if new.rope is None else tuple(x.expand(b, -1, -1)[rows, columns][None] for x in new.rope)
        keys = self.finish_keys(keys[None], rope)[0]
        return FirstTokens(rows, columns, places, keys, self.v_proj(hidden).unflatten(-1, (self.h, self.d)))

    def finish_keys(self, keys: torch.Tensor, rope: Any) -> torch.Tensor:
        """Norm and RoPE of keys (b, s, h, d)."""
        keys = keys if self.k_norm is None else self.k_norm(keys)
        return keys if rope is None else apply_rope(keys, rope)

    def rebuild(self, new: NewTokens, first: FirstTokens | None) -> list[tuple[torch.Tensor, ...]]:
        """Queries, keys and values (b, heads, s, width) of groups of heads that attend by themselves.

        One group where nothing is folded, else one a slice, whose keys or values may be latents.
        """
        plan, heads = self.plan, self.plan.slice_heads
        b, s = new.hidden.shape[:2]
        keys: Any = None
        values: Any = None
        if not plan.fold_keys:
            keys = _rebuild(new.key_latents, [self.up("k", i) for i in range(plan.slices)])
            keys = keys if self.key_bias is None else keys + self.key_bias
            keys = self.finish_keys(keys.unflatten(-1, (self.h, self.d)), new.rope)
        if not plan.fold_values:
            values = _rebuild(new.value_latents, [self.up("v", i) for i in range(plan.slices)])
            values = values.unflatten(-1, (self.h, self.d))
        if first is not None:
            at = (first.rows, first.columns)
            keys, values = keys.index_put(at, first.keys), values.index_put(at, first.values)
        if not (plan.fold_keys or plan.fold_values):
            return [(new.queries[0], keys.transpose(1, 2), values.transpose(1, 2))]
        parts = []
        for i in range(plan.slices):
            own = slice(i * heads, (i + 1) * heads)
            asked = slice(i * self.slice_query_heads, (i + 1) * self.slice_query_heads)
            q = new.queries[i] if plan.fold_keys else new.queries[0][:, asked]
            k = new.key_latents[i][:, :, None] if keys is None else keys[:, :, own]
            v = new.value_latents[i][:, :, None] if values is None else values[:, :, own]
            parts.append((q, *(x.expand(b, s, heads, -1).transpose(1, 2) for x in (k, v))))
        return parts

    def reconstructions(self) -> list[Reconstruction]:
        """The matrices of each slice for :func:`kvsketch.palu.attend`."""
        plan = self.plan
        biases: list[Any] = [None] * plan.slices
        if self.key_bias is not None:
            biases = [_array(x) for x in self.key_bias.split(plan.slice_heads * self.d)]
        return [
            Reconstruction(
                plan.slice_heads,
                _array(self.up("k", i)),
                None if plan.fold_values else _array(self.up("v", i)),
                biases[i],
            )
            for i in range(plan.slices)
        ]

    def key_norm(self) -> KeyNorm | None:
        """The norm of rebuilt keys for :func:`kvsketch.palu.attend`."""
        norm = self.k_norm
        return None if norm is None else KeyNorm(_array(norm.weight), float(norm.variance_epsilon))

    def latent_queries(self, new: NewTokens, number: int) -> torch.Tensor:
        """Queries (b, heads, s, r) of slice `number` that its latents are scored by, where there is no RoPE."""
        if self.plan.fold_keys:
            return new.queries[number]
        heads = self.slice_query_heads
        q = new.queries[0][:, number * heads : (number + 1) * heads]
        up = self.up("k", number).unflatten(0, (-1, self.d)).repeat_interleave(self.num_key_value_groups, 0)
        return q @ up

    def values_of_latents(self, latents: torch.Tensor, number: int) -> torch.Tensor:
        """What attention of slice `number` gives, (b, heads, s, d), from latents (b, heads, s, r); folded: these."""
        if self.plan.fold_values:
            return latents
        up = self.up("v", number).unflatten(0, (-1, self.d)).repeat_interleave(self.num_key_value_groups, 0)
        return latents @ up.transpose(1, 2)

    def _attend_rebuilt(
        self, new: NewTokens, mask: torch.Tensor | None, cache: Any, kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """Attention as the model has it, (b, s, outputs): keys and values rebuilt, and cached dense if at all."""
        b, s = new.hidden.shape[:2]
        past = 0 if cache is None else cache.get_seq_length(self.layer_idx)
        parts = self.rebuild(new, self.first_tokens_of(new, _places(mask, past, s)))
        if cache is not None:
            parts = _update_dense(cache, parts, self.layer_idx, kwargs)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, sdpa_attention_forward)
        # Dropout of attention weights is for training from scratch.
        outputs = [attend(self, q, k, v, mask, dropout=0.0, scaling=self.scaling, **kwargs)[0] for q, k, v in parts]
        return torch.cat([x.reshape(b, s, -1) for x in outputs], -1)


def apply_rope(x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Turn the first channels of x (b, s, heads, d), as many as `rope`, cosines and sines (b or 1, s, rotary), has."""
    cos, sin = (part[:, :, None] for part in rope)
    rotary = cos.shape[-1]
    turned, kept = x[..., :rotary], x[..., rotary:]
    left, right = turned.chunk(2, -1)
    turned = turned * cos + torch.cat([-right, left], -1) * sin
    return torch.cat([turned, kept], -1) if kept.shape[-1] else turned


def _rebuild(latents: Sequence[torch.Tensor], ups: Sequence[torch.Tensor]) -> torch.Tensor:
    """(b, s, h * d) of latents (b, s, r) of each slice."""
    return torch.cat([x @ up.T for x, up in zip(latents, ups, strict=True)], -1)


def _array(x: torch.Tensor) -> Any:
    """`x` in float32, as an array."""
    return array_from_tensor("weight", x.float())


def _update_dense(
    cache: Any, parts: list[tuple[torch.Tensor, ...]], layer: int, kwargs: dict[str, Any]
) -> list[tuple[torch.Tensor, ...]]:
    """The parts with all keys and values that a cache of another kind holds; it stores them as one tensor a side."""
    if len(parts) == 1:
        ((q, k, v),) = parts
        return [(q, *cache.update(k, v, layer, kwargs=kwargs))]
    # Latents of several slices, perhaps of several widths.
    sides = []
    for tensors in zip(*[part[1:] for part in parts], strict=True):
        widest = max(x.shape[-1] for x in tensors)
        sides.append(torch.cat([torch.nn.functional.pad(x, (0, widest - x.shape[-1])) for x in tensors], 1))
    heads = [part[1].shape[1] for part in parts]
    held = zip(*[side.split(heads, 1) for side in cache.update(*sides, layer, kwargs=kwargs)], strict=True)
    return [
        (q, all_k[..., : k.shape[-1]], all_v[..., : v.shape[-1]])
        for (q, k, v), (all_k, all_v) in zip(parts, held, strict=True)
    ]


def _by_query_head(ups: Sequence[torch.Tensor], d: int, group: int) -> list[torch.Tensor]:
    """The (d, r) rows of up factors (heads * d, r) that each query head reads."""
    return [head for up in ups for head in up.unflatten(0, (-1, d)) for _ in range(group)]


def _places(mask: torch.Tensor | None, past: int, new: int) -> torch.Tensor | None:
    """(b, s): how many tokens of its row stand before each new one; below 0 for padding; None for all rows alike.

    A position that no query of the forward sees is padding.
    """
    if mask is None:
        return None if not past else torch.arange(past, past + new)[None]
    mask = mask[..., : past + new]
    visible = mask if mask.dtype is torch.bool else mask > torch.finfo(mask.dtype).min / 2
    seen = visible[:, :, -1].any(1)
    if not bool(seen.all()):
        seen = visible.any(2).any(1)
    places = torch.where(seen, seen.cumsum(1) - 1, -1)
    return places[:, past:]
