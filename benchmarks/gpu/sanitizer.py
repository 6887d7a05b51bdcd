"""compute-sanitizer over :mod:`benchmarks.gpu.exercise`: accesses out of bounds (memcheck), races in shared memory."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.device import Device
from benchmarks.gpu.findings import Findings, NotRun
from benchmarks.gpu.processes import Ended, run_for
from benchmarks.gpu.subjects import ENGINE

PROGRAM = "compute-sanitizer"
#: Where a toolkit may lie besides the folders of PATH.
TOOLKITS = ("/usr/local/cuda", "/opt/cuda")
TOOLS = ("memcheck", "racecheck")
#: What the program exits with when it has found an error.
ERROR_CODE = 86
#: Seconds of the exercise alone by each engine, and of each tool over it.
PLAIN_SECONDS, TOOL_SECONDS = 17, 20
#: The other engine, whose kernels Numba compiles: not in a dry run, nor under a tool, where that takes too long.
OTHER_ENGINE = "numba_cuda"
DRY_SECONDS = 400
#: The first thing that the program says of an error.
_ERROR = re.compile(r"^=+ (?:Error: )?(Invalid .*|Race .*|.*hazard.*|Program hit .*|Uninit.*)$", re.MULTILINE)


def find_program() -> str | None:
    """The program, on PATH or in a toolkit."""
    toolkits = [os.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH")]
    folders = [str(Path(toolkit, "bin")) for toolkit in (*toolkits, *TOOLKITS) if toolkit]
    return shutil.which(PROGRAM) or shutil.which(PROGRAM, path=os.pathsep.join(folders))


def measure(findings: Findings, device: Device) -> None:
    """The exercise without the program, then under each of its tools."""
    for engine in (ENGINE,) if device.dry_run else (ENGINE, OTHER_ENGINE):
        options = ["--dry-run"] if device.dry_run else []
        plain = run_exercise([engine, *options], [], DRY_SECONDS if device.dry_run else PLAIN_SECONDS)
        _note(findings, f"{engine}, without it", plain)
        if plain.reason:
            findings.failures.append(f"the exercise of {engine} itself {plain.reason}: {_last_line(plain)}")
    if device.dry_run:
        raise NotRun("a dry run has no device to watch; the exercise ran with the harness's own checks")
    program = find_program()
    if program is None:
        raise NotRun(f"{PROGRAM} was not found; a CUDA toolkit has it. The exercise ran without it")
    for tool in TOOLS:
        prefix = [program, "--tool", tool, "--error-exitcode", str(ERROR_CODE), "--print-limit", "20"]
        ended = run_exercise([ENGINE, "--plain-memory"], prefix, TOOL_SECONDS)
        _note(findings, f"{ENGINE}, {tool}", ended)
        if ended.reason:
            found = _ERROR.search(ended.output)
            findings.failures.append(f"{tool} {ended.reason}: {found[1] if found else _last_line(ended)}")


def run_exercise(arguments: Sequence[str], prefix: Sequence[str], seconds: float) -> Ended:
    """The exercise in a process of its own, behind the words of another program."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*prefix, sys.executable, "-m", "benchmarks.gpu.exercise", *arguments]
        return run_for(command, seconds, Path(folder, "output"))


def _note(findings: Findings, tool: str, ended: Ended) -> None:
    findings.details[tool] = ended.output
    findings.facts[tool] = ended.reason or f"nothing found, {ended.seconds:.0f} s"
    lines = [(name, text) for name, text in findings.facts.items()]
    findings.table("The exercise of all operations", ("watched by", "what was found"), lines)


def _last_line(ended: Ended) -> str:
    return (ended.output.strip().splitlines() or ["it printed nothing"])[-1]
