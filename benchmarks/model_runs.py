"""Runs of a real model that are compared: one decode step on each kind of cache, dense, compressed or a rival's."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache, QuantizedCache

from benchmarks.names import DYNAMIC_CACHE, EMPTY, QUANTO
from kvsketch.adapters.models import find_smollm2
from kvsketch.adapters.transformers_cache import CompressedCache
from kvsketch.evaluation import read_tokens

#: Steps between two in which transformers' quantized caches quantize everything anew.
REQUANTIZE_STEPS = 128
#: Backend of transformers' QuantizedCache, its settings, the module that it needs, and the longest context for it.
QUANTIZED: dict[str, tuple[str, dict[str, Any], str | None, int | None]] = {
    QUANTO: ("quanto", {"nbits": 2}, "optimum.quanto", None),
    "QuantizedCache quanto, 4 bits": ("quanto", {"nbits": 4}, "optimum.quanto", None),
    "QuantizedCache hqq, 2 bits": ("hqq", {"nbits": 2, "axis_key": 1, "axis_value": 1}, "hqq", 2048),
    "QuantizedCache fp8": ("fp8", {}, None, None),
}
#: llama.cpp's type of cached keys and values, as llama-cpp-python names it.
LLAMA = {"llama.cpp, f16 cache": "GGML_TYPE_F16", "llama.cpp, q4_0 cache": "GGML_TYPE_Q4_0"}
LLAMA_FLOOR = "llama.cpp, empty context"


@dataclass(frozen=True)
class Run:
    """One cache: a step over it, what to do before, the bytes that it holds, and one slow step if it has such."""

    name: str
    kind: str
    step: Callable[[], object]
    prepare: Callable[[], None]
    held_bytes: Callable[[], int | None]
    slow_step: Callable[[], object] | None = None


@dataclass
class Runs:
    """What there is to run at a context, and why other things are not."""

    runs: list[Run] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)


def make_runs(model: Any, prompt: torch.Tensor, methods: Sequence[str], *, rivals: Sequence[str], threads: int) -> Runs:
    """Caches that hold `prompt` (1, n): the dense one, each of `methods`, and `rivals`, names of this module.

    The prompt is read once, exactly; the other caches of transformers are made from its keys and values.
    """
    own_attention = model.config._attn_implementation
    dense = DynamicCache(config=model.config)
    read_tokens(model, prompt, dense, last_only=True)
    token, made = prompt[:, :1], Runs()
    as_before = partial(model.set_attn_implementation, own_attention)

    def add(name: str, kind: str, cache: Any, held: Callable[[], int], **others: Any) -> None:
        step = partial(read_tokens, model, token, cache)
        made.runs.append(Run(name, kind, step, others.pop("prepare", as_before), held, **others))

    def empty_step() -> None:
        read_tokens(model, token, DynamicCache(config=model.config))

    made.runs.append(Run(EMPTY, "floor", empty_step, as_before, lambda: 0))
    add(DYNAMIC_CACHE, "transformers", dense, partial(tensor_bytes, dense))
    for name in methods:
        cache = CompressedCache.from_dense(model, dense, name)
        attention = partial(model.set_attn_implementation, model.config._attn_implementation)
        add(name, "kvsketch", cache, partial(_allocated_bytes, cache), prepare=attention)
    for name in filter(QUANTIZED.__contains__, rivals):
        as_before()
        quantized = _fill_quantized(model, name, dense, token)
        if isinstance(quantized, str):
            made.absent[name] = quantized
        else:
            slow = None if "fp8" in name else partial(_requantizing_step, model, token, quantized)
            add(name, "transformers", quantized, partial(tensor_bytes, quantized), slow_step=slow)
    llama = [name for name in rivals if name in LLAMA]
    if llama:
        made.runs.extend(_llama_runs(llama, prompt[0].tolist(), threads, made.absent))
    as_before()
    return made


def _allocated_bytes(cache: CompressedCache) -> int:
    return cache.report()["total"]["allocated_nbytes"]


def _fill_quantized(model: Any, name: str, dense: Any, token: torch.Tensor) -> Any:
    """transformers' quantized cache of what `dense` holds, after a first step, or why there is none."""
    backend, settings, module, longest = QUANTIZED[name]
    if longest is not None and dense.get_seq_length() > longest:
        return f"not at more than {longest} tokens"
    try:
        if module is not None:
            importlib.import_module(module)
        cache = QuantizedCache(backend, model.config, **settings)
        for index, layer in enumerate(dense.layers):
            cache.update(layer.keys.clone(), layer.values.clone(), index)
        read_tokens(model, token, cache)
    except Exception as error:  # whatever a rival raises, the others are still measured
        return first_line(error)
    return cache


def first_line(error: Exception) -> str:
    """What an error says, shortly."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _requantizing_step(model: Any, token: torch.Tensor, cache: Any) -> None:
    """A step in which the quantized cache quantizes all its tokens anew, as every 128th does."""
    usual = [layer.residual_length for layer in cache.layers]
    for layer in cache.layers:
        layer.residual_length = 1
    try:
        read_tokens(model, token, cache)
    finally:
        for layer, length in zip(cache.layers, usual, strict=True):
            layer.residual_length = length


def _llama_runs(names: Sequence[str], prompt: list[int], threads: int, absent: dict[str, str]) -> Iterator[Run]:
    """llama.cpp on the same weights as they are in the file, quantized, and its own empty context."""
    path = find_smollm2()
    if importlib.util.find_spec("llama_cpp") is None or path is None:
        reason = "llama-cpp-python is missing" if path is not None else "the model's file is missing"
        absent.update(dict.fromkeys(names, reason))
        return
    llama = importlib.import_module("llama_cpp")

    def load(cache_type: str, context: int) -> Any:
        kind = getattr(llama, cache_type)
        return llama.Llama(
            *(str(path),), n_ctx=context, n_batch=512, n_threads=threads, n_threads_batch=threads,
            type_k=kind, type_v=kind, flash_attn=True, verbose=False,
        )  # fmt: skip

    room = -(-(len(prompt) + 64) // 256) * 256
    for name, cache_type, held in [(LLAMA_FLOOR, "GGML_TYPE_F16", []), *((n, LLAMA[n], prompt) for n in names)]:
        instance = load(cache_type, room if held else 256)
        if held:
            instance.eval(held)

        def rewind(instance: Any = instance, length: int = len(held)) -> None:
            # eval drops what lies beyond n_tokens before it reads on.
            instance.n_tokens = length

        def step(instance: Any = instance) -> None:
            instance.eval(prompt[:1])

        yield Run(name, "llama.cpp", step, rewind, lambda: None)


def tensor_bytes(x: Any, seen: set[int] | None = None) -> int:
    """Bytes of all tensors that an object holds, however deep; memory that several share counts once."""
    seen = set() if seen is None else seen
    if id(x) in seen:
        return 0
    seen.add(id(x))
    if isinstance(x, torch.Tensor):
        if hasattr(x, "__tensor_flatten__"):
            return sum(tensor_bytes(getattr(x, name), seen) for name in x.__tensor_flatten__()[0])
        storage = x.untyped_storage()
        if storage.data_ptr() in seen:
            return 0
        seen.add(storage.data_ptr())
        return storage.nbytes()
    if isinstance(x, dict):
        return sum(tensor_bytes(value, seen) for value in x.values())
    if isinstance(x, (list, tuple)):
        return sum(tensor_bytes(value, seen) for value in x)
    return tensor_bytes(vars(x), seen) if hasattr(x, "__dict__") and not callable(x) else 0
