"""Golden bytes of page records: offsets written out by hand, and codes placed by an independent per-bit packer."""

from __future__ import annotations

import numpy as np
import pytest

from kvsketch import pages
from kvsketch._checks import FLOAT_DTYPES
from kvsketch.codecs import Exact, GroupedInts, SignSketch, TokenInts
from kvsketch.layout import code_location, locate_codes, page_layout, side_layout, unit_bytes, unit_rows
from kvsketch.rotation import draw_projection
from kvsketch.testing import CPU_ENGINES

BITS = (1, 2, 3, 4, 8)

# What a side holds, worked out by hand: fields as name@offset dtype shape, bytes used of all bytes.
SIDES = [
    (("keys", GroupedInts(2, 32), 32, 64), "codes@0 u1 1x8x64; scale@512 f2 1x64; zero@640 f2 1x64; 768 of 768"),
    (("keys", GroupedInts(2, 32), 32, 80), "codes@0 u1 1x10x64; scale@640 f2 1x80; zero@800 f2 1x80; 960 of 960"),
    (
        ("keys", GroupedInts(4, 128), 128, 128),
        "codes@0 u1 4x16x128; scale@8192 f2 1x128; zero@8448 f2 1x128; 8704 of 8704",
    ),
    # two key groups a page
    (("keys", GroupedInts(8, 32), 64, 64), "codes@0 u1 2x8x256; scale@4096 f2 2x64; zero@4352 f2 2x64; 4608 of 4608"),
    # one channel is padded to a unit: 8 rows of 2-bit codes, 16 of 3-bit and 1-bit codes
    (("keys", GroupedInts(2, 32), 32, 1), "codes@0 u1 1x1x64; scale@64 f2 1x8; zero@80 f2 1x8; 96 of 128"),
    (("keys", GroupedInts(3, 32), 32, 1), "codes@0 u1 1x1x192; scale@192 f2 1x16; zero@224 f2 1x16; 256 of 256"),
    (("keys", GroupedInts(1, 32), 32, 20), "codes@0 u1 1x2x64; scale@128 f2 1x32; zero@192 f2 1x32; 256 of 256"),
    (("values", GroupedInts(2, 32), 32, 64), "codes@0 u1 2x4x64; scale@512 f2 2x32; zero@640 f2 2x32; 768 of 768"),
    # three blocks of 32 lanes, a last group of 16 channels
    (("values", GroupedInts(2, 32), 32, 80), "codes@0 u1 3x4x64; scale@768 f2 3x32; zero@960 f2 3x32; 1152 of 1152"),
    # groups of 64 and 32 channels
    (("values", GroupedInts(3, 64), 32, 96), "codes@0 u1 3x2x192; scale@1152 f2 2x32; zero@1280 f2 2x32; 1408 of 1408"),
    (
        ("values", GroupedInts(4, 64), 128, 128),
        "codes@0 u1 4x16x128; scale@8192 f2 2x128; zero@8704 f2 2x128; 9216 of 9216",
    ),
    (("values", GroupedInts(2, 32), 32, 1), "codes@0 u1 1x4x64; scale@256 f2 1x32; zero@320 f2 1x32; 384 of 384"),
    # latents: the same on both sides, one group a token unless a group is given
    (("keys", TokenInts(3), 32, 134), "codes@0 u1 5x2x192; scale@1920 f2 1x32; zero@1984 f2 1x32; 2048 of 2048"),
    (("values", TokenInts(3), 32, 134), "codes@0 u1 5x2x192; scale@1920 f2 1x32; zero@1984 f2 1x32; 2048 of 2048"),
    (("keys", TokenInts(2, 32), 64, 80), "codes@0 u1 3x8x64; scale@1536 f2 3x64; zero@1920 f2 3x64; 2304 of 2304"),
    (("keys", TokenInts(4, 64), 32, 40), "codes@0 u1 2x4x128; scale@1024 f2 1x32; zero@1088 f2 1x32; 1152 of 1152"),
    (("keys", SignSketch(m=256), 32, 64), "codes@0 u1 1x16x64; norms@1024 f2 32; 1088 of 1088"),
    # 100 sketch rows are stored as 112
    (("keys", SignSketch(m=100), 64, 128), "codes@0 u1 2x7x64; norms@896 f2 64; 1024 of 1024"),
    (
        ("keys", SignSketch(m=256, outliers=8, outlier_m=128), 32, 128),
        "codes@0 u1 1x16x64; norms@1024 f2 32; "
        "outlier_codes@1088 u1 1x8x64; outlier_norms@1600 f2 32; channels@1664 u1 8; 1672 of 1728",
    ),
    # channel 256 and above need two bytes
    (
        ("keys", SignSketch(m=16, outliers=3, outlier_m=1), 32, 257),
        "codes@0 u1 1x1x64; norms@64 f2 32; "
        "outlier_codes@128 u1 1x1x64; outlier_norms@192 f2 32; channels@256 u2 3; 262 of 320",
    ),
    (("keys", Exact(), 32, 80), "numbers@0 f4 32x80; 10240 of 10240"),
    (("values", Exact(), 32, 1, "float16"), "numbers@0 u2 32x1; 64 of 64"),
    (("values", Exact(), 32, 1, "bfloat16"), "numbers@0 u2 32x1; 64 of 64"),
]


@pytest.mark.parametrize(("arguments", "expected"), SIDES)
def test_fields_lie_where_the_table_says(arguments, expected):
    side = side_layout(*arguments)
    fields = [f"{f.name}@{f.offset} {np.dtype(f.dtype).str[1:]} {'x'.join(map(str, f.shape))}" for f in side.fields]
    assert "; ".join([*fields, f"{side.used_bytes} of {side.nbytes}"]) == expected
    assert side.spec.nbytes == side.nbytes
    for field in side.fields:
        if field.name != "numbers":
            assert getattr(side.spec, field.name) == field.offset


@pytest.mark.parametrize(
    ("codec", "width", "spec"),
    [
        (GroupedInts(3, 64), 96, {"kind": 1, "bits": 3, "group": 64, "groups": 2, "rows": 32}),
        (GroupedInts(2, 64), 40, {"kind": 1, "bits": 2, "group": 40, "groups": 1, "rows": 32}),
        (Exact(), 64, {"kind": 0, "bits": 0, "dtype": 0}),
    ],
)
def test_spec_tells_kernels_the_value_groups(codec, width, spec):
    found = side_layout("values", codec, 32, width).spec._asdict()
    assert {name: found[name] for name in spec} == spec


def test_spec_tells_kernels_latents_apart_from_keys():
    for group, groups in ((None, 1), (64, 2), (200, 1)):
        spec = side_layout("keys", TokenInts(3, group), 32, 96).spec
        assert (spec.kind, spec.bits, spec.group, spec.groups, spec.rows) == (3, 3, min(group or 96, 96), groups, 32)
        values = side_layout("values", TokenInts(3, group), 32, 96).spec
        assert values == spec._replace(kind=1) == side_layout("values", GroupedInts(3, group or 96), 32, 96).spec


def test_spec_tells_kernels_the_key_side():
    ints = side_layout("keys", GroupedInts(1, 32), 64, 20).spec
    assert (ints.kind, ints.tokens, ints.width, ints.group, ints.groups, ints.rows) == (1, 64, 20, 32, 2, 32)
    sketch = side_layout("keys", SignSketch(m=100, outliers=2, outlier_m=30), 32, 300).spec
    assert (sketch.kind, sketch.bits, sketch.m, sketch.rows, sketch.outliers) == (2, 1, 100, 112, 2)
    assert (sketch.outlier_m, sketch.channel_bytes) == (30, 2)


@pytest.mark.parametrize(
    ("keys", "values", "d", "dv", "tokens", "value_offset", "record_bytes"),
    [
        (GroupedInts(2, 32), GroupedInts(2, 32), 64, 64, 32, 768, 1536),
        (GroupedInts(2, 32), GroupedInts(2, 32), 80, 64, 32, 960, 1728),
        (GroupedInts(4, 128), GroupedInts(4, 64), 128, 128, 128, 8704, 17920),
        (SignSketch(m=256), GroupedInts(2, 32), 192, 128, 32, 1088, 1088 + 1536),
        (GroupedInts(2, 32), Exact(), 1, 1, 32, 128, 256),
        (Exact(), GroupedInts(2, 32), 1, 1, 32, 128, 512),
    ],
)
def test_a_record_is_the_key_side_then_the_value_side(keys, values, d, dv, tokens, value_offset, record_bytes):
    layout = page_layout(keys, values, d, dv)
    assert layout.page_tokens == tokens
    assert layout.value_offset == value_offset
    assert layout.record_bytes == record_bytes
    assert layout.record_bytes % 64 == layout.value_offset % 64 == 0


def test_exact_sides_follow_the_dtypes_given():
    layout = page_layout(Exact(), Exact(), 64, 32, key_dtype="bfloat16", value_dtype="float32")
    assert (layout.keys.nbytes, layout.values.nbytes) == (32 * 64 * 2, 32 * 32 * 4)


@pytest.mark.parametrize(("bits", "rows", "size"), [(1, 16, 64), (2, 8, 64), (3, 16, 192), (4, 8, 128), (8, 8, 256)])
def test_unit_sizes(bits, rows, size):
    assert (unit_rows(bits), unit_bytes(bits)) == (rows, size)


# Single codes placed by hand: bits, lane, row, [(byte, shift, width, code_shift)].
PLACES = [
    (1, 0, 0, [(0, 0, 1, 0)]),
    (1, 0, 8, [(0, 4, 1, 0)]),
    (1, 9, 3, [(11, 1, 1, 0)]),
    (1, 31, 15, [(63, 7, 1, 0)]),
    (2, 9, 3, [(11, 2, 2, 0)]),
    (2, 31, 7, [(63, 6, 2, 0)]),
    (3, 9, 3, [(11, 2, 2, 0), (139, 1, 1, 2)]),
    (3, 9, 11, [(75, 2, 2, 0), (139, 5, 1, 2)]),
    (3, 31, 15, [(127, 6, 2, 0), (191, 7, 1, 2)]),
    (4, 9, 3, [(11, 4, 4, 0)]),
    (4, 17, 3, [(75, 0, 4, 0)]),
    (4, 31, 7, [(127, 4, 4, 0)]),
    (8, 9, 3, [(75, 0, 8, 0)]),
    (8, 31, 7, [(255, 0, 8, 0)]),
]


@pytest.mark.parametrize(("bits", "lane", "row", "parts"), PLACES)
def test_single_codes_lie_where_documented(bits, lane, row, parts):
    assert [tuple(part) for part in code_location(bits, lane, row)] == parts


def bit_of_code(bits, lane, row, k):
    """Where bit `k` of a code goes, as the number of a bit of the unit, from the formulas of the page format."""
    if bits == 8:
        return 8 * (64 * (lane // 8) + 8 * (lane % 8) + row) + k
    if bits == 4:
        return 8 * (64 * (lane // 16) + 8 * (lane % 8) + row) + 4 * (lane // 8 % 2) + k
    if bits == 2:
        return 8 * (8 * (lane % 8) + row) + 2 * (lane // 8) + k
    if bits == 1:
        return 8 * (8 * (lane % 8) + row % 8) + lane // 8 + 4 * (row // 8)
    if k < 2:
        return 512 * (row // 8) + bit_of_code(2, lane, row % 8, k)
    return 1024 + bit_of_code(1, lane, row, 0)


def pack_bit_by_bit(codes, bits):
    """Codes (lanes, rows) as bytes: blocks of 32 lanes, in each the units, both padded with code 0."""
    height = unit_rows(bits)
    lanes, rows = codes.shape
    padded = np.zeros((-(-lanes // 32) * 32, -(-rows // height) * height), np.uint8)
    padded[:lanes, :rows] = codes
    packed = b""
    for block in range(0, padded.shape[0], 32):
        for unit in range(0, padded.shape[1], height):
            whole = 0
            for lane in range(32):
                for row in range(height):
                    code = int(padded[block + lane, unit + row])
                    for k in range(bits):
                        whole |= (code >> k & 1) << bit_of_code(bits, lane, row, k)
            packed += whole.to_bytes(unit_bytes(bits), "little")
    return packed


@pytest.mark.parametrize("bits", BITS)
def test_every_bit_of_a_unit_is_used_once_and_where_documented(bits):
    places = locate_codes(bits)
    assert places.shape[:2] == (32, unit_rows(bits))
    seen: set[tuple[int, int]] = set()
    for lane in range(32):
        for row in range(unit_rows(bits)):
            located = {
                code_shift + k: 8 * byte + shift + k
                for byte, shift, width, code_shift in places[lane, row].tolist()
                for k in range(width)
            }
            assert located == {k: bit_of_code(bits, lane, row, k) for k in range(bits)}
            seen.update(located.values())
    assert seen == set(range(8 * unit_bytes(bits)))


# A unit whose code at (lane, row) is ((lane + 1) * (row + 3) * 37 // 4) mod 2^bits, as hexadecimal.
GOLDEN_UNITS = {
    1: (
        "ffff00ff0000ff00ff0000ffff0000ffffff00000000ffffff00ff00ff00ff0000ffffffff0000000000ffff0000ffff"
        "00ffff00ff0000ff0000000000000000"
    ),
    2: (
        "775522ff88aa770077aa88ffdd00225577ff22aa22aadd557700ddaa7700ddaa2255775577aa88aa22aadd55880077ff"
        "22ff7700ddaa22ff2200220022002200"
    ),
    3: (
        "775522ff88aa770077aa88ffdd00225577ff22aa22aadd557700ddaa7700ddaa2255775577aa88aa22aadd55880077ff"
        "22ff7700ddaa22ff2200220022002200ddff88552200ddaa77aa88ffdd002255dd558800880077ff7700ddaa7700ddaa"
        "88ffddffdd00220022aadd55880077ff8855ddaa7700885522002200220022009cffc9a5c6f03655c3f0c3a5960f695a"
        "6cffc6556cff9ca533ffcc55cc0033aa9c00c9559cf06ca5c30fc3a5690f965a6c00c6a5c9ff39553300665533006655"
    ),
    4: (
        "9bd50e3760aad30c572aecbf714406d9137fca2682ee3995dfc4b9ae93887d628a1997159322a02e466e759da4ccd3fb"
        "02b35304b56606b7ce08428cc6004a8457d542bf2caa1784132a20373d444a51df7f0eae4eee7d1d9bc4fd265f88b1ea"
        "4619db9d5f22e4a6026eb91560cc1773ceb3978c71664a3f8a08860482008e0c"
    ),
    8: (
        "1b252e37404a535c374a5c6f8194a6b9536f8aa6c2def9156f94b9de03284d728ab9e7154372a0cea6de154d84bcf32b"
        "c2034384c5064687de2872bc06509ae4f94da0f3469aed401572ce2b87e4409d3197fc62c82e93f94dbc2b9a0978e756"
        "68e159d149c23ab2840687098a0c8d0fa02bb540cb56e06bbc50e4780ca034c8d77512af4cea8724f39a40e78d34da81"
        "0fbf6e1ece7e2ddd2be49d560fc8813a4609cb8d4f12d496622ef9c5905c27f37e5327fcd1a67a4f9a78563412f0ceac"
        "b59d846b523a2108d1c2b2a393847465ede7e0dad4cec7c1090c0f1215181b1e24313d4955626e7a40566b8196acc1d7"
        "5c7b99b8d7f6143378a0c8f018406890"
    ),
}


def golden_codes(bits):
    lanes, rows = np.mgrid[0:32, 0 : unit_rows(bits)]
    return ((lanes + 1) * (rows + 3) * 37 // 4 % 2**bits).astype(np.uint8)


def pack_by_table(codes, bits):
    unit = np.zeros(unit_bytes(bits), np.int64)
    for (lane, row), code in np.ndenumerate(codes):
        for byte, shift, width, code_shift in locate_codes(bits)[lane, row]:
            unit[byte] |= (int(code) >> code_shift & (1 << width) - 1) << shift
    return unit.astype(np.uint8).tobytes()


@pytest.mark.parametrize("bits", BITS)
def test_golden_units(bits):
    golden = bytes.fromhex(GOLDEN_UNITS[bits])
    assert pack_by_table(golden_codes(bits), bits) == golden
    assert pack_bit_by_bit(golden_codes(bits), bits) == golden


def random_codes(rng, shape, bits):
    """Codes of which every slice along axis 1 starts with 0 and the largest code, so that a group spans its range."""
    codes = rng.integers(0, 2**bits, shape)
    codes[:, 0], codes[:, 1] = 0, 2**bits - 1
    return codes


def halves(numbers):
    return np.asarray(numbers, np.float16).astype("<f2").tobytes()


def pad_record(data):
    return data + bytes(-len(data) % 64)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("group", "tokens", "d"), [(32, 32, 20), (32, 64, 64), (64, 64, 1), (128, 128, 33)])
@pytest.mark.parametrize("engine", CPU_ENGINES)
def test_key_records_bit_by_bit(engine, group, tokens, d, bits):
    # Numbers 2 * code + zero are exact: scale 2 and that zero are stored, whatever the rounding.
    rng = np.random.default_rng(bits)
    codes = random_codes(rng, (tokens // group, group, d), bits)
    zero = rng.integers(-9, 9, (tokens // group, 1, d))
    k = (2 * codes + zero).reshape(tokens, d).astype(np.float32)
    side = side_layout("keys", GroupedInts(bits, group), tokens, d)
    record, saturated = pages.encode_keys(k, side, engine=engine)
    rows = -(-d // unit_rows(bits)) * unit_rows(bits)
    constants = np.zeros((2, tokens // group, rows))
    constants[0, :, :d], constants[1, :, :d] = 2, zero[:, 0]
    assert record.tobytes() == pad_record(pack_bit_by_bit(codes.reshape(tokens, d), bits) + halves(constants))
    assert saturated == 0


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("group", "tokens", "dv"), [(32, 32, 64), (64, 32, 24), (32, 64, 40), (8, 32, 16)])
@pytest.mark.parametrize("engine", CPU_ENGINES)
def test_value_records_bit_by_bit(engine, group, tokens, dv, bits):
    rng = np.random.default_rng(bits)
    spans = [slice(start, min(start + group, dv)) for start in range(0, dv, group)]
    zero = rng.integers(-9, 9, (len(spans), tokens))
    codes = np.concatenate([random_codes(rng, (tokens, s.stop - s.start), bits) for s in spans], axis=1)
    v = np.concatenate([2 * codes[:, s] + z[:, None] for s, z in zip(spans, zero, strict=True)], axis=1)
    side = side_layout("values", GroupedInts(bits, group), tokens, dv)
    record, _ = pages.encode_values(v.astype(np.float32), side, engine=engine)
    constants = np.stack([np.full(zero.shape, 2), zero])
    assert record.tobytes() == pad_record(pack_bit_by_bit(codes.T, bits) + halves(constants))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("group", "tokens", "width"), [(None, 32, 134), (64, 32, 24), (32, 64, 40), (8, 32, 16)])
@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("engine", CPU_ENGINES)
def test_latent_records_are_those_of_values(engine, side, group, tokens, width, bits):
    rng = np.random.default_rng(bits)
    spans = [slice(start, min(start + (group or width), width)) for start in range(0, width, group or width)]
    zero = rng.integers(-9, 9, (len(spans), tokens))
    codes = np.concatenate([random_codes(rng, (tokens, s.stop - s.start), bits) for s in spans], axis=1)
    x = np.concatenate([2 * codes[:, s] + z[:, None] for s, z in zip(spans, zero, strict=True)], axis=1)
    layout = side_layout(side, TokenInts(bits, group), tokens, width)
    encode = pages.encode_keys if side == "keys" else pages.encode_values
    record, saturated = encode(x.astype(np.float32), layout, engine=engine)
    constants = np.stack([np.full(zero.shape, 2), zero])
    assert record.tobytes() == pad_record(pack_bit_by_bit(codes.T, bits) + halves(constants))
    assert saturated == 0


@pytest.mark.parametrize("engine", CPU_ENGINES)
def test_sketch_records_bit_by_bit(engine):
    d, m, outlier_m, outliers = 24, 40, 19, [3, 17]
    rng = np.random.default_rng(5)
    k = rng.standard_normal((32, d)).astype(np.float32)
    k[:, outliers] += 50
    codec = SignSketch(m=m, outliers=2, outlier_m=outlier_m, seed=7)
    record, _ = pages.encode_keys(k, side_layout("keys", codec, 32, d), engine=engine)
    inner, outer = k.astype(np.float64), np.zeros((32, d))
    outer[:, outliers] = inner[:, outliers]
    inner[:, outliers] = 0
    expected = b""
    for part, rows, stream in ((inner, m, 0), (outer, outlier_m, 1)):
        projected = part @ draw_projection(rows, d, seed=7, stream=stream).matrix.astype(np.float64).T
        assert np.abs(projected).min() > 1e-4  # no sign hangs on rounding
        expected += pack_bit_by_bit(projected >= 0, 1) + halves(np.linalg.norm(part, axis=1))
    assert record.tobytes() == pad_record(expected + bytes(outliers))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("engine", CPU_ENGINES)
def test_exact_records_are_the_numbers_bytes(engine, dtype):
    x = np.random.default_rng(0).standard_normal((64, 5)).astype(FLOAT_DTYPES[dtype])
    records, saturated = pages.encode_keys(x, side_layout("keys", Exact(), 32, 5, dtype), engine=engine)
    assert [r.tobytes() for r in records] == [pad_record(x[:32].tobytes()), pad_record(x[32:].tobytes())]
    assert saturated == 0
