"""What the tests of the CUDA engine's operations share: executions, numbers that try every rule, and comparisons."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvsketch.tests.cuda_host import running
from kvsketch.tests.cuda_host.nvrtc import compile_for
from kvsketch.tests.cuda_host.toolchain import include_folders
from kvsketch.tests.page_cases import DTYPES

#: Checked first: what is out of bounds damages a process where it is not checked.
EXECUTIONS: tuple[dict[str, Any], ...] = (
    {"mode": "check"},
    {"mode": "fast", "order": "reverse"},
    {"mode": "fast", "order": "random", "seed": 3},
)
#: The oldest architecture, and that of the H200.
ARCHITECTURES = (75, 90)
#: Numbers that the rules of quantizers and norms speak of.
SPECIAL = (np.nan, np.inf, -np.inf, 0.0, -0.0, 65504.0, -7e4, 3e38, 1e-40, -1e-40, 6e-8)


def executions() -> Iterator[str]:
    """Run what follows checked, then unchecked with the threads in other orders."""
    for options in EXECUTIONS:
        with running(**options):
            yield " ".join(map(str, options.values()))


def rough_numbers(shape: tuple[int, ...], seed: int = 0, dtype: str = "float32") -> Any:
    """Numbers (..., n, d): normal, tiny, huge and constant runs of tokens and channels, and some special ones."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) + rng.standard_normal(shape[-1])
    x *= rng.choice([1.0, 1.0, 1.0, 1e-7, 1e-20, 3e4], size=(*shape[:-1], 1))
    x *= rng.choice([1.0, 1.0, 1.0, 1e-6, 1e3], size=shape[-1])
    x[..., rng.random(shape[-1]) < 0.1] = 2.5
    special = rng.random(shape) < 0.5 / max(shape[-2], 1)
    x[special] = rng.choice(SPECIAL, size=int(special.sum()))
    with np.errstate(all="ignore"):
        return x.astype(np.float32).astype(DTYPES[dtype])


def assert_bits(actual: Any, expected: Any) -> None:
    """Assert that a device array and a NumPy array have one shape and dtype and the same bytes."""
    got = actual.get()
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    if got.size:
        bytes_, wanted = (np.ascontiguousarray(x).view(np.uint8) for x in (got, expected))
        np.testing.assert_array_equal(bytes_, wanted)


def assert_no_spills(file: str, kernels: list[str]) -> None:
    """Assert that kernels compile for real devices and keep what they work on in registers."""
    from kvsketch.cuda_raw import _compile

    compiled = compile_for(_compile.source(file), kernels, ARCHITECTURES, _compile.options)
    assert {(use.spill_bytes, use.stack_bytes) for use in compiled.values()} == {(0, 0)}, compiled


def assert_subnormals_kept(file: str) -> None:
    """Assert that under CuPy's options no product or sum of floats takes subnormal numbers for zero, or is fused."""
    from kvsketch.cuda_raw import _compile

    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    code = _compile.source(file).encode()
    _, program = nvrtc.nvrtcCreateProgram(code, file.encode(), 0, [], [])
    folders = [f"-I{folder}" for folder in include_folders()]
    options = [*_compile.options(90), "--gpu-architecture=compute_90", "-ftz=true", *folders]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    assert int(status) == 0
    text = b" " * nvrtc.nvrtcGetPTXSize(program)[1]
    nvrtc.nvrtcGetPTX(program, text)
    nvrtc.nvrtcDestroyProgram(program)
    arithmetic = set(re.findall(rb"\b(?:add|sub|mul|fma)\S*\.f32\b", text))
    assert arithmetic == {b"add.rn.f32", b"mul.rn.f32"}
