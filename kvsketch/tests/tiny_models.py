"""Random models of two layers, small enough for a test, of several architectures."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCABULARY = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def tiny_model(name: str = "Llama", *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Model ``{name}ForCausalLM`` with random weights, in evaluation mode, with transformers' default attention."""
    config = getattr(transformers, f"{name}Config")(**(SIZES | changes))
    torch.manual_seed(seed)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval().to(dtype)


def random_prompt(rows: int, tokens: int, *, seed: int = 1) -> torch.Tensor:
    """Token ids (rows, tokens), none of them a special one."""
    return torch.randint(3, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def left_padded(lengths: list[int], *, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask (b, longest) of rows of the given lengths, padding on the left."""
    ids = random_prompt(len(lengths), max(lengths), seed=seed)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        ids[row, : max(lengths) - length] = 0
        mask[row, : max(lengths) - length] = 0
    return ids, mask


def greedy(model: Any, ids: torch.Tensor, cache: Any = None, *, new: int = 12, **options: Any) -> torch.Tensor:
    """Greedy tokens, prompt included."""
    options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0} | options
    return model.generate(ids, **({} if cache is None else {"cache": cache}), **options)
