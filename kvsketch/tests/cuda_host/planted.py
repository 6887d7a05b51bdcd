"""Bugs planted in the sources of kernels: all in one build, each behind a switch of the runtime.

A build takes seconds and a run none, so that a bug costs a run. What is planted is a text in place of another one;
files stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from typing import Protocol

import pytest

from kvsketch.cuda_raw import _compile
from kvsketch.tests.cuda_host.modes import running
from kvsketch.tests.cuda_host.runtime import runtime_library


class Planted(Protocol):
    """`old` of the sources becomes `new` where the bug's switch is on.

    `new` is an expression in place of another one, or all of the new text where it says ``PLANTED``, which is true
    where the switch is on; empty, the statement that `old` begins with is left out.
    """

    @property
    def old(self) -> str: ...
    @property
    def new(self) -> str: ...


def with_switches(source: str, bugs: Mapping[str, Planted]) -> str:
    """`source` with every bug whose text is in it; :func:`planted` switches one on."""
    changed = source
    for number, (name, bug) in enumerate(bugs.items(), 1):
        if bug.old not in source:
            continue
        if bug.old not in changed:
            raise ValueError(f"bug {name!r}: an earlier bug changed its text {bug.old!r}; list it before that one")
        changed = changed.replace(bug.old, _switched(bug).replace("PLANTED", f"(cuda_host_planted() == {number})"))
    return changed


def _switched(bug: Planted) -> str:
    if "PLANTED" in bug.new:
        return bug.new
    return f"(PLANTED ? {bug.new} : {bug.old})" if bug.new else f"if (!PLANTED)\n{bug.old}"


@contextmanager
def checked_with(bugs: Mapping[str, Planted]) -> Iterator[None]:
    """Inside, launches are checked and their kernels built with `bugs`, none of which is there before `planted`."""
    given = _compile.source
    # Kernels that were built before are not used, nor these later.
    _compile._function.cache_clear()
    with pytest.MonkeyPatch.context() as patch, running("check"):
        patch.setattr(_compile, "source", cache(lambda file: with_switches(given(file), bugs)))
        yield
    _compile._function.cache_clear()


@contextmanager
def planted(name: str, bugs: Mapping[str, Planted]) -> Iterator[None]:
    """Inside, the bug of that name is there; AssertionError where no source has its text."""
    sources = (path for path in files("kvsketch.cuda_raw").iterdir() if path.name.endswith((".cu", ".cuh")))
    assert any(bugs[name].old in path.read_text() for path in sources), f"no source has {bugs[name].old!r}"
    with switched_on([*bugs].index(name)):
        yield


@contextmanager
def switched_on(number: int) -> Iterator[None]:
    """Inside, the switch of bug `number` is on, counted from 0."""
    runtime = runtime_library()[1]
    runtime.cuda_host_plant(number + 1)
    try:
        yield
    finally:
        runtime.cuda_host_plant(0)
