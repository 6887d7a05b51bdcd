"""The claims as one self-contained HTML page, the first part of which needs no statistics."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvsketch.charts import render_page
from kvsketch.validation.claim import CORRECTED, HOLDS, MEASURED, REFUTED
from kvsketch.validation.pictures import draw_pictures
from kvsketch.validation.runner import FAILS, NOT_RUN, Result

#: A verdict's mark, its words on the page, the class of its colour, and what it means.
MARKS = {
    HOLDS: ("✓", "Holds", "good", "The statement is true as it stands."),
    CORRECTED: (
        "≈",
        "Holds, corrected",
        "corrected",
        "The statement is true once a published number is replaced by the right one, which is given.",
    ),
    REFUTED: (
        "✗",
        "Refuted",
        "refuted",
        "The statement as published is not true: there are cases in which it fails. What is true instead is given, and "
        "was checked.",
    ),
    MEASURED: ("●", "Measured", "muted", "Nothing is proved here; what was seen is given."),
    FAILS: (
        "!",
        "Fails",
        "bad",
        "What kvsketch itself states did not pass its checks in this run: something is broken, in the statement or in "
        "the software.",
    ),
    NOT_RUN: ("○", "Not run", "muted", "Something that the check needs is not installed here."),
}
#: How each verdict reads in a sentence that counts them; {s} is the s of a single one that holds.
COUNTED = {
    HOLDS: "hold{s} as stated",
    CORRECTED: "hold{s} with a corrected constant",
    REFUTED: "refuted",
    MEASURED: "measured only",
    FAILS: "FAILED",
    NOT_RUN: "not run",
}


def render_report(results: Sequence[Result], setting: dict[str, Any], versions: dict[str, str]) -> str:
    """The page for `results`, which were found with `setting`: full, seed, engine, jobs and seconds."""
    drawn, left_out = draw_pictures(results)
    return render_page(
        Path(__file__).with_name("report.html.j2"),
        results=results,
        setting=setting,
        versions=versions,
        marks=MARKS,
        shown=[verdict for verdict in MARKS if any(r.verdict == verdict for r in results)],
        pictures=drawn,
        left_out=left_out,
        summary=summarise(results),
    )


def summarise(results: Sequence[Result]) -> str:
    """One sentence: how many claims there are of each verdict."""
    found = [r.verdict for r in results]
    counts = ", ".join(
        f"{found.count(verdict)} {words.format(s='s' * (found.count(verdict) == 1))}"
        for verdict, words in COUNTED.items()
        if verdict in found
    )
    return f"{len(results)} claim{'s' if len(results) > 1 else ''}: {counts}."
