"""Attention's kernels compiled for real architectures, and what Python and C++ say of one another's sizes."""

from __future__ import annotations

import re
from itertools import groupby

import numpy as np
import pytest

from kvsketch.codecs import Codec, Exact, GroupedInts, SignSketch, TokenInts
from kvsketch.cuda_raw import _compile, attention_simt
from kvsketch.cuda_raw.attention_instances import ATTENTION
from kvsketch.cuda_raw.attention_plan import SHAPES, SHARED_BYTES, STATIC_BYTES, shared_limit
from kvsketch.layout import SideSpec, page_layout
from kvsketch.tests.cuda_host.nvrtc import ARCHITECTURES, compile_for, missing

#: Registers that let a multiprocessor hold 16 warps, of its 65536.
REGISTERS = 128
SKETCH = SignSketch(m=256, outliers=8, outlier_m=256)


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize("architecture", [75, 90])
@pytest.mark.parametrize("file", sorted({file for file, _ in ATTENTION}))
def test_no_kernel_spills(file: str, architecture: int) -> None:
    expressions = [expression for of, expression in ATTENTION if of == file]
    found = compile_for(_compile.source(file), expressions, [architecture], _compile.options)
    assert set(found) == {(architecture, expression) for expression in expressions}
    for compiled in found.values():
        assert compiled.spill_bytes == compiled.stack_bytes == 0
        assert compiled.registers <= REGISTERS


def test_instances_are_declared_once() -> None:
    assert len(set(ATTENTION)) == len(ATTENTION)
    assert {file for file, _ in groupby(sorted(ATTENTION), key=lambda instance: instance[0])} == {
        "attention_simt.cu",
        "attention_exact.cu",
        "attention_combine.cu",
    }


def test_shapes_are_the_struct_of_the_kernels() -> None:
    """Names, order and types; both lay them out as C does."""
    text = _compile.source("attention.cuh")
    numbers = {"i64": np.int64, "int": np.int32, "float": np.float32}

    def fields(struct: str) -> list[tuple[str, str]]:
        body = re.sub(r"//.*", "", re.search(rf"struct {struct} {{(.*?)}};", text, re.DOTALL)[1])  # type: ignore[index]
        found = []
        for declaration in filter(str.strip, body.split(";")):
            kind, names = declaration.split(None, 1)
            found += [(name.strip(), kind) for name in names.split(",")]
        return found

    assert [name for name, _ in fields("SideSpec")] == list(SideSpec._fields)
    assert {kind for _, kind in fields("SideSpec")} == {"int"}
    assert [name for name, _ in fields("Shapes")] == list(SHAPES.names or ())
    for name, kind in fields("Shapes"):
        assert SHAPES[name] == numbers[kind] if kind in numbers else SHAPES[name].names == SideSpec._fields
    assert SHAPES.isalignedstruct


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("keys", [Exact(), GroupedInts(2, 128), TokenInts(3), SignSketch(m=1024), SKETCH], ids=str)
def test_blocks_fit_every_architecture(keys: Codec, architecture: int) -> None:
    for d, dv in ((1, 1), (128, 128), (512, 512)):
        if d < SKETCH.outliers and keys is SKETCH:
            continue
        layout = page_layout(keys, GroupedInts(2, 32), d, dv)
        for queries in (1, 2, 4, 5, 128):
            for kernel in (
                attention_simt.page_kernel(layout, queries, architecture),
                attention_simt.exact_kernel(layout, queries, architecture),
            ):
                assert kernel.shared <= shared_limit(architecture)
                assert kernel.threads * REGISTERS <= 65536
                assert kernel.queries in attention_simt.TILES
                assert dv <= kernel.threads


def test_an_architecture_that_is_not_known_gets_what_every_one_has() -> None:
    assert shared_limit(75) == shared_limit(999) == (64 << 10) - STATIC_BYTES
    assert min(SHARED_BYTES.values()) > 64 << 10


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"values have 600 channels.*at most 512.*engine='reference'"):
        attention_simt.page_kernel(page_layout(Exact(), TokenInts(3), 8, 600), 4, 90)
    with pytest.raises(ValueError, match=r"keys of SignSketch.*shared memory a query.*engine='reference'"):
        attention_simt.page_kernel(page_layout(SignSketch(m=65536), Exact(), 8, 8), 4, 90)
