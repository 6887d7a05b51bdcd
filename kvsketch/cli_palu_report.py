"""A conversion by Palu as one self-contained HTML page: a picture of the ranks, sizes and perplexity."""

from __future__ import annotations

import io
import re
from html import escape
from typing import Any

import matplotlib
from matplotlib.figure import Figure

KEYS, VALUES = "#3b6fb6", "#c9772b"

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Palu: {model}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1b1f24; }}
table {{ border-collapse: collapse; }}
td {{ padding: .25rem 1.5rem .25rem 0; border-bottom: 1px solid #d5dae1; }}
td + td {{ text-align: right; font-variant-numeric: tabular-nums; }}
svg {{ width: 100%; height: auto; }}
</style>
</head>
<body>
<h1>{model}, converted by Palu</h1>
<p>{recipe}</p>
<table>{rows}</table>
<h2>Share of the numbers kept, by layer</h2>
{picture}
</body>
</html>
"""


def render_palu_report(record: dict[str, Any]) -> str:
    """The page for `record`, what ``kvsketch palu --json`` writes."""
    settings, cache = record["settings"], record["cache"]
    rows = [("numbers kept", f"{record['kept']:.4f}")]
    for what, key in (("attention weights", "attention_weight_nbytes"), ("all weights", "weight_nbytes")):
        before, after = (record[key][when] / 1e6 for when in ("before", "after"))
        rows.append((f"{what}, before and after", f"{before:.1f} MB, {after:.1f} MB"))
    rows.append(
        (
            f"cache of {cache['tokens']} tokens, all-in; dense in 16 bits",
            f"{cache['nbytes'] / 1e6:.2f} MB ({cache['bits']:.2f} bits a number); "
            f"{cache['dense_nbytes_16'] / 1e6:.2f} MB",
        )
    )
    if record["evaluation"] is not None:
        evaluation = record["evaluation"]
        perplexity = evaluation["perplexity"]
        rows.append(
            (
                f"perplexity on {evaluation['text']}: dense, converted",
                f"{perplexity['dense']:.3f}, {perplexity['converted']:.3f} (x{evaluation['ratio']:.4f})",
            )
        )
    recipe = (
        f"{settings['factors']} factors, {settings['granularity']} heads, {settings['ranks']} ranks in blocks of "
        f"{settings['block']}, first tokens exact: {settings['first_tokens']}, calibrated on "
        f"{record['calibration']['text'] or 'nothing'}."
    )
    return _PAGE.format(
        model=escape(record["model"]),
        recipe=escape(recipe),
        rows="".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in rows),
        picture=_draw_ranks(record["layers"]),
    )


def _draw_ranks(layers: list[dict[str, Any]]) -> str:
    """Two bars a layer: the share of its keys' and of its values' numbers that latents keep."""
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "palu", "font.family": "sans-serif"}):
        figure = Figure(figsize=(9.5, 3.4), layout="constrained")
        axes = figure.subplots()
        for shift, side, colour in ((-0.2, "key", KEYS), (0.2, "value", VALUES)):
            axes.bar(
                [layer["layer"] + shift for layer in layers],
                [sum(layer[f"{side}_ranks"]) / layer["width"] for layer in layers],
                width=0.38,
                color=colour,
                label=f"{side}s",
            )
        axes.set_ylim(0, 1.05)
        axes.set_xlabel("layer")
        axes.set_ylabel("share kept")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, ncols=2, loc="upper left", bbox_to_anchor=(0, 1.14))
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = file.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    return svg.replace("<svg", '<svg role="img" aria-label="Ranks of keys and values by layer"', 1)
