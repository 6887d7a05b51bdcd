"""A compressed cache of a whole model in one safetensors file."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvsketch import storage
from kvsketch._checks import FLOAT_DTYPES
from kvsketch.adapters.layers import CompressedLayer
from kvsketch.adapters.torch_dlpack import array_from_tensor, beside_torch, dtype_name, tensor_from_array
from kvsketch.cache import Cache
from kvsketch.codecs import codec_from_settings, codec_settings
from kvsketch.methods import LayerSettings, Method

if TYPE_CHECKING:
    import transformers

    from kvsketch.adapters.transformers_cache import CompressedCache

KIND = "transformers cache"
_CONFIG_FIELDS = ("model_type", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")


def describe_config(config: Any) -> dict[str, Any]:
    """What of a model's config must be the same for its caches to be interchangeable."""
    return {name: getattr(config, name, None) for name in _CONFIG_FIELDS}


def copy_layer(layer: Any) -> Any:
    """A layer of transformers' own with tensors of its own."""
    return copy.deepcopy(layer)


def save(cache: CompressedCache, path: Path) -> None:
    """Write `cache` to the file `path`, all or nothing."""
    tensors: dict[str, Any] = {}
    layers = []
    for index, layer in enumerate(cache.layers):
        prefix = f"layers.{index}."
        if isinstance(layer, CompressedLayer):
            with beside_torch(layer.device):
                held, header = layer.store.to_tensors(prefix)
            layers.append({"store": header})
        else:
            held, header = _dense_to_tensors(layer, index, prefix)
            layers.append({"dense": header})
        tensors |= held
    if cache.padding.valid is not None:
        tensors["valid"] = cache.padding.valid.to(torch.uint8).numpy()
    header = {
        "method": _method_settings(cache.method),
        "options": cache.options,
        "model": cache.description,
        "length": cache.get_seq_length(),
        "layers": layers,
    }
    storage.write_file(path, tensors, header, kind=KIND)


def load(cls: type[CompressedCache], model: transformers.PreTrainedModel, path: Path) -> CompressedCache:
    """The cache that :func:`save` wrote; ValueError when it is of another model, or damaged."""
    tensors, header = storage.read_file(path, kind=KIND)
    try:
        cache = cls.for_model(model, _method_from_settings(header["method"]), **header["options"])
        for name, value in cache.description.items():
            if header["model"].get(name) != value:
                raise ValueError(
                    f"{path} was saved for a model with {name}={header['model'].get(name)!r}, this one has {value!r}; "
                    "load it with the model that filled it"
                )
        if len(header["layers"]) != len(cache.layers):
            raise ValueError(f"{path} holds {len(header['layers'])} layers, the model has {len(cache.layers)}")
        devices = _layer_devices(model)
        for index, (layer, entry) in enumerate(zip(cache.layers, header["layers"], strict=True)):
            prefix, device = f"layers.{index}.", devices.get(index, model.device)
            if isinstance(layer, CompressedLayer):
                _fill_store(layer, tensors, entry["store"], prefix, path, device)
            else:
                _dense_from_tensors(layer, tensors, entry["dense"], prefix, device)
        if "valid" in tensors:
            cache.padding.valid = torch.from_numpy(tensors["valid"] != 0)
        cache.padding.length = header["length"]
        if {layer.store.length for layer in cache.compressed} != {header["length"]}:
            raise ValueError(f"{path} holds layers of different lengths; it was not written whole")
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} has a header that does not fit together: {error!r}") from None
    return cache


def _layer_devices(model: torch.nn.Module) -> dict[int, torch.device]:
    """Where each layer's attention lies, of a model that may be spread over devices."""
    devices = {}
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        weight = next(module.parameters(), None)
        if isinstance(index, int) and weight is not None:
            devices[index] = weight.device
    return devices


def _fill_store(
    layer: CompressedLayer,
    tensors: dict[str, Any],
    header: dict[str, Any],
    prefix: str,
    path: Path,
    device: torch.device,
) -> None:
    saved = Cache.from_tensors(tensors, header, prefix, engine=layer.store.engine)
    if saved.settings != layer.store.settings:
        raise ValueError(
            f"{path} holds {saved.settings} for {layer.store.name}, its method says {layer.store.settings}"
        )
    saved.coefficients = layer.store.coefficients
    if device.type == "cuda":
        with beside_torch(device):
            saved = saved.to(device.index)
    layer.store, layer.device = saved, device
    layer.is_initialized = not saved.is_empty


def _dense_to_tensors(layer: Any, index: int, prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
        raise ValueError(
            f"layer {index} is a {type(layer).__name__}, which kvsketch cannot save; copy.deepcopy the cache"
        )
    if layer.keys is None or not layer.is_initialized:
        return {}, {"length": 0}
    header = {"length": layer.get_seq_length(), "key_dtype": dtype_name(layer.keys.dtype)}
    header["value_dtype"] = dtype_name(layer.values.dtype)
    tensors = {"keys": layer.keys, "values": layer.values}
    arrays = {name: array_from_tensor(name, x.detach().cpu()) for name, x in tensors.items()}
    bits = {name: x.view(np.uint16) if x.dtype.itemsize == 2 else x for name, x in arrays.items()}
    return {prefix + name: np.ascontiguousarray(x) for name, x in bits.items()}, header


def _dense_from_tensors(
    layer: Any, tensors: dict[str, Any], header: dict[str, Any], prefix: str, device: torch.device
) -> None:
    if not header["length"]:
        return
    keys, values = (
        tensor_from_array(tensors[prefix + name].view(FLOAT_DTYPES[header[dtype]])).to(device)
        for name, dtype in (("keys", "key_dtype"), ("values", "value_dtype"))
    )
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = header["length"]


def _method_settings(method: Method) -> dict[str, Any]:
    return {
        "name": method.name,
        "settings": _layer_settings(method.settings),
        "early": None if method.early is None else _layer_settings(method.early),
        "early_layers": method.early_layers,
    }


def _method_from_settings(saved: dict[str, Any]) -> Method:
    early = saved["early"]
    return Method(
        saved["name"],
        _layer_from_settings(saved["settings"]),
        early=None if early is None else _layer_from_settings(early),
        early_layers=saved["early_layers"],
    )


def _layer_settings(settings: LayerSettings) -> dict[str, Any]:
    return {
        "keys": codec_settings(settings.keys),
        "values": codec_settings(settings.values),
        "residual_length": settings.residual_length,
        "sink_tokens": settings.sink_tokens,
    }


def _layer_from_settings(saved: dict[str, Any]) -> LayerSettings:
    return LayerSettings(
        codec_from_settings(saved["keys"]),
        codec_from_settings(saved["values"]),
        saved["residual_length"],
        saved["sink_tokens"],
    )
