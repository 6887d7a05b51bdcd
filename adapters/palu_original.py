"""The model that a converted one was made from: a teacher for tuning, and the baseline that a comparison wants."""

from __future__ import annotations

from typing import Any

import torch

#: Relative and absolute difference that weights may have by being kept in another dtype, bfloat16 at the coarsest.
ROUNDING = (2.0**-7, 1e-6)


def check_original(model: Any, original: Any) -> None:
    """Raise ValueError unless `original` has the weights that conversion and tuning left alone in `model`."""
    if getattr(original, "palu", None) is not None:
        raise ValueError("the original model is itself converted by Palu; name the model that was converted")
    converted = [name for name, module in model.named_modules() if module in model.palu.attention_modules(model)]
    inside = tuple(f"{name}." for name in converted)
    own, others = model.state_dict(), original.state_dict()
    rtol, atol = ROUNDING
    for name, tensor in own.items():
        if name.startswith(inside):
            continue
        other = others.get(name)
        if (
            other is None
            or other.shape != tensor.shape
            or not torch.allclose(tensor.float(), other.float().to(tensor.device), rtol=rtol, atol=atol)
        ):
            raise ValueError(
                f"its weights {name} are not those of the converted model, which was made from another model; name "
                "the one that was converted"
            )
