"""The command ``gpu``: all parts, each in a process of its own, then one report of them."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.gpu.card import NoCard, find_card
from benchmarks.gpu.findings import FAILED, NOT_RUN, Findings
from benchmarks.gpu.parts import ALL_SECONDS, PARTS, Part
from benchmarks.gpu.processes import Ended, run_for
from benchmarks.gpu.report import DRY_RUN, print_part, print_summary, print_title, write_reports
from benchmarks.table import CONSOLE, print_notes
from kvsketch.console import fail, waiting, writable

#: A dry run builds kernels for the CPU, which takes a while; nobody waits for it on a rented machine.
DRY_PART_SECONDS, DRY_SECONDS = 900, 3600


def gpu(
    parts: Annotated[str, typer.Option(help=f"Parts to run: {', '.join(part.name for part in PARTS)}.")] = "all",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Tiny shapes on a stand-in for a GPU; times mean nothing.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all findings to this file.")] = None,
    markdown_file: Annotated[Path | None, typer.Option("--markdown", help="Write the tables to this file.")] = None,
) -> None:
    """Check and measure kvsketch on a CUDA GPU, 8 minutes at most. Exits with 1 when a part fails."""
    writable("--json", json_file)
    writable("--markdown", markdown_file)
    chosen = choose_parts(parts)
    card = card_text(dry_run)
    heading = {"dry_run": dry_run, "card": card, "began": datetime.now(UTC).isoformat(timespec="seconds")}
    if dry_run:
        heading["times"] = DRY_RUN
    CONSOLE.record = True
    CONSOLE.export_text(clear=True)
    print_title(card, dry_run)
    started, found = time.monotonic(), []
    deadline = started + (DRY_SECONDS if dry_run else ALL_SECONDS)
    for part in chosen:
        with waiting(part.title):
            found.append(run_part(part, deadline - time.monotonic(), dry_run))
        print_part(found[-1], dry_run)
        write_reports(found, heading, json_file, None)
    print_summary(found, time.monotonic() - started)
    write_reports(found, heading, json_file, markdown_file)
    print_notes(*(f"Wrote {path}" for path in (json_file, markdown_file) if path is not None))
    if any(part["outcome"] == FAILED for part in found):
        raise typer.Exit(1)


def choose_parts(text: str) -> list[Part]:
    """The parts named, in their own order."""
    names = [part.name for part in PARTS] if text == "all" else [name.strip() for name in text.split(",")]
    known = {part.name for part in PARTS}
    if unknown := [name for name in names if name not in known]:
        fail(f"--parts must name some of {', '.join(part.name for part in PARTS)}, got {unknown[0]!r}")
    return [part for part in PARTS if part.name in names]


def card_text(dry_run: bool) -> str:
    """The GPU; without one a dry run has a stand-in, and anything else ends here."""
    try:
        card = find_card()
    except NoCard as reason:
        if dry_run:
            return "No GPU: a stand-in for CuPy"
        fail(f"there is no CUDA GPU here: {reason}; --dry-run needs none")
    return f"{card.name}, driver for CUDA {card.cuda[0]}.{card.cuda[1]}"


def run_part(part: Part, left_seconds: float, dry_run: bool) -> dict[str, Any]:
    """What a part found within its own time and what is left of all parts', whatever became of it."""
    seconds = min(DRY_PART_SECONDS if dry_run else part.seconds, left_seconds)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "findings.json")
        if seconds <= 1:
            findings = Findings(file)
            findings.end(NOT_RUN, f"the {ALL_SECONDS} s for all parts were used up")
            return contents_of(part, file, Ended(0, "", 0.0))
        options: Sequence[str] = ["--dry-run"] if dry_run else []
        command = [sys.executable, "-m", "benchmarks.gpu.run_part", part.name, str(file), *options]
        return contents_of(part, file, run_for(command, seconds, Path(folder, "output")))


def contents_of(part: Part, file: Path, ended: Ended) -> dict[str, Any]:
    """The findings that a part's process left; a process that did not come to its end has failed."""
    if not file.exists():
        Findings(file).save()
    found: dict[str, Any] = json.loads(file.read_text())
    if not found["outcome"]:
        found |= {"outcome": FAILED, "reason": ended.reason or "ended without an outcome"}
    return {"name": part.name, "title": part.title, "seconds": ended.seconds, "output": ended.output, **found}
