"""Which kernels were launched, and how long it took to have them: compiled by NVRTC, or found where CuPy keeps them.

Also a plugin of pytest, ``-p benchmarks.gpu.launches``: it writes a session's kernels to the file that
:data:`FILE_VARIABLE` names, and runs only the first tests of each file where :data:`FEW_VARIABLE` says how many.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE_VARIABLE = "KVSKETCH_GPU_LAUNCHES"
FEW_VARIABLE = "KVSKETCH_GPU_FEW_TESTS"

#: A kernel: its file and its name expression.
Kernel = tuple[str, str]


@dataclass
class Launches:
    """How often each kernel was launched, and seconds that went into having those that were not at hand."""

    counts: Counter[Kernel] = field(default_factory=Counter)
    preparing_seconds: float = 0.0

    def names(self) -> list[str]:
        """The kernels as texts, ``"file: expression"``, in order."""
        return [f"{file}: {expression}" for file, expression in sorted(self.counts)]


class _Recorder:
    """In place of the compiler's table of kernels: asks it, and notes what was asked for and how long it took."""

    def __init__(self, original: Any, launches: Launches) -> None:
        self._original = original
        self._launches = launches
        self.cache_clear = original.cache_clear
        self.cache_info = original.cache_info

    def __call__(self, file: str, expression: str, architecture: int) -> Any:
        missed = self.cache_info().misses
        start = time.perf_counter()
        function = self._original(file, expression, architecture)
        if self.cache_info().misses > missed:
            self._launches.preparing_seconds += time.perf_counter() - start
        self._launches.counts[file, expression] += 1
        return function


@contextmanager
def recorded() -> Iterator[Launches]:
    """What is launched inside."""
    from kvsketch.cuda_raw import _compile

    launches, original = Launches(), _compile._function
    _compile._function = _Recorder(original, launches)  # type: ignore[assignment]
    try:
        yield launches
    finally:
        _compile._function = original


def declared() -> set[Kernel]:
    """The kernels that the package's modules called ``...instances`` list, as tuples of (file, expression)."""
    package = importlib.import_module("kvsketch.cuda_raw")
    found: set[Kernel] = set()
    for module in pkgutil.iter_modules(package.__path__):
        if module.name.endswith("instances"):
            for listed in vars(importlib.import_module(f"kvsketch.cuda_raw.{module.name}")).values():
                if isinstance(listed, tuple) and listed and all(map(_is_kernel, listed)):
                    found |= {(file, expression) for file, expression in listed}
    return found


def _is_kernel(x: Any) -> bool:
    return isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], str) and x[0].endswith(".cu")


def write_kernels(file: Path, launches: Launches) -> None:
    """What :func:`read_kernels` reads."""
    file.write_text(json.dumps({"kernels": sorted(launches.counts), "seconds": launches.preparing_seconds}))


def read_kernels(file: Path) -> tuple[set[Kernel], float]:
    """Kernels that a session of pytest launched, and seconds that it took to have them."""
    contents = json.loads(file.read_text())
    return {(source, expression) for source, expression in contents["kernels"]}, contents["seconds"]


# -- the plugin of pytest ---------------------------------------------------------------------------------------------

_session = ExitStack()


def pytest_configure(config: Any) -> None:
    """Record from here on."""
    if FILE_VARIABLE in os.environ:
        launches = _session.enter_context(recorded())
        _session.callback(write_kernels, Path(os.environ[FILE_VARIABLE]), launches)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Keep the first tests of each file, where there are to be few."""
    few = int(os.environ.get(FEW_VARIABLE, 0))
    if few:
        kept: Counter[Any] = Counter()
        first = []
        for item in items:
            kept[item.path] += 1
            if kept[item.path] <= few:
                first.append(item)
        items[:] = first


def pytest_unconfigure(config: Any) -> None:
    """Write what was recorded."""
    _session.close()
