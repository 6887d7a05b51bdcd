"""``kvsketch validate``: what it prints, writes and ends with, and one clear line for every mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvsketch import cli
from kvsketch.tests.fake_claims import load
from kvsketch.tests.html_page import assert_self_contained
from kvsketch.validation import runner
from kvsketch.validation.claim import Setting
from kvsketch.validation.registry import NAMES
from kvsketch.validation.runner import run_claim

FAKES = ("holds", "fails", "is_nan", "is_empty", "raises", "lacks")


def run(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(cli.app, ["validate", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command run the claims of `FAKES`, whatever it was asked for."""

    def run_fakes(names: Any, setting: Setting, **options: Any) -> Any:
        return [run_claim(load(name), setting) for name in FAKES]

    monkeypatch.setattr(runner, "run_claims", run_fakes)


def test_a_claim_that_holds(tmp_path: Path) -> None:
    files = ("--json", tmp_path / "claims.json", "--report", tmp_path / "claims.html")
    output = run("--only", "unbiased", "--jobs", 2, "--seed", 5, *files).output
    for part in (
        "QJL, Lemma 3.2",
        "engine reference, seed 5, quick",
        "The sketched score",
        "bias of every score",
        "1.0e-06",
    ):
        assert part in output
    assert "1 claim: 1 holds with a corrected constant." in output
    entries = json.loads((tmp_path / "claims.json").read_text())
    assert {name: entries["setting"][name] for name in ("full", "seed", "engine", "jobs")} == {
        "full": False,
        "seed": 5,
        "engine": "reference",
        "jobs": 2,
    }
    assert {"kvsketch", "numpy", "scipy", "python"} <= set(entries["versions"])
    (claim,) = entries["claims"]
    assert claim["verdict"] == "holds with a corrected constant"
    assert all(check["passed"] for check in claim["outcome"]["checks"])
    assert (
        "The sketched score is right on average" in assert_self_contained((tmp_path / "claims.html").read_text()).text
    )


@pytest.mark.usefixtures("_fakes")
def test_a_claim_that_fails_ends_with_1(tmp_path: Path) -> None:
    files = ("--json", tmp_path / "claims.json", "--report", tmp_path / "claims.html")
    output = run(*files, code=1).output
    assert "FAILED: fails: a mean that is off: 9 <= 5 FAILS" in output
    assert "FAILED: is_empty: nothing was compared" in output
    assert "ArithmeticError: no sums with seed 0" in output
    assert "6 claims: 1 holds with a corrected constant, 4 FAILED, 1 not run." in output
    entries = json.loads((tmp_path / "claims.json").read_text())
    assert [claim["verdict"] for claim in entries["claims"]] == [run_claim(load(n), Setting()).verdict for n in FAKES]
    assert (tmp_path / "claims.html").exists()


@pytest.mark.usefixtures("_fakes")
def test_what_is_not_run_is_neither_passed_nor_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "FAKES", ("holds", "lacks"))
    output = run().output
    assert "FAILED" not in output
    assert "1 not run." in output
    assert "not run: lacks: the moon is not installed" in output


MISTAKES = [
    (("--seed", "-1"), ("--seed", "at least 0", "-1")),
    (("--jobs", "0"), ("--jobs", "at least 1", "0")),
    (("--engine", "cuda"), ("--engine", "numba_cpu or reference", "'cuda'")),
    (("--only", "unbiased,nothing"), ("--only", "there is no claim 'nothing'", NAMES[0])),
    (("--only", " , "), ("--only", "names no claim", NAMES[0])),
    (("--json", "HERE/none/x.json"), ("--json", "HERE/none", "create it")),
    (("--report", "HERE"), ("--report", "HERE", "folder")),
]


@pytest.mark.parametrize(("arguments", "parts"), MISTAKES, ids=[" ".join(a) for a, _ in MISTAKES])
def test_a_mistake_gets_one_clear_line(arguments: tuple[str, ...], parts: tuple[str, ...], tmp_path: Path) -> None:
    result = run(*(a.replace("HERE", str(tmp_path)) for a in arguments), code=2)
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    for part in parts:
        assert part.replace("HERE", str(tmp_path)) in line


PROGRAM = """
import sys
from importlib.machinery import PathFinder
from pathlib import Path


class WithoutTorch(PathFinder):
    @classmethod
    def find_spec(cls, name, *arguments):
        return None if name.partition(".")[0] in ("torch", "transformers") else super().find_spec(name, *arguments)


sys.meta_path = [WithoutTorch if finder is PathFinder else finder for finder in sys.meta_path]
from kvsketch import cli
from kvsketch.cli_validate import finish
from kvsketch.tests.fake_claims import load
from kvsketch.validation.claim import Setting
from kvsketch.validation.runner import run_claim

setting = {"full": False, "seed": 0, "engine": "reference", "jobs": 1, "seconds": 1.0}
folder = Path(sys.argv[1])
finish([run_claim(load("lacks"), Setting())], setting, json_file=folder / "a.json", report=folder / "a.html")
"""


def test_torch_is_not_needed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "a.json").read_text())["versions"]["kvsketch"]
    assert result.stdout.startswith("\nClaims checked")
    assert (tmp_path / "a.html").exists()
