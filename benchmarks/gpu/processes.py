"""Commands with a time limit, ended with all that they started when it is over."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path(__file__).parents[2]
#: The end of what a command printed, kept for a report.
KEPT_CHARACTERS = 4000


class Ended(NamedTuple):
    """How a command ended: its exit code, None when its time was over; what it printed last; seconds."""

    code: int | None
    output: str
    seconds: float

    @property
    def reason(self) -> str:
        """Why it did not end well, shortly; empty when it did."""
        if self.code == 0:
            return ""
        if self.code is None:
            return f"ended after {self.seconds:.0f} s, its time limit"
        if self.code < 0:
            return f"ended by signal {signal.Signals(-self.code).name}"
        return f"ended with exit code {self.code}"


def run_for(command: Sequence[str], seconds: float, file: Path, environment: dict[str, str] | None = None) -> Ended:
    """Run a command in the project's folder for at most so many seconds; it prints to `file`.

    `environment` is added to this process's; the project's folder is where Python finds ``benchmarks``.
    """
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | (environment or {})
    started = time.monotonic()
    with file.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=output, stderr=subprocess.STDOUT)
        code: int | None = None
        try:
            code = process.wait(max(seconds, 0.1))
        except subprocess.TimeoutExpired:
            pass
        finally:
            if code is None:
                kill_all(process)
    text = file.read_bytes().decode(errors="replace")[-KEPT_CHARACTERS:]
    return Ended(code, text, time.monotonic() - started)


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """End a process and whatever it started, in whichever session."""
    with suppress(psutil.NoSuchProcess):
        for descendant in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                descendant.kill()
    process.kill()
    process.wait()
