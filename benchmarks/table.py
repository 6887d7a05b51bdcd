"""Tables as text that can be pasted into a README, with the processor, the tier and the command that made them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.rows import Row
from benchmarks.timing import Ratio

#: Wide enough for the widest table: its lines are not folded.
WIDTH = 500
CONSOLE = Console(highlight=False, width=WIDTH, soft_wrap=True)


def print_heading(title: str, machine: dict[str, str]) -> None:
    """What was measured, on what, and how to measure it again."""
    CONSOLE.print()
    CONSOLE.print(Text(f"### {title}", style="bold"))
    CONSOLE.print()
    where = f"{machine['processor']}; tier {machine['tier']}; cores: {machine['cores']}; {machine['versions']}"
    CONSOLE.print(Text(f"{where}. `python -m benchmarks {shlex.join(sys.argv[1:])}`"))
    CONSOLE.print()


def print_table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """A Markdown table; the first column and reasons are to the left, all else to the right."""
    table = Table(box=box.MARKDOWN)
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 or name == "reason" else "right", no_wrap=True)
    for line in lines:
        table.add_row(*map(Text, line))
    with CONSOLE.capture() as captured:
        CONSOLE.print(table)
    for printed in captured.get().strip().splitlines():
        CONSOLE.print(Text(printed))
    CONSOLE.print()


def print_notes(*notes: str) -> None:
    """Sentences under a table."""
    for note in filter(None, notes):
        CONSOLE.print(Text(note, style="dim"))


def milliseconds_cell(row: Row) -> str:
    """Median and quartiles in milliseconds; a star when something else may have disturbed them."""
    digits = 3 if row.time.median < 1 else 2 if row.time.median < 100 else 1
    low, median, high = (f"{x:.{digits}f}" for x in row.time)
    return f"{median} ({low} - {high}){'*' if row.contended else ''}"


def ratio_cell(ratio: Ratio | None) -> str:
    """Median and quartiles of a ratio."""
    return "" if ratio is None else f"{ratio.median:.2f} ({ratio.first_quartile:.2f} - {ratio.third_quartile:.2f})"


def number_cell(x: float | None, digits: int = 2) -> str:
    return "" if x is None else f"{x:.{digits}f}"


def shape_cells(row: Row) -> tuple[str, str, str]:
    """Tokens, head size, query and key/value heads."""
    return f"{row.shape.n}", f"{row.shape.d}", f"{row.shape.hq}/{row.shape.h}"


def print_rows(
    rows: Sequence[Row], ratios: dict[str, str], extra: dict[str, Callable[[Row], str]] | None = None
) -> None:
    """A line a row: its shape, name, bits and time, then the ratios and others asked for, by their columns' names."""
    others = extra or {}
    columns = ("what", "n", "d", "heads", "threads", "bits", "ms (quartiles)", *ratios, *others)
    print_table(
        columns,
        [
            (
                *(row.name, *shape_cells(row), f"{row.threads}", number_cell(row.bits), milliseconds_cell(row)),
                *(ratio_cell(row.ratios.get(name)) for name in ratios.values()),
                *(cell(row) for cell in others.values()),
            )
            for row in rows
        ],
    )
    print_notes(*contention_notes(rows))


def contention_notes(rows: Sequence[Row]) -> list[str]:
    """A sentence for each reason why times are not to be trusted."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.contended and str(row.shape) not in reasons.setdefault(row.contended, []):
            reasons[row.contended].append(str(row.shape))
    return [f"* CONTENDED at {'; '.join(shapes)}: {reason}." for reason, shapes in reasons.items()]


def rate_cell(row: Row) -> str:
    """10^9 bytes of the row's array a second, at the median time."""
    return f"{row.nbytes / row.time.median / 1e6:.1f}" if row.nbytes else ""


def extra_cell(name: str, digits: int = 1) -> Callable[[Row], str]:
    """A cell that shows one of a row's other numbers."""

    def cell(row: Row) -> str:
        return number_cell(row.extra.get(name), digits)

    return cell


def document(command: str, machine: dict[str, str], **contents: Any) -> dict[str, Any]:
    """What ``--json`` writes: the command, the machine, and rows and other contents."""
    rows: list[Row] = contents.pop("rows", [])
    return {"command": command, "machine": machine, "rows": [row.to_json() for row in rows], **contents}
