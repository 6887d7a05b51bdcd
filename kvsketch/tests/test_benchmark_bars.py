"""The benchmarks' bars: met, missed or not measured, and never passed by what is absent."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import kvsketch

ROOT = Path(kvsketch.__file__).parents[1]
if not (ROOT / "benchmarks" / "__main__.py").exists():
    pytest.skip("kvsketch is installed without its tree", allow_module_level=True)
sys.path.insert(0, str(ROOT))

from benchmarks import bars  # noqa: E402
from benchmarks.__main__ import app  # noqa: E402
from benchmarks.machine import describe_machine  # noqa: E402
from benchmarks.rows import Row  # noqa: E402
from benchmarks.show import merge  # noqa: E402
from benchmarks.subjects import ANCHOR, DATA, Shape  # noqa: E402
from benchmarks.table import document  # noqa: E402
from benchmarks.timing import Ratio  # noqa: E402
from kvsketch.measurement import Timing  # noqa: E402


def decode_document(ratio: float, machine: dict[str, str]) -> dict[str, Any]:
    ratios = {name: Ratio(ratio, ratio, ratio) for name in ("best torch", "dense bf16")}
    rows = [
        Row("kvsketch", name, ANCHOR, 1, Timing(1.0, 2.0, 3.0), ratios=ratios)
        for name in ("kivi-2", "kivi-2 int8", "kivi-4", "qjl-256")
    ]
    errors = [{"name": "kivi-2", "data": kind, "error": 1e-5} for kind in DATA]
    return document("decode", machine, rows=rows, errors=errors)


def judged(tmp_path: Path, *documents: dict[str, Any], code: int) -> str:
    paths = []
    for number, contents in enumerate(documents):
        paths.append(tmp_path / f"{number}.json")
        paths[-1].write_text(json.dumps(contents))
    result = CliRunner().invoke(app, ["shows", *map(str, paths)])
    assert result.exit_code == code, result.output
    return result.output


def test_bars_that_are_met_or_missed_or_not_measured(tmp_path: Path) -> None:
    machine = describe_machine() | {"tier": "avx512-vnni"}
    output = judged(tmp_path, decode_document(100.0, machine), code=0)
    assert "MISSED" in output.splitlines()[-1]
    assert "0 MISSED" in output
    assert "12 met" in output
    assert "no result of `encode`" in output
    assert output.count("not measured") > 15
    output = judged(tmp_path, decode_document(4.2, machine), code=1)
    assert "3 MISSED" in output
    judged(tmp_path, decode_document(1.0, machine | {"tier": "generic"}), code=0)
    judged(tmp_path, decode_document(0.3, machine | {"tier": "generic"}), code=1)
    worse = decode_document(100.0, machine)
    worse["errors"][0]["error"] = float("nan")
    assert "1 MISSED" in judged(tmp_path, worse, code=1)


def test_files_of_two_machines_or_of_none_are_refused(tmp_path: Path) -> None:
    machine = describe_machine()
    other = document("encode", machine | {"processor": "another"})
    assert "one machine" in judged(tmp_path, decode_document(9.0, machine), other, code=2)
    assert "0.json" in judged(tmp_path, {"rows": []}, code=2)


def test_a_second_thread_counts_only_where_reads_gain(tmp_path: Path) -> None:
    def threads(read: float, own: float) -> bars.Results:
        rows = [
            Row("x", name, ANCHOR, 2, Timing(1, 1, 1), ratios={"one thread": Ratio(x, x, x)})
            for name, x in (("kivi-2", own), ("read of bf16 cache", read))
        ]
        return bars.Results({"threads": document("threads", {}, rows=rows)})

    (bar,) = (b for b in bars.all_bars("avx2") if b.what == "two threads, kivi-2: times faster than one")
    assert bars.judge(bar, threads(1.9, 1.8)).outcome == "met"
    assert bars.judge(bar, threads(1.9, 1.6)).outcome == "MISSED"
    assert bars.judge(bar, threads(1.3, 1.2)).outcome == "not measured"


def test_a_rival_that_is_absent_is_no_bar_passed() -> None:
    quanto = "QuantizedCache quanto, 2 bits"
    shape, three = Shape(8000, 64, 9, 3), Ratio(3.0, 3.0, 3.0)
    rows = [Row("kvsketch", "kivi-2", shape, 2, Timing(1.0, 2.0, 3.0), ratios={"dense": three})]
    without = document("generate", {}, rows=rows, absent={f"{quanto} at 8000 tokens": "No module named 'optimum'"})

    def outcomes(*documents: dict[str, Any]) -> list[tuple[str, str]]:
        merged: dict[str, dict[str, Any]] = {}
        for entry in documents:
            merge(merged, entry)
        verdicts = [bars.judge(bar, bars.Results(merged)) for bar in bars.all_bars("avx2") if "quanto" in bar.what]
        return [(v.outcome, v.reason) for v in verdicts]

    assert outcomes(without) == [("not measured", "No module named 'optimum'")] * 2
    rival = Row("transformers", quanto, shape, 2, Timing(5.0, 6.0, 7.0), extra={"mean_ms": 12.0})
    rows = [Row("kvsketch", "kivi-2", shape, 2, Timing(1.0, 2.0, 3.0), ratios={quanto: three}), rival]
    assert outcomes(without, document("generate", {}, rows=rows)) == [("met", "")] * 2
