"""The study over many seeds counts right, and finds a check out that fails more often than it states."""

from __future__ import annotations

import pytest
from scipy import stats

from kvsketch.statistical_tests import Check
from kvsketch.validation import many_seeds
from kvsketch.validation.claim import Outcome, Setting
from kvsketch.validation.many_seeds import Tally, count_failures, main, pool_tallies, print_tallies


def test_bounds_are_those_of_clopper_and_pearson() -> None:
    tally = Tally("a", "b", "<=", 0.05, runs=200, failures=13)
    low, high = tally.bounds
    assert stats.binom.sf(12, 200, low) == pytest.approx(1e-3)
    assert stats.binom.cdf(13, 200, high) == pytest.approx(1e-3)
    assert Tally("a", "b", "<=", 0.05, 10, 0).bounds[0] == 0
    assert Tally("a", "b", "<=", 0.05, 10, 10).bounds[1] == 1


def test_a_statement_that_is_false_is_refuted(capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = Tally("a", "b", "<=", 0.05, 200, 14), Tally("a", "c", "<=", 0.05, 200, 40)
    power = Tally("a", "d", ">=", 0.05, 200, 199)
    assert [t.refuted for t in (good, bad, power)] == [False, True, False]
    together = pool_tallies([good, bad, power])
    assert (together.runs, together.failures, together.stated) == (400, 54, pytest.approx(0.05))
    print_tallies([good, bad, power, together])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert [("REFUTED" in line, "(power)" in line) for line in lines[1:]] == [
        *((False, False), (True, False), (False, True)),
        (True, False),
    ]
    assert "14 of 200      0.05" in lines[1]


class Inline:
    """Stands for the pool of processes."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs

    def __enter__(self) -> Inline:
        return self

    def __exit__(self, *arguments: object) -> None:
        pass

    def submit(self, function: object, name: str, setting: Setting) -> Inline:
        assert function is many_seeds._run
        self.checks = {
            "chance": [
                Check("mean", 9, float(setting.seed % 4 == 0), 0.5, "<=", setting.level),
                Check("bits", 9, 1.0, 0.5, "<=", 0.0),
            ],
            "none": [Check("bits", 9, 1.0, 0.5, "<=", 0.0)],
        }[name]
        self.asked = [*getattr(self, "asked", []), (name, setting.seed)]
        future = Inline(0)
        future.checks = self.checks
        return future

    def result(self) -> Outcome:
        return Outcome(self.checks)


def test_failures_are_counted_by_check(monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[Inline] = []

    def open_pool(jobs: int) -> Inline:
        pools.append(Inline(jobs))
        return pools[-1]

    monkeypatch.setattr(many_seeds, "open_pool", open_pool)
    (tally,) = count_failures(["chance", "none"], 10, Setting(level=0.3), jobs=2)
    assert (tally.claim, tally.what, tally.stated, tally.runs, tally.failures) == ("chance", "mean", 0.3, 10, 2)
    (pool,) = pools
    assert pool.jobs == 2
    assert pool.asked == [("chance", 1), ("none", 1), *(("chance", seed) for seed in range(2, 11))]


def test_a_real_claim(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "unbiased", "--seeds", "2", "--share", "0.04", "--jobs", "1"]) == 0
    printed = capsys.readouterr().out
    assert "unbiased: mean estimate" in printed
    assert "2 seeds, 0.04 of the samples" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "0"], "--seeds"),
        (["--jobs", "0"], "--jobs"),
        (["--share", "1.5"], "--share"),
        (["--level", "1"], "--level"),
        (["--only", "nothing"], "there is no claim 'nothing'"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err
