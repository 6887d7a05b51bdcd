"""Generation with a real model: one-token steps on compressed, dense and rivals' caches, in one race."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.model_runs import (
    LLAMA,
    LLAMA_FLOOR,
    QUANTIZED,
    REQUANTIZE_STEPS,
    Run,
    Runs,
    first_line,
    make_runs,
)
from benchmarks.names import DYNAMIC_CACHE, EMPTY
from benchmarks.rows import Row, row_of
from benchmarks.subjects import Shape
from benchmarks.timing import Entrant, Race, run_race
from kvsketch._progress import Progress, no_progress
from kvsketch.cache import Cache
from kvsketch.codecs import GroupedInts
from kvsketch.evaluation import warm_up
from kvsketch.measurement import peak_extra_bytes
from kvsketch.methods import get_method

RIVALS = (*QUANTIZED, *LLAMA)


def measure_generate(
    model: Any,
    prompt: torch.Tensor,
    methods: Sequence[str],
    *,
    rounds: int,
    threads: int,
    rivals: Sequence[str] = RIVALS,
    progress: Progress = no_progress,
) -> tuple[list[Row], dict[str, str]]:
    """Rows of a step after `prompt` (1, n) on each cache, and the rivals that are absent with the reason.

    Ratios, within rounds: ``"dense"``, how many times faster than with transformers' dense cache; ``"dense attention"``
    the same of what is left of both without a step at an empty context; ``"floor"``, that step's time over this one's;
    and the name of each quantized cache. `extra` has tokens a second, milliseconds of attention, peak megabytes of the
    cache and a step, and for a quantized cache the milliseconds of a step that quantizes all anew and of the mean step.
    """
    config = model.config.get_text_config()
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = Shape(prompt.shape[1], head, config.num_attention_heads, config.num_key_value_heads)
    with torch.inference_mode():
        for name in methods:
            progress(f"Preparing {name}", 0, None)
            warm_up(model, get_method(name))
        progress(f"Reading a prompt of {shape.n} tokens", 0, None)
        made = make_runs(model, prompt, methods, rivals=rivals, threads=threads)
        entrants = [Entrant(run.name, run.step, run.prepare) for run in made.runs]
        race = run_race(
            entrants, rounds=rounds, warm_up=2, flush=False, steady=EMPTY, progress=progress, title="Timing steps"
        )
        rows = [_row(run, race, made, shape, threads) for run in made.runs]
    return rows, made.absent


def _row(run: Run, race: Race, made: Runs, shape: Shape, threads: int) -> Row:
    time = race.timing(run.name)
    names = [r.name for r in made.runs]
    floor = LLAMA_FLOOR if run.kind == "llama.cpp" else EMPTY
    attention = [1e3 * (x - y) for x, y in zip(race.seconds[run.name], race.seconds[floor], strict=False)]
    extra: dict[str, float | None] = {
        "tokens_per_s": 1e3 / time.median,
        "attention_ms": statistics.median(attention),
        "peak_mb": _peak_megabytes(run),
    }
    if run.slow_step is not None:
        slow = _slow_milliseconds(run, made.absent)
        extra["requantizing_ms"] = slow
        extra["mean_ms"] = slow and (time.median * (REQUANTIZE_STEPS - 1) + slow) / REQUANTIZE_STEPS
    ratios = {}
    if run.kind in ("kvsketch", "transformers"):
        ratios["floor"] = race.ratio(EMPTY, run.name)
        for rival in (DYNAMIC_CACHE, *QUANTIZED):
            if rival in names and rival != run.name:
                ratios["dense" if rival == DYNAMIC_CACHE else rival] = race.ratio(rival, run.name)
        share = race.share_ratio(DYNAMIC_CACHE, run.name, EMPTY)
        if share is not None and run.name != DYNAMIC_CACHE:
            ratios["dense attention"] = share
    elif run.name != floor and run.kind == "llama.cpp":
        ratios["floor"] = race.ratio(floor, run.name)
    return row_of(race, run.kind, run.name, shape, threads, nbytes=run.held_bytes() or 0, ratios=ratios, extra=extra)


def _slow_milliseconds(run: Run, absent: dict[str, str]) -> float | None:
    """Time of one slow step; None where the rival cannot do it, with the reason noted."""
    entrant = Entrant(run.name, run.slow_step or run.step, run.prepare)
    try:
        return run_race([entrant], rounds=1, warm_up=0, flush=False).timing(run.name).median
    except Exception as error:  # whatever a rival raises, the others are still shown
        absent[f"{run.name}, a step that quantizes anew"] = first_line(error)
        return None


def _peak_megabytes(run: Run) -> float | None:
    """10^6 bytes that the cache and one step need at most; None where the system or the rival does not tell."""
    held = run.held_bytes()
    if held is None or run.kind == "floor":
        return None
    run.prepare()
    extra = [peak_extra_bytes(run.step) for _ in range(2)]
    return None if None in extra else (held + max(e for e in extra if e is not None)) / 1e6


def reserved_share(*, rows: int = 8, tokens: int = 8192, heads: int = 3, d: int = 64) -> float:
    """Bytes of the buffers of a full kivi-2 cache with room reserved, over those of a dense 16-bit one."""
    cache = Cache(GroupedInts(bits=2), GroupedInts(bits=2))
    cache.reserve(tokens)
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, rows, heads, tokens, d), dtype=np.float32)
    cache.append(k, v)
    cache.flush()
    return cache.allocated_nbytes / cache.report()["dense_nbytes_16"]
