"""Codes, scales, zeros, signs and norms are one and the same on every engine, to the bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvsketch._checks import BITS, FLOAT_DTYPES
from kvsketch.codecs import GroupedInts, Side, SignSketch
from kvsketch.kivi import AXES, dequantize_groups, quantize_groups
from kvsketch.layout import SideLayout, locate_codes, side_layout
from kvsketch.pages import decode_keys, decode_values, encode_keys, encode_values
from kvsketch.qjl import sketch_keys
from kvsketch.rotation import KINDS, Projection, draw_projection
from kvsketch.statistical_tests import check_at_most
from kvsketch.validation.claim import HOLDS, Claim, Figure, Outcome, Setting, Twin
from kvsketch.validation.specification import Rules, outlier_channels, quantize, sketch, unpack

#: Shapes (b, h, n, d) of keys and values, and a group that does not always divide them.
SHAPES = (((1, 2, 70, 24), 32), ((2, 1, 33, 40), 16), ((1, 1, 5, 3), 8))
MORE_SHAPES = (((1, 3, 200, 128), 64), ((1, 1, 1, 1), 1), ((3, 2, 96, 80), 128))
#: Rows and head size of projections: fewer rows than a block, and several blocks with a part of one.
SKETCHES = ((16, 12), (64, 40), (24, 150))
#: Outlier channels, rows of their projection, and tokens of a page of sketches.
OUTLIERS, OUTLIER_M, PAGE = 3, 40, 32
#: Head size of pages, whose tokens are two whole pages, and rows of their projection.
PAGE_WIDTH, PAGE_TOKENS, PAGE_ROWS = 40, 64, 72
#: Largest error of a decoded sketch, as a part of its largest number: sums of some hundred float32 products.
SKETCH_ERROR = 1e-5
#: Dtypes that twins are found out with.
TWIN_DTYPES = ("float16",)

#: Makes an array of a shape and dtype that a kind of data is called.
Make = Callable[[np.random.Generator, tuple[int, ...]], Any]


def ordinary(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    """Normal numbers of many sizes, a size for each channel."""
    return rng.standard_normal(shape) * 10.0 ** rng.uniform(-5, 4, shape[-1])


def halves(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    """Small multiples of one number: many lie in the middle of two codes, where rounding shows."""
    return rng.integers(0, 15, size=shape) * rng.integers(1, 200, size=(*shape[:-2], 1, shape[-1])) / 16.0


def special(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    """Zeros of both signs, constants, subnormals and numbers beyond float16, token by token and channel by channel."""
    x = ordinary(rng, shape)
    for place in (np.s_[..., 0, :], np.s_[..., 0]):
        x[place] = 0.0
    rows = {1: -0.0, 2: 7.25, 3: 65504.0, 4: -1e5}
    for token, value in rows.items():
        if token < shape[-2]:
            x[..., token, :] = value
    if shape[-2] > 20:
        x[..., 8, :] = rng.standard_normal(shape[-1]) * 1e-7
        x[..., 9, :] = rng.standard_normal(shape[-1]) * 1e-40
        x[..., 10, :] = rng.standard_normal(shape[-1]) * 3e4
        x[..., 11, :2] = 0.0, -0.0
        x[..., 12, :] = rng.standard_normal(shape[-1]) * 1e37
        x[..., 13, -1] = np.inf
        x[..., 14, -2] = -np.inf
        x[..., -1, 1] = np.nan
    return x


KINDS_OF_DATA: tuple[Make, ...] = (ordinary, halves, special)


class Tally:
    """Counts what is compared, and what differs."""

    def __init__(self) -> None:
        self.compared = 0
        self.wrong = 0

    def compare(self, found: Any, expected: Any) -> None:
        """Count entries that are not equal; NaN equals NaN, and another shape differs everywhere."""
        found, expected = np.asarray(found), np.asarray(expected)
        self.compared += max(expected.size, 1)
        if found.shape != expected.shape:
            self.wrong += max(expected.size, 1)
            return
        with np.errstate(invalid="ignore"):
            same = (found == expected) | ((found != found) & (expected != expected))
        self.wrong += int((~same).sum())

    def compare_halves(self, found: Any, expected: Any) -> None:
        """Count float16 numbers whose bits differ, so that 0.0 and -0.0 do; any NaN equals any NaN."""
        self.compare(np.isnan(found), np.isnan(expected))
        self.compare(_bits(found), _bits(expected))


def _bits(x: Any) -> Any:
    return np.where(np.isnan(x), np.float16(0), x).astype(np.float16).view(np.uint16)


def data(setting: Setting, *stream: Any, shape: tuple[int, ...], make: Make, dtype: str) -> Any:
    with np.errstate(over="ignore"):
        x = make(setting.generator("data", make.__name__, *stream), shape)
        return x.astype(np.float32).astype(FLOAT_DTYPES[dtype])


def tally_quantizer(setting: Setting, rules: Rules, dtypes: Sequence[str], shapes: Any) -> Tally:
    """Codes, scales, zeros and counts of :func:`kvsketch.kivi.quantize_groups`, and what they are recovered as."""
    tally = Tally()
    cases = itertools.product(shapes, KINDS_OF_DATA, dtypes, AXES, BITS)
    for number, ((shape, group), make, dtype, axis, bits) in enumerate(cases):
        x = data(setting, number, shape=shape, make=make, dtype=dtype)
        found = quantize_groups(x, bits=bits, group=group, axis=axis, engine=setting.engine)
        expected = quantize(x, bits=bits, group=group, axis=axis, rules=rules)
        tally.compare(unpack(found.codes, shape[-1], bits), expected.codes)
        tally.compare_halves(found.scale, expected.scale)
        tally.compare_halves(found.zero, expected.zero)
        tally.compare(found.saturated, expected.saturated)
        tally.compare(dequantize_groups(found, engine=setting.engine), expected.recovered(group, axis))
    return tally


def tally_sketches(setting: Setting, rules: Rules, dtypes: Sequence[str]) -> Tally:
    """Signs and norms of :func:`kvsketch.qjl.sketch_keys`, with and without outlier channels."""
    tally = Tally()
    cases = itertools.product(SKETCHES, KINDS_OF_DATA, dtypes, KINDS)
    for number, ((m, d), make, dtype, kind) in enumerate(cases):
        k = data(setting, number, shape=(1, 2, 2 * PAGE + 6, d), make=make, dtype=dtype)
        main = draw_projection(m, d, kind=kind, seed=setting.seed)
        extra = draw_projection(OUTLIER_M, d, kind=kind, seed=setting.seed, stream=1)
        plain = sketch_keys(k, main, engine=setting.engine)
        signs, norms, saturated = sketch(k, main.matrix, rules)
        tally.compare(unpack(plain.signs, m, 1), signs)
        tally.compare_halves(plain.norms, norms)
        tally.compare(plain.saturated, saturated)
        split = sketch_keys(k, main, outliers=OUTLIERS, outlier_projection=extra, page=PAGE, engine=setting.engine)
        channels = outlier_channels(k, OUTLIERS, PAGE)
        tally.compare(split.channels, channels)
        is_outlier = (channels[..., None] == np.arange(d)).any(axis=-2).repeat(PAGE, axis=2)[:, :, : k.shape[2]]
        zero = k.dtype.type(0)
        inner, outer = np.where(is_outlier, zero, k), np.where(is_outlier, k, zero)
        expected = (sketch(inner, main.matrix, rules), sketch(outer, extra.matrix, rules))
        found = ((split.signs, split.norms, m), (split.outlier_signs, split.outlier_norms, OUTLIER_M))
        for (packed, stored, rows), (signs, norms, _) in zip(found, expected, strict=True):
            tally.compare(unpack(packed, rows, 1), signs)
            tally.compare_halves(stored, norms)
        tally.compare(split.saturated, expected[0][2] + expected[1][2])
    return tally


def tally_pages(setting: Setting, rules: Rules, dtypes: Sequence[str]) -> Tally:
    """What is read from the pages that caches are made of: keys per channel, values per token, and sketches."""
    tally = Tally()
    cases = itertools.product(BITS, KINDS_OF_DATA, dtypes)
    for number, (bits, make, dtype) in enumerate(cases):
        x = data(setting, number, shape=(2, PAGE_TOKENS, PAGE_WIDTH), make=make, dtype=dtype)
        tally_page(tally, setting, x, "keys", GroupedInts(bits), dtype, rules)
        tally_page(tally, setting, x, "values", GroupedInts(bits), dtype, rules)
    for number, (make, kind) in enumerate(itertools.product(KINDS_OF_DATA, KINDS)):
        k = data(setting, "sketches", number, shape=(2, PAGE_TOKENS, PAGE_WIDTH), make=make, dtype="float32")
        projection, side = sketched_side(setting, kind)
        records, saturated = encode_keys(k, side, engine=setting.engine)
        signs, norms, clipped = sketch(k, projection.matrix, rules)
        tally.compare(page_signs(records, side, projection.m), signs)
        field = side.field("norms")
        stored = np.ascontiguousarray(records[..., field.offset : field.offset + field.nbytes]).view(np.float16)
        tally.compare_halves(stored.reshape(norms.shape), norms)
        tally.compare(saturated, clipped)
    return tally


def tally_page(
    tally: Tally, setting: Setting, x: Any, side_name: Side, codec: GroupedInts, dtype: str, rules: Rules
) -> None:
    """Numbers recovered from one side of the pages of x (h, n, d)."""
    side = side_layout(side_name, codec, 32, x.shape[-1], dtype)
    encode, decode = (encode_keys, decode_keys) if side_name == "keys" else (encode_values, decode_values)
    axis = "tokens" if side_name == "keys" else "channels"
    stored = quantize(x, bits=codec.bits, group=codec.group, axis=axis, rules=rules)
    records, saturated = encode(x, side, engine=setting.engine)
    tally.compare(saturated, stored.saturated)
    tally.compare(decode(records, side, engine=setting.engine), stored.recovered(codec.group, axis))


def sketched_side(setting: Setting, kind: str) -> tuple[Projection, SideLayout]:
    """A projection, and the key side of pages that are sketched with it."""
    codec = SignSketch(m=PAGE_ROWS, kind=kind, seed=setting.seed)
    projection = draw_projection(PAGE_ROWS, PAGE_WIDTH, kind=kind, seed=setting.seed)
    return projection, side_layout("keys", codec, 32, PAGE_WIDTH)


def page_signs(records: Any, side: SideLayout, m: int) -> Any:
    """Signs (..., tokens, m) in key records (..., P, bytes), found bit by bit where docs/layout.md has them."""
    field = side.field("codes")
    blocks, units, size = field.shape
    where = locate_codes(1)[:, :, 0]
    raw = records[..., field.offset : field.offset + field.nbytes].reshape(*records.shape[:-1], blocks, units, size)
    # (..., P, blocks, units, 32 lanes, rows of a unit)
    bits = raw[..., where[..., 0]] >> where[..., 1].astype(np.uint8) & 1
    bits = bits.swapaxes(-3, -2)
    return bits.reshape(*records.shape[:-2], -1, units * where.shape[1])[..., :m]


def sketch_page_error(setting: Setting, rules: Rules) -> float:
    """Largest error of the vectors c/m |k| S^T sign(S k) that pages of sketches decode to, over their largest."""
    worst = 0.0
    for number, (make, kind) in enumerate(itertools.product((ordinary, halves), KINDS)):
        k = data(setting, "pages", number, shape=(2, PAGE_TOKENS, PAGE_WIDTH), make=make, dtype="float32")
        k[:, 5] = 0
        projection, side = sketched_side(setting, kind)
        records, _ = encode_keys(k, side, engine=setting.engine)
        found = decode_keys(records, side, engine=setting.engine)
        signs, norms, _ = sketch(k, projection.matrix, rules)
        vectors = np.where(signs, 1.0, -1.0) @ projection.matrix.astype(np.float64)
        expected = projection.constant / projection.m * norms.astype(np.float64)[..., None] * vectors
        worst = max(worst, float(np.abs(found - expected).max() / np.abs(expected).max()))
    return worst


def check_all(setting: Setting, rules: Rules, dtypes: Sequence[str] = tuple(FLOAT_DTYPES)) -> Outcome:
    """Everything that is stored of arrays of `dtypes` against its computation from the specification."""
    outcome = Outcome()
    shapes = SHAPES + MORE_SHAPES if setting.full else SHAPES
    tallies = {
        "codes, scales, zeros and recovered numbers of the quantizer": tally_quantizer(setting, rules, dtypes, shapes),
        "signs, norms and outlier channels of sketches": tally_sketches(setting, rules, dtypes),
        "numbers, signs and norms read from a cache's pages": tally_pages(setting, rules, dtypes),
    }
    for what, tally in tallies.items():
        outcome.checks.append(check_at_most(f"{what} that differ", tally.wrong, 0, n=tally.compared))
        outcome.figures.append(Figure(f"{what} that differ", "", "0", f"{tally.wrong} of {tally.compared:,}"))
    error = sketch_page_error(setting, rules)
    outcome.checks.append(check_at_most("relative error of sketches decoded from pages", error, SKETCH_ERROR))
    return outcome


def run(setting: Setting) -> Outcome:
    return check_all(setting, Rules())


CLAIM = Claim(
    name="same_codes",
    title="What is stored does not depend on the machine that stores it",
    source="kvsketch",
    published="neither paper says how to round, what sign(0) is, or what happens beyond the range of float16",
    proved="float32 in a fixed order of operations, IEEE division, half to even, sign(0) = +1, norms saturate at 65504 "
    "(kvsketch.kivi, kvsketch.qjl)",
    finding="True: codes, scales, zeros, signs and norms agree to the last bit with a second computation from the "
    "written rules, also for zeros, constants, infinities and numbers too large or too small for 16 bits.",
    verdict=HOLDS,
    run=run,
    twins=(
        Twin("sign(0) = -1", lambda setting: check_all(setting, Rules(is_positive=lambda x: x > 0), TWIN_DTYPES)),
        Twin(
            "multiplied by a reciprocal instead of divided",
            lambda setting: check_all(setting, Rules(divide=lambda x, y: x * (np.float32(1) / y)), TWIN_DTYPES),
        ),
    ),
)
