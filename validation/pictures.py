"""The report's pictures, drawn from the series of claims."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from kvsketch.charts import ROLES, STYLE, WIDTH, draw_inline
from kvsketch.validation.runner import Result

#: How a series is drawn: what was measured as points, predictions as lines.
POINTS = {"linestyle": "none", "marker": "o", "markersize": 5.5, "zorder": 3}
LINES = {"linestyle": "-", "linewidth": 1.6}
DASHES = {"linestyle": (0, (5, 3)), "linewidth": 1.6}
DOTS = {"linestyle": (0, (1, 2)), "linewidth": 1.8}
#: A logarithmic axis that spans less than this factor has labels between powers of ten too.
FEW_DECADES = 50


@dataclass(frozen=True)
class Picture:
    """A picture of one claim's series: its heading, what it shows, and the function that draws it."""

    claim: str
    heading: str
    caption: str
    draw: Callable[[dict[str, Any]], Figure]


def draw_pictures(results: Sequence[Result]) -> tuple[list[dict[str, str]], list[str]]:
    """Heading, caption and SVG of each picture, and sentences about those that cannot be drawn."""
    by_name = {result.name: result for result in results}
    drawn, left_out = [], []
    for picture in PICTURES:
        result = by_name.get(picture.claim)
        if result is None or not result.outcome.series:
            reason = "was not asked for" if result is None else result.missing and f"did not run: {result.missing}"
            left_out.append(f"{picture.heading}: the claim {picture.claim!r} {reason or 'gave nothing to draw'}.")
            continue
        with matplotlib.rc_context(STYLE):
            svg = draw_inline(picture.draw(result.outcome.series), picture.claim)
        title = result.outcome.series.get("title", "")
        drawn.append({"heading": picture.heading, "caption": picture.caption, "title": title, "svg": svg})
    return drawn, left_out


def draw_variance(series: dict[str, Any]) -> Figure:
    """Measured and predicted variance over the cosine, for both kinds of rows."""
    figure, (axes,) = _line_charts(1)
    for kind, role in (("gaussian", "second"), ("orthogonal", "accent")):
        axes.plot(series["cosine"], series[f"predicted {kind}"], color=ROLES[role], label=f"predicted, {kind}", **LINES)
        axes.plot(series["cosine"], series[f"measured {kind}"], color=ROLES[role], label=f"measured, {kind}", **POINTS)
    axes.set_xlabel("cosine between query and key")
    axes.set_ylabel("variance of the estimate")
    axes.set_ylim(0, None)
    return _with_legend(figure, axes)


def draw_tail(series: dict[str, Any]) -> Figure:
    """Probability of a large error against the number of rows, on a logarithmic axis."""
    figure, (axes,) = _line_charts(1)
    for name, role, style in (
        ("published", "second", DASHES),
        ("proved", "accent", LINES),
        ("exact", "muted", DOTS),
        ("measured", "ink", POINTS),
    ):
        # No failure seen has no place on a logarithmic axis.
        chances = np.asarray(series[name], dtype=np.float64)
        axes.plot(series["m"], np.where(chances > 0, chances, np.nan), color=ROLES[role], label=name, **style)
    axes.set_xlabel("rows of the sketch, m")
    axes.set_ylabel("probability of a large error")
    _make_logarithmic(axes)
    return _with_legend(figure, axes)


def draw_scores(series: dict[str, Any]) -> Figure:
    """Largest relative error of a score against the number of tokens, and against the norms."""
    figure, both = _line_charts(2)
    for axes, name, label in zip(both, ("n", "r"), ("tokens, n", "norm of queries and keys, r"), strict=True):
        suffix = "" if name == "n" else " over r"
        axes.plot(series[name], series[f"proved{suffix}"], color=ROLES["accent"], label="proved bound", **LINES)
        axes.plot(series[name], series[f"measured{suffix}"], color=ROLES["ink"], label="measured", **POINTS)
        axes.set_xlabel(label)
        _make_logarithmic(axes)
    both[0].set_xscale("log")
    both[0].set_xticks(series["n"], [str(n) for n in series["n"]])
    both[0].tick_params(axis="x", which="minor", length=0)
    both[0].xaxis.set_minor_formatter(NullFormatter())
    both[0].set_ylabel("relative error of a score")
    return _with_legend(figure, both[0])


def draw_axes(series: dict[str, Any]) -> Figure:
    """Two bars for each kind of error, of groups within a token and within a channel; each pair has its own scale."""
    labels = series["labels"]
    figure = Figure(figsize=(WIDTH, 0.5 + 0.95 * len(labels)), layout="constrained")
    for row, (axes, label) in enumerate(zip(np.atleast_1d(figure.subplots(len(labels))), labels, strict=True)):
        values = [series[name][row] for name in ("per token", "per channel")]
        axes.barh([0, 1], values, height=0.62, color=[ROLES["second"], ROLES["accent"]])
        for bar, value in enumerate(values):
            axes.annotate(f"{value:.3g}", (value, bar), xytext=(6, 0), textcoords="offset points", va="center")
        axes.set_yticks([0, 1], ["per token", "per channel"])
        axes.set_ylim(1.5, -0.5)
        axes.set_xlim(0, 1.12 * max(values))
        axes.set_title(label, loc="left", fontsize=10)
        axes.tick_params(axis="both", length=0, labelbottom=False)
        axes.spines["bottom"].set_visible(False)
        axes.grid(visible=False)
    return figure


def _line_charts(count: int) -> tuple[Figure, list[Any]]:
    figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    axes = list(np.atleast_1d(figure.subplots(1, count)))
    for part in axes:
        part.tick_params(axis="y", which="both", labelcolor=ROLES["muted"])
    return figure, axes


def _make_logarithmic(axes: Any) -> None:
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high < FEW_DECADES * low:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(_plain_number))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(visible=False, which="minor")


def _plain_number(value: float, position: int) -> str:
    return f"{value:g}"


def _with_legend(figure: Figure, axes: Any) -> Figure:
    """`figure` with a legend below it, where it covers nothing."""
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


PICTURES = (
    Picture(
        "variance",
        "How much an estimate scatters",
        "Each point is the scatter (variance) seen in the experiment, each line what the formula says; they "
        "should meet. Lower is better. A sketch of orthogonal rows scatters less than one of independent Gaussian "
        "rows of the same size.",
        draw_variance,
    ),
    Picture(
        "tail",
        "How often an estimate is far off",
        "A larger sketch (to the right) fails more rarely (further down; each step of the axis is ten times rarer). A "
        "promise is kept where the points stay below its line. Points above the dashed line are cases in which the "
        "published promise is broken; the line proved here stays above all of them.",
        draw_tail,
    ),
    Picture(
        "scores",
        "How far attention scores are off",
        "Left: with more tokens; right: with longer queries and keys. The points must stay below the line. Both "
        "vertical axes are logarithmic.",
        draw_scores,
    ),
    Picture(
        "kivi_axes",
        "Along which axis to round keys and values",
        "Errors after rounding to few bits, on keys and values of a real language model; shorter is better, and each "
        "pair of bars has a scale of its own. Keys want groups per channel. Values want groups per token: not for "
        "their own sake, but for what attention makes of them (value output).",
        draw_axes,
    ),
)
