"""Kernels of ``.cu`` files as functions to launch, compiled by NVRTC at first use and cached by CuPy on disk.

A source is handed over whole, its own headers expanded in place: CuPy's cache looks at the text it is given and not at
what that text includes.
"""

from __future__ import annotations

import re
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

#: The macro that names the architecture a kernel is compiled for, such as 90.
ARCHITECTURE_MACRO = "KV_SM"
OPTIONS = ("--std=c++17",)
#: Shared memory that a kernel gets without asking for more.
USUAL_SHARED_BYTES = 48 * 1024
#: What the wheels that hold NVRTC's headers are called, for CUDA 13 and 12.
HEADER_WHEELS = "nvidia-cuda-runtime and nvidia-cuda-cccl (pip install 'kvsketch[cuda13]', or 'kvsketch[cuda12]')"

_INCLUDE = re.compile(r'^#include "([^"]+)"[^\n]*$', re.MULTILINE)


@cache
def source(file: str) -> str:
    """Text of a ``.cu`` file of this package with its own headers in place, each once."""
    return _expand(file, set())


def _expand(file: str, seen: set[str]) -> str:
    seen.add(file)
    text = (files("kvsketch.cuda_raw") / file).read_text(encoding="utf-8")
    parts, end = [f'#line 1 "{file}"\n'], 0
    for found in _INCLUDE.finditer(text):
        parts.append(text[end : found.start()])
        if found[1] not in seen:
            parts.append(_expand(found[1], seen))
        parts.append(f'#line {text.count(chr(10), 0, found.end()) + 2} "{file}"')
        end = found.end()
    return "".join([*parts, text[end:]])


def options(architecture: int) -> tuple[str, ...]:
    """Options of NVRTC for an architecture such as 90; which one to generate code for is the caller's to add."""
    return (*OPTIONS, f"-D{ARCHITECTURE_MACRO}={architecture}")


def architecture() -> int:
    """Compute capability of the current device, as in 90 for 9.0."""
    import cupy

    return int(cupy.cuda.Device().compute_capability)


@lru_cache(maxsize=1024)
def _function(file: str, expression: str, architecture: int) -> Any:
    import cupy

    module = cupy.RawModule(
        code=source(file), options=options(architecture), name_expressions=(expression,), backend="nvrtc"
    )
    try:
        return module.get_function(expression)
    except cupy.cuda.compiler.CompileException as error:
        if "cannot open source file" in str(error):
            raise RuntimeError(
                f"{file} was not compiled, because headers of CUDA were not found; install {HEADER_WHEELS}"
            ) from error
        raise


def launch(
    file: str,
    expression: str,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    args: tuple[Any, ...],
    *,
    shared: int = 0,
) -> None:
    """Run a kernel on the current device and stream; `expression` names it as C++ does, ``"pack_codes<2>"``.

    `args` are arrays, NumPy scalars and 0-d NumPy arrays of a structured dtype; `shared` is the bytes of dynamic
    shared memory. Nothing is run when the grid is empty.
    """
    if 0 in grid:
        return
    function = _function(file, expression, architecture())
    if shared > USUAL_SHARED_BYTES and function.max_dynamic_shared_size_bytes < shared:
        function.max_dynamic_shared_size_bytes = shared
    function(grid, block, args, shared_mem=shared)
