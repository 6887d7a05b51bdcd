"""Kernels compiled by NVRTC to machine code of real architectures, which needs no GPU, and what each of them uses."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvsketch.tests.cuda_host import tally
from kvsketch.tests.cuda_host.toolchain import (
    CompileError,
    cuda_versions,
    include_folders,
    kept,
    missing_headers,
)

#: Turing, A100, RTX 30, RTX 40, H100/H200, B200, RTX 50.
ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)

#: Options that every compilation gets.
OPTIONS = ("--std=c++17", "--ptxas-options=-v")
#: ``name(12): error: ...``, as NVRTC writes places.
_PLACE = re.compile(r"^(\S+)\((\d+)\): ", re.MULTILINE)
_USAGE = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\s+"
    r"ptxas info\s*: Used (\d+) registers(.*)"
)


@dataclass(frozen=True)
class Compiled:
    """What one kernel uses on one architecture: registers of a thread, bytes of the rest, and the code's own size."""

    registers: int
    spill_bytes: int
    static_shared_bytes: int
    stack_bytes: int
    cubin_bytes: int


def missing() -> str | None:
    """What this machine lacks to compile for GPUs, or None."""
    try:
        found = importlib.util.find_spec("cuda.bindings.nvrtc")
    except ModuleNotFoundError:
        found = None
    if found is None:
        return "cuda.bindings was not found; pip install cuda-bindings nvidia-cuda-nvrtc"
    return missing_headers()


def compile_for(
    code: str,
    name_expressions: Sequence[str],
    architectures: Sequence[int] = ARCHITECTURES,
    options: Sequence[str] | Callable[[int], Sequence[str]] = (),
) -> dict[tuple[int, str], Compiled]:
    """What each kernel of `name_expressions` uses, by architecture and expression.

    `options`, or what it gives for an architecture, are added to the harness's own. CompileError says file and line.
    Results are kept as built modules are.
    """
    results: dict[tuple[int, str], Compiled] = {}
    for architecture in architectures:
        own = tuple(options(architecture) if callable(options) else options)
        ingredients = [code, str(architecture), *name_expressions, *own, *OPTIONS, version()]

        def build(_: Path, target: Path, architecture: int = architecture, own: tuple[str, ...] = own) -> None:
            found = _compile(code, name_expressions, architecture, own)
            target.write_text(json.dumps({name: asdict(compiled) for name, compiled in found.items()}))

        text = kept("usage", ".json", ingredients, build).read_text()
        tally.compiled |= {(name, architecture) for name in name_expressions}
        results |= {(architecture, name): Compiled(**usage) for name, usage in json.loads(text).items()}
    return results


@cache
def _nvrtc() -> Any:
    return importlib.import_module("cuda.bindings.nvrtc")


def _call(name: str, *args: Any) -> Any:
    """A function of NVRTC; CompileError unless it succeeds."""
    status, *results = getattr(_nvrtc(), name)(*args)
    if status:
        raise CompileError(f"{name}: {_nvrtc().nvrtcGetErrorString(status)[1].decode()}")
    return results[0] if results else None


def version() -> str:
    """Of NVRTC and of NVIDIA's headers."""
    return f"{_nvrtc().nvrtcVersion()[1:]} {cuda_versions()}"


def _compile(code: str, names: Sequence[str], architecture: int, options: Sequence[str]) -> dict[str, Compiled]:
    program = _call("nvrtcCreateProgram", code.encode(), b"kernel.cu", 0, [], [])
    try:
        for name in names:
            _call("nvrtcAddNameExpression", program, name.encode())
        flags = [*OPTIONS, *options, f"--gpu-architecture=sm_{architecture}", *(f"-I{f}" for f in include_folders())]
        (status,) = _nvrtc().nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
        log = bytes(_call("nvrtcGetProgramLogSize", program))
        _call("nvrtcGetProgramLog", program, log)
        text = _PLACE.sub(r"\1:\2: ", log.decode(errors="replace").rstrip("\0\n"))
        if status:
            raise CompileError(f"NVRTC for sm_{architecture}:\n{text}")
        size = _call("nvrtcGetCUBINSize", program)
        return {
            name: _usage(text, _call("nvrtcGetLoweredName", program, name.encode()).decode(), size) for name in names
        }
    finally:
        _nvrtc().nvrtcDestroyProgram(program)


def _usage(log: str, symbol: str, cubin_bytes: int) -> Compiled:
    """What the log of ``ptxas -v`` says of a kernel."""
    _, _, after = log.partition(f"'{symbol}'")
    found = _USAGE.search(after)
    if found is None:
        raise CompileError(f"the log of ptxas does not speak of {symbol}:\n{log}")
    shared = re.search(r"(\d+) bytes smem", found[5])
    stack, stores, loads, registers = map(int, found.groups()[:4])
    return Compiled(registers, stores + loads, int(shared[1]) if shared else 0, stack, cubin_bytes)
