"""The page about the claims: complete, self-contained, and every picture drawn from its claim's series."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import matplotlib
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from kvsketch.charts import STYLE
from kvsketch.tests.fake_claims import load
from kvsketch.tests.html_page import assert_self_contained
from kvsketch.validation.claim import VERDICTS, Outcome, Setting
from kvsketch.validation.pictures import PICTURES
from kvsketch.validation.report import MARKS, render_report, summarise
from kvsketch.validation.runner import FAILS, NOT_RUN, Result, run_claim

SETTING = {"full": False, "seed": 3, "engine": "reference", "jobs": 2, "seconds": 61.4}
COSINES = [-1.0, -0.5, 0.0, 0.5, 1.0]
SERIES: dict[str, dict[str, Any]] = {
    "variance": {"cosine": COSINES, "title": "m = d = 64"}
    | {f"{how} gaussian": [0.02, 0.03, 0.04, 0.03, 0.02] for how in ("measured", "predicted")}
    | {f"{how} orthogonal": [0.001, 0.01, 0.02, 0.01, 0.001] for how in ("measured", "predicted")},
    "tail": {"m": [20, 80, 200], "measured": [0.3, 0.02, 0.0], "published": [0.5, 0.02, 1e-5]}
    | {"proved": [1.0, 0.2, 0.01], "exact": [0.3, 0.03, 1e-3]},
    "scores": {"n": [16, 256, 1024], "measured": [0.1, 0.2, 0.3], "proved": [0.5, 0.6, 0.9]}
    | {"r": [1, 2, 4], "measured over r": [0.1, 1.0, 9.0], "proved over r": [0.5, 4.0, 60.0]},
    "kivi_axes": {"labels": ["keys, %", "attention, %", "values, %", "value output, %"]}
    | {"per token": [13.7, 47, 3, 3.55], "per channel": [4.55, 9.6, 3.5, 49.9]},
}  # fmt: skip


def drawable() -> list[Result]:
    base = run_claim(load("holds"), Setting())
    return [replace(base, name=name, outcome=Outcome(base.outcome.checks, [], s)) for name, s in SERIES.items()]


def test_page_shows_every_claim_and_check() -> None:
    results = [run_claim(load(name), Setting()) for name in ("holds", "fails", "is_empty", "raises", "lacks")]
    html = render_report(results, SETTING, {"numpy": "9.9"})
    page = assert_self_contained(html)
    text = " ".join(page.text.split())
    for result in results:
        assert result.name in page.ids
        assert text.count(result.title) == 2
        assert MARKS[result.verdict][1] in text
    for part in (
        "a & b",
        "Lemma <1>",
        "It is so.",
        "a mean <of> means",
        "1.9 %",
        "a mean that is off",
        "≤ 5",
        "numpy 9.9",
    ):
        assert part in text
    assert "Not checked here: the moon is not installed." in text
    assert "Nothing was compared" in text
    assert "ArithmeticError: no sums with seed 0" in text
    assert "5 claims: 1 holds with a corrected constant, 3 FAILED, 1 not run." in text
    assert "seed 3, quick samples, 2 at a time, 61 s" in text


def test_every_verdict_has_words() -> None:
    assert set(MARKS) == {*VERDICTS, FAILS, NOT_RUN}
    results = [replace(run_claim(load("holds"), Setting()), verdict=verdict) for verdict in MARKS]
    assert summarise(results).count("1 ") == len(MARKS)


def test_pictures_that_cannot_be_drawn_are_named() -> None:
    claims = {picture.claim for picture in PICTURES}
    assert claims == set(SERIES)
    html = render_report([run_claim(load("holds"), Setting())], SETTING, {})
    assert html.count("Left out: ") == len(PICTURES)
    assert html.count("was not asked for") == len(PICTURES)
    lacking = [replace(run_claim(load("lacks"), Setting()), name=name) for name in sorted(claims)]
    html = render_report(lacking, SETTING, {})
    assert html.count("did not run: the moon is not installed") == len(PICTURES)
    raised = [replace(run_claim(load("raises"), Setting()), name=name) for name in sorted(claims)]
    assert render_report(raised, SETTING, {}).count("gave nothing to draw") == len(PICTURES)


def test_pictures_are_on_the_page_in_its_colours() -> None:
    html = render_report(drawable(), SETTING, {})
    page = assert_self_contained(html)
    assert page.seen.count("svg") == len(PICTURES)
    assert "Left out" not in html
    assert "m = d = 64" in html
    for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        ElementTree.parse(io.StringIO(svg.replace("xlink:href", "href")))
        assert not re.findall(r"#0[1-6]0[1-6]0[1-6]\b", svg)
        assert "var(--accent)" in svg


@pytest.mark.parametrize("picture", PICTURES, ids=[picture.claim for picture in PICTURES])
def test_labels_do_not_touch_one_another(picture: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    draw = Text.draw

    def note(text: Any, renderer: Any) -> None:
        drawn.append(text)
        draw(text, renderer)

    monkeypatch.setattr(Text, "draw", note)
    with matplotlib.rc_context(STYLE):
        figure = picture.draw(SERIES[picture.claim])
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
    boxes = [
        (text, text.get_window_extent(canvas.get_renderer()))
        for text in drawn
        if text.get_text() and text.get_visible()
    ]
    assert len(boxes) > 8
    for i, (text, box) in enumerate(boxes):
        assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1, text
        assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1, text
        for other, other_box in boxes[i + 1 :]:
            assert not box.overlaps(other_box), (text, other)
