"""The command ``kernels``: what CUDA kernels use on each architecture, and the bytes that they read, without a GPU."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.table import CONSOLE, print_notes, print_table
from kvsketch.console import fail, one_of, progress_bar, writable

if TYPE_CHECKING:
    from benchmarks.kernels_traffic import Traffic
    from benchmarks.kernels_usage import Usage
    from kvsketch.cuda_raw.instances import Instance

COLUMNS = ("sm", "registers", "stack", "threads", "shared", "warps", "of all", "limit")


def kernels(
    architectures: Annotated[str, typer.Option(help="Compute capabilities, with commas. [default: all]")] = "",
    files: Annotated[str, typer.Option(help="Sources, with commas, as in bitpack.cu. [default: all]")] = "",
    all_lines: Annotated[bool, typer.Option("--all", help="A line for each architecture, not for the worst.")] = False,
    traffic: Annotated[bool, typer.Option(help="Run attention's kernels and count the bytes that they read.")] = True,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
) -> None:
    """Compile all CUDA kernels for real architectures, without a GPU. Exits with 1 when one spills or fails."""
    writable("--json", json_file)
    from benchmarks.kernels_usage import compile_all
    from benchmarks.machine import core_count
    from kvsketch.cuda_raw.instances import ARCHITECTURES, INSTANCES
    from kvsketch.tests.cuda_host import nvrtc, toolchain

    if reason := nvrtc.missing():
        fail(reason)
    numbers = _chosen("--architectures", architectures, [str(n) for n in ARCHITECTURES])
    sources = _chosen("--files", files, sorted({instance.file for instance in INSTANCES}))
    instances = [instance for instance in INSTANCES if instance.file in sources]
    with progress_bar() as progress:
        usages = compile_all(instances, [int(n) for n in numbers], workers=core_count(), progress=progress)
    _print_usages(usages, all_lines)
    counted: list[Traffic] = []
    if traffic:
        if reason := toolchain.missing():
            print_notes(f"not counted: the bytes that kernels read. {reason}.")
        else:
            counted = _count_traffic(sources)
    failures = [usage for usage in usages if usage.failure]
    print_notes(_count_line(instances, usages, len(numbers)))
    if json_file is not None:
        contents = {"command": "kernels", "compiler": nvrtc.version(), "kernels": [usage.to_json() for usage in usages]}
        contents |= {"traffic": [entry.to_json() for entry in counted]}
        json_file.write_text(json.dumps(contents, indent=1) + "\n")
        print_notes(f"Wrote {json_file}")
    for usage in failures:
        what = f"{usage.instance.file} {usage.instance.expression} on {usage.architecture}"
        typer.echo(f"{what} {usage.failure}", err=True)
    if failures:
        raise typer.Exit(1)


def _chosen(option: str, text: str, known: Sequence[str]) -> list[str]:
    """Those of `known` that `text` names, with commas between; all of them where it names none."""
    wanted = [part.strip() for part in text.split(",")] if text else list(known)
    for name in wanted:
        one_of(known, option, name)
    return [name for name in known if name in wanted]


def _print_title(title: str) -> None:
    CONSOLE.print(f"\n### {title}\n\n`python -m benchmarks {shlex.join(sys.argv[1:])}`\n", markup=False)


def _print_usages(usages: Sequence[Usage], all_lines: bool) -> None:
    """A table for each source: a line for each instance, where it has the fewest warps, or for each architecture."""
    _print_title("What kernels use, and how many of a multiprocessor's warps that leaves room for")
    for file, of in groupby(usages, key=lambda usage: usage.instance.file):
        lines = []
        for _, group in groupby(of, key=lambda usage: usage.instance.expression):
            compiled = [usage for usage in group if usage.compiled is not None]
            lines += [_cells(usage) for usage in (compiled if all_lines else sorted(compiled, key=_room)[:1])]
        print_table((file, *COLUMNS), lines)
    where = "" if all_lines else "A line is for the architecture on which a kernel has the smallest share of all warps."
    print_notes(
        "stack: bytes of a thread for what calls take by address; shared: bytes of a block, its own arrays + what it "
        f"is launched with; warps: those that a multiprocessor holds, and what share that is. {where}"
    )


def _room(usage: Usage) -> tuple[float, int]:
    """What is small where an architecture has little room for a kernel."""
    assert usage.compiled is not None
    return usage.occupancy.share, -usage.compiled.registers


def _cells(usage: Usage) -> tuple[str, ...]:
    assert usage.compiled is not None
    block, held = usage.instance.blocks[usage.architecture], usage.occupancy
    return (
        usage.instance.expression,
        f"{usage.architecture}",
        f"{usage.compiled.registers}",
        f"{usage.compiled.stack_bytes}",
        f"{block.threads}",
        f"{usage.compiled.static_shared_bytes} + {block.shared}",
        f"{held.warps}",
        f"{held.share:.0%}",
        held.limit,
    )


def _count_traffic(sources: Sequence[str]) -> list[Traffic]:
    """Measure and print the bytes that attention's kernels read, of those in `sources`."""
    from benchmarks.kernels_traffic import measure_all

    with progress_bar() as progress:
        found = measure_all(sources, progress)
    if found:
        _print_title("Bytes that attention moves for each token of a key/value head, or of a slice of latents")
        columns = ("cache", "level", "queries", "record", "read", "over record", "asked", "other", "written")
        print_table(columns, [_traffic_cells(entry) for entry in found])
        print_notes(
            "record: what a token's numbers take, so the least that is read; read: of records, by blocks, a byte once "
            "for each block; asked: by threads, a byte as often as one asks; other: queries, matrices and counts, by "
            "blocks. Counted in checked runs on the CPU, of small caches, where what a block reads once weighs more."
        )
    return found


def _traffic_cells(entry: Traffic) -> tuple[str, ...]:
    of = entry.bytes
    numbers = (of.record, of.read, of.read / of.record, of.asked, of.other, of.written)
    return (entry.subject, entry.level, f"{entry.queries}", *(f"{number:.2f}" for number in numbers))


def _count_line(instances: Sequence[Instance], usages: Sequence[Usage], architectures: int) -> str:
    kernel_count = len({(instance.file, instance.kernel) for instance in instances})
    failures = sum(usage.failure is not None for usage in usages)
    return (
        f"({kernel_count}, {len(instances)}) kernels and instantiations compiled for {architectures} architectures: "
        f"{len(usages)} in all, of which {failures} spill registers, do not compile or do not fit."
    )
