"""The command ``shows``: figures of all other commands beside their bars."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.table import print_heading, print_notes, print_table
from kvsketch.console import fail

#: What ``shows`` measures, each in a process of its own.
COMMANDS = ("decode", "encode", "threads", "start", "generate")


def shows(
    files: Annotated[list[Path] | None, typer.Argument(help="Files of --json. Without any, all is measured.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Measure with short runs.")] = False,
) -> None:
    """Print measured figures beside their bars. Exits with 1 when a bar is missed; 'not measured' is no success."""
    from benchmarks.bars import Results, all_bars, judge

    documents: dict[str, dict[str, Any]] = {}
    machines: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        for path in files or measured_files(Path(folder), quick):
            try:
                entry = json.loads(path.read_text())
                machines.add(f"{entry['machine']['processor']}, tier {entry['machine']['tier']}")
                merge(documents, entry)
            except (OSError, ValueError, KeyError, TypeError) as error:
                fail(f"{path}: no file that --json wrote ({type(error).__name__}: {error})")
    if len(machines) != 1:
        fail(f"the files must be of one machine, they are of {len(machines)}: {'; '.join(sorted(machines))}")
    machine = next(iter(documents.values()))["machine"]
    verdicts = [judge(bar, Results(documents)) for bar in all_bars(machine["tier"])]
    print_heading("Figures and their bars", machine)
    print_table(("what", "measured", "bar", "outcome", "reason"), verdicts)
    counts = {outcome: sum(v.outcome == outcome for v in verdicts) for outcome in ("met", "MISSED", "not measured")}
    print_notes(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    if counts["MISSED"]:
        raise typer.Exit(1)


def merge(documents: dict[str, dict[str, Any]], entry: dict[str, Any]) -> None:
    """Add a file's contents; of two files of one command the first that has a row counts."""
    known = documents.setdefault(entry["command"], {"rows": [], "absent": {}})
    for name, contents in entry.items():
        if name == "rows":
            known["rows"] += contents
        elif name == "absent":
            known["absent"] |= contents
        else:
            known.setdefault(name, contents)


def measured_files(folder: Path, quick: bool) -> list[Path]:
    """Run the commands, each in a process of its own; the files of those that ended well."""
    found = []
    for command in COMMANDS:
        path = folder / f"{command}.json"
        arguments = [command, "--json", str(path), *(["--quick"] if quick else [])]
        subprocess.run([sys.executable, "-m", "benchmarks", *arguments], check=False)
        if path.exists():
            found.append(path)
    return found
