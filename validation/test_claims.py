"""Every claim, on every engine that runs here, and its twins, which must fail."""

from __future__ import annotations

import pytest

from kvsketch.testing import CPU_ENGINES
from kvsketch.validation.claim import VERDICTS, Claim, Outcome, Setting
from kvsketch.validation.registry import load_claims

CLAIMS = load_claims()
RUNS = [(claim, engine) for claim in CLAIMS for engine in (CPU_ENGINES if claim.on_engines else CPU_ENGINES[:1])]
TWINS = [(claim, twin) for claim in CLAIMS for twin in claim.twins]


def show(outcome: Outcome) -> None:
    for check in outcome.checks:
        print(check)


def need(claim: Claim) -> None:
    """Skip where what the claim needs is not installed."""
    reason = claim.missing()
    if reason:
        pytest.skip(reason)


@pytest.mark.parametrize(("claim", "engine"), RUNS, ids=[f"{claim.name}-{engine}" for claim, engine in RUNS])
def test_claim(claim, engine):
    need(claim)
    setting = Setting(engine=engine)
    outcome = claim.run(setting)
    show(outcome)
    assert outcome.false_alarm <= setting.level * (1 + 1e-9)
    assert outcome.passed, "\n".join(str(check) for check in outcome.checks if not check.passed)


@pytest.mark.parametrize(("claim", "twin"), TWINS, ids=[f"{claim.name}: {twin.name}" for claim, twin in TWINS])
def test_twin_is_found_out(claim, twin):
    need(claim)
    outcome = twin.run(Setting())
    show(outcome)
    assert outcome.checks
    assert not outcome.passed


def test_claims_say_what_they_must():
    assert len({claim.name for claim in CLAIMS}) == len(CLAIMS)
    for claim in CLAIMS:
        assert claim.verdict in VERDICTS
        assert claim.twins
        assert all((claim.title, claim.source, claim.published, claim.proved, claim.finding))
