"""``kvsketch palu`` on a tiny model: what it writes and prints, one clear line a mistake, nothing half-written."""

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
from kvsketch.adapters import palu, palu_saving
from kvsketch.evaluation import text_windows
from kvsketch.tests.tiny_text_model import save_text_model

TOKENS = 1024


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_text_model(path)
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(topics[name] for name in ("assignment", "class", "operator-summary")))
    return path


def run(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(cli.app, ["palu", *(str(a) for a in arguments), "--threads", "1"])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def converted(folder: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, dict[str, Any]]:
    """Output, folder and record of one conversion."""
    path = tmp_path_factory.mktemp("converted")
    result = run(
        *(folder, path / "out", "--keep", "0.5", "--block", 8, "--rotate", "--latent-bits", 4, "--windows", 1),
        *("--calibration", text, "--tokens", TOKENS, "--evaluate", text, "--calibration-cache", path / "sums"),
        *("--json", path / "record.json", "--report", path / "page.html"),
    )
    return result.output, path, json.loads((path / "record.json").read_text())


def test_record_tells_ranks_sizes_and_perplexity(
    converted: tuple[str, Path, dict[str, Any]], folder: Path, text: Path
) -> None:
    output, path, record = converted
    ranks = [sum(layer[side]) for layer in record["layers"] for side in ("key_ranks", "value_ranks")]
    assert sum(ranks) == 64
    assert record["kept"] == 0.5
    model = palu.load(path / "out")
    held = sum(x.numel() * 4 for layer in model.model.layers for x in layer.self_attn.state_dict().values())
    assert record["attention_weight_nbytes"]["after"] == held
    assert record["attention_weight_nbytes"]["before"] == 2 * 4 * 64 * (64 + 32 + 32 + 64)
    moved = record["weight_nbytes"]["after"] - record["weight_nbytes"]["before"]
    assert moved == held - record["attention_weight_nbytes"]["before"]
    assert record["cache"]["dense_nbytes_16"] == 4096 * 2 * 2 * 64
    assert f"{record['cache']['bits']:.2f} bits a number all-in" in output
    assert f"x{record['evaluation']['ratio']:.4f}" in output
    assert record["evaluation"]["perplexity"]["converted"] != record["evaluation"]["perplexity"]["dense"]
    assert record["calibration"]["fingerprint"] == model.palu.calibration != ""


def test_dense_perplexity_is_that_of_one_forward_over_text_behind_the_calibrated_part(
    converted: tuple[str, Path, dict[str, Any]], folder: Path, text: Path
) -> None:
    content = text.read_text()
    held_out = content[int(0.6 * len(content)) :]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    (window,) = text_windows(tokenizer, held_out, prompt_tokens=256, score_tokens=767)
    with torch.no_grad():
        logits = transformers.AutoModelForCausalLM.from_pretrained(folder)(window).logits[0, 256:-1]
    expected = math.exp(torch.nn.functional.cross_entropy(logits, window[0, 257:]).item())
    assert converted[2]["evaluation"]["perplexity"]["dense"] == pytest.approx(expected, rel=1e-4)
    assert converted[2]["evaluation"]["text"].startswith("what follows the first 60%")


def test_a_second_conversion_takes_the_calibration_from_its_file(
    converted: tuple[str, Path, dict[str, Any]], folder: Path, text: Path, tmp_path: Path
) -> None:
    path = converted[1]
    before = (path / "sums").read_bytes()
    # The first run's calibration read a part of the text: the same part is needed for the same fingerprint.
    part = tmp_path / "part.txt"
    content = text.read_text()
    part.write_text(content[: int(0.6 * len(content))])
    arguments = ("--calibration", part, "--tokens", TOKENS, "--calibration-cache", path / "sums")
    run(folder, tmp_path / "out", *arguments, "--keep", "1.0", "--block", 8, "--json", tmp_path / "x.json")
    assert (path / "sums").read_bytes() == before
    record = json.loads((tmp_path / "x.json").read_text())
    assert record["calibration"]["fingerprint"] == converted[2]["calibration"]["fingerprint"]
    assert record["kept"] == 1
    assert record["evaluation"] is None


def test_page_shows_the_ranks(converted: tuple[str, Path, dict[str, Any]]) -> None:
    html = (converted[1] / "page.html").read_text()
    assert html.count("<svg") == 1
    assert "<script" not in html
    assert f"x{converted[2]['evaluation']['ratio']:.4f}" in html


def test_the_converted_folder_has_its_tokenizer(converted: tuple[str, Path, dict[str, Any]], folder: Path) -> None:
    own, saved = (transformers.AutoTokenizer.from_pretrained(path) for path in (folder, converted[1] / "out"))
    assert saved("a = b")["input_ids"] == own("a = b")["input_ids"]


MISTAKES: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (("--keep", "0"), ("--keep", "above 0 and at most 1", "got 0.0")),
    (("--keep", "1.5"), ("--keep", "above 0 and at most 1", "1.5")),
    (("--keep", "0.01"), ("keep=0.01", "keep at least", "smaller block")),
    (("--granularity", "pairs"), ("--granularity", "'pairs'", "group:N")),
    (("--granularity", "group:3"), ("group:3", "2 key/value heads", "divisor")),
    (("--ranks", "best"), ("--ranks", "'best'", "balanced")),
    (("--factors", "three-sided"), ("--factors", "'three-sided'", "two-sided")),
    (("--first-tokens", "-1"), ("--first-tokens", "-1")),
    (("--latent-bits", "5"), ("--latent-bits", "5", "[1, 2, 3, 4, 8]")),
    (("--latent-group", "32"), ("--latent-group", "latent_bits")),
    (("--tokens", "100"), ("--tokens", "at least 1024", "100")),
    (("--tokens", "1100", "--calibration-window", "600"), ("--tokens", "at least 1200", "1100")),
    (("--calibration-window", "1"), ("--calibration-window", "at least 2")),
    (("--tokens", "900000"), ("--calibration", "900000 tokens", "longer text or fewer tokens")),
    (("--evaluate", "HERE/none.txt"), ("--evaluate", "no such file")),
    (("--evaluate", "SHORT"), ("--evaluate", "longer text")),
    (("--windows", "0"), ("--windows", "at least 1")),
    (("--json", "HERE/none/x.json"), ("--json", "create it")),
    (("--dtype", "int8"), ("--dtype", "int8")),
]


@pytest.mark.parametrize(("arguments", "parts"), MISTAKES, ids=[" ".join(a) for a, _ in MISTAKES])
def test_a_mistake_gets_one_clear_line_and_writes_nothing(
    arguments: tuple[str, ...], parts: tuple[str, ...], folder: Path, text: Path, tmp_path: Path
) -> None:
    (tmp_path / "short.txt").write_text("a = b")
    places = {"HERE": str(tmp_path), "SHORT": str(tmp_path / "short.txt")}
    for name, place in places.items():
        arguments = tuple(argument.replace(name, place) for argument in arguments)
    before = sorted(tmp_path.iterdir())
    result = run(folder, tmp_path / "out", "--calibration", text, "--tokens", TOKENS, *arguments, code=2)
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    for part in parts:
        assert part in line
    assert sorted(tmp_path.iterdir()) == before


def test_an_existing_folder_is_refused_before_any_work(folder: Path, tmp_path: Path) -> None:
    (line,) = run("no such model", tmp_path, code=2).stderr.splitlines()
    assert f"OUT: {tmp_path} exists already" in line


def test_an_interrupted_conversion_leaves_nothing(
    folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(palu_saving.os, "rename", interrupt)
    CliRunner().invoke(
        cli.app, ["palu", str(folder), str(tmp_path / "out"), "--factors", "plain", "--block", "8", "--threads", "1"]
    )
    assert list(tmp_path.iterdir()) == []


def generate(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(cli.app, ["generate", *(str(a) for a in arguments), "--threads", "1"])
    assert result.exit_code == code, result.output
    return result


@pytest.mark.parametrize(("method", "name"), [("palu", "palu-0.5-4bit"), ("palu-8", "palu-0.5-8bit")])
def test_generate_takes_a_converted_folder(method: str, name: str, converted: tuple[str, Path, dict[str, Any]]) -> None:
    out = converted[1] / "out"
    result = generate("a = b", "--raw", "--model", out, "--method", method, "--max-new-tokens", 6)
    answer, closing = result.output.rstrip("\n").rsplit("\n", 1)
    model, tokenizer = palu.load(out), transformers.AutoTokenizer.from_pretrained(out)
    ids = tokenizer("a = b", return_tensors="pt")["input_ids"]
    new = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    # Fewer tokens than a page: nothing is encoded yet, so a dense cache of the same model gives the same.
    assert answer.rstrip("\n") == tokenizer.decode(new, skip_special_tokens=True).rstrip("\n")
    assert f"{name} cache of {ids.shape[1] + 5} tokens" in closing


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--method", "palu-"), ("palu-exact or palu-BITS",)),
        (("--method", "palu-5"), ("--method", "bits must be one of")),
        (("--method", "palu", "--sink-tokens", "4"), ("--sink-tokens 4", "--first-tokens")),
    ],
)
def test_methods_of_latents_that_do_not_exist(
    arguments: tuple[str, ...], parts: tuple[str, ...], converted: tuple[str, Path, dict[str, Any]]
) -> None:
    (line,) = generate("a", "--model", converted[1] / "out", *arguments, code=2).stderr.splitlines()
    for part in parts:
        assert part in line


def test_a_model_that_is_not_converted_has_no_latents(folder: Path) -> None:
    (line,) = generate("a", "--model", folder, "--method", "palu", code=2).stderr.splitlines()
    assert "--method: LlamaForCausalLM is not converted by Palu" in line
