"""Compression methods side by side on a real model: size, quality and speed, as ``kvsketch compare`` reports them.

A window of text is `prompt_tokens` tokens that the model reads exactly, once, with transformers' own ``DynamicCache``;
then `score_tokens` tokens that it is asked to predict one after the other while it reads them (teacher forcing). Each
method starts from the same exact prompt, compressed, and reads the scored tokens through its compressed cache: the
path that generation takes. Everything is compared with what the dense cache of transformers predicts.

A model converted by Palu makes latents while it reads, so its own cache reads the prompt itself, and nothing in it is
encoded before the prompt is read. The dense cache is then the original model's where that is given.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from kvsketch._progress import Progress, no_progress
from kvsketch.measurement import NEIGHBOUR_LIMIT, STEADY_LIMIT, Neighbours, Step, Timing, peak_extra_bytes, time_steps
from kvsketch.methods import LatentMethod, Method

#: Tokens read in one forward while scoring.
CHUNK = 16
#: Decode steps timed a method: one page of 32 tokens, so that every cache encodes a page once meanwhile.
STEPS = 32
WARM_UP = 2
#: Name of the row of transformers' dense cache.
BASELINE = "transformers"
#: Largest relative difference in perplexity, and smallest top-1 agreement, of `exact` and transformers' dense cache.
EXACT_LIMITS = {"float32": (1e-4, 1.0), "float16": (1e-2, 0.9), "bfloat16": (1e-2, 0.9)}


@dataclass(frozen=True)
class Result:
    """One row of a comparison.

    Bits are a number, first tokens and window included, in the live cache of `tokens` tokens. `dense_bytes` is the
    same cache dense in 16 bits, `dense_bytes_model` dense in the model's dtype, `ratio` dense_bytes/cache_bytes. `kl`
    is the mean KL(dense || method) in nats over scored tokens, `top1` how often both name the same likeliest token.
    `decode_ms` is the median time of a one-token step, `floor_ms` of one with an empty context, `attention_ms` the
    difference. `peak_step_mb` is what the cache and one step need at most, in 10^6 bytes, None where that cannot be
    read. `contended` marks times that were taken while something else used the machine.
    """

    method: str
    key_bits: float
    value_bits: float
    bits: float
    cache_bytes: int
    dense_bytes: int
    dense_bytes_model: int
    ratio: float
    perplexity: float
    perplexity_ratio: float
    kl: float
    top1: float
    decode_ms: float
    floor_ms: float
    tokens_per_s: float
    contended: bool
    decode_q1_ms: float
    decode_q3_ms: float
    attention_ms: float
    peak_step_mb: float | None
    tokens: int


def text_windows(
    tokenizer: Any, text: str, *, prompt_tokens: int, score_tokens: int, windows: int = 1, spread: bool = False
) -> list[torch.Tensor]:
    """The first `windows` windows of `text`, one after the other: int64 tensors (1, prompt_tokens + score_tokens + 1).

    With `spread` they are taken from all over the text, at equal distances. The last token is only predicted. A
    tokenizer that opens a text with a token of its own (BOS) opens each window with it, as part of the prompt.
    ValueError when the text is too short.
    """
    body = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    opened = tokenizer("a", verbose=False)["input_ids"]
    plain = tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"]
    opening = opened[: opened.index(plain[0])] if plain else []
    taken = prompt_tokens + score_tokens + 1 - len(opening)
    if len(body) < windows * taken:
        raise ValueError(
            f"the text has {len(body)} tokens, but windows={windows} of prompt_tokens={prompt_tokens} and "
            f"score_tokens={score_tokens} take {windows * taken}; give a longer text or ask for less"
        )
    apart = len(body) // windows if spread else taken
    return [torch.tensor([[*opening, *body[w * apart : w * apart + taken]]]) for w in range(windows)]


def compare_methods(
    model: Any,
    windows: Sequence[torch.Tensor],
    methods: Sequence[Method | LatentMethod],
    *,
    prompt_tokens: int,
    original: Any = None,
    baseline: bool = False,
    coefficients: str = "int16",
    progress: Progress = no_progress,
) -> list[Result]:
    """Measure each of `methods` with `model` on `windows` of tokens (1, n), n > prompt_tokens + 1.

    With `baseline` the first row is transformers' dense cache, named ``"transformers"``. `progress` is called with a
    description, the work done and, where known, the work to do. Decode steps are timed after the last window, at the
    length of a whole window. `coefficients` is what attention may round to. The model is left with the attention that
    it came with.

    With `original`, the model that `model` was converted from, the dense cache and the methods that do not hold latents
    are those of `original`.
    """
    scores = {name: _Score() for name in (BASELINE, *(m.name for m in methods))}
    models = [model if original is None else original, model]
    own_attention = [each.config._attn_implementation for each in models]
    try:
        with torch.inference_mode():
            for number, window in enumerate(windows, 1):
                title = f"window {number}/{len(windows)}"
                runs = _start_runs(
                    *(models, own_attention, window[:, :prompt_tokens], methods, coefficients, title, progress)
                )
                _score_window(window[:, prompt_tokens:], runs, scores, title, progress)
            measured = runs if baseline else runs[1:]
            steps = _measure_steps(measured, windows[-1], models, own_attention, progress)
    finally:
        for each, attention in zip(models, own_attention, strict=True):
            each.set_attn_implementation(attention)
    exact_perplexity = scores[BASELINE].perplexity
    return [_result(run, scores[run.name], exact_perplexity, steps) for run in measured]


def warm_up(model: Any, method: Method | LatentMethod, coefficients: str = "int16") -> None:
    """Fill and read a cache that is thrown away, so that the kernels of `method` are compiled afterwards.

    The model keeps its attention. Raises ValueError, at the price of a few short forwards, when the method does not fit
    the model.
    """
    from kvsketch.adapters.palu import PaluCache
    from kvsketch.adapters.transformers_cache import CompressedCache

    config = model.config.get_text_config()
    layers = config.num_hidden_layers
    exact = 0
    if isinstance(method, Method):
        settings = [method.for_layer(layer, layers) for layer in range(layers)]
        exact = max(s.sink_tokens + s.residual_length for s in settings)
    tokens = exact + 128
    ids = torch.arange(tokens)[None] % config.vocab_size
    own_attention = model.config._attn_implementation
    try:
        cache: CompressedCache
        if isinstance(method, LatentMethod):
            cache = PaluCache.for_model(model, **method.options)
        else:
            cache = CompressedCache.for_model(model, method, coefficients=coefficients)
        with torch.inference_mode():
            for chunk in (ids[:, :-3], ids[:, -3:-1], ids[:, -1:]):
                read_tokens(model, chunk, cache, last_only=True)
    finally:
        model.set_attn_implementation(own_attention)


def check_exact(results: Sequence[Result], dtype: str) -> tuple[bool, str] | None:
    """Whether the row ``exact`` is what transformers' dense cache gives, and a sentence on it; None without a row."""
    row = next((r for r in results if r.method == "exact"), None)
    if row is None:
        return None
    difference = abs(row.perplexity_ratio - 1)
    most, least = EXACT_LIMITS[dtype]
    passed = difference <= most and row.top1 >= least
    return passed, (
        f"exact against transformers' DynamicCache: perplexity differs by {difference:.1e} (at most {most:.0e}), "
        f"top-1 agreement {row.top1:.4f} (at least {least:g})"
    )


@dataclass
class _Run:
    """A cache that is being compared, its model, and the attention that this needs."""

    name: str
    cache: Any
    model: Any
    attention: str

    def prepare(self) -> None:
        """Give the model its attention."""
        self.model.set_attn_implementation(self.attention)

    def sizes(self) -> dict[str, Any]:
        """Bits and bytes of the cache as it is now."""
        if self.name != BASELINE:
            return self.cache.report()["total"]
        tensors = [t for layer in self.cache.layers for t in (layer.keys, layer.values)]
        nbytes = sum(t.nbytes for t in tensors)
        bits = 8.0 * self.model.dtype.itemsize
        return {"tokens": self.cache.get_seq_length(), "key_bits": bits, "value_bits": bits, "bits": bits} | {
            "nbytes": nbytes,
            "allocated_nbytes": nbytes,
            "dense_nbytes_16": 2 * sum(t.numel() for t in tensors),
            "dense_nbytes_model": nbytes,
        }


@dataclass
class _Score:
    """Sums over scored tokens."""

    tokens: int = 0
    surprise: float = 0.0
    kl: float = 0.0
    agreed: int = 0

    def add(self, log_p: torch.Tensor, exact_log_p: torch.Tensor, targets: torch.Tensor) -> None:
        """Count predictions `log_p` (s, vocabulary) against `exact_log_p` and the true tokens `targets` (s,)."""
        self.tokens += len(targets)
        self.surprise -= float(log_p.gather(1, targets[:, None]).sum())
        self.kl += float((exact_log_p.exp() * (exact_log_p - log_p)).nan_to_num(0.0).sum())
        self.agreed += int((log_p.argmax(1) == exact_log_p.argmax(1)).sum())

    @property
    def perplexity(self) -> float:
        return math.exp(self.surprise / self.tokens)


def read_tokens(model: Any, ids: torch.Tensor, cache: Any, *, last_only: bool = False) -> torch.Tensor:
    """Logits (s, vocabulary) of `model` for `ids` (1, s) after what `cache` holds; of the last token only if asked."""
    arguments: dict[str, Any] = {"use_cache": True, cache_argument(model): cache}
    if last_only and "logits_to_keep" in inspect.signature(model.forward).parameters:
        arguments["logits_to_keep"] = 1
    logits = model(ids.to(model.device), **arguments).logits[0]
    return logits[-1:] if last_only else logits


def cache_argument(model: Any) -> str:
    """What the model's ``forward`` calls its cache: ``"cache"`` since transformers 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _start_runs(
    models: Sequence[Any],
    own_attention: Sequence[str],
    prompt: torch.Tensor,
    methods: Sequence[Method | LatentMethod],
    coefficients: str,
    title: str,
    progress: Progress,
) -> list[_Run]:
    """Prefill `prompt` once, exactly; compress the dense cache by each method. The dense run comes first.

    `models` are the one that is dense and the one of latents, which reads the prompt for each cache of latents.
    """
    from kvsketch.adapters.palu import PaluCache
    from kvsketch.adapters.transformers_cache import CompressedCache

    progress(f"{title}: reading a prompt of {prompt.shape[1]} tokens", 0, None)
    model, latent_model = models
    dense = DynamicCache(config=model.config)
    runs = [_Run(BASELINE, dense, model, own_attention[0])]
    runs[0].prepare()
    read_tokens(model, prompt, dense, last_only=True)
    for number, method in enumerate(methods):
        progress(f"{title}: compressing by {method.name}", number, len(methods))
        if isinstance(method, LatentMethod):
            latents = PaluCache.for_model(latent_model, **method.options)
            runs.append(_Run(method.name, latents, latent_model, own_attention[1]))
            runs[-1].prepare()
            read_tokens(latent_model, prompt, latents, last_only=True)
        else:
            cache = CompressedCache.from_dense(model, dense, method, coefficients=coefficients)
            runs.append(_Run(method.name, cache, model, model.config._attn_implementation))
    return runs


def _score_window(
    rest: torch.Tensor, runs: Sequence[_Run], scores: dict[str, _Score], title: str, progress: Progress
) -> None:
    """Read `rest` (1, s + 1) but its last token through every run's cache, and score what each predicts."""
    given, targets = rest[:, :-1], rest[0, 1:].to(runs[0].model.device)
    for start in range(0, len(targets), CHUNK):
        progress(f"{title}: scoring", start, len(targets))
        chunk = slice(start, start + CHUNK)
        exact_log_p: torch.Tensor | None = None
        for run in runs:
            run.prepare()
            log_p = read_tokens(run.model, given[:, chunk], run.cache).double().log_softmax(-1)
            exact_log_p = log_p if exact_log_p is None else exact_log_p
            scores[run.name].add(log_p, exact_log_p, targets[chunk])


@dataclass(frozen=True)
class _Steps:
    """What was measured of decode steps: by run, the quartiles of its time and of its floor, sizes and peak memory."""

    times: dict[str, Timing]
    floors: dict[str, Timing]
    sizes: dict[str, dict[str, Any]]
    peak_mb: dict[str, float | None]
    contended: bool


def _measure_steps(
    runs: Sequence[_Run], window: torch.Tensor, models: Sequence[Any], own_attention: Sequence[str], progress: Progress
) -> _Steps:
    """Sizes of the runs' caches, then one-token steps through them, in turns, and through empty dense caches."""
    token = window[:, :1]

    def step(run: _Run) -> Step:
        return Step(run.name, run.prepare, lambda: read_tokens(run.model, token, run.cache))

    def floor(model: Any, attention: str) -> Step:
        return Step(
            f"floor of model {id(model)}",
            lambda: model.set_attn_implementation(attention),
            lambda: read_tokens(model, token, DynamicCache(config=model.config)),
        )

    sizes = {run.name: run.sizes() for run in runs}
    used = {id(run.model) for run in runs}
    empty = {id(m): floor(m, a) for m, a in zip(models, own_attention, strict=True) if id(m) in used}
    neighbours = Neighbours()
    times = time_steps([*empty.values(), *map(step, runs)], rounds=STEPS, warm_up=WARM_UP, progress=progress)
    floors = {run.name: times[empty[id(run.model)].name] for run in runs}
    spread = max(timing.spread for timing in floors.values())
    contended = neighbours.busiest_share() > NEIGHBOUR_LIMIT or spread > STEADY_LIMIT

    peak_mb: dict[str, float | None] = {}
    for number, run in enumerate(runs):
        progress("Measuring the memory of a step", number, len(runs))
        measured = step(run)
        measured.prepare()
        extra = [peak_extra_bytes(measured.run) for _ in range(2)]
        peaks = [e + run.sizes()["allocated_nbytes"] for e in extra if e is not None]
        peak_mb[run.name] = max(peaks) / 1e6 if peaks else None
    return _Steps(times, floors, sizes, peak_mb, contended)


def _result(run: _Run, score: _Score, exact_perplexity: float, steps: _Steps) -> Result:
    sizes, time, floor = steps.sizes[run.name], steps.times[run.name], steps.floors[run.name]
    return Result(
        method=run.name,
        key_bits=sizes["key_bits"],
        value_bits=sizes["value_bits"],
        bits=sizes["bits"],
        cache_bytes=sizes["nbytes"],
        dense_bytes=sizes["dense_nbytes_16"],
        dense_bytes_model=sizes["dense_nbytes_model"],
        ratio=sizes["dense_nbytes_16"] / sizes["nbytes"],
        perplexity=score.perplexity,
        perplexity_ratio=score.perplexity / exact_perplexity,
        kl=score.kl / score.tokens,
        top1=score.agreed / score.tokens,
        decode_ms=time.median,
        floor_ms=floor.median,
        tokens_per_s=1e3 / time.median,
        contended=steps.contended,
        decode_q1_ms=time.first_quartile,
        decode_q3_ms=time.third_quartile,
        attention_ms=time.median - floor.median,
        peak_step_mb=steps.peak_mb[run.name],
        tokens=sizes["tokens"],
    )
