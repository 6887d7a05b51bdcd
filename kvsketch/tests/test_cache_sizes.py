"""Sizes of a cache: bytes and bits from closed formulas, and the report."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from kvsketch.cache import Cache
from kvsketch.codecs import Codec, Exact, GroupedInts, SignSketch
from kvsketch.methods import METHODS
from kvsketch.numba_cpu._tiers import TIER
from kvsketch.tests.cache_cases import ENGINES, PAIRS, append_in_chunks, make_cache, make_tokens


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def page_side_nbytes(side: str, codec: Codec, page: int, width: int, itemsize: int) -> int:
    """Bytes of one head's page side, from algorithms alone: codes, scales, zeros, norms, channels, padding to 64."""
    if isinstance(codec, Exact):
        used = page * width * itemsize
    elif isinstance(codec, SignSketch):
        used = page * (round_up(codec.m, 16) // 8 + 2)
        if codec.outliers:
            used += page * (round_up(codec.outlier_m, 16) // 8 + 2) + codec.outliers * (1 if width <= 256 else 2)
    else:
        unit = 16 if codec.bits in (1, 3) else 8
        if side == "keys" and isinstance(codec, GroupedInts):
            channels = round_up(width, unit)
            used = page * channels * codec.bits // 8 + page // codec.group * channels * 4
        else:
            used = (
                page * round_up(width, 32) * codec.bits // 8 + page * -(-width // min(codec.group or width, width)) * 4
            )
    return round_up(used, 64)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("pair", [*PAIRS, "prompt"])
@pytest.mark.parametrize(("d", "dv"), [(16, 16), (64, 96), (300, 20)])
def test_bits_per_value_is_a_closed_formula_of_the_live_counts(d: int, dv: int, pair: str, dtype: Any) -> None:
    """T26: everything that is stored counts, to the bit."""
    h, b, n, residual, sinks = 2, 3, 260, 20, 4
    keys, values = (
        PAIRS[pair] if pair in PAIRS else (SignSketch(32, outliers=2, outlier_m=16, outlier_channels="prompt"), Exact())
    )
    k, v = make_tokens(1, b, h, n, d, dv, dtype)
    valid = np.arange(n) >= np.array([[0], [120], [250]])
    for padded in (False, True):
        cache = Cache(keys, values, residual_length=residual, sink_tokens=sinks)
        append_in_chunks(cache, k, v, [n], valid if padded else None)
        cache.flush()
        lengths = valid.sum(axis=1) if padded else np.full(b, n)
        page = max(32, keys.group) if isinstance(keys, GroupedInts) else 32
        pages = np.maximum(0, (lengths - residual - sinks) // page)
        itemsize = np.dtype(dtype).itemsize
        exact_tokens = int((lengths - pages * page).sum())
        total = int(pages.sum())
        key_nbytes = h * (total * page_side_nbytes("keys", keys, page, d, itemsize) + exact_tokens * d * itemsize)
        value_nbytes = h * (
            total * page_side_nbytes("values", values, page, dv, itemsize) + exact_tokens * dv * itemsize
        )
        if pair == "prompt":
            key_nbytes += int((pages > 0).sum()) * h * 2 * 2  # two channels of 16 bits a head of rows with pages
        tokens = int(lengths.sum())
        assert cache.key_nbytes == key_nbytes
        assert cache.value_nbytes == value_nbytes
        assert cache.nbytes == key_nbytes + value_nbytes + (b * n if padded else 0)
        assert cache.key_bits == 8 * key_nbytes / (tokens * h * d)
        assert cache.value_bits == 8 * value_nbytes / (tokens * h * dv)
        assert cache.bits_per_value == 8 * cache.nbytes / (tokens * h * (d + dv))
        assert cache.nbytes <= cache.allocated_nbytes


def test_live_bytes_are_those_of_the_arrays() -> None:
    """The same count, from the buffers that a view shows."""
    for pair in PAIRS:
        cache = make_cache(pair)
        cache.append(*make_tokens(2, 1, 2, 300, 40, 24))
        cache.flush()
        view = cache.view()
        start, count = int(view.window_starts[0]), int(view.window_counts[0])
        window = slice(start, start + count)
        live = (view.pages[:, :, : int(view.page_counts[0])], view.sink_k, view.sink_v)
        assert cache.nbytes == sum(a.nbytes for a in (*live, view.window_k[:, :, window], view.window_v[:, :, window]))
        buffers = (view.pages, view.sink_k, view.sink_v, view.window_k, view.window_v)
        assert cache.allocated_nbytes == sum(a.nbytes for a in buffers)


@pytest.mark.parametrize(("bits", "expected"), [(2, 3.0), (4, 5.0)])
def test_published_cost_of_encoded_tokens(bits: int, expected: float) -> None:
    """4096 tokens of head size 128, g = 32: bits + 32/g a number, scale and zero included, no byte of padding."""
    cache = Cache(GroupedInts(bits, 32), GroupedInts(bits, 32), residual_length=0, sink_tokens=0)
    cache.append(*make_tokens(3, 1, 1, 4096, 128))
    cache.flush()
    assert cache.exact_tokens.tolist() == [0]
    assert cache.bits_per_value == expected


def test_published_cost_of_the_sketch() -> None:
    """qjl-paper at d = 128, without window, averaged over the layers of a 32-layer model: 3.87 bits a number."""
    total = 0.0
    for layer in range(32):
        settings = METHODS["qjl-paper"].with_settings(residual_length=0).for_layer(layer, 32)
        cache = Cache(settings.keys, settings.values, residual_length=0, sink_tokens=0)
        cache.append(*make_tokens(3, 1, 1, 256, 128))
        cache.flush()
        total += cache.bits_per_value
    assert math.isclose(total / 32, 3.87, abs_tol=0.06)


@pytest.mark.parametrize("engine", [*ENGINES, None])
def test_report_names_sizes_and_the_engine_of_each_operation(engine: str | None) -> None:
    """T58: what runs is said, and every operation of a cache has a Numba version."""
    cache = make_cache("outliers-ints1", engine=engine)
    operations = {"pages.encode_keys", "pages.encode_values", "attention.attend"}
    expected = dict.fromkeys(operations, engine or "numba_cpu")
    assert cache.report()["engines"] == expected
    assert (cache.report()["tokens"], cache.report()["bits"]) == (0, 0.0)
    k, v = make_tokens(4, 2, 2, 200, 16, 24, np.float16)
    valid = np.ones((2, 200), dtype=bool)
    valid[0, :30] = False
    cache.append(k, v, valid=valid)
    cache.flush()
    report = cache.report()
    assert report["engines"] == expected
    assert report["tokens"] == 370
    assert report["exact_tokens"] + report["encoded_tokens"] == 370
    assert report["encoded_tokens"] == 32 * int(cache.page_counts.sum())
    assert report["dense_nbytes_16"] == report["dense_nbytes_model"] == 370 * 2 * (16 + 24) * 2
    assert report["table_nbytes"] == 4 * 16 * (48 + 32)
    for name in ("batch", "length", "nbytes", "allocated_nbytes", "key_bits", "value_bits", "saturated"):
        assert report[name] == getattr(cache, name)
    assert report["bits"] == cache.bits_per_value
    assert report["kernels"] == {}
    cache.attend(np.ones((2, 4, 3, 16), np.float16))
    assert cache.report()["kernels"] == (
        {} if expected["attention.attend"] == "reference" else {"attention.attend": TIER}
    )


def test_saturations_are_counted() -> None:
    cache = make_cache("ints2-ints2", sink_tokens=0, residual_length=0)
    k, v = make_tokens(5, 1, 1, 64)
    k[0, 0, 3, 2] = 1e6
    cache.append(k, v)
    assert cache.saturated == 0
    cache.flush()
    assert cache.saturated == 1
    assert np.isfinite(cache.decode(0)[0]).all()


def test_importing_a_cache_loads_numpy_only() -> None:
    code = (
        "import sys, kvsketch.cache, kvsketch.methods, kvsketch.storage; "
        "print([m for m in ('numba', 'torch', 'cupy', 'scipy', 'safetensors') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
