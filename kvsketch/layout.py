"""The bytes of a page: the single source of every offset, for every codec and engine (docs/layout.md).

A page is `p` tokens of one key/value head, stored as one contiguous record: the key side, then the value side, each
padded to 64 bytes. A side is a run of fields, and codes inside a field are bit planes of 64-byte vectors, arranged so
that a machine unpacks them with a shift and a mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from kvsketch._checks import FLOAT_DTYPES, check_choice, check_integer
from kvsketch.codecs import Codec, Exact, GroupedInts, Side, TokenInts

LANES = 32
VECTOR_BYTES = 64
RECORD_ALIGN = 64
MAX_WIDTH = 512
#: The widest latents: those of all heads of a layer together, which `Exact` and `TokenInts` hold.
MAX_LATENT_WIDTH = 8192

#: What a kernel finds on a side; integers grouped along a token's channels are `KIND_INTS` on the value side only.
KIND_EXACT, KIND_INTS, KIND_SKETCH, KIND_LATENTS = 0, 1, 2, 3
DTYPE_CODES = {"float32": 0, "float16": 1, "bfloat16": 2}


def unit_rows(bits: int) -> int:
    """Contraction rows of one unit: a unit holds this many rows of 32 lanes (16 for 1 and 3 bits, else 8)."""
    return 16 if bits in (1, 3) else 8


def unit_bytes(bits: int) -> int:
    """Bytes of one unit: 32 lanes times :func:`unit_rows` codes of `bits` bits, no bit unused."""
    return LANES * unit_rows(bits) * bits // 8


class BitField(NamedTuple):
    """Part of a code: `width` bits at bit `shift` of byte `byte` of a unit are bits `code_shift`.. of the code."""

    byte: int
    shift: int
    width: int
    code_shift: int


def code_location(bits: int, lane: int, row: int) -> tuple[BitField, ...]:
    """Where the code of lane `lane` (0..31) and contraction row `row` lies inside a unit.

    - 2, 4 and 8 bits: planes of `bits` bits; with P = 8/bits planes a byte, lane = 8*(P*vector + plane) + i, and the
      byte is 64*vector + 8*i + row.
    - 1 bit: planes 0..3 hold rows 0..7 of lanes 8*plane + i, planes 4..7 rows 8..15 of the same lanes.
    - 3 bits: two 64-byte vectors hold the low two bits of rows 0..7 and 8..15 as 2-bit units do, a third the high bit
      as a 1-bit unit does.
    """
    i, block = lane % 8, lane // 8
    if bits == 1:
        return (BitField(8 * i + row % 8, block + 4 * (row // 8), 1, 0),)
    if bits == 3:
        low = BitField(VECTOR_BYTES * (row // 8) + 8 * i + row % 8, 2 * block, 2, 0)
        high = BitField(2 * VECTOR_BYTES + 8 * i + row % 8, block + 4 * (row // 8), 1, 2)
        return (low, high)
    planes = 8 // bits
    vector, plane = divmod(block, planes)
    return (BitField(VECTOR_BYTES * vector + 8 * i + row, bits * plane, bits, 0),)


class SideSpec(NamedTuple):
    """The numbers of a :class:`SideLayout` that a compiled kernel needs; offsets are from the side's first byte."""

    kind: int
    tokens: int
    width: int
    nbytes: int
    dtype: int
    bits: int
    group: int
    groups: int
    rows: int
    codes: int
    scale: int
    zero: int
    m: int
    norms: int
    outliers: int
    outlier_m: int
    outlier_codes: int
    outlier_norms: int
    channels: int
    channel_bytes: int


@dataclass(frozen=True)
class Field:
    """A named array inside a side: `shape` elements of NumPy dtype `dtype`, C order, at byte `offset`."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class SideLayout:
    """Bytes of one side (keys or values) of a page: `tokens` tokens of `width` channels under `codec`.

    `dtype` is that of the numbers given; it decides the bytes of an ``Exact`` side only. `fields` cover the first
    `used_bytes` bytes without gaps and the side is padded with zeros to `nbytes`.
    """

    side: Side
    codec: Codec
    tokens: int
    width: int
    dtype: str
    fields: tuple[Field, ...]
    used_bytes: int
    nbytes: int
    spec: SideSpec

    @property
    def by_token(self) -> bool:
        """Whether groups of integers are channels of one token, not tokens of one channel."""
        return self.side == "values" or isinstance(self.codec, TokenInts)

    def field(self, name: str) -> Field:
        """The field called `name`; KeyError when this codec has none."""
        for f in self.fields:
            if f.name == name:
                return f
        raise KeyError(f"{self.codec} has no field {name!r}; its fields are {[f.name for f in self.fields]}")


@dataclass(frozen=True)
class PageLayout:
    """Record of a page: the key side at byte 0, the value side at byte `value_offset`."""

    keys: SideLayout
    values: SideLayout

    def __hash__(self) -> int:
        """Of what tells most layouts apart: engines look a layout up at every step."""
        return hash((self.keys.nbytes, self.values.nbytes, self.keys.width, self.values.width))

    @property
    def page_tokens(self) -> int:
        return self.keys.tokens

    @property
    def value_offset(self) -> int:
        return self.keys.nbytes

    @property
    def record_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _code_field(name: str, lanes: int, rows: int, bits: int) -> tuple[str, tuple[int, ...], str]:
    """Codes of `lanes` lanes (outer, in blocks of 32) by `rows` contraction rows (inner, in units)."""
    blocks = _round_up(lanes, LANES) // LANES
    units = _round_up(rows, unit_rows(bits)) // unit_rows(bits)
    return name, (blocks, units, unit_bytes(bits)), "uint8"


@lru_cache(maxsize=1024)
def side_layout(side: Side, codec: Codec, tokens: int, width: int, dtype: str = "float32") -> SideLayout:
    """Layout of one side of a page of `tokens` tokens; raises ValueError when the codec cannot hold it."""
    check_choice("side", side, ("keys", "values"))
    check_choice("dtype", dtype, tuple(FLOAT_DTYPES))
    latents = isinstance(codec, (Exact, TokenInts))
    check_integer("head size", width, low=1, high=MAX_LATENT_WIDTH if latents else MAX_WIDTH)
    check_integer("tokens", tokens, low=LANES)
    codec.check_width(side, width)
    smallest = codec.page_tokens(side)
    if tokens % LANES or tokens % smallest:
        raise ValueError(f"a page of {tokens} tokens does not fit {codec}, which takes multiples of {smallest}")
    wanted: list[tuple[str, tuple[int, ...], str]] = []
    numbers = dict.fromkeys(SideSpec._fields, 0) | {"tokens": tokens, "width": width, "dtype": DTYPE_CODES[dtype]}
    if isinstance(codec, Exact):
        # float16 and bfloat16 are both two bytes; the bits are stored, so uint16 names them without ml_dtypes.
        wanted.append(("numbers", (tokens, width), "float32" if dtype == "float32" else "uint16"))
        numbers |= {"kind": KIND_EXACT}
    elif isinstance(codec, (GroupedInts, TokenInts)):
        kind = KIND_INTS
        if side == "keys" and isinstance(codec, GroupedInts):
            rows, group = _round_up(width, unit_rows(codec.bits)), codec.group
            shape = (tokens // group, rows)
            wanted.append(_code_field("codes", tokens, width, codec.bits))
        else:
            rows, group = tokens, min(codec.group or width, width)
            shape = (-(-width // group), tokens)
            wanted.append(_code_field("codes", width, tokens, codec.bits))
            kind = KIND_LATENTS if side == "keys" else KIND_INTS
        wanted += [("scale", shape, "float16"), ("zero", shape, "float16")]
        numbers |= {"kind": kind, "bits": codec.bits, "group": group, "groups": shape[0], "rows": rows}
    else:
        wanted += [_code_field("codes", tokens, codec.m, 1), ("norms", (tokens,), "float16")]
        channel_dtype = "uint8" if width <= 256 else "uint16"
        if codec.outliers:
            wanted += [
                _code_field("outlier_codes", tokens, codec.outlier_m, 1),
                ("outlier_norms", (tokens,), "float16"),
                ("channels", (codec.outliers,), channel_dtype),
            ]
        numbers |= {"kind": KIND_SKETCH, "bits": 1, "rows": _round_up(codec.m, 16), "m": codec.m}
        numbers |= {"outliers": codec.outliers, "outlier_m": codec.outlier_m}
        numbers |= {"channel_bytes": np.dtype(channel_dtype).itemsize}
    offset = 0
    fields = []
    for name, field_shape, field_dtype in wanted:
        fields.append(Field(name, offset, field_shape, field_dtype))
        if name in numbers:
            numbers[name] = offset
        offset += fields[-1].nbytes
    numbers["nbytes"] = _round_up(offset, RECORD_ALIGN)
    spec = SideSpec(**numbers)
    return SideLayout(side, codec, tokens, width, dtype, tuple(fields), offset, spec.nbytes, spec)


@lru_cache(maxsize=1024)
def page_layout(
    keys: Codec, values: Codec, d: int, dv: int, *, key_dtype: str = "float32", value_dtype: str = "float32"
) -> PageLayout:
    """Record layout of a cache with `d`-channel keys and `dv`-channel values.

    A page has p = max(32, group of the keys) tokens. ValueError names the setting that does not fit.
    """
    tokens = max(keys.page_tokens("keys"), values.page_tokens("values"))
    return PageLayout(
        side_layout("keys", keys, tokens, d, key_dtype), side_layout("values", values, tokens, dv, value_dtype)
    )


def locate_codes(bits: int) -> Any:
    """All of :func:`code_location` as an int64 array (32 lanes, rows, parts, 4): byte, shift, width, code_shift."""
    rows = unit_rows(bits)
    return np.array([[code_location(bits, lane, row) for row in range(rows)] for lane in range(LANES)], dtype=np.int64)
