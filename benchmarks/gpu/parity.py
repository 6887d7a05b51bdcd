"""The suite's own tests of kernels, run on the device, and the declared kernels that they launch there.

Each test file is a process of its own, since an access out of bounds leaves a process without its device. Not run here
are the tests of the harness that stands in for a GPU, those that only compile for other devices, and those with
planted bugs, which harm a real one.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import kvsketch.tests
from benchmarks.gpu.device import Device
from benchmarks.gpu.findings import Findings, NotRun
from benchmarks.gpu.launches import FEW_VARIABLE, FILE_VARIABLE, Kernel, declared, read_kernels
from benchmarks.gpu.parts import ALL_SECONDS
from benchmarks.gpu.processes import run_for

TESTS = Path(kvsketch.tests.__file__).parent
PATTERN = "test_cuda_*.py"
#: What names of test files begin or end with that are not for a real device: these compile for others, or plant bugs.
OTHERS_BEGIN, OTHERS_END = "test_cuda_host", ("_bugs.py", "_compiles.py")
#: Seconds for the tests; what is left of the part's time is for kernels that none of them launches.
SECONDS = 125
#: Processes at once: each has a context of some hundred megabytes on the device.
MOST_PROCESSES = 8
#: Tests of a file, and kernels that are compiled alone, in a dry run.
FEW_TESTS, FEW_KERNELS = 1, 1


class Outcome(NamedTuple):
    """What came of one file: counts of tests, the first failure, and the kernels that were launched."""

    file: str
    passed: int
    failed: int
    skipped: int
    seconds: float
    reason: str = ""
    skip_reason: str = ""
    kernels: frozenset[Kernel] = frozenset()
    preparing_seconds: float = 0.0


def chosen_files() -> list[Path]:
    """Test files for the device."""
    return [
        path
        for path in sorted(TESTS.glob(PATTERN))
        if not path.name.startswith(OTHERS_BEGIN) and not path.name.endswith(OTHERS_END)
    ]


def measure(findings: Findings, device: Device) -> None:
    """Run the files, a few at once, then compile what none of them launched."""
    check_files(findings, device, chosen_files(), SECONDS)


def check_files(findings: Findings, device: Device, files: Sequence[Path], seconds: float) -> None:
    """Run test files for at most so many seconds in all."""
    if not files:
        raise NotRun(f"{TESTS} has no {PATTERN} for a device")
    deadline = time.monotonic() + (seconds if not device.dry_run else ALL_SECONDS)
    outcomes: list[Outcome] = []
    processes = 1 if device.dry_run else max(1, min(MOST_PROCESSES, (os.cpu_count() or 2) // 2, len(files)))
    with ThreadPoolExecutor(processes) as pool:
        running = [pool.submit(run_file, file, deadline, device.dry_run) for file in files]
        for ended in as_completed(running):
            outcomes.append(ended.result())
            _show(findings, outcomes)
    launched = set[Kernel]().union(*(outcome.kernels for outcome in outcomes))
    for outcome in outcomes:
        if outcome.failed or not outcome.passed:
            why = outcome.reason or f"no test ran ({outcome.skip_reason or 'none was collected'})"
            findings.failures.append(f"{outcome.file}: {outcome.failed} failed, {outcome.passed} passed: {why}")
    _show_kernels(findings, device, launched, sum(outcome.preparing_seconds for outcome in outcomes))


def run_file(file: Path, deadline: float, dry_run: bool) -> Outcome:
    """Run one test file by pytest until `deadline`, as :func:`time.monotonic` has it."""
    started = time.monotonic()
    if deadline <= started:
        return Outcome(file.name, 0, 1, 0, 0.0, "not run: the time was used up")
    with tempfile.TemporaryDirectory() as folder:
        report, kernels = Path(folder, "junit.xml"), Path(folder, "kernels.json")
        # Warnings are errors in the suite, which is about its own code and not about this machine's packages.
        command = [
            *(sys.executable, "-m", "pytest", str(file), "-q", "-W", "default", "-p", "no:cacheprovider"),
            *("-p", "benchmarks.gpu.launches", f"--junitxml={report}", "-o", "junit_logging=no"),
        ]
        environment = {FILE_VARIABLE: str(kernels)} | ({FEW_VARIABLE: str(FEW_TESTS)} if dry_run else {})
        ended = run_for(command, deadline - started, Path(folder, "output"), environment)
        counts = _counts(report)
        found, preparing = read_kernels(kernels) if kernels.exists() else (set(), 0.0)
    if counts is None:
        return Outcome(file.name, 0, 1, 0, ended.seconds, f"pytest {ended.reason or 'left no report'}")
    return Outcome(file.name, *counts[:3], ended.seconds, counts[3], counts[4], frozenset(found), preparing)


def _counts(report: Path) -> tuple[int, int, int, str, str] | None:
    """Tests passed, failed and skipped, the first failure and the first reason to skip, from pytest's JUnit file."""
    if not report.exists():
        return None
    cases = list(ElementTree.parse(report).iter("testcase"))
    failures = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skips = [skip for case in cases if (skip := case.find("skipped")) is not None]
    reason = ""
    if failures:
        found = failures[0].find("failure")
        found = failures[0].find("error") if found is None else found
        message = "" if found is None else found.get("message", "")
        reason = f"{failures[0].get('name')}: {message.strip().splitlines()[0] if message.strip() else 'no message'}"
    skipped = "" if not skips else skips[0].get("message", "")
    return len(cases) - len(failures) - len(skips), len(failures), len(skips), reason, skipped


def _show(findings: Findings, outcomes: Sequence[Outcome]) -> None:
    columns = ("tests", "passed", "failed", "skipped", "seconds", "having kernels, s", "reason")
    lines = [
        (
            *(x.file, f"{x.passed}", f"{x.failed}", f"{x.skipped}", f"{x.seconds:.1f}", f"{x.preparing_seconds:.1f}"),
            x.reason or (x.skip_reason if x.skipped else ""),
        )
        for x in outcomes
    ]
    findings.facts["tests"] = ", ".join(
        f"{sum(getattr(x, what) for x in outcomes)} {what}" for what in ("passed", "failed", "skipped")
    )
    findings.table("Tests on the device", columns, lines)


def _show_kernels(findings: Findings, device: Device, launched: set[Kernel], preparing_seconds: float) -> None:
    """Compile the declared kernels that no test launched, and say which were launched."""
    listed = declared()
    left = sorted(listed - launched)
    compiled, broken = _compile_alone(left[:FEW_KERNELS] if device.dry_run else left)
    findings.failures += [f"{kernel} does not compile: {reason}" for kernel, reason in broken.items()]
    counts = (len(listed), len(listed & launched), len(left), len(compiled), len(broken), len(launched - listed))
    findings.facts["kernels"] = (
        f"{counts[0]} declared, {counts[1]} of them launched by the tests, {counts[2]} not: {counts[3]} of these "
        f"compile here, {counts[4]} do not; {counts[5]} more launched that are not declared"
    )
    if left and not device.dry_run:
        findings.failures.append(f"{len(left)} declared kernels were not launched")
    findings.details["kernels not launched"] = [f"{file}: {expression}" for file, expression in left]
    findings.notes += [
        findings.facts["kernels"] + ".",
        f"Having the kernels, by NVRTC or from where CuPy keeps them, took {preparing_seconds:.0f} s, all processes "
        "together.",
    ]


def _compile_alone(kernels: Sequence[Kernel]) -> tuple[list[Kernel], dict[str, str]]:
    """Those of the kernels that compile for the device, and why others do not."""
    from kvsketch.cuda_raw import _compile

    compiled, broken = [], {}
    for file, expression in kernels:
        try:
            function = _compile._function(file, expression, _compile.architecture())
            # Asking for what it uses builds it where that is done late.
            assert function.shared_size_bytes >= 0
            compiled.append((file, expression))
        except Exception as error:
            broken[f"{file}: {expression}"] = str(error).strip().splitlines()[0]
    return compiled, broken
