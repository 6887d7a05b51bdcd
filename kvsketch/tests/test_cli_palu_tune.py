"""``kvsketch palu-tune`` on a tiny model: what it writes and prints, one clear line a mistake, nothing half-written."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner

pytest.importorskip("peft", reason="peft is not installed: pip install 'kvsketch[tune]'")

from kvsketch import cli
from kvsketch.adapters import palu, palu_saving, palu_tuning
from kvsketch.evaluation import text_windows
from kvsketch.tests.palu_models import plain
from kvsketch.tests.tiny_text_model import save_text_model, tiny_tokenizer

FIRST, SECOND = "assignment", "class"
STEPS, WINDOW = 10, 64


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model, conversions of it with exact and with quantized latents, a text, and another one."""
    path = tmp_path_factory.mktemp("places")
    save_text_model(path / "original")
    for name, bits in (("exact", None), ("quantized", 2)):
        model = transformers.AutoModelForCausalLM.from_pretrained(path / "original")
        palu.save_pretrained(palu.convert(model, settings=plain(0.5, latent_bits=bits)), path / name, tiny_tokenizer())
    (path / "text.txt").write_text(topics[FIRST])
    (path / "other.txt").write_text(topics[SECOND])
    return {"root": path} | {n: path / n for n in ("original", "exact", "quantized", "text.txt", "other.txt")}


def run(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(cli.app, ["palu-tune", "--threads", "1", *(str(a) for a in arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def tuned(places: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, dict[str, Any]]:
    """Output, folder and record of one run with everything."""
    path = tmp_path_factory.mktemp("tuned")
    result = run(
        *(places["quantized"], path / "out", "--text", places["text.txt"], "--evaluate", places["other.txt"]),
        *("--steps", STEPS, "--window", WINDOW, "--rank", 4, "--learning-rate", 0.01, "--windows", 1),
        *("--loss", "distillation", "--original", places["original"], "--json", path / "record.json"),
    )
    return result.output, path / "out", json.loads((path / "record.json").read_text())


def test_record_tells_the_losses_and_perplexities_before_and_after(
    tuned: tuple[str, Path, dict[str, Any]], places: dict[str, Path]
) -> None:
    output, out, record = tuned
    assert len(record["losses"]) == STEPS
    assert record["loss"] == {"first": record["losses"][0], "last": record["losses"][-1], "steps": 1}
    (window,) = text_windows(tiny_tokenizer(), topics[SECOND], prompt_tokens=256, score_tokens=767)
    models = {
        "original": transformers.AutoModelForCausalLM.from_pretrained(places["original"]),
        "converted": palu.load(places["quantized"]),
        "tuned": palu.load(out),
    }
    perplexity = record["evaluation"]["perplexity"]
    assert list(perplexity) == list(models)
    for name, model in models.items():
        with torch.no_grad():
            logits = model(window).logits[0, 256:-1]
        expected = math.exp(torch.nn.functional.cross_entropy(logits, window[0, 257:]).item())
        assert perplexity[name] == pytest.approx(expected, rel=1e-4)
        assert f"{perplexity[name]:.3f}" in output
    assert len(set(perplexity.values())) == 3
    cached = record["evaluation"]["cached"]
    assert list(cached) == ["converted", "tuned"]
    for name, through in cached.items():
        assert through["perplexity"] != perplexity[name]
        assert f"{through['perplexity']:.3f}" in output
    assert record["evaluation"]["ratio"] == perplexity["tuned"] / perplexity["converted"]
    assert f"{abs(1 - record['evaluation']['ratio']):.2%}" in output


def test_the_tuned_folder_says_how_and_generates(tuned: tuple[str, Path, dict[str, Any]]) -> None:
    out = tuned[1]
    settings = tuned[2]["settings"]
    assert palu.load(out).palu.tuning == settings
    assert settings == {"steps": STEPS, "window": WINDOW, "rank": 4, "learning_rate": 0.01, "seed": 0} | {
        "loss": "distillation"
    }
    arguments = ["generate", "a = b", "--raw", "--model", str(out), "--method", "palu", "--max-new-tokens", "4"]
    result = CliRunner().invoke(cli.app, [*arguments, "--threads", "1"])
    assert result.exit_code == 0, result.output
    assert "palu-0.5-2bit cache of" in result.output


def test_one_text_for_both_is_split(places: dict[str, Path], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(topics[name] for name in (FIRST, SECOND)))
    arguments = ("--steps", 2, "--window", WINDOW, "--windows", 1, "--json", tmp_path / "x.json")
    output = run(places["exact"], tmp_path / "out", "--text", text, "--evaluate", text, *arguments).output
    record = json.loads((tmp_path / "x.json").read_text())
    assert record["text"].startswith("the first 60% of")
    assert record["evaluation"]["text"].startswith("what follows the first 60%")
    assert record["evaluation"]["cached"] is None
    assert list(record["evaluation"]["perplexity"]) == ["converted", "tuned"]
    assert "over converted" in output


@pytest.mark.parametrize(("tuned", "sentence"), [(9.8, "by 2.00%"), (10.0, "No gain"), (10.2, "+2.00%")])
@pytest.mark.parametrize("original", [None, 9.0, 9.9])
def test_no_gain_is_called_so_and_one_below_the_original_too(
    tuned: float, sentence: str, original: float | None
) -> None:
    from kvsketch.cli_palu_tune import _verdict

    perplexity = {"converted": 10.0, "tuned": tuned} | ({} if original is None else {"original": original})
    assert sentence in _verdict(perplexity)
    assert ("No gain" in _verdict(perplexity)) == (tuned >= 10)
    assert ("below the original" in _verdict(perplexity)) == (original is not None and tuned < original)


MISTAKES: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (("--steps", "0"), ("--steps", "0")),
    (("--rank", "0"), ("--rank", "0")),
    (("--loss", "both"), ("--loss", "'both'", "distillation")),
    (("--loss", "distillation"), ("--loss distillation", "--original")),
    (("--loss", "distillation", "--original", "exact"), ("--original", "itself converted")),
    (("--loss", "distillation", "--original", "HERE/none"), ("--original", "HERE/none")),
    (("--learning-rate", "0"), ("--learning-rate", "above 0", "0.0")),
    (("--window", "1"), ("--window", "1")),
    (("--window", "90000"), ("--text", "longer text")),
    (("--text", "HERE/none.txt"), ("--text", "no such file")),
    (("--evaluate", "HERE/none.txt"), ("--evaluate", "no such file")),
    (("--evaluate", "text.txt", "--windows", "900"), ("--evaluate", "longer text")),
    (("--windows", "0"), ("--windows", "at least 1")),
    (("--threads", "0"), ("--threads", "at least 1")),
    (("--json", "HERE/none/x.json"), ("--json", "create it")),
]


@pytest.mark.parametrize(("arguments", "parts"), MISTAKES, ids=[" ".join(a) for a, _ in MISTAKES])
def test_a_mistake_gets_one_clear_line_and_writes_nothing(
    arguments: tuple[str, ...], parts: tuple[str, ...], places: dict[str, Path], tmp_path: Path
) -> None:
    def fill(part: str) -> str:
        return str(places.get(part, part)).replace("HERE", str(tmp_path))

    result = run(
        *(places["exact"], tmp_path / "out", "--text", places["text.txt"], "--steps", 2, "--window", WINDOW),
        *map(fill, arguments),
        code=2,
    )
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    for part in parts:
        assert part.replace("HERE", str(tmp_path)) in line
    assert list(tmp_path.iterdir()) == []


def test_folders_are_checked_first(places: dict[str, Path], tmp_path: Path) -> None:
    text = ("--text", places["text.txt"])
    (line,) = run(places["exact"], tmp_path, *text, code=2).stderr.splitlines()
    assert f"OUT: {tmp_path} exists already" in line
    (line,) = run(places["original"], tmp_path / "out", *text, code=2).stderr.splitlines()
    assert f"CONVERTED: {places['original']} is no folder of a converted model" in line


def test_a_missing_peft_names_the_extra_that_brings_it(
    places: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "kvsketch.adapters.palu_tuning")
    monkeypatch.setitem(sys.modules, "peft", None)
    (line,) = run(places["exact"], tmp_path / "out", "--text", places["text.txt"], code=2).stderr.splitlines()
    assert line == "error: palu-tune: needs the package peft; run: pip install 'kvsketch[cli,hf,tune]'"


@pytest.mark.parametrize("where", [(palu_tuning, "_train"), (palu_saving.os, "rename")])
def test_an_interrupted_run_leaves_nothing(
    where: tuple[Any, str], places: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(*where, interrupt)
    arguments = [places["exact"], tmp_path / "out", "--text", places["text.txt"], "--steps", 2, "--window", WINDOW]
    result = CliRunner().invoke(cli.app, ["palu-tune", *map(str, arguments), "--threads", "1"])
    assert result.exit_code != 0
    assert list(tmp_path.iterdir()) == []
