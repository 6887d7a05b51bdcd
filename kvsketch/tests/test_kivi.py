"""KIVI: codes and scales bit for bit on every engine, products against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsketch import kivi
from kvsketch.bounds import kivi_bits, quantizer_error_bound
from kvsketch.testing import CPU_ENGINES, assert_accurate, assert_same

BITS = (1, 2, 3, 4, 8)
AXES = ("tokens", "channels")
DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)

per_engine = pytest.mark.parametrize("engine", CPU_ENGINES)
per_bits = pytest.mark.parametrize("bits", BITS)
per_axis = pytest.mark.parametrize("axis", AXES)


def random_array(shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(dtype)


def unpacked_codes(codes):
    """Codes (..., n, d) read bit by bit with NumPy, independently of the library."""
    used = codes.size * codes.bits
    bits = np.unpackbits(codes.codes, axis=-1, bitorder="little")[..., :used]
    bits = bits.reshape(*codes.shape, codes.bits)
    return (bits.astype(np.int64) << np.arange(codes.bits)).sum(axis=-1)


def decoded(codes):
    """``code * scale + zero`` in float64."""
    scale, zero = (np.asarray(x, np.float64) for x in (codes.scale, codes.zero))
    axis, count = (-2, codes.shape[-2]) if codes.axis == "tokens" else (-1, codes.size)
    scale, zero = (np.repeat(x, codes.group, axis).take(range(count), axis) for x in (scale, zero))
    return unpacked_codes(codes) * scale + zero


def assert_same_codes(actual, expected):
    for name in ("codes", "scale", "zero"):
        a, e = getattr(actual, name), getattr(expected, name)
        assert (a.dtype, a.shape) == (e.dtype, e.shape), name
        assert a.tobytes() == e.tobytes(), name
    settings_of = ("bits", "group", "axis", "size", "saturated")
    assert [getattr(actual, name) for name in settings_of] == [getattr(expected, name) for name in settings_of]


def quantize_by_hand(group, bits):
    """The rule for one group of finite float32 numbers, a number at a time."""
    lo, hi = np.float32(min(group)), np.float32(max(group))
    levels = np.float32(2**bits - 1)
    scale = np.float16(min(np.float32(hi - lo) / levels, np.float32(65504)))
    zero = np.float16(lo)
    codes = [0] * len(group)
    if scale > 0:
        steps = [np.float32(np.float32(x - np.float32(zero)) / np.float32(scale)) for x in group]
        codes = [min(max(round(float(step)), 0), 2**bits - 1) for step in steps]
    return codes, scale, zero


# ---- the rule ----


@per_engine
def test_a_group_worked_out_by_hand(engine):
    # Range 6, scale 2, zero -1: steps 0, .5, 1, 1.5, 2.5, 3; halves round to even.
    x = np.array([[-1, 0, 1, 2, 4, 5]], np.float32)
    codes = kivi.quantize_groups(x, bits=2, group=6, axis="channels", engine=engine)
    assert unpacked_codes(codes).tolist() == [[0, 0, 1, 2, 2, 3]]
    assert codes.codes.tolist() == [[0b10_01_00_00, 0b11_10]]
    assert (codes.scale.tolist(), codes.zero.tolist(), codes.saturated) == ([[2.0]], [[-1.0]], 0)
    assert kivi.dequantize_groups(codes, engine=engine).tolist() == [[-1, -1, 1, 3, 3, 5]]


@per_engine
@per_bits
@pytest.mark.parametrize("dtype", DTYPES)
def test_rule_number_by_number(engine, bits, dtype):
    x = random_array((11, 13), dtype)
    wide = x.astype(np.float32)
    for axis, groups in (("tokens", (wide[:8].T, wide[8:].T)), ("channels", (wide[:, :8], wide[:, 8:]))):
        codes = kivi.quantize_groups(x, bits=bits, group=8, axis=axis, engine=engine)
        for part, group_rows in enumerate(groups):
            for row, group in enumerate(group_rows):
                expected, scale, zero = quantize_by_hand(group, bits)
                members = slice(8 * part, 8 * part + len(group))
                at = (part, row) if axis == "tokens" else (row, part)
                place: Any = (members, row) if axis == "tokens" else (row, members)
                assert unpacked_codes(codes)[place].tolist() == expected
                assert (codes.scale[at], codes.zero[at]) == (scale, zero)


adversarial = st.one_of(
    st.floats(width=32, allow_nan=True, allow_infinity=True),
    st.sampled_from([0.0, -0.0, 65504.0, -65504.0, 65520.0, 1e-8, -3e-8, 5.96e-8, 1e-45, 3.4e38, -3.4e38, 100.03]),
    st.floats(-4, 4, width=16),
)


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_engines_agree_bit_for_bit(data):
    bits, axis = data.draw(st.sampled_from(BITS)), data.draw(st.sampled_from(AXES))
    n, d, group = (data.draw(st.integers(low, 9)) for low in (0, 1, 1))
    numbers = data.draw(st.lists(adversarial, min_size=n * d, max_size=n * d))
    with np.errstate(over="ignore"):
        x = np.array(numbers, np.float32).reshape(n, d).astype(data.draw(st.sampled_from(DTYPES)))
    codes = check_engines_agree(x, bits, group, axis)
    for dtype in ("float32", "float16", "bfloat16"):
        assert_same(*(kivi.dequantize_groups(codes, dtype=dtype, engine=engine) for engine in CPU_ENGINES))


def check_engines_agree(x, bits, group, axis):
    codes = [kivi.quantize_groups(x, bits=bits, group=group, axis=axis, engine=engine) for engine in CPU_ENGINES]
    assert_same_codes(*codes)
    return codes[0]


@per_bits
@per_axis
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [1e-7, 1e-3, 1.0, 1e4])
def test_engines_agree_on_long_arrays(bits, axis, dtype, spread):
    x = (random_array((2, 3, 150, 72)) * np.float32(spread) + np.float32(spread / 3)).astype(dtype)
    for group in (32, 64, 200):
        check_engines_agree(x, bits, group, axis)


# ---- shapes and groups ----


@per_engine
@per_axis
@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("d", [64, 80, 96, 128, 192, 256])
def test_any_number_of_tokens(engine, axis, group, d):
    for n in (1, 2, 3, 31, 32, 33, 63, 65, 127, 128, 129):
        x = random_array((n, d), seed=n)
        codes = kivi.quantize_groups(x, bits=2, group=group, axis=axis, engine=engine)
        assert codes.shape == (n, d)
        assert codes.scale.shape == ((-(-n // group), d) if axis == "tokens" else (n, -(-d // group)))
        back = kivi.dequantize_groups(codes, engine=engine)
        np.testing.assert_allclose(back, decoded(codes), rtol=1e-6, atol=1e-6)
        along = 0 if axis == "tokens" else 1
        for part, start in enumerate(range(0, x.shape[along], group)):
            block = x.take(range(start, min(start + group, x.shape[along])), along)
            again = back.take(range(start, min(start + group, x.shape[along])), along)
            bound = quantizer_error_bound(block.min(along), block.max(along), 2)
            assert np.all(np.abs(block.astype(np.float64) - again) <= np.expand_dims(bound, along)), part


@per_engine
@per_axis
@per_bits
def test_a_shorter_last_group_is_a_group_of_its_own(engine, axis, bits):
    x = random_array((96, 96)) + 5  # padding with zeros would join the range
    whole = kivi.quantize_groups(x, bits=bits, group=64, axis=axis, engine=engine)
    cut = (lambda a, s: a[s]) if axis == "tokens" else (lambda a, s: a[:, s])
    for part, span in enumerate((slice(0, 64), slice(64, 96))):
        alone = kivi.quantize_groups(cut(x, span), bits=bits, group=64, axis=axis, engine=engine)
        np.testing.assert_array_equal(cut(unpacked_codes(whole), span), unpacked_codes(alone))
        np.testing.assert_array_equal(cut(whole.scale, slice(part, part + 1)), alone.scale)
        np.testing.assert_array_equal(cut(whole.zero, slice(part, part + 1)), alone.zero)


@per_engine
@per_axis
def test_groups_never_span_batch_or_heads(engine, axis):
    x = random_array((2, 3, 40, 24))
    x[1] *= 50
    x[0, 1] *= 7
    whole = kivi.quantize_groups(x, bits=3, group=32, axis=axis, engine=engine)
    for i, j in np.ndindex(2, 3):
        alone = kivi.quantize_groups(x[i, j], bits=3, group=32, axis=axis, engine=engine)
        assert_same_codes(
            replace(whole, codes=whole.codes[i, j], scale=whole.scale[i, j], zero=whole.zero[i, j]), alone
        )


@per_engine
@per_axis
@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 5), (0, 3, 7, 5), (2, 0, 7, 5)])
def test_empty_arrays(engine, axis, shape):
    codes = kivi.quantize_groups(np.zeros(shape, np.float32), bits=3, group=4, axis=axis, engine=engine)
    assert (codes.shape, codes.nbytes, codes.saturated) == (shape, 0, 0)
    assert kivi.dequantize_groups(codes, dtype="float16", engine=engine).shape == shape


@per_engine
@per_axis
@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_and_read_only_inputs(engine, axis, dtype):
    base = random_array((48, 2, 3, 34), dtype)
    view = base.transpose(1, 2, 0, 3)[..., ::-2]
    plain = np.ascontiguousarray(view)
    view.flags.writeable = False
    found, expected = (kivi.quantize_groups(x, bits=4, group=8, axis=axis, engine=engine) for x in (view, plain))
    assert_same_codes(found, expected)
    np.testing.assert_array_equal(plain, np.ascontiguousarray(view))


def test_bytes_are_what_the_formula_says():
    for bits in BITS:
        for axis, count in (("tokens", 80), ("channels", 96)):
            codes = kivi.quantize_groups(random_array((4, 80, 96)), bits=bits, group=64, axis=axis)
            assert codes.nbytes * 8 == pytest.approx(4 * 80 * 96 * kivi_bits(bits, 64, count), rel=1e-12)
    big = kivi.quantize_groups(np.zeros((4096, 128), np.float16), bits=2, group=32, axis="channels")
    assert big.nbytes * 8 / (4096 * 128) == 3.0


# ---- products ----


def exact_scores(q, codes):
    k = np.repeat(decoded(codes), q.shape[1] // codes.shape[1], axis=1)
    q = q.astype(np.float64)
    return np.einsum("bhsd,bhnd->bhsn", q, k), np.einsum("bhsd,bhnd->bhsn", abs(q), abs(k)).max(initial=0)


def exact_sums(p, codes):
    v = np.repeat(decoded(codes), p.shape[1] // codes.shape[1], axis=1)
    p = p.astype(np.float64)
    return np.einsum("bhsn,bhnd->bhsd", p, v), np.einsum("bhsn,bhnd->bhsd", abs(p), abs(v)).max(initial=0)


@per_bits
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("d", [1, 64, 80, 96, 128])
def test_every_width_of_codes_and_heads(bits, group, d):
    x = random_array((1, 2, 150, d))
    q, p = random_array((1, 4, 3, d), seed=1), random_array((1, 4, 3, 150), seed=2)
    check_products(x, q, p, bits, group)


def check_products(x, q, p, bits, group):
    keys = kivi.quantize_groups(x, bits=bits, group=group, axis="tokens")
    values = kivi.quantize_groups(x, bits=bits, group=group, axis="channels")
    for product, weights, codes, oracle in (
        (kivi.key_scores, q, keys, exact_scores),
        (kivi.weighted_values, p, values, exact_sums),
    ):
        exact, size = oracle(weights, codes)
        reference = product(weights, codes, engine="reference")
        assert reference.dtype == weights.dtype
        assert_accurate(reference, exact, exact.astype(weights.dtype), size=size)
        assert_accurate(product(weights, codes, engine="numba_cpu"), exact, reference, size=size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hq", "h"), [(16, 4), (32, 8), (14, 2), (7, 1), (3, 3)])
def test_query_heads_share_key_heads(hq, h, dtype):
    x = random_array((2, h, 70, 24), dtype)
    q, p = random_array((2, hq, 2, 24), dtype, seed=1), random_array((2, hq, 2, 70), dtype, seed=2)
    check_products(x, q, p, 2, 32)


def test_long_sums_stay_accurate():
    # Summing 9000 products of one sign one after another would err by about 2e-6.
    p = np.full((1, 1, 1, 9000), 1 / 9000, np.float32)
    codes = kivi.quantize_groups(random_array((1, 1, 9000, 16)) + 1, bits=4, group=32, axis="channels")
    exact, size = exact_sums(p, codes)
    assert_accurate(kivi.weighted_values(p, codes, engine="numba_cpu"), exact, exact.astype(np.float32), size=size)
    assert np.abs(kivi.weighted_values(p, codes, engine="reference") - exact).max() < 1e-5 * size


@per_engine
@pytest.mark.parametrize(("b", "h", "s", "n"), [(1, 1, 0, 5), (1, 1, 2, 0), (0, 1, 2, 5)])
def test_products_of_empty_arrays(engine, b, h, s, n):
    x = np.zeros((b, h, n, 6), np.float32)
    keys, values = (kivi.quantize_groups(x, bits=2, group=4, axis=axis, engine=engine) for axis in AXES)
    assert kivi.key_scores(np.zeros((b, 2 * h, s, 6), np.float16), keys, engine=engine).shape == (b, 2 * h, s, n)
    sums = kivi.weighted_values(np.zeros((b, 2 * h, s, n), np.float16), values, engine=engine)
    assert (sums.shape, sums.dtype, sums.any()) == ((b, 2 * h, s, 6), np.float16, np.False_)


# ---- arguments ----


def quantize(x, bits=2, group=4, axis="tokens", engine="reference"):
    return kivi.quantize_groups(x, bits=bits, group=group, axis=axis, engine=engine)


X = np.zeros((1, 2, 8, 4), np.float32)
KEYS, VALUES = (quantize(X, axis=axis) for axis in AXES)


@pytest.mark.parametrize("bits", [0, 5, 6, 7, 16, -1, True, "2", None])
def test_unsupported_bits_are_refused(bits):
    with pytest.raises(ValueError, match=r"bits must be one of \[1, 2, 3, 4, 8\]"):
        quantize(X, bits=bits)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: quantize(X.astype(np.float64)), TypeError, "x has dtype float64; cast it to one of"),
        (lambda: quantize([[1.0]]), TypeError, "x must be a NumPy or CuPy array, got list"),
        (lambda: quantize(X[0, 0, 0]), ValueError, r"x must have shape \(\.\.\., n, d\)"),
        (lambda: quantize(X[..., :0]), ValueError, "d >= 1"),
        (lambda: quantize(X, group=0), ValueError, "group must be >= 1, got 0"),
        (lambda: quantize(X, group=4.0), TypeError, "group must be an integer"),
        (lambda: quantize(X, axis="heads"), ValueError, "axis must be one of"),
        (lambda: quantize(X, engine="cuda"), ValueError, "engine='cuda'"),
        (lambda: kivi.dequantize_groups(X), TypeError, "codes must be a GroupedCodes, got ndarray"),  # type: ignore[arg-type]
        (lambda: kivi.dequantize_groups(KEYS, dtype="float64"), ValueError, "dtype must be one of"),
        (lambda: kivi.key_scores(X, VALUES), ValueError, "grouped along channels; .*axis='tokens'"),
        (lambda: kivi.weighted_values(X, KEYS), ValueError, "grouped along tokens; .*axis='channels'"),
        (lambda: kivi.key_scores(X[..., :3], KEYS), ValueError, "q has 3 channels but the quantized keys have 4"),
        (lambda: kivi.key_scores(X[0], KEYS), ValueError, r"q must have shape \(b, hq, s, d\)"),
        (lambda: kivi.key_scores(X[:, [0, 1, 1]], KEYS), ValueError, "3 heads, .* multiple of the 2 key"),
        (lambda: kivi.key_scores(np.concatenate([X, X]), KEYS), ValueError, "q has batch 2 but codes have batch 1"),
        (lambda: kivi.weighted_values(X, VALUES), ValueError, "p weighs 4 tokens but codes hold 8"),
        (lambda: kivi.key_scores(X.astype(np.int32), KEYS), TypeError, "q has dtype int32"),
    ],
)
def test_bad_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
