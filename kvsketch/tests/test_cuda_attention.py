"""Attention on CUDA without tensor cores: every codec, over shapes that cover all pairs of settings."""

from __future__ import annotations

from typing import Any

import pytest

from kvsketch.codecs import Codec, Exact, GroupedInts, SignSketch, TokenInts
from kvsketch.cuda_raw import attention_simt
from kvsketch.cuda_raw.attention_instances import ATTENTION, EXACT, SIMT, Simt
from kvsketch.layout import DTYPE_CODES, page_layout
from kvsketch.testing import assert_same
from kvsketch.tests.cuda_attention_cases import (
    MASKS,
    attend_on_device,
    check,
    covering_cases,
    mask_options,
    queries,
    row_of,
    take_simt,
)
from kvsketch.tests.cuda_host import running
from kvsketch.tests.cuda_host.fixtures import needs_compiler
from kvsketch.tests.page_cases import Row, make_view

pytestmark = needs_compiler

#: Codecs that a kernel's codec of keys, or of values, serves: groups of all kinds take turns.
KEYS: dict[str, tuple[Codec, ...]] = {
    **{f"IntKeys<{bits}>": tuple(GroupedInts(bits, group) for group in (32, 64, 128)) for bits in (1, 2, 3, 4, 8)},
    **{f"TokenIntKeys<{bits}>": (TokenInts(bits), TokenInts(bits, 24), TokenInts(bits, 8)) for bits in (1, 2, 3, 4, 8)},
    **{f"ExactKeys<{number}>": (Exact(),) for number in attention_simt.NUMBERS},
    "SketchKeys": (
        SignSketch(m=100),
        SignSketch(m=48, kind="gaussian", outliers=3, outlier_m=20),
        SignSketch(m=256, kind="hadamard"),
        SignSketch(m=64, outliers=8, outlier_m=64),
    ),
}
VALUES: dict[str, tuple[Codec, ...]] = {
    **{f"IntValues<{bits}>": tuple(GroupedInts(bits, group) for group in (32, 8, 64, 40)) for bits in (1, 2, 3, 4, 8)},
    **{f"ExactValues<{number}>": (Exact(),) for number in attention_simt.NUMBERS},
}
DTYPE_OF = {"float": "float32", "__half": "float16", "__nv_bfloat16": "bfloat16"}
WIDTHS = (8, 64, 80, 96, 128, 256)
FACTORS: dict[str, tuple[Any, ...]] = {
    "instance": SIMT,
    "n": (1, 31, 32, 33, 257),
    "d": WIDTHS,
    "dv": WIDTHS,
    "ratio": (1, 3, 4, 7, 8),
    "s": (1, 2, 5, 16),
    "dtype": ("float32", "float16", "bfloat16"),
    "mask": MASKS,
    "turn": (0, 1, 2, 3),
}


def exact_dtype(instance: Simt) -> str | None:
    """The dtype of the exact tokens where a codec asks for one."""
    named = {codec.partition("<")[2][:-1] for codec in (instance.keys, instance.values) if codec.startswith("Exact")}
    return DTYPE_OF[named.pop()] if named else None


def allowed(case: Any) -> bool:
    """Whether a case takes kernels that are declared, and is of a size that runs in a moment."""
    instance = case["instance"]
    rows = case["ratio"] * case["s"]
    return (
        (rows == 1) == (instance.queries == 1)
        and exact_dtype(instance) in (None, case["dtype"])
        and (attention_simt.NUMBERS[DTYPE_CODES[case["dtype"]]], instance.queries, instance.warps) in EXACT
        and rows * case["n"] <= 32 * 257
    )


CASES = covering_cases(FACTORS, allowed)


@pytest.fixture(autouse=True)
def _simt(monkeypatch: pytest.MonkeyPatch) -> None:
    take_simt(monkeypatch)


def sides_of(case: Any) -> tuple[Codec, Codec, int, int]:
    """Codecs and widths of a case's keys and values; more than 256 channels take blocks of twice the warps."""
    instance, turn = case["instance"], case["turn"]
    keys, values = (codecs[turn % len(codecs)] for codecs in (KEYS[instance.keys], VALUES[instance.values]))
    return keys, values, case["d"], case["dv"] + (256 if instance.warps == 16 else 0)


def instantiations(case: Any) -> set[tuple[str, str]]:
    """What a case executes."""
    keys, values, d, dv = sides_of(case)
    layout = page_layout(keys, values, d, dv, key_dtype=case["dtype"], value_dtype=case["dtype"])
    kernels = [
        choose(layout, case["ratio"] * case["s"], 90)
        for choose in (attention_simt.page_kernel, attention_simt.exact_kernel)
    ]
    around = {("attention_combine.cu", name) for name in ("prepare_queries", "combine_splits")}
    if attention_simt.sketch_widths(layout.keys.spec)[0]:
        around.add(("attention_combine.cu", "sketch_queries"))
    return {(kernel.file, kernel.expression) for kernel in kernels} | around


def test_the_cases_execute_every_declared_instantiation() -> None:
    executed = [instantiations(case) for case in CASES]
    assert set.union(*executed) == set(ATTENTION)
    simt = {i: ("attention_simt.cu", f"attend_pages_simt<{', '.join(map(str, i))}>") for i in SIMT}
    assert all(simt[case["instance"]] in found for case, found in zip(CASES, executed, strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(v) for v in case.values()))
def test_every_pair_of_settings(cupy: Any, case: Any) -> None:
    keys, values, d, dv = sides_of(case)
    rows = [row_of(case["n"], keys, values), row_of(case["n"] // 2, keys, values)]
    view, tokens = make_view(keys, values, d=d, dv=dv, h=2, rows=rows, dtype=case["dtype"], seed=case["turn"])
    q = queries(2, 2 * case["ratio"], case["s"], d, case["dtype"])
    options = mask_options(case["mask"], view, q.shape[1], q.shape[2], seed=case["turn"])
    with running("check"):
        checked = check(cupy, q, view, tokens, **options)
    with running("fast", "random", seed=case["turn"]):
        assert_same(attend_on_device(cupy, q, view, **options), checked)


@pytest.mark.slow
@pytest.mark.parametrize("dv", [72, 328])
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("keys", KEYS)
def test_every_codec_of_keys_with_every_codec_of_values(cupy: Any, keys: str, values: str, dv: int) -> None:
    """For one query row and for several, by blocks of 8 and of 16 warps."""
    dtypes = {exact_dtype(Simt(name, "", 4)) for name in (keys, values)} - {None}
    if len(dtypes) > 1:
        pytest.skip("the two sides of a cache have one dtype")
    dtype = dtypes.pop() if dtypes else "float32"
    assert dtype is not None
    view, tokens = make_view(
        KEYS[keys][1 % len(KEYS[keys])], VALUES[values][1 % len(VALUES[values])],
        d=40, dv=dv, h=2, rows=[Row(2, 3, 5), Row(0, 1, 0)], dtype=dtype,
    )  # fmt: skip
    for s in (1, 3):
        with running("check"):
            check(cupy, queries(2, 2, s, 40, dtype), view, tokens)
