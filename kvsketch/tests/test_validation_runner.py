"""Running claims: every kind of outcome is told apart, in processes of one thread, and written down completely."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from kvsketch.tests.fake_claims import load
from kvsketch.validation.claim import CORRECTED, Setting
from kvsketch.validation.registry import NAMES, load_claims
from kvsketch.validation.runner import FAILS, NOT_RUN, run_claim, run_claims

VERDICTS = {
    "holds": CORRECTED,
    "fails": FAILS,
    "is_nan": FAILS,
    "is_empty": FAILS,
    "raises": FAILS,
    "lacks": NOT_RUN,
}


@pytest.mark.parametrize(("name", "verdict"), VERDICTS.items())
def test_verdicts(name: str, verdict: str) -> None:
    result = run_claim(load(name), Setting(seed=2))
    assert result.verdict == verdict
    assert result.failed == (verdict == FAILS)
    assert result.name == name
    assert result.title == f"What {name} says"
    assert result.seconds >= 0
    assert ("ArithmeticError: no sums with seed 2" in result.error) == (name == "raises")
    assert result.missing == ("the moon is not installed" if name == "lacks" else "")


def test_processes_give_what_this_one_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    setting, calls = Setting(seed=1), []
    results = run_claims(
        list(VERDICTS), setting, jobs=2, progress=lambda *arguments: calls.append(arguments), load=load
    )
    here = [run_claim(load(name), setting) for name in VERDICTS]
    assert [_without_times(r.to_json()) for r in results] == [_without_times(r.to_json()) for r in here]
    assert [completed for _, completed, _ in calls] == list(range(len(VERDICTS) + 1))
    assert {total for *_, total in calls} == {len(VERDICTS)}
    assert "OPENBLAS_NUM_THREADS" not in os.environ


def _without_times(entries: dict[str, Any]) -> dict[str, Any]:
    error = entries["error"].strip().splitlines()
    return entries | {"seconds": 0, "error": error[-1:]}


def test_processes_have_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    (result,) = run_claims(["holds"], Setting(), load=load)
    assert not result.failed
    assert result.outcome.checks[1].statistic == 1
    assert os.environ["OMP_NUM_THREADS"] == "7"


def test_a_process_that_dies_is_a_failure() -> None:
    (result,) = run_claims(["dies"], Setting(), load=load)
    assert result.failed
    assert "its process died" in result.error


def test_json_has_everything() -> None:
    entries = json.loads(json.dumps(run_claim(load("holds"), Setting()).to_json(), allow_nan=False))
    assert entries["verdict"] == CORRECTED
    assert entries["false_alarm"] == Setting().level / 2
    assert entries["outcome"]["checks"][0] == {
        "what": "a mean <of> means",
        "n": 1000,
        "statistic": 1.5,
        "threshold": 5.0,
        "relation": "<=",
        "false_alarm": Setting().level / 2,
        "passed": True,
    }
    assert entries["outcome"]["figures"] == [
        {"what": "a rate", "published": "1 %", "proved": "2 %", "measured": "1.9 %"}
    ]
    assert entries["outcome"]["series"] == {"cosine": [0.0, "inf"]}
    failed = json.loads(json.dumps(run_claim(load("is_nan"), Setting()).to_json(), allow_nan=False))
    assert failed["outcome"]["checks"][0]["statistic"] == "nan"
    assert failed["outcome"]["checks"][0]["passed"] is False


def test_jobs_and_names_are_checked() -> None:
    with pytest.raises(ValueError, match="jobs must be >= 1, got 0"):
        run_claims(["holds"], Setting(), jobs=0, load=load)
    with pytest.raises(ValueError, match=f"there is no claim 'nothing'; the claims are {NAMES[0]}"):
        load_claims(("unbiased", "nothing"))
    assert [claim.name for claim in load_claims()] == list(NAMES)
