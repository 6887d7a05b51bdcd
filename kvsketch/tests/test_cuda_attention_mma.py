"""Decode attention of the CUDA engine on tensor cores: every instantiation, sizes of numbers, what is served."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvsketch import pages
from kvsketch.attention import CacheView
from kvsketch.codecs import Codec, Exact, GroupedInts, SignSketch, TokenInts
from kvsketch.cuda_raw import attention
from kvsketch.cuda_raw.attention_mma import FILE, page_kernel
from kvsketch.cuda_raw.attention_mma_instances import ATTENTION_MMA, KIVI, MMA, OUTLIERS, SKETCH, Mma
from kvsketch.cuda_raw.attention_plan import PageKernel, shared_limit
from kvsketch.layout import page_layout
from kvsketch.testing import assert_same
from kvsketch.tests.cuda_attention_cases import MASKS, attend_on_device, mask_options, queries, row_of
from kvsketch.tests.cuda_host import running
from kvsketch.tests.cuda_host.fixtures import needs_compiler
from kvsketch.tests.cuda_host.stand_in import available
from kvsketch.tests.page_cases import DTYPES, attend_exactly, make_numbers, make_view, stored_numbers

TOKENS = (1, 31, 32, 33, 257, 700)
#: Half a unit in the last place of outputs.
ROUNDING = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def limit_of(keys: Codec, coefficients: str) -> float:
    """Relative L2 error against float64 that coefficients may add, and what tensor cores cut off if they are real."""
    cut = 5e-5 if available() else 0.0
    if isinstance(keys, SignSketch):
        return 1e-2 if coefficients == "int8" else 2e-5 + cut
    return 1e-3 if coefficients == "int8" else 2e-6 + cut


def relative_error(actual: Any, exact: Any) -> float:
    return float(np.linalg.norm(actual.astype(np.float64) - exact) / np.linalg.norm(exact))


def check(
    cupy: Any, q: Any, view: CacheView, tokens: list[tuple[Any, Any]], coefficients: str = "int16", **options: Any
) -> Any:
    """The result on tensor cores, whose error is that of coefficients and of the output's dtype."""
    rows = q.shape[1] // view.pages.shape[1] * q.shape[2]
    kernel, reason = attention.chosen_kernel(view.layout, rows, 90, coefficients)
    assert kernel.level == "mma", reason
    actual = attend_on_device(cupy, q, view, coefficients=coefficients, **options)
    error = relative_error(actual, attend_exactly(q, tokens, **options)[0])
    limit = limit_of(view.layout.keys.codec, coefficients) + ROUNDING[str(q.dtype)]
    assert error <= limit, f"error {error:.2e}, limit {limit:.2e}"
    return actual


#: Combinations that are not declared.
OTHERS = (
    Mma(KIVI, KIVI, 128, 128, 8, 1),
    Mma(KIVI, KIVI, 128, 128, 7, 1, "int8"),
    Mma(KIVI, KIVI, 128, 128, 3, 5, "int8"),
    Mma(GroupedInts(4, 64), GroupedInts(4, 64), 128, 96, 7, 1),
    Mma(GroupedInts(3, 32), GroupedInts(3, 32), 96, 80, 3, 1),
    Mma(GroupedInts(1, 32), GroupedInts(1, 24), 80, 64, 4, 2),
    Mma(GroupedInts(2, 128), GroupedInts(8, 8), 256, 256, 3, 3),
    Mma(GroupedInts(2, 64), GroupedInts(2, 8), 8, 8, 1, 2),
    Mma(SignSketch(m=100), GroupedInts(4, 32), 64, 8, 3, 2),
    Mma(SignSketch(m=48, kind="gaussian"), GroupedInts(1, 32), 96, 64, 8, 2),
    Mma(SignSketch(m=48, outliers=3, outlier_m=20), GroupedInts(3, 32), 80, 96, 3, 5),
    Mma(TokenInts(1), GroupedInts(3, 16), 8, 96, 1, 2),
)


@needs_compiler
@pytest.mark.parametrize("turn", range(len(MMA)), ids=lambda turn: ATTENTION_MMA[turn][1])
def test_every_instance(cupy: Any, monkeypatch: pytest.MonkeyPatch, turn: int) -> None:
    check_instance(cupy, monkeypatch, MMA[turn], turn)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("turn", range(len(OTHERS)), ids=lambda turn: OTHERS[turn].kernel(90).expression)
def test_instances_that_are_not_declared(cupy: Any, monkeypatch: pytest.MonkeyPatch, turn: int) -> None:
    assert (FILE, OTHERS[turn].kernel(90).expression) not in ATTENTION_MMA
    check_instance(cupy, monkeypatch, OTHERS[turn], len(MMA) + turn)


def check_instance(cupy: Any, monkeypatch: pytest.MonkeyPatch, instance: Mma, turn: int) -> None:
    """Rows of all lengths, by one block or split; masks and dtypes take turns."""
    if turn % 2:
        monkeypatch.setattr(attention, "multiprocessors", lambda _: 0)
    dtype = tuple(DTYPES)[turn % len(DTYPES)]
    rows = [row_of(n, instance.keys, instance.values) for n in TOKENS[-2 if instance.d == 256 else 0 :]]
    view, tokens = make_view(
        instance.keys, instance.values, d=instance.d, dv=instance.dv, h=1, rows=rows, dtype=dtype, seed=turn
    )
    q = queries(len(rows), instance.ratio, instance.s, instance.d, dtype, seed=turn)
    options = mask_options(MASKS[turn % len(MASKS)], view, instance.ratio, instance.s, seed=turn)
    with running("check"):
        checked = check(cupy, q, view, tokens, instance.coefficients, **options)
    with running("fast", "random", seed=turn):
        again = attend_on_device(cupy, q, view, coefficients=instance.coefficients, **options)
    assert_same(again, checked)


def test_instances_are_declared_once_and_cover_the_codecs() -> None:
    assert len(set(ATTENTION_MMA)) == len(ATTENTION_MMA) <= 16
    for rest in ("BY_COLUMN, false", "BY_PRODUCT, false", "BY_PRODUCT, true", "NONE, false", "NONE, true"):
        assert any(expression.endswith(f"{rest}>") for _, expression in ATTENTION_MMA)
    for codec in ("IntKeys", "LatentKeys", "IntValues"):
        assert all(
            any(f"{codec}<{bits}, " in expression for _, expression in ATTENTION_MMA) for bits in (1, 2, 3, 4, 8)
        )


def whole_pages(keys: Codec, values: Codec, k: Any, v: Any) -> tuple[CacheView, list[tuple[Any, Any]]]:
    """A row of pages alone that hold k (h, n, d) and v (h, n, dv), and what they keep of them."""
    (h, n, d), dv = k.shape, v.shape[-1]
    layout = page_layout(keys, values, d, dv)
    records = np.zeros((1, h, n // layout.page_tokens, layout.record_bytes), np.uint8)
    key_records, value_records = np.split(records[0], [layout.value_offset], axis=-1)
    pages.encode_keys(k, layout.keys, out=key_records, engine="reference")
    pages.encode_values(v, layout.values, out=value_records, engine="reference")
    none, zero = (np.zeros((1, h, 1, width), np.float32) for width in (d, dv)), np.zeros(1, np.int64)
    exact_k, exact_v = none
    count = np.array([records.shape[2]])
    view = CacheView(layout, records, count, exact_k, exact_v, zero, exact_k, exact_v, zero, zero)
    return view, [(stored_numbers(k, layout.keys), stored_numbers(v, layout.values))]


PAGES, WIDTH = 12, 64
#: A factor for each token that grows by a million, a page at a time; shapes (tokens, 1).
RAMP = np.repeat(np.geomspace(1e-3, 1e3, PAGES), 32)[:, None].astype(np.float32)
#: A factor for each channel, so that scales of one page differ; the queries' are its inverse.
SPREAD = np.geomspace(0.05, 20, WIDTH).astype(np.float32)
#: Factors of keys, values and queries. Scores are scaled so that they stay of ordinary size.
RANGES: dict[str, tuple[Any, Any, Any]] = {
    "large keys": (1e3, 1, 1),
    "small keys": (1e-5, 1, 1),
    "large values": (1, 1e3, 1),
    "small values": (1, 1e-5, 1),
    "values that grow": (1, RAMP, 1),
    "values that shrink": (1, RAMP[::-1], 1),
    "keys that grow": (RAMP / 1e3, 1, 1),
    "keys that shrink": (RAMP[::-1] / 1e3, 1, 1),
    "channels of several sizes": (SPREAD, 1, 1 / SPREAD),
    "large queries": (1, 1, 1e9),
    "small queries": (1, 1, 1e-20),
    "no query": (1, 1, 0),
    "scores that grow": (1, 1, 30),
}


@needs_compiler
@pytest.mark.parametrize("name", RANGES)
def test_numbers_of_any_size(cupy: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Nothing overflows or is lost on the way through float16."""
    monkeypatch.setattr(attention, "multiprocessors", lambda _: 0)
    key_factor, value_factor, query_factor = (np.float32(factor) for factor in RANGES[name])
    k, v = (make_numbers((1, 32 * PAGES, WIDTH), seed) for seed in (1, 2))
    view, tokens = whole_pages(KIVI, KIVI, k * key_factor, v * value_factor)
    q = queries(1, 3, 1, WIDTH) * query_factor
    usual = 1.0 if name == "scores that grow" else float(np.max(key_factor * np.ones(1)) * np.max(query_factor)) or 1.0
    scale = WIDTH**-0.5 / (1.0 if name == "channels of several sizes" else usual)
    with running("fast"):
        actual = attend_on_device(cupy, q, view, scale=scale)
    assert relative_error(actual, attend_exactly(q, tokens, scale=scale)[0]) <= 2e-5 + limit_of(KIVI, "int16")


@needs_compiler
def test_a_query_that_sees_nothing_and_one_that_sees_a_token(cupy: Any) -> None:
    k, v = (make_numbers((1, 32 * PAGES, WIDTH), seed) for seed in (1, 2))
    view, tokens = whole_pages(KIVI, KIVI, k, v)
    q = queries(1, 1, 3, WIDTH)
    for limits in ([[0, 1, 33]], [[0, 0, 0]]):
        with running("check"):
            actual = attend_on_device(cupy, q, view, limits=np.array(limits))
        expected = attend_exactly(q, tokens, limits=np.array(limits))[0]
        assert (actual[0, 0, 0] == 0).all()
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("keys", "values", "d", "dv", "reason"),
    [
        (Exact(), KIVI, 128, 128, "keys are exact"),
        (KIVI, Exact(), 128, 128, "values are exact"),
        (KIVI, KIVI, 257, 128, "keys have 257 channels, more than 256"),
        (KIVI, TokenInts(3), 128, 300, "values have 300 channels, more than 256"),
        (TokenInts(3, 24), KIVI, 128, 128, "groups of 24 channels of a token's keys are not whole blocks of 32"),
        (SignSketch(m=1025), KIVI, 128, 128, "the sketch has 1025 rows, more than 1024"),
        (SignSketch(m=8, outliers=9, outlier_m=8), KIVI, 128, 128, "there are 9 outlier channels, more than 8"),
    ],
    ids=str,
)
def test_what_is_not_served_has_a_reason_and_a_kernel(keys: Codec, values: Codec, d: int, dv: int, reason: str) -> None:
    layout = page_layout(keys, values, d, dv)
    assert page_kernel(layout, 4, 90, "int16") == reason
    kernel, given = attention.chosen_kernel(layout, 4, 90)
    assert (kernel.level, given) == ("simt", reason)


def test_architectures_without_asynchronous_copies_are_not_served() -> None:
    reason = page_kernel(page_layout(KIVI, KIVI, 128, 128), 4, 75, "int16")
    assert reason == "the architecture is 75, the kernels on tensor cores are for 80 and later"


@pytest.mark.parametrize("architecture", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("keys", [KIVI, GroupedInts(8, 128), TokenInts(8, 32), SignSketch(m=1024), OUTLIERS], ids=str)
def test_blocks_fit_every_architecture(keys: Codec, architecture: int) -> None:
    for d, dv in ((8, 8), (128, 128), (256, 256)):
        layout = page_layout(keys, GroupedInts(8, 8), d, dv)
        for rows in (1, 4, 5, 8, 9, 16, 64, 128):
            for coefficients in ("int16", "int8"):
                kernel = page_kernel(layout, rows, architecture, coefficients)
                assert isinstance(kernel, PageKernel), kernel
                assert kernel.shared <= shared_limit(architecture)
                assert kernel.tokens % layout.page_tokens == 0
                assert min(rows, 8) <= kernel.queries or (rows <= 4 and kernel.queries == 4)


def test_how_many_query_rows_share_what_is_read() -> None:
    for keys in (KIVI, SKETCH):
        kernel = Mma(keys, KIVI, 128, 128, 8, 16).kernel(90)
        assert (kernel.queries, kernel.threads) == (128, 512)
    assert Mma(OUTLIERS, KIVI, 128, 128, 8, 16).kernel(90).queries == 96
    assert Mma(KIVI, KIVI, 128, 256, 8, 16).kernel(90).queries == 64
