"""Pages: the same bytes and numbers on every engine, against kivi and qjl, in any layout of the arrays."""

from __future__ import annotations

import numpy as np
import pytest

from kvsketch import kivi, pages, qjl
from kvsketch.bounds import quantizer_error_bound
from kvsketch.codecs import Exact, GroupedInts, SignSketch, TokenInts
from kvsketch.layout import side_layout
from kvsketch.testing import CPU_ENGINES, assert_accurate, assert_same, spacing
from kvsketch.tests.page_cases import DTYPES, make_numbers, sketch_of, split_sizes, stored_numbers

WIDTHS = (1, 5, 37, 64, 80, 96, 130, 512)
BITS = (1, 2, 3, 4, 8)

per_engine = pytest.mark.parametrize("engine", CPU_ENGINES)
per_dtype = pytest.mark.parametrize("dtype", DTYPES)
per_bits = pytest.mark.parametrize("bits", BITS)

#: Sides of every kind: (side, codec, tokens of a page, width).
SIDES = {
    "ints2 keys": ("keys", GroupedInts(2, 32), 32, 64),
    "ints3 keys": ("keys", GroupedInts(3, 64), 64, 37),
    "ints1 keys in larger pages": ("keys", GroupedInts(1, 32), 64, 20),
    "ints2 values": ("values", GroupedInts(2, 32), 32, 64),
    "ints3 values": ("values", GroupedInts(3, 64), 32, 96),
    "ints4 values in larger pages": ("values", GroupedInts(4, 16), 128, 37),
    "latents3 keys": ("keys", TokenInts(3), 32, 134),
    "latents1 keys in larger pages": ("keys", TokenInts(1, 24), 64, 80),
    "latents2 values": ("values", TokenInts(2), 32, 37),
    "latents4 values, wide": ("values", TokenInts(4, 64), 32, 1100),
    "sketch": ("keys", SignSketch(m=100, seed=3), 32, 24),
    "sketch in larger pages": ("keys", SignSketch(m=32, kind="gaussian"), 64, 130),
    "sketch with outliers": ("keys", SignSketch(m=48, kind="hadamard", outliers=3, outlier_m=20), 32, 37),
    "exact keys": ("keys", Exact(), 32, 5),
    "exact values": ("values", Exact(), 32, 37),
}
per_side = pytest.mark.parametrize("name", SIDES)


def encode(x, side, **options):
    return (pages.encode_keys if side.side == "keys" else pages.encode_values)(x, side, **options)


def decode(records, side, **options):
    return (pages.decode_keys if side.side == "keys" else pages.decode_values)(records, side, **options)


def page_of(name, dtype="float32"):
    return side_layout(*SIDES[name], dtype)


def assert_engines_agree(x, side, **options):
    """Records and decoded numbers of the reference, after comparing all engines' with them."""
    records, saturated = encode(x, side, engine="reference", **options)
    assert records.shape == (*x.shape[:-2], x.shape[-2] // side.tokens, side.nbytes)
    decoded = decode(records, side, engine="reference")
    assert (decoded.dtype, decoded.shape) == (np.float32, x.shape)
    for engine in CPU_ENGINES[1:]:
        found, clipped = encode(x, side, engine=engine, **options)
        assert_same(found, records)
        assert clipped == saturated
        assert_same(decode(records, side, engine=engine), decoded)
    assert not records[..., side.used_bytes :].any()
    return records, decoded, saturated


# ---- what is stored ----


@per_dtype
@per_bits
@pytest.mark.parametrize("group", [32, 64, 128])
def test_integer_keys_are_those_of_kivi(group, bits, dtype):
    for width in WIDTHS:
        x = make_numbers((2, 2 * group, width), width, dtype)
        _, decoded, _ = assert_engines_agree(x, side_layout("keys", GroupedInts(bits, group), group, width, dtype))
        groups = kivi.quantize_groups(x, bits=bits, group=group, axis="tokens", engine="reference")
        assert_same(decoded, kivi.dequantize_groups(groups, engine="reference"))


@per_dtype
@per_bits
@pytest.mark.parametrize("group", [8, 32, 64, 128])
def test_integer_values_are_those_of_kivi(group, bits, dtype):
    for width in WIDTHS:
        x = make_numbers((2, 64, width), width, dtype)
        _, decoded, _ = assert_engines_agree(x, side_layout("values", GroupedInts(bits, group), 32, width, dtype))
        groups = kivi.quantize_groups(x, bits=bits, group=group, axis="channels", engine="reference")
        assert_same(decoded, kivi.dequantize_groups(groups, engine="reference"))


@pytest.mark.parametrize("width", WIDTHS)
def test_scales_and_zeros_lie_by_group_and_row(width):
    """The fields hold kivi's numbers: (groups, channels) of keys, padded with 0, and (groups, tokens) of values."""
    x = make_numbers((64, width), 1)
    for name, group, axis in (("keys", 32, "tokens"), ("values", 16, "channels")):
        side = side_layout(name, GroupedInts(2, group), 64, width)
        records, _ = encode(x, side)
        codes = kivi.quantize_groups(x, bits=2, group=group, axis=axis, engine="reference")
        for field, expected in (("scale", codes.scale), ("zero", codes.zero)):
            f = side.field(field)
            found = records[0, f.offset : f.offset + f.nbytes].view(np.float16).reshape(f.shape)
            if name == "keys":
                assert not found[:, width:].any()
                found = found[:, :width]
            assert_same(found, expected if name == "keys" else np.ascontiguousarray(expected.T))


@per_side
@per_dtype
def test_decoded_numbers_are_what_the_codec_keeps(name, dtype):
    side = page_of(name, dtype)
    x = make_numbers((2, 3, 2 * side.tokens, side.width), 5, dtype)
    _, decoded, saturated = assert_engines_agree(x, side)
    kept = stored_numbers(x, side)
    size = 4 * np.abs(kept).max() if isinstance(side.codec, SignSketch) else None
    assert_accurate(decoded, kept, kept.astype(np.float32), size=size)
    assert saturated == 0


@per_bits
@pytest.mark.parametrize(("name", "group"), [("keys", 32), ("keys", 128), ("values", 8), ("values", 64)])
def test_errors_stay_below_half_a_step_and_rounding(name, group, bits):
    side = side_layout(name, GroupedInts(bits, group), 128 if name == "keys" else 32, 96)
    x = make_numbers((4, side.tokens, 96), bits)
    records, _ = encode(x, side)
    decoded = decode(records, side)
    if name == "keys":
        x, decoded = np.swapaxes(x, -1, -2), np.swapaxes(decoded, -1, -2)
    for part in split_sizes(x.shape[-1], group):
        numbers, error = x[..., part], np.abs(decoded[..., part] - x[..., part])
        low, high = (edge(numbers, axis=-1, keepdims=True).astype(np.float64) for edge in (np.min, np.max))
        half_step = (high - low) / (2**bits - 1) / 2
        # Scale and zero are float16: each is off by half a spacing, the scale counted once for every step.
        rounding = spacing(np.float16) * ((high - low) + np.maximum(np.abs(low), np.abs(high)))
        assert (error <= half_step + rounding).all()
        assert (error <= quantizer_error_bound(low, high, bits)).all()


@pytest.mark.parametrize("kind", ["gaussian", "orthogonal", "hadamard"])
@pytest.mark.parametrize(("outliers", "outlier_m"), [(0, 0), (1, 16), (4, 33)])
def test_sketched_pages_score_as_qjl_does(outliers, outlier_m, kind):
    for d, m in ((5, 7), (37, 64), (64, 256), (96, 100), (130, 16), (512, 40)):
        side = side_layout("keys", SignSketch(m, kind, outliers, outlier_m, seed=d), 32, d)
        k = make_numbers((3, 96, d), d)
        _, decoded, _ = assert_engines_agree(k, side)
        q = np.random.default_rng(d).standard_normal((1, 3, 4, d)).astype(np.float32)
        keys, (main, *outlier) = sketch_of(k, side)
        options = {"outlier_projection": outlier[0]} if outliers else {}
        scores = qjl.sketch_scores(q, keys, main, engine="reference", **options)
        found = np.einsum("bhsd,hnd->bhsn", q.astype(np.float64), decoded.astype(np.float64))
        exact = np.einsum("bhsd,hnd->bhsn", q.astype(np.float64), stored_numbers(k, side))
        size = float(np.einsum("bhsd,hnd->bhsn", np.abs(q), np.abs(decoded)).max())
        assert_accurate(found.astype(np.float32), exact, scores, size=size)


def test_outlier_channels_are_of_the_page_or_of_the_prompt():
    side = side_layout("keys", SignSketch(m=40, outliers=2, outlier_m=30), 32, 300)
    k = make_numbers((2, 64, 300), 1)
    for head, page, channels in ((0, 0, [7, 299]), (0, 1, [0, 256]), (1, 0, [1, 2]), (1, 1, [2, 150])):
        k[head, 32 * page : 32 * page + 32, channels] += 40
    records, _, _ = assert_engines_agree(k, side)
    f = side.field("channels")
    found = np.ascontiguousarray(records[..., f.offset : f.offset + f.nbytes]).view(np.uint16)
    assert found.tolist() == [[[7, 299], [0, 256]], [[1, 2], [2, 150]]]

    prompt = np.array([[3, 299], [0, 1]])
    records, decoded, _ = assert_engines_agree(k, side, channels=prompt)
    found = np.ascontiguousarray(records[..., f.offset : f.offset + f.nbytes]).view(np.uint16)
    assert found.tolist() == [[[3, 299]] * 2, [[0, 1]] * 2]
    kept = stored_numbers(k, side, channels=prompt)
    assert_accurate(decoded, kept, kept.astype(np.float32), size=4 * np.abs(kept).max())
    assert np.abs(kept - stored_numbers(k, side)).max() > 1


@per_engine
@per_dtype
def test_prompt_channels_are_the_largest_over_all_tokens(dtype, engine):
    side = side_layout("keys", SignSketch(m=40, outliers=4, outlier_m=30, outlier_channels="prompt"), 32, 37)
    k = make_numbers((2, 3, 45, 37), 2, dtype)
    norms = np.square(k.astype(np.float64)).sum(axis=-2)
    expected = np.sort(np.argsort(-norms, axis=-1, kind="stable")[..., :4], axis=-1)
    np.testing.assert_array_equal(pages.select_channels(k, side, engine=engine), expected)
    ties = np.ones((1, 37), np.float32)
    ties[0, 30] = -2
    assert pages.select_channels(ties, side, engine=engine).tolist() == [0, 1, 2, 30]


# ---- unusual numbers ----


@pytest.mark.parametrize("name", ["ints2 keys", "ints3 values", "ints4 values in larger pages"])
@pytest.mark.parametrize("number", [0.0, -0.0, 3.0, -3.0, 0.01])
def test_constant_groups_come_back(name, number):
    side = page_of(name)
    _, decoded, saturated = assert_engines_agree(np.full((side.tokens, side.width), number, np.float32), side)
    np.testing.assert_array_equal(decoded, np.float32(np.float16(number)))
    assert saturated == 0


def test_saturation_is_counted_and_harms_no_other_group():
    """T18: ±60000 in a 1-bit group has a range of 120000; T19: NaN and infinities stay in their group."""
    x = make_numbers((2, 64, 64), 3)
    kinds = {"keys": GroupedInts(1, 32), "values": GroupedInts(1, 32)}
    for name, codec in kinds.items():
        side = side_layout(name, codec, 32, 64)
        clean, clean_decoded, none = assert_engines_agree(x, side)
        assert none == 0
        for bad, clipped in (([60000, -60000], 1), ([1e38, -1e38], 2), ([np.inf, -np.inf], 2), ([np.nan, 1], 0)):
            spoilt = x.copy()
            spoilt[1, 40, 33] = bad[0]
            spoilt[1, (41, 40)[name == "values"], (33, 34)[name == "values"]] = bad[1]
            records, decoded, saturated = assert_engines_agree(spoilt, side)
            assert saturated == clipped
            group = np.zeros(x.shape, bool)
            group[(1, slice(32, 64), 33) if name == "keys" else (1, 40, slice(32, 64))] = True
            np.testing.assert_array_equal(decoded[~group], clean_decoded[~group])
            np.testing.assert_array_equal(records[0], clean[0])
            assert np.isnan(decoded[group]).all() == (clipped == 0)
            if clipped:
                assert np.isfinite(decoded[group]).all()


def test_norms_of_sketches_saturate_and_spoil_their_token_alone():
    side = page_of("sketch with outliers")
    k = make_numbers((32, 37), 4)
    channels = np.array([0, 1, 2])
    clean = assert_engines_agree(k, side, channels=channels)[1]
    for number, clipped in ((1e6, 1), (np.inf, 1), (np.nan, 0)):
        spoilt = k.copy()
        spoilt[9, 30] = number
        _, decoded, saturated = assert_engines_agree(spoilt, side, channels=channels)
        assert saturated == clipped
        np.testing.assert_array_equal(np.delete(decoded, 9, axis=0), np.delete(clean, 9, axis=0))
        np.testing.assert_array_equal(decoded[9, :3], clean[9, :3])
        assert np.isnan(decoded[9, 3:]).all() == (clipped == 0)


@per_engine
def test_a_zero_key_is_sketched_as_zero(engine):
    side = page_of("sketch")
    records, _ = encode(np.zeros((32, 24), np.float32), side, engine=engine)
    assert not decode(records, side, engine=engine).any()
    assert records[0, 0] == 255  # the sign of 0 is +1


# ---- arrays of any layout ----


@per_side
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 1, 3), (0,), (2, 0)])
def test_any_leading_axes_and_numbers_of_pages(name, lead):
    side = page_of(name)
    for count in (0, 1, 3):
        x = make_numbers((*lead, count * side.tokens, side.width), 6)
        records, decoded, _ = assert_engines_agree(x, side)
        flat = x.reshape(-1, side.tokens, side.width)
        expected = [encode(page, side, engine="reference")[0] for page in flat]
        np.testing.assert_array_equal(records.reshape(-1, 1, side.nbytes), np.reshape(expected, (-1, 1, side.nbytes)))
        assert_same(decode(records, side), decoded)


@per_side
def test_outlier_channels_and_codes_do_not_depend_on_other_pages(name):
    """T9: a head beside one that is fifty times larger has the bytes that it has alone."""
    side = page_of(name)
    x = make_numbers((2, 3, 2 * side.tokens, side.width), 7)
    x[1] *= 50
    x[:, 2] += 9
    records, _, _ = assert_engines_agree(x, side)
    for index in np.ndindex(2, 3, 2):
        page = x[index[:2]][index[2] * side.tokens : (index[2] + 1) * side.tokens]
        for engine in CPU_ENGINES:
            assert_same(encode(page, side, engine=engine)[0][0], records[index])


@per_engine
@per_side
@per_dtype
def test_strided_and_read_only_arrays(name, dtype, engine):
    side = page_of(name, dtype)
    wide = make_numbers((2, 4 * side.tokens, 3, 2 * side.width), 8, dtype)
    x = wide[:, ::-2, :, ::2].swapaxes(1, 2)  # (2, 3, 2 pages, width), as a (b, n, h, d) model gives it
    expected, _ = encode(np.ascontiguousarray(x), side, engine="reference")
    for given in (x, np.ascontiguousarray(x)):
        given.flags.writeable = False
        assert_same(encode(given, side, engine=engine)[0], expected)
    decoded = decode(expected, side, engine="reference")
    spread = np.zeros((2, 2, 3, 2 * side.nbytes), np.uint8).swapaxes(1, 2)[..., ::2]
    spread[...] = expected
    expected.flags.writeable = False
    for records in (expected, spread):
        assert_same(decode(records, side, engine=engine), decoded)


@per_engine
@per_side
def test_out_may_be_a_part_of_larger_dirty_records(name, engine):
    side = page_of(name)
    x = make_numbers((2, 2 * side.tokens, side.width), 9)
    expected, saturated = encode(x, side, engine="reference")
    large = np.full((2, 5, side.nbytes + 128), 0xA5, np.uint8)
    part = large[:, 1:5:2, 64:-64]
    records, found = encode(x, side, out=part, engine=engine)
    assert records is part
    assert found == saturated
    assert_same(np.ascontiguousarray(part), expected)
    part[...] = 0xA5
    assert (large == 0xA5).all()


# ---- errors ----


def test_numbers_that_do_not_fit_are_refused():
    keys, values = page_of("ints2 keys"), page_of("ints2 values")
    good = np.zeros((2, 32, 64), np.float32)
    for run, side, name, other in (
        (pages.encode_keys, keys, "k", values),
        (pages.encode_values, values, "v", keys),
    ):
        with pytest.raises(TypeError, match=rf"{name} has dtype float64; cast it to one of"):
            run(good.astype(np.float64), side)
        with pytest.raises(TypeError, match=rf"{name} must be a NumPy or CuPy array, got list"):
            run(good.tolist(), side)
        for shape in ((32,), (2, 31, 64), (2, 32, 65)):
            message = rf"{name} must have shape \(..., tokens, 64\) with tokens a multiple of the page of 32"
            with pytest.raises(ValueError, match=message):
                run(np.zeros(shape, np.float32), side)
        with pytest.raises(ValueError, match=rf"side is a layout of {other.side}; give one of {side.side}"):
            run(good, other)
        for out in (np.zeros((2, 1, 767), np.uint8), np.zeros((2, 768), np.uint8), np.zeros((2, 1, 768), np.int8)):
            with pytest.raises(ValueError, match=r"out must be uint8 of shape \(2, 1, 768\), got .*int8 of shape"):
                run(good, side, out=out)
        with pytest.raises(ValueError, match="engine='cuda_raw' does not run on numpy arrays"):
            run(good, side, engine="cuda_raw")


def test_records_that_do_not_fit_are_refused():
    keys, values = page_of("ints2 keys"), page_of("ints2 values")
    for run, side, other in ((pages.decode_keys, keys, values), (pages.decode_values, values, keys)):
        for records in (np.zeros((1, 767), np.uint8), np.zeros(768, np.uint8), np.zeros((1, 768), np.int8)):
            with pytest.raises(ValueError, match=r"records must be uint8 of shape \(..., P, 768\), got"):
                run(records, side)
        with pytest.raises(ValueError, match=f"side is a layout of {other.side}"):
            run(np.zeros((1, 768), np.uint8), other)


def test_outlier_channels_that_do_not_fit_are_refused():
    side = page_of("sketch with outliers")
    k = np.zeros((2, 32, 37), np.float32)
    for shape in ((2, 2), (3,), (1, 3)):
        with pytest.raises(ValueError, match=r"channels must have shape \(2, 3\), got"):
            pages.encode_keys(k, side, channels=np.zeros(shape, np.int64))
    for name in ("ints2 keys", "sketch"):
        plain = page_of(name)
        with pytest.raises(ValueError, match=r"channels must have shape \(0,\), got \(3,\)"):
            pages.encode_keys(np.zeros((32, plain.width), np.float32), plain, channels=np.array([0, 1, 2]))
        with pytest.raises(ValueError, match="splits off no outlier channels; give a SignSketch with outliers > 0"):
            pages.select_channels(np.zeros((32, plain.width), np.float32), plain)
    with pytest.raises(ValueError, match=r"k must have shape \(..., n, 37\), got \(2, 32, 36\)"):
        pages.select_channels(k[..., 1:], side)
    with pytest.raises(TypeError, match="k has dtype float64"):
        pages.select_channels(k.astype(np.float64), side)
