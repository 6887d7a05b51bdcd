"""asv: decode steps. Ratios come from races, run once for all; times of single calls show regressions."""

from __future__ import annotations

from typing import Any

from benchmarks.decode import measure_decode, measure_errors
from benchmarks.machine import set_threads
from benchmarks.rows import Row
from benchmarks.scaling import measure_sweep, sweeps
from benchmarks.subjects import ANCHOR, DATA, SUBJECTS, Shape, attend_stored, make_queries, parse_subject, store

SHAPES = {
    str(shape): shape
    for shape in (Shape(n, d, 8 * gqa) for n in (4096, 32768, 131072) for d in (64, 128) for gqa in (1, 4, 8))
}
NAMES = tuple(subject.name for subject in SUBJECTS)
ROUNDS = 11


class Decode:
    """One race a shape, of all codecs and all rivals."""

    params = (NAMES, tuple(SHAPES))
    param_names = ("subject", "shape")
    timeout = 600

    def setup_cache(self) -> dict[str, dict[str, Row]]:
        return {
            name: {row.name: row for row in measure_decode(shape, SUBJECTS, rounds=ROUNDS)}
            for name, shape in SHAPES.items()
        }

    setup_cache.timeout = 3600  # type: ignore[attr-defined]

    def track_milliseconds(self, rows: Any, subject: str, shape: str) -> float:
        return rows[shape][subject].time.median

    def track_over_best_torch(self, rows: Any, subject: str, shape: str) -> float:
        return rows[shape][subject].ratios["best torch"].median

    def track_over_dense_bf16(self, rows: Any, subject: str, shape: str) -> float:
        return rows[shape][subject].ratios["dense bf16"].median

    def track_over_dense_fp32(self, rows: Any, subject: str, shape: str) -> float:
        return rows[shape][subject].ratios["dense fp32"].median

    def track_over_read_floor(self, rows: Any, subject: str, shape: str) -> float:
        return rows[shape][subject].ratios["read"].median

    def track_bits(self, rows: Any, subject: str, shape: str) -> float:
        return rows[shape][subject].bits

    def track_contended(self, rows: Any, subject: str, shape: str) -> int:
        return int(bool(rows[shape][subject].contended))

    track_milliseconds.unit = "ms"  # type: ignore[attr-defined]
    track_over_best_torch.unit = "times faster"  # type: ignore[attr-defined]
    track_over_dense_bf16.unit = "times faster"  # type: ignore[attr-defined]
    track_over_dense_fp32.unit = "times faster"  # type: ignore[attr-defined]
    track_over_read_floor.unit = "times a plain read"  # type: ignore[attr-defined]
    track_bits.unit = "bits a number"  # type: ignore[attr-defined]


class Attend:
    """One call at a time, by asv's own clock."""

    params = (NAMES, (str(Shape(4096)), str(ANCHOR)))
    param_names = ("subject", "shape")
    timeout = 600

    def setup(self, subject: str, shape: str) -> None:
        set_threads(1)
        self.subject = parse_subject(subject)
        self.q = make_queries(SHAPES[shape])
        self.stored = store(self.subject.method, SHAPES[shape])
        self.time_attend(subject, shape)

    def time_attend(self, subject: str, shape: str) -> None:
        attend_stored(self.q, self.stored, self.subject)


class Errors:
    """Relative L2 error against float64 attention over the decoded cache."""

    params = (NAMES, DATA)
    param_names = ("subject", "data")
    timeout = 600

    def setup_cache(self) -> dict[tuple[str, str], float]:
        return {(entry["name"], entry["data"]): entry["error"] for entry in measure_errors(SUBJECTS)}

    def track_error(self, errors: Any, subject: str, data: str) -> float:
        return errors[subject, data]

    track_error.unit = "relative L2"  # type: ignore[attr-defined]


class Scaling:
    """Exponents of the cost along each axis."""

    params = (tuple(f"{sweep.name} along {sweep.axis}" for sweep in sweeps()),)
    param_names = ("sweep",)
    timeout = 600

    def track_exponent(self, sweep: str) -> float:
        (chosen,) = (s for s in sweeps() if f"{s.name} along {s.axis}" == sweep)
        return measure_sweep(chosen, rounds=5)[1].exponent

    track_exponent.unit = "exponent"  # type: ignore[attr-defined]
