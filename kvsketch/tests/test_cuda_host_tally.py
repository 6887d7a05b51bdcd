"""What a run of the tests says about kernels at its end."""

from __future__ import annotations

import numpy as np
import pytest

from kvsketch.cuda_raw.instances import INSTANCES
from kvsketch.tests.cuda_host import CudaHostError, HostModule, running, tally
from kvsketch.tests.cuda_host.fixtures import needs_compiler

CODE = 'extern "C" __global__ void fill(float* x, int n) { for (int i = 0; i < n; ++i) x[i] = 1.f; }'


@pytest.fixture(autouse=True)
def _empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tally, "executed", set())
    monkeypatch.setattr(tally, "compiled", set())


@needs_compiler
def test_launches_that_end_well_count() -> None:
    fill = HostModule(CODE, name_expressions=("fill",)).get_function("fill")
    for mode in ("check", "fast"):
        with running(mode):
            fill((1,), (1,), (np.empty(4, np.float32), np.int32(4)))
    assert tally.executed == {("fill", "check"), ("fill", "fast")}
    tally.executed.clear()
    with running("check"), pytest.raises(CudaHostError, match="OUT OF BOUNDS"):
        fill((1,), (1,), (np.empty(4, np.float32), np.int32(5)))
    assert not tally.executed
    assert tally.summary() == []


def test_declared_instances_are_counted_over_processes() -> None:
    first, second = INSTANCES[0].expression, next(i for i in INSTANCES if "<" in i.expression).expression
    tally.add({"executed": [[first, "check"], ["another", "check"]], "compiled": [[first, 90]]})
    tally.add({"executed": [[first, "check"], [second, "check"], [second, "fast"]], "compiled": [[second, 75]]})
    assert len({instance.expression for instance in INSTANCES}) == len(INSTANCES)
    kernels = len({instance.kernel for instance in INSTANCES})
    assert tally.summary() == [
        f"CUDA kernels executed on the CPU, of {len(INSTANCES)} instances ({kernels} kernels): "
        "2 instances (2 kernels) in check mode, 1 instances (1 kernels) in fast mode",
        "CUDA kernels compiled by NVRTC: 1 instances (1 kernels) for sm_75, 1 instances (1 kernels) for sm_90",
    ]
    assert tally.found()["compiled"] == [list(pair) for pair in tally.compiled]
