"""Runs the cases of ``numba_cuda`` in a process of its own: ``python -m kvsketch.tests.numba_cuda_runner simulate``.

``simulate`` executes the kernels in Numba's simulator, or on a device where CuPy has one, and compares the results
with the reference's. ``compile`` makes PTX of every kernel for the types that it is called with, without a device. Both
print what they found as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import warnings
from typing import Any

import numpy as np

ARCHITECTURES = ((7, 5), (9, 0))
#: Instructions whose number is reported: fused ones, and arithmetic in float64.
COUNTED = {"fma": "fma.rn.f32", "float64": ".f64"}


def main(task: str, *wanted: str) -> None:
    """Print the results of a task; with words behind it, of the cases whose names hold one of them."""
    from kvsketch.tests.cuda_host.stand_in import available, installed

    if task == "simulate" and not available():
        os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
    from kvsketch.tests import numba_cuda_attention_cases  # noqa: F401  (registers its cases)
    from kvsketch.tests.numba_cuda_cases import CASES

    if task == "compile" and (missing := _missing()):
        print(json.dumps({"missing": missing}))
        return
    warnings.simplefilter("ignore")
    report: dict[str, Any] = {}
    with installed() as cupy:
        # Small enough for a few tokens to be several splits and runs.
        from kvsketch.numba_cuda import attention, palu

        attention.SPLIT_TOKENS, palu.RUN_TOKENS = 32, 24
        found = _Compiler() if task == "compile" else None
        for name, case in CASES.items():
            if wanted and not any(word in name for word in wanted):
                continue
            begun = time.perf_counter()
            try:
                results = list(case.run(cupy.asarray, "numba_cuda"))
                if found is None:
                    _compare(results, list(case.run(lambda x: x, "reference")))
                error = None
            except Exception:
                error = traceback.format_exc()
            report[name] = {"seconds": time.perf_counter() - begun, "error": error, "operation": case.operation}
    print(json.dumps({"missing": "", "cases": report, "kernels": found.kernels if found else {}}))


def _missing() -> str:
    """What compiling needs and is not there."""
    from kvsketch.numba_cuda._launch import INSTALLED

    if not INSTALLED:
        return "numba-cuda is not installed (pip install numba-cuda 'nvidia-nvvm==13.*')"
    from numba.cuda.cudadrv import nvvm

    try:
        nvvm.NVVM()
        nvvm.LibDevice()
    except Exception as error:
        return f"NVVM was not found (pip install 'nvidia-nvvm==13.*'): {str(error).strip().partition(chr(10))[0]}"
    return ""


def _compare(found: list[Any], expected: list[Any]) -> None:
    from kvsketch.tests.numba_cuda_cases import assert_results_agree

    assert found
    for one, other in zip(found, expected, strict=True):
        assert_results_agree(one, other)


class _Compiler:
    """Takes the place of the launches: compiles each kernel once for each combination of types."""

    def __init__(self) -> None:
        from numba.cuda import dispatcher

        from kvsketch.numba_cuda import _launch

        self.kernels: dict[str, dict[str, int]] = {}
        self._compiled: set[Any] = set()
        # Device functions ask for the current device, but need nothing but its compute capability.
        dispatcher.get_current_device = lambda: self
        self.compute_capability = ARCHITECTURES[0]
        _launch.start = self._compile

    def _compile(self, kernel: Any, blocks: int, threads: int, shared: int, args: tuple[Any, ...]) -> None:
        from numba import cuda, typeof

        signature = tuple(typeof(_like(arg)) for arg in args)
        if (kernel, signature) in self._compiled:
            return
        self._compiled.add((kernel, signature))
        counts = self.kernels.setdefault(kernel.py_func.__name__, {"variants": 0} | dict.fromkeys(COUNTED, 0))
        counts["variants"] += 1
        # Types change the code, the architecture hardly does: all variants for the oldest, one of each kernel for both.
        for architecture in ARCHITECTURES if counts["variants"] == 1 else ARCHITECTURES[:1]:
            ptx, _ = cuda.compile_ptx(kernel.py_func, signature, cc=architecture)
            for name, instruction in COUNTED.items():
                counts[name] += ptx.count(instruction)


def _like(arg: Any) -> Any:
    """An argument of the same type whose arrays are NumPy's, with the shapes and strides but not the memory."""
    from kvsketch.numba_cuda._launch import as_bits

    if isinstance(arg, tuple):
        items = [_like(item) for item in arg]
        return type(arg)(*items) if hasattr(arg, "_fields") else tuple(items)
    if isinstance(arg, int | np.generic):
        return arg
    array = as_bits(arg)
    return np.lib.stride_tricks.as_strided(np.zeros(1, array.dtype), array.shape, array.strides)


if __name__ == "__main__":
    main(*sys.argv[1:])
