"""Tiny models of every architecture that Palu converts, and conversions of them that need no calibration."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from kvsketch.adapters.palu import PaluSettings, convert
from kvsketch.tests.tiny_models import SIZES, VOCABULARY, tiny_model

CHANGES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": None},
    "Qwen2": {},
    "Qwen3": {"head_dim": 24},
    "GPT2": {},
}


def palu_model(name: str, **changes: Any) -> Any:
    """A random model of architecture `name`; biases and norms are random too, where it has them."""
    if name == "GPT2":
        sizes = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "initializer_range": 0.15}
        special = {key: SIZES[key] for key in ("pad_token_id", "bos_token_id", "eos_token_id")}
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**(sizes | special | changes))).eval()
    else:
        model = tiny_model(name, **(CHANGES[name] | changes))
    torch.manual_seed(1)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(".bias"):
                parameter.normal_()
            elif "k_norm" in key:
                parameter.uniform_(0.5, 1.5)
    return model


def plain(keep: float = 1.0, **changes: Any) -> PaluSettings:
    """A recipe without calibration, in small blocks."""
    settings: dict[str, Any] = {"keep": keep, "factors": "plain", "ranks": "uniform", "block": 8} | changes
    return PaluSettings(**settings)


def converted(name: str, keep: float = 1.0, *, model_changes: dict[str, Any] | None = None, **changes: Any) -> Any:
    """:func:`palu_model`, converted by :func:`plain`."""
    return convert(palu_model(name, **(model_changes or {})), settings=plain(keep, **changes))
