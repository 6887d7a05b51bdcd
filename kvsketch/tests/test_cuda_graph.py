"""Decode steps on a device that wait for nothing, captured once in a CUDA graph and launched for every token."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvsketch.cuda_raw import _compile, attention, device_step
from kvsketch.tests.cache_cases import make_cache, make_tokens
from kvsketch.tests.cuda_attention_cases import assert_same_bytes, take_simt
from kvsketch.tests.cuda_host import CudaHostError, nvrtc, running
from kvsketch.tests.cuda_host.devices import counts
from kvsketch.tests.cuda_host.fixtures import needs_compiler, needs_harness
from kvsketch.tests.cuda_step_cases import (
    COUNTS,
    DV,
    HQ,
    SETTINGS,
    TOLERANCE,
    B,
    Captured,
    begin,
    make_example,
)
from kvsketch.tests.page_cases import DTYPES

pytestmark = needs_compiler

#: KIVI with 2 bits, sketches with outlier channels, and pages of exact numbers.
METHODS = ("ints2-ints2", "outliers-ints1", "exact-exact")


@pytest.fixture(autouse=True)
def _fast() -> Iterator[None]:
    with running("fast"):
        yield


@pytest.mark.parametrize("pair", METHODS)
def test_a_graph_takes_all_steps(cupy: Any, pair: str) -> None:
    """After `reserve` no buffer moves, though pages become due; nothing is waited for, nor sent without a page."""
    tokens = make_example(160)
    here, there = begin(cupy, pair, tokens, 80)
    here.flush()
    there.flush()
    there.reserve(160)
    step, addresses = Captured(cupy, there), set()
    options: dict[str, Any] = {"softcap": 20.0, "sink_logits": np.linspace(-1, 2, HQ, dtype=np.float32)}
    on_device = options | {"sink_logits": cupy.asarray(options["sink_logits"])}
    sent, placed = [], []
    for i in range(80, 152):
        q, k, v = tokens.step(i)
        found = step((q, k, v), **on_device)
        here.append(k, v)
        expected = here.attend(q, **options)
        np.testing.assert_allclose(found.astype(np.float32), expected.astype(np.float32), atol=TOLERANCE, rtol=4e-3)
        view = there.view()
        addresses.add(tuple(x.data.ptr for x in (view.pages, view.window_k, view.window_v, view.sink_k)))
        placed.append((view.page_counts.tolist(), view.window_starts.tolist()))
        if i > 80 and COUNTS:
            assert step.waits[0] == 0
            sent.append(step.waits[1])
    assert step.captures == 2  # the first step, which was not captured, and one capture
    assert len(addresses) == 1
    if COUNTS:
        # The counts, where a page was encoded or a window moved to the front of its buffer.
        assert sent == [before != after for before, after in itertools.pairwise(placed)]
        assert 2 * 3 <= sum(sent) < 12
    np.testing.assert_array_equal(there.lengths, here.lengths)
    here.flush()
    there.flush()
    assert_same_bytes(there, here)
    assert there.saturated == here.saturated
    assert there.report()["kernels"].keys() == {"attention.attend"}


@pytest.mark.parametrize("level", ["mma", "simt"])
def test_a_graph_in_check_mode(cupy: Any, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from the first token on: tokens go to the first ones while there is room for these."""
    if level == "simt":
        take_simt(monkeypatch)
    tokens = make_example(48)
    here, there = begin(cupy, "ints2-ints2", tokens, 3)
    there.reserve(60)
    step = Captured(cupy, there)
    with running("check"):
        for i in range(3, 8):
            q, k, v = tokens.step(i)
            found = step((q, k, v))
            here.append(k, v)
            expected = here.attend(q)
            np.testing.assert_allclose(found.astype(np.float32), expected.astype(np.float32), atol=TOLERANCE)
    assert step.captures == 2
    assert there.view().sink_counts.tolist() == [3, 3]
    assert there.lengths.tolist() == here.lengths.tolist() == [8, 7]
    assert_same_bytes(there, here)


def test_buffers_that_move_are_told(cupy: Any) -> None:
    """Without `reserve` pages outgrow their buffer: another number, and the old graph would write to freed memory."""
    tokens = make_example(160)
    here, there = begin(cupy, "ints2-ints2", tokens, 40)
    step, numbers, graphs = Captured(cupy, there), [], []
    for i in range(40, 140):
        q, k, v = tokens.step(i)
        found = step((q, k, v))
        numbers.append(step.buffers)
        graphs.append(step.graph)
        here.append(k, v)
        expected = here.attend(q)
        np.testing.assert_allclose(found.astype(np.float32), expected.astype(np.float32), atol=TOLERANCE)
    assert step.captures == 1 + len(set(numbers[1:]))
    assert len(set(numbers[1:])) >= 3
    assert_same_bytes(there, here)
    if COUNTS:
        with pytest.raises(CudaHostError, match="freed after the capture"):
            graphs[1].launch()


def test_counts_that_others_change_reach_the_graph(cupy: Any) -> None:
    """Rows that change places, a crop and a flush between launches of one graph."""
    tokens = make_example(140)
    here, there = begin(cupy, "ints2-ints2", tokens, 100)
    for cache in (here, there):
        cache.flush()
    there.reserve(200)
    step = Captured(cupy, there)

    def take(i: int) -> None:
        q, k, v = tokens.step(i)
        found = step((q, k, v))
        here.append(k, v)
        expected = here.attend(q)
        np.testing.assert_allclose(found.astype(np.float32), expected.astype(np.float32), atol=TOLERANCE)

    changes = {104: lambda c: c.reorder([1, 0]), 108: lambda c: c.crop(-3), 112: lambda c: c.flush()}
    for i in range(100, 116):
        take(i)
        if i in changes:
            changes[i](here)
            changes[i](there)
    assert step.captures == 2
    there.copy().append(*(cupy.asarray(x) for x in tokens.step(116)[1:]))
    take(116)
    assert step.captures == 2


@pytest.mark.parametrize(("dtype", "exact_dtype"), [("bfloat16", None), ("float32", "float16"), ("float16", "float32")])
def test_dtypes_of_tokens(cupy: Any, dtype: str, exact_dtype: str | None) -> None:
    """Tokens are stored as they come, or rounded as `append` rounds them; heads need not be whole vectors."""
    k, v = make_tokens(3, 2, 2, 12, d=20, dv=13, dtype=DTYPES[dtype])
    options = {"exact_dtype": exact_dtype, "sink_tokens": 3, "checked": False}
    here, there = make_cache("exact-exact", **options), make_cache("exact-exact", **options)
    here.append(k, v)
    there.append(cupy.asarray(k[:, :, :2]), cupy.asarray(v[:, :, :2]))
    with running("check"):
        for i in range(2, 12):
            token = [cupy.asarray(np.ascontiguousarray(x[:, :, i : i + 1])) for x in (k, k, v)]
            there.prepare_step()
            found = there.step(*token)
    assert_same_bytes(there, here)
    expected = here.attend(k[:, :, 11:]).astype(np.float32)
    np.testing.assert_allclose(found.get().astype(np.float32), expected, atol=0.02 if dtype == "bfloat16" else 2e-3)


@needs_harness
def test_encoding_does_not_wait(cupy: Any) -> None:
    """The count of saturated numbers stays on the device until somebody asks for it."""
    tokens = make_example(120)
    _, there = begin(cupy, "outliers-ints1", tokens, 100)
    there.flush()
    k, v = (cupy.asarray(x[:, :, 100:]) * np.float16(2000) for x in tokens[:2])
    counts.reset()
    there.append(k, v)
    there.append(k, v)
    there.flush()
    assert counts.synchronisations == 0
    twin = there.copy()
    assert there.saturated == twin.saturated
    assert there.to("cpu").saturated == there.saturated


@pytest.mark.parametrize("pair", METHODS)
def test_steps_on_the_host_are_append_and_attend(pair: str) -> None:
    tokens = make_example(110)
    caches = [make_cache(pair, **SETTINGS) for _ in range(2)]
    for cache in caches:
        cache.append(tokens.k[:, :, :70], tokens.v[:, :, :70])
    usual, stepped = caches
    out = np.empty((B, HQ, 1, DV), np.float16)
    for i in range(70, 110):
        q, k, v = tokens.step(i)
        usual.append(k, v)
        stepped.prepare_step()
        assert stepped.step(q, k, v, out=out) is out
        np.testing.assert_array_equal(out, usual.attend(q))
        with pytest.raises(ValueError, match="not prepared"):
            stepped.step(q, k, v)
    assert_same_bytes(stepped, usual)
    stepped.prepare_step()
    with pytest.raises(ValueError, match="keys hold nan"):
        stepped.step(q, k * np.float16("nan"), v)
    assert stepped.length == usual.length
    np.testing.assert_array_equal(stepped.step(q, k, v), stepped.attend(q))


# ---- what would go unseen ----

BUGS = {
    "counted before all have read the counts": ("  __syncthreads();\n  // Nobody", "  // Nobody", "RACE"),
    "counted twice": (
        "++*(to_sinks ? sinks : window);",
        "*(to_sinks ? sinks : window) += 2;",
        "Mismatched|UNINITIALISED",
    ),
    "behind a window without a start": ("counts[2 * token.b + row] + *window", "*window", "Mismatched"),
    "the first head alone": ("at / units * room * units", "0", "RACE|Mismatched"),
}


@needs_harness
@pytest.mark.parametrize("name", BUGS)
def test_a_bug_in_storing_a_token_is_seen(cupy: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    old, new, says = BUGS[name]
    usual = _compile.source
    assert old in usual("device_step.cu")
    monkeypatch.setattr(_compile, "source", lambda file: usual(file).replace(old, new))
    _compile._function.cache_clear()
    tokens = make_example(60)
    here, there = begin(cupy, "ints2-ints2", tokens, 57)

    def take_steps() -> None:
        for i in range(57, 59):
            q, k, v = tokens.step(i)
            here.append(k, v)
            there.prepare_step()
            found = there.step(*map(cupy.asarray, (q, k, v)))
            np.testing.assert_allclose(found.get(), here.attend(q), atol=TOLERANCE, rtol=4e-3)

    try:
        with running("check"), pytest.raises((CudaHostError, AssertionError), match=f"(?s){says}"):
            take_steps()
    finally:
        _compile._function.cache_clear()


def test_sizes_are_those_of_the_kernel() -> None:
    text = _compile.source("device_step.cu")
    fields = re.sub(r"//.*", "", re.search(r"struct Token {(.*?)};", text, re.DOTALL)[1])  # type: ignore[index]
    assert re.findall(r"\w+(?=[,;])", fields) == list(device_step.TOKEN.names or ())
    assert f"TOKEN_THREADS = {device_step.THREADS}," in text
    text = _compile.source(attention.COMBINE_FILE)
    assert f"SKETCH_QUERIES = {attention.SKETCH_QUERIES}, SKETCH_ROWS = {attention.SKETCH_ROWS}," in text


@pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))
def test_the_kernel_compiles_without_spills() -> None:
    found = nvrtc.compile_for(_compile.source(device_step.FILE), ["append_token"], [75, 90], _compile.options)
    assert {compiled.spill_bytes for compiled in found.values()} == {0}
