"""Perplexity of a model on windows of text, each window read alone: dense, by latents as they are, or by a cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvsketch._progress import Progress, no_progress
from kvsketch.evaluation import CHUNK, read_tokens


@dataclass(frozen=True)
class Reading:
    """What a model made of some text: its perplexity, and the report on the cache of the last window, if any."""

    perplexity: float
    cache: dict[str, Any] | None


def read_windows(
    model: Any,
    windows: Sequence[torch.Tensor],
    *,
    prompt_tokens: int,
    new_cache: Callable[[], Any] | None = None,
    title: str = "Reading",
    progress: Progress = no_progress,
) -> Reading:
    """Perplexity of `model` over the tokens of `windows` (1, n) that stand behind `prompt_tokens` + 1 others.

    Without `new_cache` each window is read at once. With it a window's prompt is read first, then the rest a few tokens
    at a time, through a cache that `new_cache` makes: as in generation, what is encoded by then is read as encoded.
    """
    surprise, tokens, report = 0.0, 0, None
    with torch.inference_mode():
        for number, window in enumerate(windows):
            progress(title, number, len(windows))
            targets = window[0, prompt_tokens + 1 :]
            if new_cache is None:
                logits = model(window.to(model.device), use_cache=False).logits[0, prompt_tokens:-1]
                surprise += _surprise(logits, targets)
            else:
                cache = new_cache()
                read_tokens(model, window[:, :prompt_tokens], cache, last_only=True)
                for start in range(0, len(targets), CHUNK):
                    at = prompt_tokens + start
                    given = window[:, at : min(at + CHUNK, window.shape[1] - 1)]
                    surprise += _surprise(read_tokens(model, given, cache), targets[start : start + CHUNK])
                report = cache.report()["total"]
            tokens += len(targets)
    progress(title, len(windows), len(windows))
    return Reading(math.exp(surprise / tokens), report)


def _surprise(logits: torch.Tensor, targets: torch.Tensor) -> float:
    """Nats by which the true next tokens `targets` (s,) surprise `logits` (s, vocabulary), summed."""
    return float(torch.nn.functional.cross_entropy(logits.double(), targets.to(logits.device), reduction="sum"))
