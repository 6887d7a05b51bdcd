"""What Palu's factors and ranks need to know of a model's activations, gathered over windows of text.

For each attention layer, with h the input that its key and value projections share and g the gradient of the summed
next-token loss at a projection's output (before any norm or RoPE):

- ``gram`` (in, in): the mean of h h^T;
- ``error`` (out, out) of keys and of values: the mean of g g^T;
- ``fisher`` (out,) of keys and of values: diagonal Fisher information of the weights, whose square roots are averaged
  over each row (the importance that the paper's code gives to a projection is their mean).

Sums are float64, one window of activations is in memory at a time, and an interrupted run goes on where its file ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from kvsketch._checks import check_integer
from kvsketch._progress import Progress, no_progress
from kvsketch.adapters.palu_models import AttentionLayer, Projection, attention_layers
from kvsketch.evaluation import text_windows

#: Of the calibration file; part of the fingerprint.
VERSION = 2
#: Seconds between two writings of the calibration file.
SAVE_SECONDS = 30.0


@dataclass(frozen=True)
class CalibrationSettings:
    """How much text is read: windows of `window` tokens, `tokens` for Grams, of which `gradient_tokens` for gradients.

    Both kinds of windows come from all over the text, at equal distances. `skip` first tokens of each window, those
    whose keys and values stay exact, are left out of all means.
    """

    tokens: int = 32768
    gradient_tokens: int = 16384
    window: int = 512
    skip: int = 0

    def __post_init__(self) -> None:
        check_integer("window", self.window, low=2)
        check_integer("tokens", self.tokens, low=self.window)
        check_integer("gradient_tokens", self.gradient_tokens, low=self.window)
        check_integer("skip", self.skip, low=0, high=self.window - 2)

    @property
    def windows(self) -> int:
        """Windows read; :attr:`gradient_windows` of them with gradients."""
        return self.tokens // self.window

    @property
    def gradient_windows(self) -> int:
        return min(self.gradient_tokens, self.tokens) // self.window

    def needs_gradients(self, number: int) -> bool:
        """Whether a window is one of those with gradients, which lie at equal distances too."""
        return number * self.gradient_windows % self.windows < self.gradient_windows


class LayerCalibration(NamedTuple):
    """Of one layer, float64: `gram` (in, in); of keys and values `error` (out, out) and `fisher` (out,)."""

    gram: np.ndarray[Any, Any]
    key_error: np.ndarray[Any, Any]
    value_error: np.ndarray[Any, Any]
    key_fisher: np.ndarray[Any, Any]
    value_fisher: np.ndarray[Any, Any]


@dataclass(frozen=True)
class Calibration:
    """A layer's statistics by its index in the model, and the fingerprint of model, text and settings behind them."""

    fingerprint: str
    settings: CalibrationSettings
    layers: dict[int, LayerCalibration]


def calibrate(
    model: Any,
    tokenizer: Any,
    text: str,
    *,
    settings: CalibrationSettings = CalibrationSettings(),
    file: str | os.PathLike[str] | None = None,
    progress: Progress = no_progress,
) -> Calibration:
    """Gather the statistics of `model` over ``settings.tokens`` tokens from all over `text`.

    Parameters
    ----------
    model
        A model that :func:`kvsketch.adapters.palu_models.attention_layers` knows; it is left as it was.
    tokenizer
        Its tokenizer; windows open with the token that it opens a text with, if any.
    file
        A file that keeps the sums, written twice a minute: a later run with the same model, text and settings goes on
        from there. A file of another run is refused.
    progress
        Called with a description, the windows done and all windows.

    Raises
    ------
    ValueError
        For too little text, activations or gradients that are not finite, a model that Palu cannot convert, or a file
        of another model, text or settings.
    """
    layers = attention_layers(model)
    try:
        windows = text_windows(
            tokenizer, text, prompt_tokens=settings.window - 1, score_tokens=0, windows=settings.windows, spread=True
        )
    except ValueError:
        have = len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        raise ValueError(
            f"calibration reads {settings.tokens} tokens, but its text has {have}; give a longer text or fewer tokens"
        ) from None
    mark = fingerprint(model, windows, settings)
    path = None if file is None else Path(file)
    sums = _Sums.start(layers) if path is None or not path.exists() else _Sums.read(path, mark)
    _accumulate(model, layers, windows, settings, sums, mark, path, progress)
    return Calibration(mark, settings, {layer.index: sums.means(layer.index, settings) for layer in layers})


def fingerprint(model: Any, windows: Sequence[torch.Tensor], settings: CalibrationSettings) -> str:
    """SHA-256 of the model's weights, the windows' tokens and the settings, as hexadecimal digits."""
    digest = hashlib.sha256(json.dumps([VERSION, type(model).__name__, asdict(settings)]).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    for window in windows:
        digest.update(window.numpy().tobytes())
    return digest.hexdigest()


class _Sums:
    """Running sums by name, ``gram.3`` or ``key_error.3``, float64 tensors, over the first `done` windows."""

    def __init__(self, tensors: dict[str, torch.Tensor], done: int) -> None:
        self.tensors = tensors
        self.done = done

    @classmethod
    def start(cls, layers: Sequence[AttentionLayer]) -> _Sums:
        tensors = {}
        for layer in layers:
            inputs = layer.k.weight.shape[1]
            tensors[f"gram.{layer.index}"] = torch.zeros(inputs, inputs, dtype=torch.float64)
            for side, projection in (("key", layer.k), ("value", layer.v)):
                out = projection.weight.shape[0]
                tensors[f"{side}_error.{layer.index}"] = torch.zeros(out, out, dtype=torch.float64)
                tensors[f"{side}_fisher.{layer.index}"] = torch.zeros(out, inputs, dtype=torch.float64)
        return cls(tensors, 0)

    @classmethod
    def read(cls, path: Path, mark: str) -> _Sums:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as opened:
                header = opened.metadata() or {}
                if header.get("fingerprint") != mark:
                    raise ValueError(
                        f"{path} holds the calibration of another model, text or settings; name another file"
                    )
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  (no mapping)
                return cls(tensors, int(header["done"]))
        except (SafetensorError, KeyError, OSError) as error:
            raise ValueError(f"{path} is no calibration file, or was damaged ({error}); delete it") from None

    def write(self, path: Path, mark: str) -> None:
        """Write the file whole or not at all."""
        from safetensors.torch import save_file

        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            save_file(self.tensors, part, metadata={"fingerprint": mark, "done": str(self.done)})
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)

    def means(self, index: int, settings: CalibrationSettings) -> LayerCalibration:
        rows = settings.windows * (settings.window - settings.skip)
        gradient_rows = settings.gradient_windows * (settings.window - settings.skip)
        error, fisher = (
            [self.tensors[f"{side}_{what}.{index}"] for side in ("key", "value")] for what in ("error", "fisher")
        )
        return LayerCalibration(
            (self.tensors[f"gram.{index}"] / rows).numpy(),
            *((x / gradient_rows).numpy() for x in error),
            *((x / settings.gradient_windows).sqrt().mean(1).numpy() for x in fisher),
        )


def _accumulate(
    model: Any,
    layers: Sequence[AttentionLayer],
    windows: Sequence[torch.Tensor],
    settings: CalibrationSettings,
    sums: _Sums,
    mark: str,
    path: Path | None,
    progress: Progress,
) -> None:
    """Add the windows that `sums` does not hold yet; the file is written now and then and at the end."""
    saved = time.monotonic()
    with _frozen(model), _watching(layers, sums.tensors, settings.skip) as window_sums:
        for number in range(sums.done, len(windows)):
            ids = windows[number].to(model.device)
            with_gradients = settings.needs_gradients(number)
            progress(f"Calibrating ({'gradients' if with_gradients else 'Grams'})", number, len(windows))
            window_sums.clear()
            _read_window(model, ids, with_gradients)
            for name, addend in window_sums.items():
                if not bool(torch.isfinite(addend).all()):
                    what, _, index = name.partition(".")
                    raise ValueError(
                        f"layer {index} has activations or gradients that are not finite ({what}, window {number}); "
                        "check the model's weights, or use float32"
                    )
                sums.tensors[name] += addend
            sums.done = number + 1
            finished = sums.done == len(windows)
            if path is not None and (finished or time.monotonic() - saved > SAVE_SECONDS):
                sums.write(path, mark)
                saved = time.monotonic()
    progress("Calibrating", len(windows), len(windows))


def _read_window(model: Any, ids: torch.Tensor, with_gradients: bool) -> None:
    """Run the model on ids (1, s), and back from the summed loss of its s - 1 predictions when asked."""
    if not with_gradients:
        # Only what attention sees is needed: no logits.
        options = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
        with torch.no_grad():
            model(ids, use_cache=False, **options)
        return
    with torch.enable_grad():
        logits = model(ids, use_cache=False).logits[0, :-1].float()
        torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").backward()


@contextlib.contextmanager
def _frozen(model: Any) -> Iterator[None]:
    """The model in evaluation mode, without gradients of its weights, which are not kept."""
    training = model.training
    wanted = [p for p in model.parameters() if p.requires_grad]
    try:
        model.eval()
        for parameter in wanted:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)
        model.train(training)


@contextlib.contextmanager
def _watching(
    layers: Sequence[AttentionLayer], names: dict[str, torch.Tensor], skip: int
) -> Iterator[dict[str, torch.Tensor]]:
    """While open, every window that the model reads leaves its sums in the dict given: entries of `names`."""
    found: dict[str, torch.Tensor] = {}
    handles = []

    def watch(layer: AttentionLayer, side: str, projection: Projection) -> Any:
        def see_output(module: Any, inputs: Any, output: torch.Tensor) -> None:
            h = inputs[0].detach()[0, skip:].double()
            if side == "key":
                found[f"gram.{layer.index}"] = (h.T @ h).cpu()
            if not torch.is_grad_enabled():
                return
            if not output.requires_grad:
                # The first layer's: nothing before it asks for gradients.
                output.requires_grad_()

            def see_gradient(gradient: torch.Tensor) -> None:
                g = gradient.detach()[0, skip:, projection.columns].double()
                found[f"{side}_error.{layer.index}"] = (g.T @ g).cpu()
                found[f"{side}_fisher.{layer.index}"] = (g.T @ h).square().cpu()

            output.register_hook(see_gradient)

        return projection.module.register_forward_hook(see_output)

    try:
        for layer in layers:
            handles += [watch(layer, "key", layer.k), watch(layer, "value", layer.v)]
        yield found
    finally:
        for handle in handles:
            handle.remove()
