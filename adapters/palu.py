"""Convert a model by Palu (arXiv 2407.21118), so that its cache holds low-rank latents instead of keys and values.

``calibrate`` a model on text, ``convert`` it, and generate with ``PaluCache.for_model(model)``; ``save_pretrained`` and
``load`` keep a converted model in a folder.

Examples
--------
>>> import torch
>>> from transformers import LlamaConfig, LlamaForCausalLM
>>> from kvsketch.adapters.palu import PaluCache, PaluSettings, convert
>>> _ = torch.manual_seed(0)
>>> config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
...                      num_attention_heads=4, num_key_value_heads=4)
>>> model = LlamaForCausalLM(config).eval()
>>> model = convert(model, settings=PaluSettings(keep=0.5, factors="plain", ranks="uniform", latent_bits=4))
>>> cache = PaluCache.for_model(model)
>>> prompt = torch.randint(3, 64, (1, 200))
>>> tokens = model.generate(prompt, cache=cache, max_new_tokens=8, do_sample=False, pad_token_id=0)
>>> cache.report()["total"]["dense_nbytes_16"] > 4 * cache.nbytes
True
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvsketch.adapters.palu_attention import PaluAttention
from kvsketch.adapters.palu_cache import PaluCache
from kvsketch.adapters.palu_calibration import Calibration, CalibrationSettings, calibrate
from kvsketch.adapters.palu_models import SUPPORTED, AttentionLayer, attention_layers
from kvsketch.adapters.palu_plan import LayerPlan, PaluSettings, Progress, factor_layers

__all__ = [
    "SUPPORTED",
    "Calibration",
    "CalibrationSettings",
    "Conversion",
    "PaluCache",
    "PaluSettings",
    "calibrate",
    "convert",
]


@dataclass(frozen=True)
class Conversion:
    """How a model was converted: ``model.palu``.

    `calibration` is the fingerprint of the calibration, empty without one; `nbytes_before` are the bytes of the
    attention layers' weights in the original model.
    """

    settings: PaluSettings
    plans: tuple[LayerPlan, ...]
    calibration: str
    nbytes_before: int

    def attention_modules(self, model: Any) -> list[PaluAttention]:
        """The converted attention modules of `model`, in order."""
        return [module for module in model.modules() if isinstance(module, PaluAttention)]

    def nbytes_after(self, model: Any) -> int:
        """Bytes of the attention layers' weights, kept original projections included."""
        return sum(module_nbytes(module) for module in self.attention_modules(model))

    def kept(self, model: Any) -> float:
        """Share of the numbers of keys and values that the latents have: what rounding made of ``settings.keep``."""
        dense = sum(2 * module.h * module.d for module in self.attention_modules(model))
        return sum(sum(plan.key_ranks) + sum(plan.value_ranks) for plan in self.plans) / dense


def convert(
    model: Any,
    calibration: Calibration | None = None,
    *,
    settings: PaluSettings = PaluSettings(),  # noqa: B008  (a frozen dataclass)
    progress: Progress = lambda description, completed, total: None,
) -> Any:
    """Replace the key and value projections of `model`, in place, by low-rank ones; the model is returned.

    Parameters
    ----------
    model
        One of :data:`SUPPORTED`, as transformers loads it.
    calibration
        What :func:`calibrate` gathered; not needed for plain factors with ranks that do not use Fisher information.
    settings
        The recipe.
    progress
        Called with a description, the layers done and all layers.

    Raises
    ------
    ValueError
        For a model that cannot be converted, or settings that do not fit it; the model is then as it was.
    """
    layers = attention_layers(model)
    if calibration is not None and set(calibration.layers) != {layer.index for layer in layers}:
        raise ValueError(
            f"calibration is of layers {sorted(calibration.layers)}, the model has {[layer.index for layer in layers]}"
        )
    factors = factor_layers(layers, calibration, settings, progress)
    conversion = Conversion(
        settings,
        tuple(f.plan for f in factors),
        "" if calibration is None else calibration.fingerprint,
        sum(module_nbytes(layer.module) for layer in layers),
    )
    modules = new_modules(layers, conversion)
    for module, layer, f in zip(modules, layers, factors, strict=True):
        module.fill(layer, f)
    install(model, layers, modules, conversion)
    return model


def new_modules(layers: Sequence[AttentionLayer], conversion: Conversion) -> list[PaluAttention]:
    """Attention modules to take the place of those of `layers`; :meth:`PaluAttention.fill` gives them weights."""
    first_tokens = conversion.settings.first_tokens
    return [
        PaluAttention(layer, plan, first_tokens, layer.module.config).train(layer.module.training)
        for layer, plan in zip(layers, conversion.plans, strict=True)
    ]


def install(
    model: Any, layers: Sequence[AttentionLayer], modules: Sequence[PaluAttention], conversion: Conversion
) -> None:
    """Put `modules` in place of those of `layers`, and note the conversion on the model."""
    for layer, module in zip(layers, modules, strict=True):
        setattr(layer.owner, layer.attribute, module)
    model.palu = conversion


def module_nbytes(module: torch.nn.Module) -> int:
    """Bytes of a module's parameters and buffers."""
    return sum(x.numel() * x.element_size() for x in [*module.parameters(), *module.buffers()])
