"""The parts' findings on the terminal, in a Markdown file and in one JSON file."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from benchmarks.gpu.findings import NOT_RUN, PASSED
from benchmarks.table import CONSOLE, number_cell, print_notes, print_table

DRY_RUN = "dry run: times are not a GPU's"
#: What a run is called in both files.
TITLE = "kvsketch on a CUDA GPU"


def print_title(card: str, dry_run: bool) -> None:
    """What is measured, and on what."""
    CONSOLE.print()
    CONSOLE.print(Text(f"# {TITLE}", style="bold"))
    CONSOLE.print()
    CONSOLE.print(Text(f"{card}. `python -m benchmarks {shlex.join(sys.argv[1:])}`"))
    if dry_run:
        CONSOLE.print()
        CONSOLE.print(Text(f"**{DRY_RUN}**, but the host's clock's; shapes are tiny, kernels run on the CPU."))


def print_part(part: dict[str, Any], dry_run: bool) -> None:
    """A part's tables, and what it has to say of them."""
    CONSOLE.print()
    CONSOLE.print(Text(f"## {part['title']}: {outcome_text(part)}{f' ({DRY_RUN})' if dry_run else ''}", style="bold"))
    CONSOLE.print()
    for title, table in part["tables"].items():
        CONSOLE.print(Text(f"### {title}", style="bold"))
        CONSOLE.print()
        print_table(table["columns"], table["lines"])
    print_sentences(part["notes"])
    print_sentences(f"failed: {failure}" for failure in part["failures"])
    print_sentences(f"not measured: {name} ({reason})" for name, reason in part["absent"].items())
    print_sentences(
        f"MISSED: {mark['what']}: {mark['measured']:.2f}, target {mark['target']:g}"
        for mark in part["marks"]
        if not mark["met"]
    )


def print_sentences(sentences: Iterator[str] | Sequence[str]) -> None:
    """Each as an item of a list, which Markdown keeps apart."""
    lines = [f"- {sentence}" for sentence in sentences]
    if lines:
        print_notes(*lines)
        CONSOLE.print()


def print_summary(parts: Sequence[dict[str, Any]], seconds: float) -> None:
    """A line a part."""
    CONSOLE.print()
    CONSOLE.print(Text("## Summary", style="bold"))
    CONSOLE.print()
    lines = [
        (part["title"], part["outcome"], number_cell(part["seconds"], 0), targets_text(part), part["reason"])
        for part in parts
    ]
    print_table(("part", "outcome", "seconds", "targets met", "reason"), lines)
    counts = [f"{sum(part['outcome'] == outcome for part in parts)} {outcome}" for outcome in _outcomes(parts)]
    print_notes(f"{', '.join(counts)}; {seconds:.0f} s in all.")


def _outcomes(parts: Sequence[dict[str, Any]]) -> list[str]:
    return sorted({part["outcome"] for part in parts}, key=lambda outcome: (outcome != PASSED, outcome == NOT_RUN))


def outcome_text(part: dict[str, Any]) -> str:
    """The outcome with its reason, if it has one."""
    return f"{part['outcome']}, {part['reason']}" if part["reason"] else str(part["outcome"])


def targets_text(part: dict[str, Any]) -> str:
    """How many targets were met; empty where there are none."""
    marks = part["marks"]
    return f"{sum(mark['met'] for mark in marks)} of {len(marks)}" if marks else ""


def write_reports(
    parts: Sequence[dict[str, Any]], heading: dict[str, Any], json_file: Path | None, markdown_file: Path | None
) -> None:
    """Write the files that were asked for; the Markdown one is what was printed since the console began to record."""
    if json_file is not None:
        json_file.write_text(json.dumps({"command": "gpu", **heading, "parts": list(parts)}, indent=1) + "\n")
    if markdown_file is not None:
        lines = (line.rstrip() for line in CONSOLE.export_text(clear=False).splitlines())
        markdown_file.write_text("\n".join(lines).strip() + "\n")
