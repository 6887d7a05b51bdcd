"""What a compressed cache of a whole model holds, layer by layer and in all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvsketch.adapters.layers import CompressedLayer

if TYPE_CHECKING:
    from kvsketch.adapters.transformers_cache import CompressedCache

_SUMMED = ("nbytes", "allocated_nbytes", "dense_nbytes_16", "dense_nbytes_model", "saturated")
_COMMON = ("batch", "length", "tokens", "exact_tokens", "encoded_tokens")


def layer_reports(cache: CompressedCache) -> list[dict[str, Any]]:
    """A dict for each layer that holds anything to report, with the layer's index under ``"layer"``."""
    entries = []
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, CompressedLayer):
            entries.append({"layer": index} | layer.store.report())
        else:
            entries.append({"layer": index} | _dense_report(layer))
    return entries


def total_report(cache: CompressedCache) -> dict[str, Any]:
    """All layers together: bytes summed, bits weighted by numbers, tokens those of one compressed layer."""
    entries = layer_reports(cache)
    own = [entry for entry, layer in zip(entries, cache.layers, strict=True) if isinstance(layer, CompressedLayer)]
    total: dict[str, Any] = {name: _common([entry[name] for entry in own]) for name in _COMMON}
    stores = [layer.store for layer in cache.compressed if not layer.store.is_empty]
    keys = sum(int(store.lengths.sum()) * store.heads * store.d for store in stores)
    values = sum(int(store.lengths.sum()) * store.heads * store.dv for store in stores)
    key_nbytes = sum(store.key_nbytes for store in stores)
    value_nbytes = sum(store.value_nbytes for store in stores)
    total["key_bits"] = 8 * key_nbytes / keys if keys else 0.0
    total["value_bits"] = 8 * value_nbytes / values if values else 0.0
    total["bits"] = 8 * (key_nbytes + value_nbytes) / (keys + values) if keys + values else 0.0
    total |= {name: sum(entry[name] for entry in entries) for name in _SUMMED}
    # Layers with sketches of one seed and size share their projections.
    tables = {(store.settings.keys, store.d): store.table_nbytes for store in stores}
    total["table_nbytes"] = sum(tables.values())
    for names in ("engines", "kernels"):
        found: dict[str, set[str]] = {}
        for entry in own:
            for operation, name in entry[names].items():
                found.setdefault(operation, set()).add(name)
        total[names] = {operation: ", ".join(sorted(of)) for operation, of in found.items()}
    return total


def _common(numbers: list[Any]) -> Any:
    """The number that all agree on, else their mean."""
    return numbers[0] if len(set(numbers)) == 1 else sum(numbers) / len(numbers)


def _dense_report(layer: Any) -> dict[str, Any]:
    """The same report for a layer of transformers' own: everything in it is exact."""
    tensors = [x for x in vars(layer).values() if isinstance(x, torch.Tensor)]
    for states in ("conv_states", "recurrent_states"):
        held = getattr(layer, states, None)
        tensors += [x for x in held.values() if isinstance(x, torch.Tensor)] if isinstance(held, dict) else []
    nbytes = sum(x.numel() * x.element_size() for x in tensors if x.is_floating_point())
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    batch, tokens, key_bits, value_bits = 0, 0, 0.0, 0.0
    if keys is not None and values is not None and keys.numel() > 0:
        batch, tokens = keys.shape[0], keys.shape[0] * keys.shape[2]
        key_bits, value_bits = 8.0 * keys.element_size(), 8.0 * values.element_size()
    return {
        "batch": batch,
        "length": layer.get_seq_length() if hasattr(layer, "get_seq_length") else 0,
        "tokens": tokens,
        "exact_tokens": tokens,
        "encoded_tokens": 0,
        "key_bits": key_bits,
        "value_bits": value_bits,
        "bits": (key_bits + value_bits) / 2,
        "nbytes": nbytes,
        "allocated_nbytes": nbytes,
        "table_nbytes": 0,
        "dense_nbytes_16": 2 * sum(x.numel() for x in tensors if x.is_floating_point()),
        "dense_nbytes_model": nbytes,
        "saturated": 0,
        "engines": {},
        "kernels": {},
    }
