"""Running claims in processes of their own, and what came of each."""

from __future__ import annotations

import math
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvsketch._checks import check_integer
from kvsketch._progress import Progress, no_progress
from kvsketch.validation.claim import Claim, Outcome, Setting
from kvsketch.validation.registry import load_claim

#: What a claim comes to when a check fails or it raises, and when it cannot be checked here.
FAILS, NOT_RUN = "FAILS", "not run"
#: What limits the threads of the libraries below NumPy, read when they are loaded.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


@dataclass(frozen=True)
class Result:
    """What checking one claim came to.

    Attributes
    ----------
    name, title, source, published, proved, finding : str
        As in :class:`kvsketch.validation.claim.Claim`.
    verdict : str
        The claim's own where all checks pass; else :data:`FAILS`, or :data:`NOT_RUN`.
    outcome : Outcome
        Empty where the claim raised or did not run.
    seconds : float
    error : str
        What the claim raised, with its traceback; empty where it ended.
    missing : str
        What the claim needs and this machine lacks; empty where it ran.
    """

    name: str
    title: str
    source: str
    published: str
    proved: str
    finding: str
    verdict: str
    outcome: Outcome
    seconds: float = 0.0
    error: str = ""
    missing: str = ""

    @property
    def failed(self) -> bool:
        """Whether a claim that we make does not hold."""
        return self.verdict == FAILS

    def to_json(self) -> dict[str, Any]:
        """Everything, in types of JSON; each check with whether it passed."""
        entries = asdict(self)
        for entry, check in zip(entries["outcome"]["checks"], self.outcome.checks, strict=True):
            entry["passed"] = check.passed
        plain: dict[str, Any] = _plain(entries | {"false_alarm": self.outcome.false_alarm})
        return plain


def run_claim(claim: Claim, setting: Setting) -> Result:
    """Check `claim` in this process; an error that it raises is part of the result."""
    missing, error, outcome = claim.missing(), "", Outcome()
    started = time.perf_counter()
    if not missing:
        try:
            outcome = claim.run(setting)
        except Exception:
            error = traceback.format_exc()
    verdict = NOT_RUN if missing else claim.verdict if outcome.passed else FAILS
    return _result(claim, verdict, outcome, seconds=time.perf_counter() - started, error=error, missing=missing)


def run_claims(
    names: Sequence[str],
    setting: Setting,
    *,
    jobs: int = 1,
    progress: Progress = no_progress,
    load: Callable[[str], Claim] = load_claim,
) -> list[Result]:
    """Check the claims called `names`, `jobs` at a time, in fresh processes of one thread each.

    Results come in the order of `names`. A claim whose process dies fails, and so do those that were not done by then.
    `load` gives the claim of a name; processes import it, so it must be a function of a module.
    """
    jobs = check_integer("jobs", jobs, low=1)
    results: dict[str, Result] = {}
    progress("Starting", 0, len(names))
    with open_pool(min(jobs, len(names))) as pool:
        futures = {pool.submit(_run_named, load, name, setting): name for name in names}
        for future in as_completed(futures):
            name = futures[future]
            try:
                results[name] = future.result()
            except BrokenProcessPool as error:
                results[name] = _result(load(name), FAILS, Outcome(), error=f"its process died: {error}")
            progress(f"Checked {name}", len(results), len(names))
    return [results[name] for name in names]


def _run_named(load: Callable[[str], Claim], name: str, setting: Setting) -> Result:
    from kvsketch.numba_cpu._threads import set_num_threads

    set_num_threads(1)
    return run_claim(load(name), setting)


@contextmanager
def open_pool(processes: int) -> Iterator[ProcessPoolExecutor]:
    """Fresh processes, in which libraries below NumPy use one thread: that claims use the cores, not each of them."""
    before = {name: os.environ.get(name) for name in THREAD_VARIABLES}
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))
    try:
        with ProcessPoolExecutor(max(1, processes), mp_context=multiprocessing.get_context("spawn")) as pool:
            yield pool
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _plain(value: Any) -> Any:
    """`value` in types of JSON, which has no numbers that are not finite: those become text."""
    if isinstance(value, dict):
        return {str(name): _plain(entry) for name, entry in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _result(claim: Claim, verdict: str, outcome: Outcome, **rest: Any) -> Result:
    texts = {name: getattr(claim, name) for name in ("name", "title", "source", "published", "proved", "finding")}
    return Result(**texts, verdict=verdict, outcome=outcome, **rest)
