"""What the engine ``numba_cuda`` is tested with: calls that any engine runs, and what their results are compared by.

A case is a generator that calls operations on arrays from ``device`` with an engine and yields their results. It is run
by the reference on NumPy arrays and by ``numba_cuda`` on CuPy's, or on those of the stand-in, and sizes are tiny,
because the simulator takes about a millisecond for each thread. Results are compared byte by byte, or, where sums may
be taken in another order, as :class:`Near`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from kvsketch import bitpack, kivi, pages, qjl, rotation
from kvsketch.codecs import Exact, GroupedInts, SignSketch, TokenInts
from kvsketch.layout import SideLayout, side_layout
from kvsketch.testing import assert_accurate
from kvsketch.tests.page_cases import DTYPES, make_numbers, stored_numbers

Device = Callable[[Any], Any]


class Near(NamedTuple):
    """A result of sums, what it is in float64, and the size of the terms that are summed."""

    result: Any
    exact: Any
    size: float


class Case(NamedTuple):
    """Calls of one operation."""

    operation: str
    run: Callable[[Device, str], Iterator[Any]]


CASES: dict[str, Case] = {}


def case(operation: str, *arguments: Any) -> Callable[[Callable[..., Iterator[Any]]], Callable[..., Iterator[Any]]]:
    """Register a case of `operation`, run with `arguments`, the device and the engine."""

    def register(run: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        name = " ".join([run.__name__, *map(str, arguments)])
        CASES[name] = Case(operation, partial(run, *arguments))
        return run

    return register


def assert_results_agree(found: Any, expected: Any) -> None:
    """Compare a result of ``numba_cuda`` with the reference's; NaN of a float32 is NaN, whatever its bits."""
    if isinstance(expected, Near):
        assert_accurate(found.result.get(), expected.exact, expected.result, size=expected.size)
    elif isinstance(expected, tuple):
        for one, other in zip(found, expected, strict=True):
            assert_results_agree(one, other)
    elif isinstance(expected, np.ndarray):
        array = found.get()
        assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
        if expected.dtype == np.float32:
            np.testing.assert_array_equal(array, expected)
        else:
            assert array.tobytes() == expected.tobytes()
    else:
        assert found == expected


def numbers(*shape: int, dtype: str = "float32", seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(DTYPES[dtype])


def awkward(*shape: int, dtype: str = "float32") -> Any:
    """Numbers among which are infinities, NaN, both zeros, the smallest ones and those beyond float16."""
    x = numbers(*shape)
    special = [np.nan, np.inf, -np.inf, 0, -0.0, 1e-45, -1e-8, 65504, -65520, 1e38, 3e38, 5.96e-8][: x.size]
    np.put(x, np.arange(len(special)) * (x.size // len(special)), special)
    with np.errstate(over="ignore"):
        return x.astype(DTYPES[dtype])


# ---- bit packing, rotation ----


@case("bitpack.pack_signs")
def pack_signs(device: Device, engine: str) -> Iterator[Any]:
    for dtype in DTYPES:
        yield bitpack.pack_signs(device(awkward(3, 11, dtype=dtype)), engine=engine)
    for other in ("float64", "int8", "uint16", "int64"):
        yield bitpack.pack_signs(device(np.arange(-9, 9).astype(other).reshape(2, 3, 3)[:, ::-1]), engine=engine)
    yield bitpack.pack_signs(device(np.zeros((2, 0), np.float32)), engine=engine)


@case("bitpack.unpack_signs")
def unpack_signs(device: Device, engine: str) -> Iterator[Any]:
    packed = np.random.default_rng(0).integers(0, 256, (2, 3, 2), np.uint8)
    for m in (9, 16):
        yield bitpack.unpack_signs(device(packed), m, engine=engine)


@case("bitpack.pack_codes")
def pack_codes(device: Device, engine: str) -> Iterator[Any]:
    for bits in (1, 2, 3, 4, 8):
        codes = np.random.default_rng(bits).integers(0, 1 << bits, (2, 1, 13), np.uint8)
        yield bitpack.pack_codes(device(codes), bits=bits, engine=engine)
    yield bitpack.pack_codes(device(codes.swapaxes(0, 2)), bits=8, engine=engine)


@case("bitpack.unpack_codes")
def unpack_codes(device: Device, engine: str) -> Iterator[Any]:
    for bits in (1, 2, 3, 4, 8):
        packed = np.random.default_rng(bits).integers(0, 256, (2, -(-13 * bits // 8)), np.uint8)
        yield bitpack.unpack_codes(device(packed), 13, bits=bits, engine=engine)


@case("rotation.hadamard_transform")
def hadamard_transform(device: Device, engine: str) -> Iterator[Any]:
    for dtype in DTYPES:
        for shape in ((3, 1), (2, 3, 8), (1, 12)):
            yield rotation.hadamard_transform(device(numbers(*shape, dtype=dtype)), engine=engine)
    yield rotation.hadamard_transform(device(numbers(4, 3)), axis=0, engine=engine)


# ---- grouped integers ----


@case("kivi.quantize_groups")
def quantize_groups(device: Device, engine: str) -> Iterator[Any]:
    for bits in (1, 2, 3, 4, 8):
        for axis in kivi.AXES:
            yield _fields(kivi.quantize_groups(device(numbers(2, 7, 5)), bits=bits, group=4, axis=axis, engine=engine))
    for dtype in DTYPES:
        for axis in kivi.AXES:
            x = device(awkward(6, 10, dtype=dtype)[:, ::-1])
            yield _fields(kivi.quantize_groups(x, bits=3, group=3, axis=axis, engine=engine))
    yield _fields(kivi.quantize_groups(device(numbers(2, 0, 3)), bits=2, group=4, axis="tokens", engine=engine))


def _fields(codes: kivi.GroupedCodes) -> tuple[Any, ...]:
    return codes.codes, codes.scale, codes.zero, codes.size, codes.saturated


def _quantized(device: Device, axis: str, x: Any, *, bits: int = 3) -> tuple[Any, Any]:
    """Codes of `x` from the reference, on the device; and the numbers that they keep, in float64."""
    codes = kivi.quantize_groups(x, bits=bits, group=4, axis=axis, engine="reference")
    kept = kivi.dequantize_groups(codes, engine="reference").astype(np.float64)
    return replace(codes, codes=device(codes.codes), scale=device(codes.scale), zero=device(codes.zero)), kept


@case("kivi.dequantize_groups")
def dequantize_groups(device: Device, engine: str) -> Iterator[Any]:
    for axis in kivi.AXES:
        beyond = np.full((4, 4), 1000, np.float32)
        beyond[1, 2] = 3e38  # comes back as 1000 + 65504
        for x, bits in ((make_numbers((2, 7, 5)), 8), (awkward(2, 7, 5), 3), (beyond, 1)):
            codes, _ = _quantized(device, axis, x, bits=bits)
            for dtype in DTYPES:
                yield kivi.dequantize_groups(codes, dtype=dtype, engine=engine)


@case("kivi.key_scores")
def key_scores(device: Device, engine: str) -> Iterator[Any]:
    codes, kept = _quantized(device, "tokens", make_numbers((2, 2, 7, 5)))
    for dtype in DTYPES:
        q = numbers(2, 4, 1, 5, dtype=dtype)
        exact = np.einsum("bhsd,bhnd->bhsn", q.astype(np.float64), np.repeat(kept, 2, axis=1))
        yield Near(kivi.key_scores(device(q), codes, engine=engine), exact, float(5 * np.abs(kept).max()))


@case("kivi.weighted_values")
def weighted_values(device: Device, engine: str) -> Iterator[Any]:
    codes, kept = _quantized(device, "channels", make_numbers((2, 2, 7, 5)))
    for dtype in DTYPES:
        p = np.abs(numbers(2, 4, 1, 7, dtype=dtype))
        exact = np.einsum("bhsn,bhnd->bhsd", p.astype(np.float64), np.repeat(kept, 2, axis=1))
        yield Near(kivi.weighted_values(device(p), codes, engine=engine), exact, float(7 * np.abs(kept).max()))


# ---- sign sketches ----


@case("qjl.select_outlier_channels")
def select_outlier_channels(device: Device, engine: str) -> Iterator[Any]:
    for dtype in DTYPES:
        yield qjl.select_outlier_channels(device(awkward(1, 2, 7, 6, dtype=dtype)), 2, page=4, engine=engine)
    yield qjl.select_outlier_channels(device(np.ones((1, 1, 3, 5), np.float32)), 3, page=9, engine=engine)
    yield qjl.select_outlier_channels(device(numbers(1, 1, 3, 5)), 0, engine=engine)


MAIN = rotation.draw_projection(11, 6, seed=1)
OUTLYING = rotation.draw_projection(9, 6, seed=1, stream=1)


@case("qjl.sketch_keys")
def sketch_keys(device: Device, engine: str) -> Iterator[Any]:
    for dtype in DTYPES:
        yield _sketch_fields(qjl.sketch_keys(device(awkward(1, 2, 5, 6, dtype=dtype)), MAIN, engine=engine))
    options: dict[str, Any] = {"outlier_projection": OUTLYING, "page": 4, "engine": engine}
    yield _sketch_fields(qjl.sketch_keys(device(awkward(1, 2, 5, 6)), MAIN, outliers=2, **options))
    yield _sketch_fields(qjl.sketch_keys(device(np.zeros((1, 1, 2, 6), np.float32)), MAIN, engine=engine))
    channels = device(np.array([[[1, 4], [0, 5]]]))
    yield _sketch_fields(qjl.sketch_keys(device(numbers(1, 2, 5, 6)), MAIN, channels=channels, **options))


def _sketch_fields(keys: qjl.SketchedKeys) -> tuple[Any, ...]:
    return keys.signs, keys.norms, keys.outlier_signs, keys.outlier_norms, keys.channels, keys.saturated


@case("qjl.sketch_scores")
def sketch_scores(device: Device, engine: str) -> Iterator[Any]:
    k = make_numbers((2, 2, 5, 6))
    for outliers in (0, 2):
        second = {"outlier_projection": OUTLYING} if outliers else {}
        keys = qjl.sketch_keys(k, MAIN, outliers=outliers, page=4, engine="reference", **second)
        arrays: dict[str, Any] = {n: device(x) for n, x in vars(keys).items() if isinstance(x, np.ndarray)}
        given = replace(keys, **arrays)
        kept = _sketched(keys)
        for dtype in DTYPES:
            q = numbers(2, 4, 1, 6, dtype=dtype)
            exact = np.einsum("bhsd,bhnd->bhsn", q.astype(np.float64), np.repeat(kept, 2, axis=1))
            result = qjl.sketch_scores(device(q), given, MAIN, engine=engine, **second)
            yield Near(result, exact, float(6 * np.abs(kept).max() * np.abs(q).max()))


def _sketched(keys: qjl.SketchedKeys) -> Any:
    """The vectors (b, h, n, d), float64, whose products with queries are what sketches estimate."""
    estimates = []
    for signs, norms, projection in (
        (keys.signs, keys.norms, MAIN),
        (keys.outlier_signs, keys.outlier_norms, OUTLYING),
    ):
        if signs is not None:
            bits = bitpack.unpack_signs(signs, projection.m, engine="reference").astype(np.float64)
            factor = norms.astype(np.float64)[..., None] * projection.constant / projection.m
            estimates.append(factor * (bits @ projection.matrix.astype(np.float64)))
    if len(estimates) == 1:
        return estimates[0]
    outlying = (keys.channels[..., None] == np.arange(MAIN.d)).any(axis=-2)
    outlying = np.repeat(outlying, keys.page, axis=2)[:, :, : keys.norms.shape[2]]
    return np.where(outlying, estimates[1], estimates[0])


# ---- pages ----

KEY_SIDES = (
    *(side_layout("keys", GroupedInts(bits, 32), 32, 3) for bits in (1, 2, 4, 8)),
    side_layout("keys", GroupedInts(3, 64), 64, 3),
    side_layout("keys", GroupedInts(1, 32), 64, 18),
    side_layout("keys", TokenInts(3), 32, 34),
    side_layout("keys", SignSketch(m=18, seed=3), 32, 4),
    side_layout("keys", SignSketch(m=5, kind="gaussian", outliers=2, outlier_m=3), 64, 4),
    side_layout("keys", SignSketch(m=2, outliers=1, outlier_m=1), 32, 260),
    *(side_layout("keys", Exact(), 32, 3, dtype) for dtype in DTYPES),
)
VALUE_SIDES = (
    *(side_layout("values", GroupedInts(bits, 8), 32, 10) for bits in (1, 2, 4, 8)),
    side_layout("values", GroupedInts(3, 16), 64, 35),
    side_layout("values", TokenInts(2), 32, 5),
    *(side_layout("values", Exact(), 32, 3, dtype) for dtype in DTYPES),
)


def side_numbers(side: SideLayout, dtype: str, count: int = 2) -> Any:
    """Numbers (count, p, width) for a side, the last channel the largest."""
    x = make_numbers((count, side.tokens, side.width), 1)
    x[..., -1] *= 40
    return x.astype(DTYPES[dtype])


def _name(side: SideLayout) -> str:
    return f"{side.codec} {side.dtype} {side.tokens}x{side.width}"


def _encode_cases(operation: str, encode: Callable[..., Any], sides: tuple[SideLayout, ...]) -> None:
    def encoded(side: SideLayout, device: Device, engine: str) -> Iterator[Any]:
        given: Any = DTYPES if side.width < 5 and side.spec.bits in (0, 2) else ("float32",)
        for dtype in (side.dtype,) if isinstance(side.codec, Exact) else given:
            yield encode(device(side_numbers(side, dtype)), side, engine=engine)

    for side in sides:
        CASES[f"{operation} {_name(side)}"] = Case(operation, partial(encoded, side))


_encode_cases("pages.encode_keys", pages.encode_keys, KEY_SIDES)
_encode_cases("pages.encode_values", pages.encode_values, VALUE_SIDES)


@case("pages.encode_keys")
def awkward_keys(device: Device, engine: str) -> Iterator[Any]:
    """Numbers of every kind, in strided arrays, written to a part of larger records."""
    for side in (KEY_SIDES[1], side_layout("keys", SignSketch(m=6, outliers=1, outlier_m=3), 32, 4)):
        x = device(awkward(2 * side.tokens, 2, side.width, dtype="float32")).swapaxes(0, 1)
        large = device(np.full((2, 5, side.nbytes + 128), 0xA5, np.uint8))
        channels = device(np.array([[1], [3]])) if side.spec.outliers else None
        _, saturated = pages.encode_keys(x, side, channels=channels, out=large[:, 1:5:2, 64:-64], engine=engine)
        yield large, saturated


@case("pages.encode_values")
def awkward_values(device: Device, engine: str) -> Iterator[Any]:
    for side in (VALUE_SIDES[1], VALUE_SIDES[5]):
        yield pages.encode_values(device(awkward(side.tokens, side.width, dtype="bfloat16")), side, engine=engine)


@case("pages.encode_values")
def no_pages(device: Device, engine: str) -> Iterator[Any]:
    side = VALUE_SIDES[0]
    for shape in ((0, side.tokens, side.width), (2, 0, side.width)):
        records, _ = pages.encode_values(device(np.zeros(shape, np.float32)), side, engine=engine)
        yield records
        yield pages.decode_values(records, side, engine=engine)


def _decode_cases(
    operation: str, encode: Callable[..., Any], decode: Callable[..., Any], sides: tuple[SideLayout, ...]
) -> None:
    def decoded(side: SideLayout, device: Device, engine: str) -> Iterator[Any]:
        x = side_numbers(side, side.dtype, 2 if side.width < 200 else 1)
        records, _ = encode(x, side, engine="reference")
        spread = np.repeat(records, 2, axis=0)[::2]
        result = decode(device(spread), side, engine=engine)
        if isinstance(side.codec, SignSketch):
            yield Near(result, stored_numbers(x, side), 4 * float(np.abs(stored_numbers(x, side)).max()))
        else:
            yield result

    for side in sides:
        CASES[f"{operation} {_name(side)}"] = Case(operation, partial(decoded, side))


_decode_cases("pages.decode_keys", pages.encode_keys, pages.decode_keys, KEY_SIDES)
_decode_cases("pages.decode_values", pages.encode_values, pages.decode_values, VALUE_SIDES)


@case("pages.select_channels")
def select_channels(device: Device, engine: str) -> Iterator[Any]:
    side = side_layout("keys", SignSketch(m=5, outliers=2, outlier_m=3, outlier_channels="prompt"), 32, 6)
    for dtype in DTYPES:
        yield pages.select_channels(device(make_numbers((2, 1, 9, 6), 2, dtype)), side, engine=engine)
