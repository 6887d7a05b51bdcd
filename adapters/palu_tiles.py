"""Attention over stored latents, rebuilt a row at a time in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvsketch.adapters.padding import Step
from kvsketch.adapters.palu_rope import RopeTable
from kvsketch.adapters.palu_store import LatentStore

if TYPE_CHECKING:
    from kvsketch.adapters.palu_attention import NewTokens, PaluAttention


def attend_store(
    module: PaluAttention, store: LatentStore, new: NewTokens, step: Step, rope: RopeTable
) -> torch.Tensor:
    """Attention of the newest tokens over `store`: (b, s, outputs of `module`)."""
    b, s = new.hidden.shape[:2]
    held = store.slices[0]._contents
    lengths = torch.from_numpy(store.lengths)
    limits = held.positions.limits(s, store.lengths)
    limits = lengths[:, None] + torch.arange(1 - s, 1) if limits is None else torch.from_numpy(limits)
    bias = None if step.mask is None else held.positions.bias(step.mask, s, module.hq)
    positions = rope.compact(held.positions.map)
    out = []
    for row in range(b):
        n = int(lengths[row])
        turn = None
        if module.has_rope:
            at = positions[row, :n]
            turn = tuple(torch.from_numpy(x[at])[None].to(new.hidden.dtype) for x in (rope.cos, rope.sin))
        decoded = [cache.decode(row) for cache in store.slices]
        keys = torch.cat(
            [torch.from_numpy(k[0]).to(new.hidden.dtype) @ module.up("k", i).T for i, (k, _) in enumerate(decoded)], -1
        )
        keys = keys if module.key_bias is None else keys + module.key_bias
        keys = module.finish_keys(keys.unflatten(-1, (module.h, module.d))[None], turn)[0]
        first = int(store.first_counts[row])
        if first:
            keys[:first] = torch.from_numpy(store.first_keys[row, :first])
        q = new.queries[0][row].unflatten(0, (module.h, -1))
        scores = torch.einsum("hgsd,nhd->hgsn", q, keys) * module.scaling
        if bias is not None:
            scores = scores + torch.from_numpy(bias[row, :, :, :n]).unflatten(0, (-1, 1))
        hidden = torch.arange(n) >= limits[row][:, None]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0)
        parts = []
        for i, (_, v) in enumerate(decoded):
            own = slice(i * module.plan.slice_heads, (i + 1) * module.plan.slice_heads)
            w = weights[own].clone()
            w[..., :first] = 0
            latents = torch.einsum("hgsn,nr->hgsr", w, torch.from_numpy(v[0]).to(w.dtype)).flatten(0, 1)
            value = module.values_of_latents(latents[None], i)[0]
            if first:
                true = torch.from_numpy(store.first_values[row, :first, own])
                value = value + torch.einsum("hgsn,nhd->hgsd", weights[own][..., :first], true).flatten(0, 1)
            parts.append(value.transpose(0, 1).flatten(1))
        out.append(torch.cat(parts, -1))
    return torch.stack(out)
