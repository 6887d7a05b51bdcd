"""The engine ``numba_cuda``: its kernels in Numba's simulator against the reference, and compiled for two devices."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsketch import numba_cuda
from kvsketch._dispatch import engine_module, implementation
from kvsketch.numba_cuda import _launch
from kvsketch.tests.numba_cuda_attention_cases import CASES
from kvsketch.tests.test_public_api import dispatched

#: Kernels whose results are bytes that all engines share: nothing in them may be rounded once where it is twice here.
EXACT = {
    *("_pack_signs", "_unpack_signs", "_pack_codes", "_unpack_codes", "_pack_units", "transform", "quantize"),
    *("dequantize", "sign_rows", "norm_rows", "sum_squares", "_rank_channels", "_mark_channels"),
}


@cache
def run(task: str) -> subprocess.CompletedProcess[str]:
    """Run :mod:`kvsketch.tests.numba_cuda_runner`, in a process that has the simulator from the start or not."""
    command = [sys.executable, "-m", "kvsketch.tests.numba_cuda_runner", task]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


def found(task: str) -> dict[str, Any]:
    """What the runner reports of a task."""
    result = run(task)
    assert result.returncode == 0, result.stderr
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def compiled() -> dict[str, Any]:
    report = found("compile")
    if report["missing"]:
        pytest.skip(report["missing"])
    return report


def kernels() -> set[str]:
    """Names of all functions of the engine that are decorated as kernels."""
    names: set[str] = set()
    for path in Path(numba_cuda.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and "cuda.jit" in map(ast.unparse, node.decorator_list):
                names.add(node.name)
    return names


def test_it_offers_every_operation() -> None:
    assert sorted(numba_cuda.OPERATIONS) == dispatched()
    assert {case.operation for case in CASES.values()} == set(numba_cuda.OPERATIONS)


@pytest.mark.parametrize("operation", numba_cuda.OPERATIONS)
def test_signatures_are_those_of_the_reference(operation: str) -> None:
    family, _, name = operation.partition(".")
    own = getattr(engine_module("numba_cuda", family), name)
    reference = implementation(operation, np.empty(0), engine="reference")
    signatures = [
        [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]
        for function in (own, reference)
    ]
    assert signatures[0] == signatures[1]


@pytest.mark.parametrize("name", CASES)
def test_simulated(name: str) -> None:
    case = found("simulate")["cases"][name]
    assert case["error"] is None, case["error"]


@pytest.mark.parametrize("name", CASES)
def test_compiled(name: str) -> None:
    case = compiled()["cases"][name]
    assert case["error"] is None, case["error"]


def test_every_kernel_is_compiled() -> None:
    assert set(compiled()["kernels"]) == kernels()


def test_a_launch_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launch, "INSTALLED", False)
    with pytest.raises(RuntimeError, match="needs numba-cuda; install it with pip"):
        _launch.launch(None, 1)


def test_arithmetic_of_compiled_kernels() -> None:
    """No fused multiply-add where bytes are shared, and no float64 but for the signs of float64 numbers."""
    for name, counts in compiled()["kernels"].items():
        assert name not in EXACT or counts["fma"] == 0, name
        assert name == "_pack_signs" or counts["float64"] == 0, name
    assert compiled()["kernels"]["attend_part"]["fma"] > 0  # what the count is of
