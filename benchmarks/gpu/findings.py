"""What a part finds, written to a file at every addition, so that a part that is ended half-way leaves what it had."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.rows import Row

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"


class NotRun(Exception):
    """Why a part, or what it was about to do, cannot be done on this machine."""


def said(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


class Table(NamedTuple):
    """A table as it is printed."""

    columns: Sequence[str]
    lines: Sequence[Sequence[str]]


class Mark(NamedTuple):
    """A figure beside what it should be at least."""

    what: str
    measured: float
    target: float

    @property
    def met(self) -> bool:
        return self.measured >= self.target


@dataclass
class Findings:
    """Facts, tables by title, rows with all their figures, targets, and what went wrong or is not there.

    `failures` make the part fail; a missed target does not. `absent` says why something was not measured. `outcome` is
    empty until the part has come to its end.
    """

    file: Path
    facts: dict[str, str] = field(default_factory=dict)
    tables: dict[str, Table] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    outcome: str = ""
    reason: str = ""

    def save(self) -> None:
        """Write all of it, in place of what was there."""
        contents = {name: value for name, value in asdict(self).items() if name not in ("file", "rows")}
        contents["tables"] = {title: table._asdict() for title, table in self.tables.items()}
        contents["marks"] = [{**mark._asdict(), "met": mark.met} for mark in self.marks]
        contents["rows"] = [row.to_json() for row in self.rows]
        beside = self.file.with_suffix(".new")
        beside.write_text(json.dumps(contents))
        os.replace(beside, self.file)

    def table(self, title: str, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
        """Add a table, in place of one of the same title."""
        self.tables[title] = Table(columns, lines)
        self.save()

    def end(self, outcome: str, reason: str = "") -> None:
        """Say how the part ended."""
        self.outcome, self.reason = outcome, reason
        self.save()
