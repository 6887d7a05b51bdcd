"""Rows of the tables: what was measured, how long it took, and its ratios to others of the same race."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from benchmarks.subjects import Shape
from benchmarks.timing import Race, Ratio
from kvsketch.measurement import Timing


@dataclass(frozen=True)
class Row:
    """One line: `name` of `kind` at `shape`, its time and its ratios to rivals, each a median with quartiles.

    A ratio ``"best torch"`` is the rival's time over this one's, within rounds: how many times faster this is.
    ``"read"`` and ``"memcpy"`` are this one's time over, or speed relative to, a plain read or copy of the same bytes.
    """

    kind: str
    name: str
    shape: Shape
    threads: int
    time: Timing
    nbytes: int = 0
    bits: float | None = None
    ratios: dict[str, Ratio] = field(default_factory=dict)
    rivals: dict[str, str] = field(default_factory=dict)
    contended: str = ""
    extra: dict[str, float | None] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The row as JSON has it."""
        return {
            **{
                name: getattr(self, name)
                for name in ("kind", "name", "threads", "nbytes", "bits", "rivals", "contended", "extra")
            },
            "shape": self.shape._asdict(),
            "time": self.time._asdict(),
            "ratios": {name: ratio._asdict() for name, ratio in self.ratios.items()},
        }

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> Row:
        """The row that :meth:`to_json` gave."""
        return cls(
            **{
                **entry,
                "shape": Shape(**entry["shape"]),
                "time": Timing(**entry["time"]),
                "ratios": {name: Ratio(**ratio) for name, ratio in entry["ratios"].items()},
            }
        )


def row_of(
    race: Race, kind: str, name: str, shape: Shape, threads: int, *, entrant: str | None = None, **entries: Any
) -> Row:
    """The row of one entrant of a race, by default the one of its own name."""
    return Row(kind, name, shape, threads, race.timing(entrant or name), contended=race.contended, **entries)
