"""Pages on CuPy arrays: the bytes and the numbers of the CPU engines, whatever the shapes and wherever arrays lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvsketch import pages
from kvsketch.cache import Cache
from kvsketch.codecs import Codec, Exact, GroupedInts, SignSketch, TokenInts
from kvsketch.layout import SideLayout, side_layout
from kvsketch.testing import CPU_ENGINES, assert_accurate
from kvsketch.tests.cuda_host import nvrtc, running
from kvsketch.tests.cuda_host.devices import counts, pretending
from kvsketch.tests.cuda_host.fixtures import cupy  # noqa: F401
from kvsketch.tests.cuda_host.stand_in import available
from kvsketch.tests.cuda_parity import assert_bits, assert_no_spills, executions, rough_numbers
from kvsketch.tests.page_cases import DTYPES, make_numbers, stored_numbers
from kvsketch.tests.pairwise import pairwise

ENGINE: dict[str, Any] = {"engine": "cuda_raw"}
BITS = (1, 2, 3, 4, 8)
LEADS = ((), (1,), (3,), (2, 2), (2, 1, 2))

#: Keys grouped along tokens; `times` groups of a page.
KEY_CASES = pairwise(
    {
        "bits": BITS,
        "group": (32, 64, 128),
        "times": (1, 2),
        "width": (5, 8, 64, 80, 96, 128, 256),
        "dtype": DTYPES,
        "lead": LEADS,
        "count": (1, 3),
    }
)
#: Groups along the channels of one token; a group of None is that of latents.
TOKEN_CASES = pairwise(
    {
        "bits": BITS,
        "group": (8, 24, 32, 40, 64, 128, None),
        "tokens": (32, 96),
        "width": (5, 8, 64, 80, 96, 128, 256, 500),
        "dtype": DTYPES,
        "lead": LEADS,
        "count": (1, 3),
    }
)
SKETCH_CASES = pairwise(
    {
        "m": (1, 16, 100, 256, 300),
        "outliers": (0, 3, 8),
        "kind": ("gaussian", "hadamard"),
        "tokens": (32, 64),
        "width": (8, 64, 80, 128, 300),
        "dtype": DTYPES,
        "lead": LEADS,
        "count": (1, 2),
        "given": (False, True),
    }
)


def encode(x: Any, side: SideLayout, **options: Any) -> tuple[Any, int]:
    return (pages.encode_keys if side.side == "keys" else pages.encode_values)(x, side, **options)


def decode(records: Any, side: SideLayout, **options: Any) -> Any:
    return (pages.decode_keys if side.side == "keys" else pages.decode_values)(records, side, **options)


def assert_same_pages(cupy: Any, x: Any, side: SideLayout, channels: Any = None) -> None:  # noqa: F811
    """Assert that a device encodes numbers to the bytes of the CPU engines, and decodes these to the same numbers."""
    options = {} if channels is None else {"channels": channels}
    on_device = {name: cupy.asarray(array) for name, array in options.items()}
    with np.errstate(all="ignore"):
        expected = [encode(x, side, engine=engine, **options) for engine in CPU_ENGINES]
        decoded = decode(expected[0][0], side, engine="reference")
    for _ in executions():
        records, saturated = encode(cupy.asarray(x), side, **on_device, **ENGINE)
        for bytes_, count in expected:
            assert_bits(records, bytes_)
            assert saturated == count
        back = decode(records, side, **ENGINE).get()
        assert (back.shape, back.dtype) == (decoded.shape, decoded.dtype)
        if not isinstance(side.codec, SignSketch):
            np.testing.assert_array_equal(back, decoded)


@pytest.mark.parametrize("case", KEY_CASES, ids=str)
def test_integer_keys(cupy, case):  # noqa: F811
    side = side_layout("keys", GroupedInts(case["bits"], case["group"]), case["group"] * case["times"], case["width"])
    x = rough_numbers((*case["lead"], case["count"] * side.tokens, side.width), case["width"], case["dtype"])
    assert_same_pages(cupy, x, side)


@pytest.mark.parametrize("case", TOKEN_CASES, ids=str)
def test_integers_of_one_token(cupy, case):  # noqa: F811
    latents = case["group"] in (None, 40)
    codec: Codec = (TokenInts if latents else GroupedInts)(case["bits"], case["group"])
    name = "keys" if latents and case["count"] == 1 else "values"
    side = side_layout(name, codec, case["tokens"], case["width"])
    x = rough_numbers((*case["lead"], case["count"] * side.tokens, side.width), case["width"], case["dtype"])
    assert_same_pages(cupy, x, side)


def test_latents_wider_than_a_thread_block_holds(cupy):  # noqa: F811
    for bits, width, group in ((3, 1100, None), (2, 1500, 264), (4, 1000, 8)):
        side = side_layout("values", TokenInts(bits, group), 32, width)
        assert_same_pages(cupy, rough_numbers((1, 32, width), bits, "float16"), side)


@pytest.mark.parametrize("case", SKETCH_CASES, ids=str)
def test_sketches(cupy, case):  # noqa: F811
    codec = SignSketch(case["m"], case["kind"], case["outliers"], 20 if case["outliers"] else 0, seed=case["width"])
    side = side_layout("keys", codec, case["tokens"], case["width"])
    x = rough_numbers((*case["lead"], case["count"] * side.tokens, side.width), case["m"], case["dtype"])
    channels = None
    if case["given"] and case["outliers"]:
        rng = np.random.default_rng(0)
        chosen = [np.sort(rng.permutation(side.width)[: case["outliers"]]) for _ in range(int(np.prod(case["lead"])))]
        channels = np.array(chosen, np.uint16).reshape(*case["lead"], case["outliers"])
    assert_same_pages(cupy, x, side, channels)


@pytest.mark.parametrize("outliers", [0, 5])
def test_decoded_sketches_are_as_accurate_as_the_references(cupy, outliers):  # noqa: F811
    for m, width in ((40, 24), (600, 130)):
        side = side_layout("keys", SignSketch(m, outliers=outliers, outlier_m=48 if outliers else 0), 64, width)
        x = make_numbers((2, 128, width), m)
        records, _ = encode(x, side, engine="reference")
        for _ in executions():
            actual = decode(cupy.asarray(records), side, **ENGINE).get()
            assert_accurate(actual, stored_numbers(x, side), decode(records, side, engine="reference"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", DTYPES)
def test_exact_numbers(cupy, dtype, stored):  # noqa: F811
    for width, lead, name in ((5, (), "keys"), (64, (2, 3), "values"), (80, (3,), "keys")):
        side = side_layout(name, Exact(), 32, width, stored)
        assert_same_pages(cupy, rough_numbers((*lead, 64, width), width, dtype), side)


def test_exact_numbers_are_copied_bit_by_bit(cupy):  # noqa: F811
    bits = np.random.default_rng(0).integers(0, 1 << 16, (2, 32, 24)).astype(np.uint16)
    side = side_layout("keys", Exact(), 32, 24, "float16")
    for _ in executions():
        records, _ = encode(cupy.asarray(bits.view(np.float16)), side, **ENGINE)
        assert_bits(records[..., : side.used_bytes], bits.view(np.uint8).reshape(2, 1, -1))


#: Sides for tests of where arrays lie: one of each kernel.
SIDES = {
    "ints2 keys": ("keys", GroupedInts(2, 32), 32, 64),
    "ints3 keys": ("keys", GroupedInts(3, 64), 64, 40),
    "ints2 values": ("values", GroupedInts(2, 32), 32, 64),
    "latents3 keys": ("keys", TokenInts(3), 32, 72),
    "sketch": ("keys", SignSketch(m=48, outliers=3, outlier_m=20), 32, 40),
    "exact values": ("values", Exact(), 32, 40),
}
per_side = pytest.mark.parametrize("name", SIDES)


@per_side
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_windows_go_straight_into_larger_records(cupy, name, dtype):  # noqa: F811
    side = side_layout(*SIDES[name], dtype)
    window = cupy.asarray(make_numbers((3, 2, 4 * side.tokens + 24, side.width), 1, dtype))
    for _ in executions():
        store = cupy.zeros((3, 2, 5, side.nbytes + 128), np.uint8)
        for rows, first in ((slice(0, 3), 0), (slice(1, 3), 8), (slice(2, 3), 3)):
            x = window[rows, :, first : first + 2 * side.tokens]
            out = store[rows, :, 1:3, 64 : 64 + side.nbytes]
            expected, _ = encode(x.get(), side, engine="reference")
            store[...] = 0xA5
            records, _ = encode(x, side, out=out, **ENGINE)
            assert records is out
            assert_bits(out, expected)
            assert_bits(decode(out, side, **ENGINE), decode(cupy.ascontiguousarray(out), side, **ENGINE).get())
            untouched = store.get()
            untouched[rows, :, 1:3, 64 : 64 + side.nbytes] = 0xA5
            assert (untouched == 0xA5).all()


@per_side
def test_arrays_that_kernels_cannot_read_in_place(cupy, name):  # noqa: F811
    """Channels apart, tokens backwards, leading axes that do not merge, records off by a byte."""
    side = side_layout(*SIDES[name])
    x = cupy.asarray(make_numbers((2, 3, 4, 2, 2 * side.tokens, 2 * side.width), 1))
    store = cupy.zeros((2, 3, 4, 2, 2, side.nbytes + 1), np.uint8)
    for _ in executions():
        for part in (
            np.s_[0, 0, 0, 0, :, ::2],
            np.s_[0, 0, 0, :, ::-1, 1 : side.width + 1],
            np.s_[::-1, ::2, ::2, ...],
        ):
            view = x[part][..., : side.width]
            expected, count = encode(view.get(), side, engine="reference")
            places = part[:-2] if len(part) == 6 else part[:-1]
            for start in (0, 1):
                out = store[places][..., start : start + side.nbytes]
                records, saturated = encode(view, side, out=out, **ENGINE)
                assert saturated == count
                assert_bits(records, expected)
                assert_bits(decode(out, side, **ENGINE), decode(cupy.asarray(expected), side, **ENGINE).get())


@per_side
def test_more_heads_and_pages_than_a_grid_counts(cupy, name, monkeypatch):  # noqa: F811
    from kvsketch.cuda_raw import _places

    monkeypatch.setattr(_places, "MOST_HEADS", 2)
    monkeypatch.setattr(_places, "MOST_ITEMS", 1)
    side = side_layout(*SIDES[name])
    assert_same_pages(cupy, make_numbers((5, 3 * side.tokens, side.width), 1), side)


@per_side
def test_no_pages(cupy, name):  # noqa: F811
    side = side_layout(*SIDES[name])
    for shape in ((2, 0, side.width), (0, side.tokens, side.width)):
        records, saturated = encode(cupy.zeros(shape, np.float32), side, **ENGINE)
        assert records.shape == (*shape[:-2], shape[-2] // side.tokens, side.nbytes)
        assert saturated == 0
        assert decode(records, side, **ENGINE).shape == shape


#: Beyond 32 bits in bytes and, with a sign, in numbers of two bytes; cut to 32 bits it still lies in the memory.
FAR = (1 << 32) + 4096


def far_apart(cupy: Any, x: Any) -> Any:  # noqa: F811
    """A copy on a device of `x` (2, ...), its halves :data:`FAR` bytes apart; memory in between is never touched."""
    strided = (x.shape, (FAR, *x[0].strides))
    if available():
        first = cupy.empty(FAR + x.nbytes, np.uint8)[: x[0].nbytes].view(x.dtype).reshape(x.shape[1:])
        copy = cupy.lib.stride_tricks.as_strided(first, *strided)
    else:
        memory = np.empty(FAR + x.nbytes + 256, np.uint8)
        first = np.ndarray(x.shape[1:], x.dtype, memory.data, offset=-memory.ctypes.data % 256)
        copy = cupy.ndarray(np.lib.stride_tricks.as_strided(first, *strided))
    copy[...] = cupy.asarray(x)
    return copy


@per_side
@pytest.mark.parametrize("lead", [(2,), (2, 3)])
def test_rows_and_heads_further_apart_than_32_bits_count(cupy, name, lead):  # noqa: F811
    side = side_layout(*SIDES[name], "float16")
    x = make_numbers((*lead, 2 * side.tokens, side.width), 1, "float16")
    expected, _ = encode(x, side, engine="reference")
    with running("check"):
        assert_bits(encode(far_apart(cupy, x), side, **ENGINE)[0], expected)
    # Not checked: the harness would keep a history of every byte in between.
    records = far_apart(cupy, np.zeros_like(expected))
    with running("fast"):
        assert_bits(encode(cupy.asarray(x), side, out=records, **ENGINE)[0], expected)
    with running("check"):
        assert_bits(decode(records, side, **ENGINE), decode(cupy.asarray(expected), side, **ENGINE).get())


def test_prompt_channels(cupy):  # noqa: F811
    side = side_layout("keys", SignSketch(m=48, outliers=3, outlier_m=20), 32, 40)
    k = make_numbers((2, 3, 77, 40), 5, "bfloat16")
    for _ in executions():
        chosen = pages.select_channels(cupy.asarray(k)[:, 1:, 7:], side, **ENGINE)
        assert_bits(chosen, pages.select_channels(k[:, 1:, 7:], side, engine="reference"))


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        (GroupedInts(2, 64), GroupedInts(4, 32)),
        (SignSketch(48, outliers=4, outlier_m=32, outlier_channels="prompt"), Exact()),
        (TokenInts(3), TokenInts(4)),
    ],
)
def test_the_pages_of_a_cache(cupy, keys, values):  # noqa: F811
    """Of ragged rows, appended in parts, written beside one another into one buffer."""
    caches = [Cache(keys, values, residual_length=40) for _ in range(2)]
    valid = np.ones((2, 230), bool)
    valid[1, :37] = False
    with running("check"):
        for first, end in ((0, 150), (150, 151), (151, 230)):
            k, v = (make_numbers((2, 3, end - first, 24), first + part, "float16") for part in (0, 1))
            caches[0].append(k, v, valid=valid[:, first:end])
            caches[1].append(cupy.asarray(k), cupy.asarray(v), valid=valid[:, first:end])
        for cache in caches:
            cache.flush()
    ours, theirs = (cache._contents.pages for cache in caches)  # type: ignore[union-attr]
    assert ours.saturated == theirs.saturated
    assert (ours.counts == theirs.counts).all()
    assert ours.counts.min() >= 2
    assert_bits(theirs.pages, ours.pages)


@pytest.mark.skipif(available(), reason="only the stand-in for CuPy counts what makes the host wait")
@per_side
def test_the_host_waits_once_a_side_and_sends_nothing(cupy, name):  # noqa: F811
    side = side_layout(*SIDES[name])
    x, out = cupy.asarray(make_numbers((2, 64, side.width))), cupy.zeros((2, 64 // side.tokens, side.nbytes), np.uint8)
    encode(x, side, out=out, **ENGINE)
    counts.reset()
    encode(x, side, out=out, **ENGINE)
    assert (counts.synchronisations, counts.uploads) == (0 if isinstance(side.codec, Exact) else 1, 0)
    counts.reset()
    decode(out, side, **ENGINE)
    assert (counts.synchronisations, counts.uploads) == (0, 0)


@pytest.mark.skipif(available(), reason="the stand-in for CuPy has a second device")
@per_side
def test_arrays_of_a_device_that_is_not_the_current_one(cupy, name):  # noqa: F811
    from kvsketch.cuda_raw import pages as engine

    side = side_layout(*SIDES[name])
    x = make_numbers((2, 64, side.width), 1)
    expected, _ = encode(x, side, engine="reference")
    with pretending(count=2):
        with cupy.cuda.Device(1):
            on_device, out = cupy.asarray(x), cupy.zeros(expected.shape, np.uint8)
        if side.side == "keys":
            engine.encode_keys(on_device, side, channels=None, out=out)
        else:
            engine.encode_values(on_device, side, out=out)
        assert_bits(out, expected)
        assert (engine.decode_keys if side.side == "keys" else engine.decode_values)(out, side).device.id == 1


@pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))
def test_kernels_do_not_spill():
    assert_no_spills("pages_encode.cu", [f"encode_by_{by}<{bits}>" for by in ("channel", "token") for bits in BITS])
    assert_no_spills("pages_decode.cu", ["decode_by_channel", "decode_by_token"])
    assert_no_spills("pages_exact.cu", ["encode_exact", "decode_exact"])
    assert_no_spills("pages_sketch.cu", ["decode_sketch"])
