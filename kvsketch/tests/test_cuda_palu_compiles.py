"""The kernels over latents compiled for real architectures, and what Python and C++ say of one another's sizes."""

from __future__ import annotations

import re

import numpy as np
import pytest

from kvsketch.cuda_raw import _compile, palu_plan
from kvsketch.cuda_raw.palu_instances import MMA, PALU
from kvsketch.cuda_raw.palu_plan import FIRST, MMA_ARCHITECTURE, MMA_FILE, MMA_THREADS, REBUILD, SIMT_THREADS, Keys
from kvsketch.layout import DTYPE_CODES, KIND_EXACT
from kvsketch.tests.cuda_host.nvrtc import compile_for, missing

#: Registers of a multiprocessor, and what the blocks on it need to hide one another's waiting.
REGISTERS = 65536
#: Bytes that functions which are not inlined get arguments in.
ARGUMENT_BYTES = 128


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize(
    ("file", "architecture"),
    [
        (file, architecture)
        for file in sorted({file for file, _ in PALU})
        for architecture in (MMA_ARCHITECTURE if file == MMA_FILE else 75, 90)
    ],
)
def test_no_kernel_spills(file: str, architecture: int) -> None:
    expressions = [expression for of, expression in PALU if of == file]
    found = compile_for(_compile.source(file), expressions, [architecture], _compile.options)
    assert set(found) == {(architecture, expression) for expression in expressions}
    for (_, expression), compiled in found.items():
        assert compiled.spill_bytes == 0
        assert compiled.stack_bytes <= ARGUMENT_BYTES
        one_plane = file == MMA_FILE and expression.startswith("attend_latents_mma<1, 1,")
        blocks = 2 if one_plane or file != MMA_FILE else 1
        threads = SIMT_THREADS if file == palu_plan.SIMT_FILE else MMA_THREADS
        assert compiled.registers * threads * blocks <= REGISTERS


def test_instances_are_declared_once() -> None:
    assert len(set(PALU)) == len(PALU) == len(MMA) + 6


def fields(text: str, struct: str) -> list[tuple[str, str]]:
    """Names and types of a struct's fields."""
    body = re.sub(r"//.*", "", re.search(rf"struct {struct} {{(.*?)}};", text, re.DOTALL)[1])  # type: ignore[index]
    found = []
    for declaration in filter(str.strip, body.split(";")):
        kind, names = declaration.split(None, 1)
        found += [(name.strip(), kind) for name in names.split(",")]
    return found


@pytest.mark.parametrize(
    ("file", "struct", "dtype"), [("palu.cuh", "Rebuild", REBUILD), ("palu_first.cu", "FirstTokens", FIRST)]
)
def test_structs_are_those_of_the_kernels(file: str, struct: str, dtype: np.dtype[np.void]) -> None:
    """Names, order and types; both lay them out as C does."""
    numbers = {"i64": np.int64, "int": np.int32, "float": np.float32}
    found = fields(_compile.source(file), struct)
    assert [name for name, _ in found] == list(dtype.names or ())
    assert all(dtype[name] == numbers[kind] for name, kind in found)
    assert dtype.isalignedstruct


@pytest.mark.parametrize(
    ("file", "name", "value"),
    [
        ("palu.cuh", "EXACT", KIND_EXACT),
        *(("palu.cuh", name.upper(), code) for name, code in DTYPE_CODES.items()),
        ("palu_simt.cu", "MOST_QUERIES", palu_plan.SIMT_QUERIES),
        ("palu_simt.cu", "WARPS", SIMT_THREADS // 32),
        ("palu_words.cuh", "MMA_WARPS", palu_plan.MMA_WARPS),
        ("palu_mma.cu", "SCORE_PAD", palu_plan.SCORE_PAD),
    ],
)
def test_constants_are_those_of_the_kernels(file: str, name: str, value: int) -> None:
    found = re.search(rf"\b{name} = (\d+)[,;]", _compile.source(file))
    assert found is not None
    assert int(found[1]) == value


def test_columns_of_keys() -> None:
    """Blocks of 32 columns, those that are turned first: each half of the pairs is padded on its own."""
    assert (Keys(1, 128, rotary=128).turned, Keys(1, 128, rotary=128).blocks) == (4, 4)
    assert (Keys(1, 80, rotary=20).turned, Keys(1, 80, rotary=20).blocks) == (1, 3)
    assert (Keys(1, 8).turned, Keys(1, 8).blocks) == (0, 1)
