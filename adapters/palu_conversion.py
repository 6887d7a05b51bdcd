"""Put low-rank attention modules in place of a model's own, and say how it was done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvsketch._progress import Progress, no_progress
from kvsketch.adapters.palu_attention import PaluAttention
from kvsketch.adapters.palu_cache import latent_codec
from kvsketch.adapters.palu_calibration import Calibration
from kvsketch.adapters.palu_models import AttentionLayer, attention_layers
from kvsketch.adapters.palu_plan import LayerPlan, PaluSettings, factor_layers
from kvsketch.adapters.palu_rope import POSITION_BYTES
from kvsketch.adapters.palu_store import latent_nbytes
from kvsketch.adapters.torch_dlpack import dtype_name


@dataclass(frozen=True)
class Conversion:
    """How a model was converted: ``model.palu``.

    `calibration` is the fingerprint of the calibration, empty without one; `nbytes_before` are the bytes of the
    attention layers' weights in the original model, `tuning` the settings of a recovery after it, if there was one.
    """

    settings: PaluSettings
    plans: tuple[LayerPlan, ...]
    calibration: str
    nbytes_before: int
    tuning: dict[str, Any] | None = None

    def attention_modules(self, model: Any) -> list[PaluAttention]:
        """The converted attention modules of `model`, in order."""
        return [module for module in model.modules() if isinstance(module, PaluAttention)]

    def nbytes_after(self, model: Any) -> int:
        """Bytes of the attention layers' weights, kept original projections included."""
        return sum(module_nbytes(module) for module in self.attention_modules(model))

    def cache_nbytes(self, model: Any, tokens: int) -> int:
        """Live bytes of a PaluCache of one unpadded row of `tokens` tokens, every full page encoded."""
        settings, modules = self.settings, self.attention_modules(model)
        codec = latent_codec(settings.latent_bits, settings.latent_group)
        latents = sum(
            latent_nbytes(
                *(codec, module.plan.key_ranks, module.plan.value_ranks, tokens),
                heads=module.h,
                d=module.d,
                first_tokens=module.first_tokens,
                dtype=dtype_name(module.k_down.weight.dtype),
            )
            for module in modules
        )
        return latents + (POSITION_BYTES * tokens if any(module.has_rope for module in modules) else 0)

    def dense_nbytes(self, model: Any, tokens: int) -> int:
        """Bytes of a dense 16-bit cache of the same layers and tokens."""
        return sum(2 * 2 * module.h * module.d * tokens for module in self.attention_modules(model))

    def kept(self, model: Any) -> float:
        """Share of the numbers of keys and values that the latents have: what rounding made of ``settings.keep``."""
        dense = sum(2 * module.h * module.d for module in self.attention_modules(model))
        return sum(sum(plan.key_ranks) + sum(plan.value_ranks) for plan in self.plans) / dense


def convert(
    model: Any,
    calibration: Calibration | None = None,
    *,
    settings: PaluSettings = PaluSettings(),  # noqa: B008  (a frozen dataclass)
    progress: Progress = no_progress,
) -> Any:
    """Replace the key and value projections of `model`, in place, by low-rank ones; the model is returned.

    Parameters
    ----------
    model
        One of :data:`kvsketch.adapters.palu.SUPPORTED`, as transformers loads it.
    calibration
        What :func:`~kvsketch.adapters.palu.calibrate` gathered; not needed for plain factors with ranks that do
        not use Fisher information.
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
    model.save_pretrained = refuse_save_pretrained


def refuse_save_pretrained(*args: Any, **kwargs: Any) -> None:
    """What a converted model has for ``model.save_pretrained``, whose folder no transformers could load."""
    raise ValueError(
        "a model converted by Palu is not one that transformers can load; write it with "
        "kvsketch.adapters.palu.save_pretrained(model, folder)"
    )


def module_nbytes(module: torch.nn.Module) -> int:
    """Bytes of a module's parameters and buffers."""
    return sum(x.numel() * x.element_size() for x in [*module.parameters(), *module.buffers()])
