"""What the library promises of itself: names, docstrings, engines, and a light import."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import kvsketch
from kvsketch._contents import OPERATIONS
from kvsketch._dispatch import ENGINES, engine_for, engine_module, implementation

#: Modules that importing may load NumPy and ml_dtypes only.
LIGHT = (
    *("attention", "bitpack", "bounds", "cache", "codecs", "environment", "kivi", "layout", "methods", "pages", "qjl"),
    *("palu", "rotation", "storage"),
)
#: Modules that tests import, which may load SciPy besides.
FOR_TESTS = ("statistical_tests", "testing")
#: Modules of functions on arrays, and those of their functions that take no array.
ARRAY_MODULES = ("attention", "bitpack", "kivi", "pages", "palu", "qjl", "rotation")
NO_ARRAYS = {"bitpack.packed_bytes", "palu.check_latent_codec", "rotation.draw_projection", "rotation.hadamard_block"}


def public_modules() -> Iterator[ModuleType]:
    for info in pkgutil.iter_modules(kvsketch.__path__):
        if not info.name.startswith("_") and not info.ispkg:
            yield importlib.import_module(f"kvsketch.{info.name}")


def own_functions(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """Public functions that `module` defines itself."""
    return {
        name: member
        for name, member in vars(module).items()
        if not name.startswith("_") and inspect.isfunction(member) and member.__module__ == module.__name__
    }


def dispatched() -> list[str]:
    """Every operation that a public module, or what it shares with caches, asks an engine for."""
    found: set[str] = set()
    for name in (*ARRAY_MODULES, "_attend"):
        source = Path(importlib.import_module(f"kvsketch.{name}").__file__ or "").read_text(encoding="utf-8")
        found |= set(re.findall(r'implementation\(\s*"(\w+\.\w+)"', source))
    return sorted(found)


def test_all_lists_exactly_the_public_names() -> None:
    modules = {name for name, member in vars(kvsketch).items() if inspect.ismodule(member)}
    names = {name for name in vars(kvsketch) if not name.startswith("_")}
    assert set(kvsketch.__all__) == names - (modules - {"bounds"})
    assert len(set(kvsketch.__all__)) == len(kvsketch.__all__)


def test_everything_public_is_documented() -> None:
    missing = []
    for module in public_modules():
        if not module.__doc__:
            missing.append(module.__name__)
        for name, member in vars(module).items():
            if name.startswith("_") or getattr(member, "__module__", None) != module.__name__:
                continue
            if (inspect.isfunction(member) or inspect.isclass(member)) and not inspect.getdoc(member):
                missing.append(f"{module.__name__}.{name}")
    for name in kvsketch.__all__:
        member = getattr(kvsketch, name)
        if (inspect.isfunction(member) or inspect.isclass(member)) and not member.__doc__:
            missing.append(f"kvsketch.{name}")
    assert not missing


@pytest.mark.parametrize("name", ARRAY_MODULES)
def test_array_functions_take_an_engine_last(name: str) -> None:
    functions = own_functions(importlib.import_module(f"kvsketch.{name}"))
    assert functions
    for function_name, function in functions.items():
        if f"{name}.{function_name}" in NO_ARRAYS:
            assert "engine" not in inspect.signature(function).parameters
            continue
        last = list(inspect.signature(function).parameters.values())[-1]
        assert (last.name, last.kind, last.default) == ("engine", inspect.Parameter.KEYWORD_ONLY, None), function_name


def test_operations_are_found() -> None:
    assert {"attention.attend", "bitpack.pack_signs", "kivi.key_scores", "qjl.sketch_scores"} <= set(dispatched())
    assert set(OPERATIONS) <= set(dispatched())


@pytest.mark.parametrize("operation", dispatched())
def test_engines_have_the_signature_of_the_reference(operation: str) -> None:
    family, _, name = operation.partition(".")
    reference = implementation(operation, np.empty(0), engine="reference")
    wanted = [(p.name, p.kind, p.default) for p in inspect.signature(reference).parameters.values()]
    offered = 0
    for engine in ENGINES["numpy"]:
        function = getattr(engine_module(engine, family), name, None)
        if function is not None:
            offered += 1
            parameters = inspect.signature(function).parameters.values()
            assert [(p.name, p.kind, p.default) for p in parameters] == wanted, engine
    assert offered == len(ENGINES["numpy"])


@pytest.mark.parametrize("operation", sorted({*OPERATIONS, *(o for o in dispatched() if o.startswith("pages."))}))
def test_numba_engine_covers_what_a_cache_uses(operation: str) -> None:
    assert engine_for(operation, np.empty(0)) == "numba_cpu"


def test_a_named_engine_that_cannot_run_raises() -> None:
    x = np.ones((1, 1, 2, 8), np.float32)
    with pytest.raises(ValueError, match="'cuda_raw' does not run on numpy arrays"):
        kvsketch.pack_signs(x, engine="cuda_raw")
    with pytest.raises(ValueError, match="'numpy' does not run on numpy arrays"):
        kvsketch.engine_for("bitpack.pack_signs", x, engine="numpy")


def loaded_by(program: str) -> set[str]:
    """Top-level names of the modules that a fresh interpreter has after `program`."""
    program += "\nimport sys; print(*{name.partition('.')[0] for name in sys.modules})"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


HEAVY = {"numba", "llvmlite", "cupy", "torch", "transformers", "scipy", "safetensors", "matplotlib", "rich", "typer"}


@pytest.mark.parametrize(
    ("modules", "also"),
    [
        (["kvsketch"], set()),
        ([f"kvsketch.{n}" for n in LIGHT], set()),
        ([f"kvsketch.{n}" for n in FOR_TESTS], {"scipy"}),
    ],
    ids=["package", "modules", "tests"],
)
def test_import_is_light(modules: list[str], also: set[str]) -> None:
    loaded = loaded_by("\n".join(f"import {module}" for module in modules))
    assert {"kvsketch", "numpy", "ml_dtypes"} <= loaded
    assert loaded & HEAVY == also


def test_light_modules_are_all_but_those_of_the_command_line() -> None:
    commands = {"charts", "cli", "cli_palu", "cli_palu_report", "cli_palu_tune", "cli_validate", "console"}
    commands |= {"evaluation", "measurement", "report"}
    assert {module.__name__.partition(".")[2] for module in public_modules()} - commands == {*LIGHT, *FOR_TESTS}


def test_show_config_prints_what_runs(capsys: pytest.CaptureFixture[str]) -> None:
    kvsketch.show_config()
    printed = capsys.readouterr().out
    for heading in ("versions:", "engines:", "devices:", "threads:", "kernel caches:"):
        assert heading in printed
    assert f"numpy: {np.__version__}" in printed
    assert "numba_cpu, reference" in printed
