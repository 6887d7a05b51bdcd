"""The built wheel holds what the tree holds, and works from wherever it is put."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from email.parser import HeaderParser
from pathlib import Path

import pytest

import kvsketch

ROOT = Path(kvsketch.__file__).parents[1]
#: Folders of the tree and the packages that they are installed as.
FOLDERS = {
    "kvsketch": "kvsketch",
    "adapters": "kvsketch/adapters",
    "cuda_raw": "kvsketch/cuda_raw",
    "validation": "kvsketch/validation",
}
SUFFIXES = (".py", ".typed", ".j2", ".cu", ".cuh", ".hpp", ".cpp")

pytestmark = pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="kvsketch is installed without its tree")


def tree_files() -> Iterator[tuple[Path, str]]:
    """Every file of the tree that belongs in the wheel, and its name there."""
    for folder, package in FOLDERS.items():
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in SUFFIXES:
                yield path, f"{package}/{path.relative_to(ROOT / folder)}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the tree, so that nothing left in the tree from an earlier build gets in."""
    tree = tmp_path_factory.mktemp("tree")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(tree / "dist"), str(tree)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = (tree / "dist").glob("kvsketch-*-py3-none-any.whl")
    return path


def test_wheel_holds_exactly_the_tree(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}
    wanted = {name: path.read_bytes() for path, name in tree_files()}
    assert sorted(held) == sorted(wanted)
    assert held == wanted
    assert {"kvsketch/page.html.j2", "kvsketch/report.html.j2", "kvsketch/validation/report.html.j2"} <= set(held)
    assert "kvsketch/adapters/transformers_cache.py" in held


def test_wheel_says_what_it_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        info = f"{wheel.name.removesuffix('-py3-none-any.whl')}.dist-info"
        metadata = HeaderParser().parsestr(archive.read(f"{info}/METADATA").decode())
        assert "kvsketch = kvsketch.cli:main" in archive.read(f"{info}/entry_points.txt").decode()
        assert f"{info}/licenses/LICENSE" in archive.namelist()
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert {"hf", "cli", "test"} <= set(metadata.get_all("Provides-Extra", []))
    always = {r.split(">")[0].strip() for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r}
    assert always == {"numpy", "scipy", "numba", "ml_dtypes", "safetensors"}


PROGRAM = """
import importlib.util, pathlib, sys
import numpy as np
import kvsketch
from kvsketch import Cache, GroupedInts

target = pathlib.Path(sys.argv[1])
for name in (
    *("kvsketch", "kvsketch.adapters.transformers_cache", "kvsketch.numba_cpu.attention", "kvsketch.cli"),
    "kvsketch.validation.unbiased",
):
    origin = pathlib.Path(importlib.util.find_spec(name).origin)
    assert origin.is_relative_to(target), (name, origin)
cache = Cache(GroupedInts(bits=4), GroupedInts(bits=4), engine="reference")
x = np.random.default_rng(0).standard_normal((1, 2, 80, 16), dtype=np.float32)
cache.append(x, x)
cache.flush()
print(cache.attend(x[:, :, :1]).shape, cache.page_counts)
"""


def run_unpacked(wheel: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python with `arguments`, in `folder`, where it finds the unpacked `wheel` and not the tree."""
    target = folder / "target"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    environment = os.environ | {"PYTHONPATH": str(target)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=environment)


def test_unpacked_wheel_works_from_its_own_place(wheel: Path, tmp_path: Path) -> None:
    result = run_unpacked(wheel, tmp_path, "-c", PROGRAM, str(tmp_path / "target"))
    assert result.returncode == 0, result.stderr
    assert result.stdout.split("\n")[0] == "(1, 2, 1, 16) [1]"


def test_claims_are_checked_from_an_unpacked_wheel(wheel: Path, tmp_path: Path) -> None:
    few = "(unbiased and reference) or claims_say or compares_nothing"
    options = ("-k", few, "-q", "-rA", "--rootdir", str(tmp_path), "-p", "no:cacheprovider")
    result = run_unpacked(wheel, tmp_path, "-m", "pytest", "--pyargs", "kvsketch.validation", *options)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "PASSED target/kvsketch/validation/test_claims.py::test_claim[unbiased-reference]" in result.stdout


def test_command_validates_from_an_unpacked_wheel(wheel: Path, tmp_path: Path) -> None:
    options = ("--only", "unbiased", "--report", "claims.html", "--jobs", "1")
    result = run_unpacked(wheel, tmp_path, "-m", "kvsketch.cli", "validate", *options)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Wrote claims.html" in result.stdout
    assert "What the theory says" in (tmp_path / "claims.html").read_text(encoding="utf-8")
