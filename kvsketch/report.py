"""A comparison as one self-contained HTML page: tables, three charts and how to read them, no script."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from kvsketch.charts import ROLES, STYLE, WIDTH, draw_inline, render_page
from kvsketch.evaluation import BASELINE, Result

#: Increase in perplexity up to which the summary calls a method's quality that of the dense cache.
SMALL_LOSS = 0.01
#: Height of a line of a chart's text and width of a longest label, in points.
LINE_POINTS, LABEL_POINTS = 13, 170


def render_report(results: Sequence[Result], setting: dict[str, Any], check: tuple[bool, str] | None = None) -> str:
    """The page for `results`, which were measured with `setting`: model, text, dtype, threads and token counts.

    `check` is what :func:`kvsketch.evaluation.check_exact` said.
    """
    with matplotlib.rc_context(STYLE):
        charts = {
            "quality": _draw_quality([r for r in results if r.method not in ("exact", BASELINE)]),
            "speed": _draw_speed(results),
            "memory": _draw_memory(results),
        }
    return render_page(
        Path(__file__).with_name("report.html.j2"),
        results=results,
        setting=setting,
        check=check,
        charts=charts,
        summary=summarise(results),
    )


def summarise(results: Sequence[Result]) -> str:
    """One sentence: the smallest cache whose perplexity is within 1 % of the dense cache's."""
    good = [r for r in results if r.method not in ("exact", BASELINE) and r.perplexity_ratio <= 1 + SMALL_LOSS]
    if not good:
        return f"No compressed cache here keeps perplexity within {SMALL_LOSS:.0%} of the dense cache's."
    best = min(good, key=lambda r: r.cache_bytes)
    return (
        f"{best.method} keeps perplexity within {SMALL_LOSS:.0%} of the dense cache's in {best.bits:.2f} bits a "
        f"number: {best.ratio:.1f} times less memory than a dense 16-bit cache."
    )


def _draw_quality(lossy: Sequence[Result]) -> str:
    """Mean KL against bits a number, both as measured; empty where there is nothing to draw."""
    drawn = [r for r in lossy if r.kl > 0]
    if not drawn:
        return ""
    figure = Figure(figsize=(WIDTH, 4), layout="constrained")
    axes = figure.subplots()
    axes.set_yscale("log")
    axes.scatter([r.bits for r in drawn], [r.kl for r in drawn], s=46, color=ROLES["accent"], zorder=3)
    axes.set_xlim(0, 1.4 * max(r.bits for r in drawn))
    axes.set_ylim(min(r.kl for r in drawn) / 2, 2 * max(r.kl for r in drawn))
    figure.draw_without_rendering()
    points = 72 / figure.dpi
    placed: list[tuple[float, float]] = []
    for r in sorted(drawn, key=lambda r: r.kl):
        # From the lowest point up, a label moves up where it would touch one placed before.
        x, y = points * axes.transData.transform((r.bits, r.kl))
        name = _wrap(r.method)
        height = LINE_POINTS * (name.count("\n") + 1)
        middle = max([y, *(top + height / 2 for left, top in placed if abs(x - left) < LABEL_POINTS)])
        placed.append((x, middle + height / 2))
        axes.annotate(name, (r.bits, r.kl), xytext=(8, middle - y), textcoords="offset points", va="center")
    axes.set_xlabel("bits a number, exact tokens included (less is smaller)")
    axes.set_ylabel("mean KL in nats (lower is closer)")
    axes.tick_params(axis="y", which="both", labelcolor=ROLES["muted"])
    axes.grid(visible=False, which="minor")
    return draw_inline(figure, "quality")


def _draw_speed(results: Sequence[Result]) -> str:
    """A bar a method: the model's own part of a step, then attention; quartiles as a line over its end."""
    figure, axes = _bar_chart(results)
    rows = range(len(results))
    floors = [min(r.floor_ms, r.decode_ms) for r in results]
    axes.barh(rows, floors, height=0.56, color=ROLES["soft"])
    axes.barh(rows, [r.decode_ms - f for r, f in zip(results, floors, strict=True)], left=floors, height=0.56)
    for row, r in enumerate(results):
        axes.plot([r.decode_q1_ms, r.decode_q3_ms], [row, row], color=ROLES["ink"], linewidth=1.4)
        _label(axes, row, max(r.decode_ms, r.decode_q3_ms), f"{r.decode_ms:.1f} ms")
    axes.set_xlabel("milliseconds a step")
    axes.set_xlim(0, 1.18 * max(max(r.decode_ms, r.decode_q3_ms) for r in results))
    return draw_inline(figure, "speed")


def _draw_memory(results: Sequence[Result]) -> str:
    """A bar a method, and lines where the dense caches end."""
    figure, axes = _bar_chart(results)
    axes.barh(range(len(results)), [r.cache_bytes / 1e6 for r in results], height=0.56)
    for row, r in enumerate(results):
        _label(axes, row, r.cache_bytes / 1e6, f"{r.cache_bytes / 1e6:.2f} MB")
    dense = results[0].dense_bytes / 1e6
    axes.axvline(dense, color=ROLES["muted"], linewidth=1.2, linestyle=(0, (4, 3)))
    axes.annotate("dense, 16 bits", (dense, -0.62), xytext=(4, 0), textcoords="offset points", color=ROLES["muted"])
    axes.set_xlabel("MB of cache")
    axes.set_xlim(0, 1.18 * max(dense, *(r.cache_bytes / 1e6 for r in results)))
    return draw_inline(figure, "memory")


def _bar_chart(results: Sequence[Result]) -> tuple[Figure, Any]:
    names = [_wrap(r.method) for r in results]
    height = max(0.42, LINE_POINTS / 72 * (1 + max(name.count("\n") + 1 for name in names)))
    figure = Figure(figsize=(WIDTH, 0.9 + height * len(results)), layout="constrained")
    axes = figure.subplots()
    axes.set_prop_cycle(color=[ROLES["accent"]])
    axes.set_yticks(range(len(results)), names)
    axes.set_ylim(len(results) - 0.45, -0.85)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False, axis="y")
    return figure, axes


def _wrap(name: str) -> str:
    """`name`, on several lines after its commas and semicolons when it spells a long method out."""
    lines = [""]
    for part in re.split(r"(?<=[,;])", name):
        if len(lines[-1]) + len(part) > 26 and lines[-1]:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _label(axes: Any, row: int, x: float, text: str) -> None:
    axes.annotate(text, (x, row), xytext=(6, 0), textcoords="offset points", va="center")
