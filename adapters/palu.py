"""Convert a model by Palu (arXiv 2407.21118), so that its cache holds low-rank latents instead of keys and values.

``calibrate`` a model on text, ``convert`` it, and generate with ``PaluCache.for_model(model)``; ``save_pretrained`` and
``load`` keep a converted model in a folder. ``kvsketch.adapters.palu_tuning.tune`` trains a converted model for a few
steps, to recover what was lost; it needs the extra ``tune``.

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

from kvsketch.adapters.palu_cache import PaluCache
from kvsketch.adapters.palu_calibration import Calibration, CalibrationSettings, calibrate
from kvsketch.adapters.palu_conversion import Conversion, convert
from kvsketch.adapters.palu_models import SUPPORTED
from kvsketch.adapters.palu_plan import PaluSettings
from kvsketch.adapters.palu_saving import is_converted, load, save_pretrained

__all__ = [
    "SUPPORTED",
    "Calibration",
    "CalibrationSettings",
    "Conversion",
    "PaluCache",
    "PaluSettings",
    "calibrate",
    "convert",
    "is_converted",
    "load",
    "save_pretrained",
]
