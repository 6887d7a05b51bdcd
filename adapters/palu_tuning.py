"""Recover what a conversion by Palu lost: low-rank additions to the down projections, trained and then merged.

Of a layer's keys, and of its values, the latents become A x + A' B' x with A the down projections of all slices, one
under the other, B' (rank, in) and A' (latents, rank) trained by peft and everything else frozen. Merging adds A' B' to
A: the model keeps its size, its ranks and its cache. The loss is that of the next token, or the distance from what the
original model predicts (distillation). Trained on exact latents, in float32.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import peft
import torch
from peft.tuners.lora import LoraModel

from kvsketch._checks import check_choice, check_integer
from kvsketch._progress import Progress, no_progress
from kvsketch.adapters.palu_conversion import Conversion
from kvsketch.evaluation import text_windows

LOSSES = ("next-token", "distillation")
#: The projections that are added to, by their names in PaluAttention.
TARGETS = ["k_down", "v_down"]
#: Norm that the gradient of a step is cut to.
GRADIENT_NORM = 1.0


@dataclass(frozen=True)
class TuningSettings:
    """How additions are trained: `steps` of one window of `window` tokens each, drawn from the text without repetition.

    When the text has fewer windows than there are steps, it is read again in another order. `rank` is that of the
    additions; the learning rate falls linearly from `learning_rate` to zero; `seed` draws windows and first weights.
    """

    steps: int = 100
    rank: int = 8
    loss: str = "next-token"
    learning_rate: float = 1e-3
    window: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("steps", self.steps, low=1)
        check_integer("rank", self.rank, low=1)
        check_choice("loss", self.loss, LOSSES)
        if not isinstance(self.learning_rate, (int, float)) or not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be above 0, got {self.learning_rate!r}")
        check_integer("window", self.window, low=2)
        check_integer("seed", self.seed, low=0)


def tune(
    model: Any,
    tokenizer: Any,
    text: str,
    *,
    settings: TuningSettings = TuningSettings(),
    original: Any = None,
    progress: Progress = no_progress,
) -> list[float]:
    """Train additions to the down projections of a converted `model` on `text` and merge them, in place.

    Parameters
    ----------
    model
        A converted model; ``model.palu.tuning`` tells afterwards how it was tuned.
    tokenizer
        Its tokenizer.
    settings
        How long, and on which loss.
    original
        The model that was converted, in float32: for the loss ``"distillation"`` only.
    progress
        Called with a description and the loss, the steps done and all steps.

    Returns
    -------
    list of float
        The loss of each step in nats a token, before its update.

    Raises
    ------
    ValueError
        For a model that is not converted, too little text, or a loss that is not finite. The model is then, as after
        an interruption, what it was before.
    """
    conversion = getattr(model, "palu", None)
    if not isinstance(conversion, Conversion):
        raise ValueError(f"{type(model).__name__} is not converted by Palu; convert it, or load a converted one")
    if (settings.loss == "distillation") != (original is not None):
        raise ValueError(
            f"original must be the model that was converted for loss='distillation' and None for other losses, got "
            f"{type(original).__name__} for loss={settings.loss!r}"
        )
    windows = _all_windows(tokenizer, text, settings.window)
    with _ready_for_training(model), _additions(model, settings):
        losses = _train(model, windows, settings, original, progress)
    model.palu = replace(conversion, tuning=asdict(settings))
    return losses


@contextlib.contextmanager
def _ready_for_training(model: Any) -> Iterator[None]:
    """The model in float32 and evaluation mode; afterwards in its own dtypes, unchanged where nothing was trained."""
    training = model.training
    # Not model.float() and model.to(dtype): these would leave RoPE's frequencies, always float32, in 16 bits.
    held = [(x, x.dtype) for x in [*model.parameters(), *model.buffers()] if x.is_floating_point()]
    wanted = [(p, p.requires_grad) for p in model.parameters()]
    try:
        model.eval()
        for x, _ in held:
            x.data = x.data.float()
        yield
    finally:
        for x, dtype in held:
            x.data = x.data.to(dtype)
        for parameter, want in wanted:
            parameter.requires_grad_(want)
        model.train(training)


@contextlib.contextmanager
def _additions(model: Any, settings: TuningSettings) -> Iterator[None]:
    """Additions to train while open, all else frozen; then merged, or taken away when something failed."""
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        config = peft.LoraConfig(r=settings.rank, lora_alpha=settings.rank, target_modules=TARGETS)
        tuner = LoraModel(model, config, "default")
    try:
        yield
    except BaseException:
        tuner.unload()
        raise
    tuner.merge_and_unload(safe_merge=True)


def _all_windows(tokenizer: Any, text: str, window: int) -> list[torch.Tensor]:
    """All whole windows (1, window) of `text`."""
    have = len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    # A window may open with a token that is not in the text.
    return text_windows(tokenizer, text, prompt_tokens=window - 1, score_tokens=0, windows=max(have // window, 1))


def _shuffled(windows: list[torch.Tensor], settings: TuningSettings) -> Iterator[torch.Tensor]:
    """One window a step: all of them in a drawn order, then again in another one."""
    generator = torch.Generator().manual_seed(settings.seed)
    order: list[int] = []
    for _ in range(settings.steps):
        order = order or torch.randperm(len(windows), generator=generator).tolist()
        yield windows[order.pop()]


def _train(
    model: Any, windows: list[torch.Tensor], settings: TuningSettings, original: Any, progress: Progress
) -> list[float]:
    """Run all steps on the parameters of `model` that ask for gradients; the loss of each."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=settings.learning_rate, weight_decay=0.0)
    losses: list[float] = []
    for step, window in enumerate(_shuffled(windows, settings)):
        progress(f"Tuning{f', loss {losses[-1]:.3f}' if losses else ''}", step, settings.steps)
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * (1 - step / settings.steps)
        ids = window.to(model.device)
        with torch.enable_grad():
            loss = _next_token_loss(model, ids) if original is None else _distillation_loss(model, original, ids)
            optimizer.zero_grad()
            loss.backward()
        losses.append(float(loss.detach()))
        if not math.isfinite(losses[-1]):
            raise ValueError(f"the loss is {losses[-1]} at step {step}; give a smaller learning_rate")
        torch.nn.utils.clip_grad_norm_(parameters, GRADIENT_NORM)
        optimizer.step()
    progress("Tuning", settings.steps, settings.steps)
    return losses


def _next_token_loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Nats by which ids (1, s) surprise `model`, the mean of s - 1 predictions."""
    return torch.nn.functional.cross_entropy(model(ids, use_cache=False).logits[0, :-1], ids[0, 1:])


def _distillation_loss(model: Any, original: Any, ids: torch.Tensor) -> torch.Tensor:
    """KL(original || model) in nats, the mean over the predictions of ids (1, s)."""
    with torch.no_grad():
        expected = original(ids.to(original.device), use_cache=False).logits[0].log_softmax(-1).to(ids.device)
    found = model(ids, use_cache=False).logits[0].log_softmax(-1)
    return torch.nn.functional.kl_div(found, expected, log_target=True, reduction="batchmean")
