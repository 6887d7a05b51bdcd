"""``kvsketch compare`` on a converted model: caches of latents beside others, and what they are compared with."""

from __future__ import annotations

import json
import math
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner

from kvsketch import cli
from kvsketch.adapters import palu
from kvsketch.evaluation import CHUNK, read_tokens, text_windows
from kvsketch.tests.palu_models import plain
from kvsketch.tests.tiny_text_model import save_text_model, tiny_tokenizer

PROMPT, SCORED = 150, 40


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    path = tmp_path_factory.mktemp("folders")
    save_text_model(path / "original")
    model = transformers.AutoModelForCausalLM.from_pretrained(path / "original")
    palu.save_pretrained(palu.convert(model, settings=plain(0.5, latent_bits=3)), path / "converted", tiny_tokenizer())
    save_text_model(path / "other", hidden_size=32)
    (path / "text.txt").write_text(topics["assignment"])
    return {name: path / name for name in ("original", "converted", "other", "text.txt")}


def compare(folders: dict[str, Path], *arguments: object, model: str = "converted", code: int = 0) -> Any:
    fixed = ("compare", "--model", folders[model], "--text", folders["text.txt"], "--threads", 1)
    sizes = ("--prompt-tokens", PROMPT, "--score-tokens", SCORED)
    result = CliRunner().invoke(cli.app, [str(a) for a in (*fixed, *sizes, *arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def rows_of(folders: dict[str, Path], path: Path, *arguments: object) -> tuple[str, dict[str, dict[str, Any]]]:
    files = ("--json", path / "rows.json", "--report", path / "page.html")
    result = compare(folders, "--baseline", *arguments, *files)
    rows = json.loads((path / "rows.json").read_text())
    assert rows[0]["baseline"] in " ".join((path / "page.html").read_text().split())
    return " ".join(result.output.split()), {row["method"]: row for row in rows}


def perplexity(model: Any, cache: Any = None) -> float:
    """Of the tokens that are scored; with `cache` the prompt, and then a few at a time, are read through it."""
    (window,) = text_windows(tiny_tokenizer(), topics["assignment"], prompt_tokens=PROMPT, score_tokens=SCORED)
    with torch.no_grad():
        if cache is None:
            logits = model(window).logits[0, PROMPT:-1]
        else:
            read_tokens(model, window[:, :PROMPT], cache, last_only=True)
            ids = window[:, PROMPT:-1]
            logits = torch.cat([read_tokens(model, given, cache) for given in ids.split(CHUNK, 1)])
    return math.exp(torch.nn.functional.cross_entropy(logits, window[0, PROMPT + 1 :]).item())


def test_with_the_original_all_is_compared_with_its_dense_cache(folders: dict[str, Path], tmp_path: Path) -> None:
    methods = "exact,kivi-2,palu,palu-exact,palu-8"
    output, rows = rows_of(folders, tmp_path, "--methods", methods, "--original", folders["original"])
    assert list(rows) == ["transformers", *methods.split(",")]
    assert f"Quality against the dense cache of {folders['original']}, which was converted" in output
    assert "ok: exact against transformers' DynamicCache" in output
    original = transformers.AutoModelForCausalLM.from_pretrained(folders["original"])
    model = palu.load(folders["converted"])
    dense = perplexity(original)
    assert rows["transformers"]["perplexity"] == pytest.approx(dense, rel=1e-4)
    for name, options in (("palu", {}), ("palu-exact", {"latent_bits": None}), ("palu-8", {"latent_bits": 8})):
        cache = palu.PaluCache.for_model(model, **options)
        expected = perplexity(model, cache)
        assert rows[name]["perplexity"] == pytest.approx(expected, rel=1e-4)
        assert rows[name]["perplexity_ratio"] == pytest.approx(rows[name]["perplexity"] / dense, rel=1e-4)
        assert rows[name]["bits"] == cache.report()["total"]["bits"]
    # Half of the numbers are gone: far from the original, whatever the bits.
    assert rows["palu-exact"]["kl"] > 100 * rows["exact"]["kl"]
    assert rows["palu"]["bits"] < rows["palu-8"]["bits"] < rows["palu-exact"]["bits"]
    assert rows["palu"]["dense_bytes"] == rows["exact"]["dense_bytes"]
    floors = {name: row["floor_ms"] for name, row in rows.items()}
    assert floors["palu"] == floors["palu-exact"] == floors["palu-8"]
    assert floors["transformers"] == floors["exact"] == floors["kivi-2"] != floors["palu"]


def test_without_it_the_converted_model_is_compared_with_itself(folders: dict[str, Path], tmp_path: Path) -> None:
    output, rows = rows_of(folders, tmp_path, "--methods", "exact,palu-exact,palu,kivi-4")
    assert "Quality against the dense cache of the converted model itself" in output
    assert "--original names the model" in output
    model = palu.load(folders["converted"])
    assert rows["transformers"]["perplexity"] == pytest.approx(perplexity(model), rel=1e-4)
    assert rows["palu-exact"]["kl"] < 1e-6
    assert rows["exact"]["kl"] < 1e-6
    assert rows["palu"]["kl"] > 100 * rows["palu-exact"]["kl"]
    assert len({row["floor_ms"] for row in rows.values()}) == 1


@pytest.mark.parametrize(
    ("model", "arguments", "parts"),
    [
        ("original", ("--methods", "palu"), ("--methods palu", "is not converted by Palu")),
        ("original", ("--methods", "exact", "--original", "smollm2"), ("--original", "is not converted by Palu")),
        ("converted", ("--methods", "palu-5"), ("--methods palu-5", "bits must be one of")),
        ("converted", ("--methods", "palu-x"), ("--methods palu-x", "palu-BITS")),
        ("converted", ("--methods", "palu", "--sink-tokens", "4"), ("--sink-tokens 4", "--first-tokens")),
        ("converted", ("--methods", "palu", "--coefficients", "int8"), ("--coefficients int8", "palu")),
        ("converted", ("--methods", "palu", "--original", "OTHER"), ("--original", "are not those of the converted")),
    ],
)
def test_mistakes(model: str, arguments: tuple[str, ...], parts: tuple[str, ...], folders: dict[str, Path]) -> None:
    filled = [argument.replace("OTHER", str(folders["other"])) for argument in arguments]
    (line,) = compare(folders, *filled, model=model, code=2).stderr.splitlines()
    assert line.startswith("error: ")
    for part in parts:
        assert part in line
