"""Fixtures that several test files use, and what a run says about CUDA kernels at its end."""

from __future__ import annotations

from typing import Any

import pytest

from kvsketch.tests.cuda_host import tally
from kvsketch.tests.cuda_host.fixtures import cupy as cupy


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of several tells the process that started it what it did."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["cuda_kernels"] = tally.found()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    """What a worker did; nothing is known of one that died."""
    output = getattr(node, "workeroutput", {})
    if "cuda_kernels" in output:
        tally.add(output["cuda_kernels"])


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How many kernels were executed and compiled."""
    for line in tally.summary():
        terminalreporter.write_line(line)
