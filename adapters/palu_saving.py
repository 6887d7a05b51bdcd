"""A converted model in a folder: ``palu.json``, which says everything about it, its weights, and its tokenizer."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.initialization import no_init_weights

from kvsketch.adapters.palu_conversion import Conversion, install, new_modules
from kvsketch.adapters.palu_models import SUPPORTED, attention_layers
from kvsketch.adapters.palu_plan import LayerPlan, PaluSettings
from kvsketch.adapters.torch_dlpack import dtype_name

FORMAT = "kvsketch palu"
VERSION = 1
CONFIG_FILE = "palu.json"
WEIGHTS_FILE = "palu.safetensors"


def is_converted(folder: str | os.PathLike[str]) -> bool:
    """Whether `folder` looks like one that :func:`save_pretrained` wrote."""
    return (Path(folder) / CONFIG_FILE).is_file()


def check_new_folder(folder: str | os.PathLike[str]) -> None:
    """Raise ValueError when `folder` exists, or could not be made."""
    path = Path(folder)
    if path.exists() or path.is_symlink():
        raise ValueError(f"{path} exists already; remove it, or name another folder")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{path} cannot be made: there is no folder {path.absolute().parent}; create it first")


def save_pretrained(model: Any, folder: str | os.PathLike[str], tokenizer: Any = None) -> None:
    """Write a converted `model`, and its tokenizer if given, into the new folder `folder`, all or nothing.

    ValueError when the model is not converted or the folder exists.
    """
    from safetensors.torch import save_file

    conversion = getattr(model, "palu", None)
    if not isinstance(conversion, Conversion):
        raise ValueError(f"{type(model).__name__} is not converted by Palu; use its own save_pretrained")
    check_new_folder(folder)
    path = Path(folder)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.mkdir()
    try:
        if tokenizer is not None:
            tokenizer.save_pretrained(part)
        save_file(_own_tensors(model), part / WEIGHTS_FILE)
        (part / CONFIG_FILE).write_text(json.dumps(_describe(model, conversion), indent=1) + "\n", encoding="utf-8")
        os.rename(part, path)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _describe(model: Any, conversion: Conversion) -> dict[str, Any]:
    generation = model.generation_config
    return {
        "format": FORMAT,
        "version": VERSION,
        "architecture": type(model).__name__,
        "dtype": dtype_name(model.dtype),
        "settings": asdict(conversion.settings),
        "layers": [asdict(plan) for plan in conversion.plans],
        "calibration": conversion.calibration,
        "nbytes_before": conversion.nbytes_before,
        "tuning": conversion.tuning,
        "config": json.loads(model.config.to_json_string(use_diff=False)),
        "generation_config": None if generation is None else json.loads(generation.to_json_string()),
    }


def _own_tensors(model: Any) -> dict[str, torch.Tensor]:
    """The state of `model` without tensors that are others once more, as a tied output embedding is."""
    tensors: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tuple(tensor.shape))
        if tensor.numel() == 0 or key not in seen:
            tensors[name] = tensor.contiguous()
            seen.add(key)
    return tensors


def load(folder: str | os.PathLike[str], *, dtype: torch.dtype | str | None = None) -> Any:
    """The converted model in `folder`, in evaluation mode; in `dtype`, or the one that it was saved in.

    ValueError says what is wrong with a folder of another version or another program, or a damaged one.
    """
    path = Path(folder)
    asked = None if dtype is None else dtype_name(dtype)
    description = _read_description(path)
    try:
        settings = PaluSettings(**description["settings"])
        plans = tuple(_read_plan(entry) for entry in description["layers"])
        conversion = Conversion(
            *(settings, plans, description["calibration"], description["nbytes_before"]),
            tuning=description.get("tuning"),
        )
        config = transformers.AutoConfig.for_model(**description["config"])
        # Made in the dtype asked for: model.to(dtype) would take RoPE's frequencies, always float32, with it.
        chosen = getattr(torch, asked or dtype_name(description["dtype"]))
        if description["architecture"] not in SUPPORTED:
            raise ValueError(f"its architecture {description['architecture']!r} is none of {', '.join(SUPPORTED)}")
        with no_init_weights():
            model = getattr(transformers, description["architecture"])._from_config(
                config, dtype=chosen, attn_implementation="sdpa"
            )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path / CONFIG_FILE} does not describe a converted model: {error}") from None
    layers = attention_layers(model)
    if [layer.index for layer in layers] != [plan.layer for plan in plans]:
        raise ValueError(f"{path / CONFIG_FILE} describes layers {[p.layer for p in plans]} of {len(layers)}")
    install(model, layers, new_modules(layers, conversion), conversion)
    _load_weights(model, path / WEIGHTS_FILE)
    if description["generation_config"] is not None:
        model.generation_config = transformers.GenerationConfig(**description["generation_config"])
    return model.eval()


def _read_description(path: Path) -> dict[str, Any]:
    file = path / CONFIG_FILE
    try:
        description = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"{path} is no folder of a converted model: {CONFIG_FILE} cannot be read ({error.strerror})"
        ) from None
    except ValueError as error:
        raise ValueError(f"{file} was damaged: {error}; convert the model again") from None
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        raise ValueError(f"{file} was not written by kvsketch palu")
    if description.get("version") != VERSION:
        raise ValueError(
            f"{path} has format version {description.get('version')!r}, this kvsketch reads version {VERSION}; "
            "convert the model again with this version"
        )
    return description


def _read_plan(entry: dict[str, Any]) -> LayerPlan:
    known = {f.name for f in fields(LayerPlan)}
    if set(entry) != known:
        raise ValueError(f"a layer must have {sorted(known)}, got {sorted(entry)}")
    return LayerPlan(**entry | {side: tuple(entry[side]) for side in ("key_ranks", "value_ranks")})


def _load_weights(model: Any, file: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file} cannot be read ({error}); convert the model again") from None
    expected = _own_tensors(model)
    if model.config.tie_word_embeddings:
        model.tie_weights()
        expected = _own_tensors(model)
    shapes, held = ({name: tuple(x.shape) for name, x in group.items()} for group in (expected, tensors))
    if shapes != held:
        wrong = sorted(set(shapes.items()) ^ set(held.items()))
        raise ValueError(f"{file} does not fit {CONFIG_FILE} at {wrong[0][0]}; convert the model again")
    with torch.no_grad():
        for name, tensor in expected.items():
            tensor.copy_(tensors[name])
