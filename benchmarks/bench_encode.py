"""asv: encoding a prompt, and the first use of a kernel."""

from __future__ import annotations

from typing import Any

from benchmarks.encode import CACHES, SIDES, measure_encode
from benchmarks.rows import Row
from benchmarks.start import measure_start
from benchmarks.subjects import ANCHOR

ROUNDS = 7


class Encode:
    """One race of all encoders and of copies."""

    params = ((*SIDES, *(f"cache {method}: append and flush" for method in CACHES)),)
    param_names = ("what",)
    timeout = 600

    def setup_cache(self) -> dict[str, Row]:
        return {row.name: row for row in measure_encode(ANCHOR, rounds=ROUNDS)}

    setup_cache.timeout = 600  # type: ignore[attr-defined]

    def track_milliseconds(self, rows: Any, what: str) -> float:
        return rows[what].time.median

    def track_over_memcpy(self, rows: Any, what: str) -> float:
        return rows[what].ratios["memcpy"].median

    def track_contended(self, rows: Any, what: str) -> int:
        return int(bool(rows[what].contended))

    track_milliseconds.unit = "ms"  # type: ignore[attr-defined]
    track_over_memcpy.unit = "of the speed of a copy"  # type: ignore[attr-defined]


class Start:
    """Seconds of a process that compiles its kernels, and of one that finds them on disk."""

    params = (("kivi-2", "qjl-256"),)
    param_names = ("method",)
    timeout = 600

    def track_compiling(self, method: str) -> float:
        return measure_start((method,), processes=1)[0].first_use

    def track_second_process(self, method: str) -> float:
        return measure_start((method,), processes=2)[1].total

    track_compiling.unit = "s"  # type: ignore[attr-defined]
    track_second_process.unit = "s"  # type: ignore[attr-defined]
