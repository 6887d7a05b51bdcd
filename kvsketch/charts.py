"""What the HTML reports share: one self-contained page in the style of ``page.html.j2``, and charts as inline SVG."""

from __future__ import annotations

import io
import re
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
from matplotlib.figure import Figure

#: Colours of a chart stand for roles; the page's style sheet gives each role a colour, light or dark.
ROLES = {
    "ink": "#010101",
    "muted": "#020202",
    "line": "#030303",
    "accent": "#040404",
    "soft": "#050505",
    "second": "#060606",
}
#: Width of a chart in inches.
WIDTH = 9.5

#: Settings of matplotlib that go with the page.
STYLE = {
    "svg.fonttype": "none",
    "font.size": 10,
    "text.color": ROLES["ink"],
    "axes.labelcolor": ROLES["muted"],
    "axes.edgecolor": ROLES["line"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": ROLES["line"],
    "grid.linewidth": 0.6,
    "xtick.color": ROLES["line"],
    "ytick.color": ROLES["line"],
    "xtick.labelcolor": ROLES["muted"],
    "ytick.labelcolor": ROLES["ink"],
}


def render_page(template: Path, **values: Any) -> str:
    """The page that `template`, which extends ``page.html.j2``, makes of `values`."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template.parent, Path(__file__).parent]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    return environment.get_template(template.name).render(
        version=version("kvsketch"), date=datetime.now(UTC).strftime("%Y-%m-%d"), **values
    )


def draw_inline(figure: Figure, name: str) -> str:
    """`figure` as an SVG element whose colours are the page's and whose text is text."""
    file = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' width="[\d.]+pt" height="[\d.]+pt"| height="[\d.]+pt" width="[\d.]+pt"', "", svg, count=1)
    svg = re.sub(r"font: (\w+ )?([\d.]+px)[^;\"]*", r"font: \1\2 system-ui, sans-serif", svg)
    for role, colour in ROLES.items():
        svg = svg.replace(colour, f"var(--{role})")
    return svg.replace("<svg", '<svg aria-hidden="true"', 1)
