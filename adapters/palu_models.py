"""The attention layers that Palu can convert, whatever their model calls them: projections, heads, norm and RoPE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from transformers.pytorch_utils import Conv1D

from kvsketch.adapters.transformers_cache import compressed_layers, decoder_config

#: Model classes with ``q_proj``, ``k_proj``, ``v_proj`` and ``o_proj`` under ``model.layers[i].self_attn``, and RoPE.
ROPE_MODELS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
#: Model classes with one ``c_attn`` for queries, keys and values under ``transformer.h[i].attn``, without RoPE.
FUSED_MODELS = ("GPT2LMHeadModel",)
SUPPORTED = ROPE_MODELS + FUSED_MODELS


@dataclass(frozen=True)
class Projection:
    """Output channels `columns` of a linear `module`: all of ``k_proj``, or the middle third of ``c_attn``."""

    module: torch.nn.Module
    columns: slice

    @property
    def weight(self) -> torch.Tensor:
        """(out, in)"""
        weight = self.module.weight.detach()
        return (weight.T if isinstance(self.module, Conv1D) else weight)[self.columns]

    @property
    def bias(self) -> torch.Tensor | None:
        """(out,), or None."""
        bias = self.module.bias
        return None if bias is None else bias.detach()[self.columns]

    def linear(self, *, bias: bool = True) -> torch.nn.Linear:
        """A copy as a layer of its own, with its bias unless told otherwise."""
        return linear_layer(self.weight, self.bias if bias else None)


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer: `owner.attribute` is the module; `hq` query heads, `h` key/value heads of size `d`."""

    index: int
    owner: torch.nn.Module
    attribute: str
    q: Projection
    k: Projection
    v: Projection
    o: Projection
    hq: int
    h: int
    d: int
    scaling: float
    rope: bool
    q_norm: torch.nn.Module | None = None
    k_norm: torch.nn.Module | None = None

    @property
    def module(self) -> torch.nn.Module:
        return getattr(self.owner, self.attribute)


def linear_layer(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.nn.Linear:
    """A linear layer that holds copies of `weight` (out, in) and `bias` (out,)."""
    layer = torch.nn.Linear(
        weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype, device=weight.device
    )
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)
    return layer


def attention_layers(model: transformers.PreTrainedModel) -> list[AttentionLayer]:
    """The full-attention layers of `model`, in order; ValueError when Palu cannot convert them."""
    name = type(model).__name__
    if not isinstance(getattr(model, "config", None), transformers.PretrainedConfig):
        raise ValueError(f"model must be a transformers model, got {name}")
    if getattr(model, "palu", None) is not None:
        raise ValueError("model is converted by Palu already; convert the original model")
    config = decoder_config(model)
    if name not in SUPPORTED:
        raise ValueError(f"model is a {name}, which Palu does not convert; it converts {', '.join(SUPPORTED)}")
    try:
        indices = compressed_layers(config)
    except ValueError as error:
        raise ValueError(
            f"{error}; a model whose sliding window is longer than every text can be converted after "
            "model.config.sliding_window = None"
        ) from None
    read = _read_fused_layer if name in FUSED_MODELS else _read_rope_layer
    layers = [read(model, index) for index in indices]
    _check_projections(layers)
    return layers


def _read_rope_layer(model: Any, index: int) -> AttentionLayer:
    owner = model.model.layers[index]
    attention = owner.self_attn
    config, d = attention.config, attention.head_dim
    q, k, v, o = (
        Projection(getattr(attention, side), slice(None)) for side in ("q_proj", "k_proj", "v_proj", "o_proj")
    )
    return AttentionLayer(
        *(index, owner, "self_attn", q, k, v, o),
        *(config.num_attention_heads, config.num_key_value_heads, d, attention.scaling),
        rope=True,
        q_norm=getattr(attention, "q_norm", None),
        k_norm=getattr(attention, "k_norm", None),
    )


def _read_fused_layer(model: Any, index: int) -> AttentionLayer:
    owner = model.transformer.h[index]
    attention = owner.attn
    width, heads = attention.split_size, attention.num_heads
    if attention.reorder_and_upcast_attn:
        raise ValueError("model.config.reorder_and_upcast_attn=True is not supported by Palu; set it to False")
    if getattr(owner, "crossattention", None) is not None:
        raise ValueError("model.config.add_cross_attention=True is not supported by Palu; load a decoder without it")
    q, k, v = (Projection(attention.c_attn, slice(part * width, (part + 1) * width)) for part in range(3))
    o = Projection(attention.c_proj, slice(None))
    return AttentionLayer(
        *(index, owner, "attn", q, k, v, o), *(heads, heads, attention.head_dim, attention.scaling), rope=False
    )


def _check_projections(layers: list[AttentionLayer]) -> None:
    """ValueError for weights that are quantized, wrapped by another library, or shared between projections."""
    seen: dict[tuple[int, int], str] = {}
    for layer in layers:
        for side in ("q", "k", "v", "o"):
            projection: Projection = getattr(layer, side)
            module, what = projection.module, f"the {side} projection of layer {layer.index}"
            weight = getattr(module, "weight", None)
            if type(module) not in (torch.nn.Linear, Conv1D) or weight is None or not weight.is_floating_point():
                raise ValueError(
                    f"{what} is a {type(module).__name__}, quantized or wrapped; Palu needs plain torch.nn.Linear "
                    "weights: load the model without quantization, merge adapters first"
                )
            key = (weight.data_ptr(), projection.columns.start or 0)
            if key in seen:
                raise ValueError(f"{what} is tied to {seen[key]}; Palu converts models whose projections are their own")
            seen[key] = what


def float64_array(x: torch.Tensor) -> np.ndarray[Any, Any]:
    """A copy of `x` on the host, in float64, in which all of Palu's arithmetic on weights is done."""
    return x.detach().to("cpu", torch.float64).numpy(force=True)
