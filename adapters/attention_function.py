"""The attention function that transformers calls, registered as ``"kvsketch"``.

A layer of a :class:`~kvsketch.adapters.transformers_cache.CompressedCache` travels to it as a keyword (transformers
5.24 and later) or as an attribute of the key tensor (before). Without one, for another cache or none, it is
transformers' own sdpa, extended by what sdpa lacks: soft-capped scores and learned attention sinks.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "kvsketch"
LAYER_KEYWORD = "kvsketch_layer"
LAYER_ATTRIBUTE = "_kvsketch_layer"

NO_WEIGHTS = (
    "output_attentions=True is not supported: attention weights are never built; set "
    "model.config.output_attentions = False, or use attn_implementation='eager' with a DynamicCache"
)

#: Scores held at once by :func:`dense_attention` where it cannot use sdpa.
_TILE_SCORES = 1 << 24


def register() -> None:
    """Make ``model.set_attn_implementation("kvsketch")`` possible. Without a mask function masks would be dropped."""
    AttentionInterface.register(NAME, compressed_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def compressed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of `query` (b, hq, s, d) over the compressed cache; returns (b, s, hq, dv) and no weights."""
    layer = kwargs.pop(LAYER_KEYWORD, None)
    sinks = kwargs.pop("sinks", None)
    if sinks is not None:
        kwargs["s_aux"] = sinks
    if layer is None:
        layer = getattr(key, LAYER_ATTRIBUTE, None)
    if layer is None:
        return dense_attention(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    return layer.attend(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs), None


def check_supported(
    module: torch.nn.Module,
    *,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    position_bias: torch.Tensor | None = None,
    is_causal: bool | None = None,
    output_attentions: bool | None = None,
    **ignored: Any,
) -> None:
    """Raise ValueError for what a compressed layer cannot honour, rather than leave it out unseen."""
    if position_bias is not None:
        raise ValueError("position_bias is not supported on a compressed cache; use a transformers DynamicCache")
    if sliding_window is not None:
        raise ValueError(
            f"this layer attends over a sliding window of {sliding_window} tokens, but the cache treats it as full "
            "attention; build the cache with CompressedCache.for_model from this model's config"
        )
    if is_causal is False or (is_causal is None and getattr(module, "is_causal", True) is False):
        raise ValueError("is_causal=False is not supported: a compressed cache attends causally; leave it out")
    if output_attentions:
        raise ValueError(NO_WEIGHTS)
    if dropout or (module.training and torch.is_grad_enabled()):
        raise ValueError(
            f"a compressed cache is for inference only (dropout={dropout}, training={module.training}); "
            "call model.eval() or use torch.no_grad()"
        )


def dense_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' sdpa on the tensors given; with `softcap` or sink logits `s_aux` (hq,), the same in plain torch."""
    if softcap is None and s_aux is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if dropout:
        raise ValueError(f"dropout={dropout} with softcap or sinks is not supported; call model.eval()")
    if kwargs.get("position_bias") is not None:
        raise ValueError("position_bias with softcap or sinks is not supported; use attn_implementation='eager'")
    is_causal = kwargs.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    b, hq, s, d = query.shape
    if s_aux is not None and s_aux.shape != (hq,):
        raise ValueError(
            f"sinks must have shape (hq,) = ({hq},), got {tuple(s_aux.shape)}; use attn_implementation='eager'"
        )
    h, n = key.shape[1:3]
    scaling = d**-0.5 if scaling is None else scaling
    # Query heads of one key/value head next to each other: a matrix product per kv head, nothing repeated.
    grouped = query.reshape(b, h, hq // h, s, d)
    sinks = None if s_aux is None else s_aux.float().reshape(1, h, hq // h, 1, 1)
    out = torch.empty(b, s, hq, value.shape[-1], dtype=query.dtype, device=query.device)
    rows = max(1, _TILE_SCORES // max(1, b * hq * n))
    for start in range(0, s, rows):
        stop = min(s, start + rows)
        scores = torch.matmul(grouped[:, :, :, start:stop], key[:, :, None].transpose(-1, -2)).float() * scaling
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if attention_mask is not None:
            scores = _apply_mask(scores, attention_mask[:, :, start:stop, :n])
        elif is_causal and s > 1:
            visible = torch.ones(stop - start, n, dtype=torch.bool, device=query.device).tril(n - s + start)
            scores = scores.masked_fill(~visible, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
        weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)[..., :n].to(value.dtype)
        block = torch.matmul(weights, value[:, :, None])
        out[:, start:stop] = block.reshape(b, hq, stop - start, -1).transpose(1, 2)
    return out, None


def _apply_mask(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Scores (b, h, group, s, n) under a mask (b or 1, hq or 1, s, n): boolean with True for visible, or additive."""
    h, group = scores.shape[1:3]
    mask = mask[:, :, None] if mask.shape[1] == 1 else mask.unflatten(1, (h, group))
    return scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask.float()


def attend_rows_alone(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    valid: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """Causal attention of a padded batch, each row over its own tokens; padding gives zeros.

    `valid` (b, s) lies on the host. A row's result is then bit for bit what the row gives alone, and no work goes into
    padding.
    """
    b, hq, s, _ = query.shape
    out = torch.zeros(b, s, hq, value.shape[-1], dtype=query.dtype, device=query.device)
    for row in range(b):
        kept = valid[row].nonzero()[:, 0].to(query.device)
        if len(kept):
            q, k, v = (x[row : row + 1].index_select(2, kept) for x in (query, key, value))
            out[row, kept] = dense_attention(module, q, k, v, None, **options)[0][0]
    return out
