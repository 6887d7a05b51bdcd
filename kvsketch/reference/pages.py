"""Page records, encoded and decoded in plain array calls: what docs/layout.md says, byte for byte."""

from __future__ import annotations

import math
from typing import Any

from kvsketch._checks import FLOAT_DTYPES
from kvsketch._dispatch import namespace
from kvsketch.codecs import Exact, GroupedInts, SignSketch, TokenInts
from kvsketch.layout import LANES, SideLayout, unit_bytes, unit_rows
from kvsketch.reference import kivi, qjl
from kvsketch.reference.bitpack import unpack_signs
from kvsketch.rotation import Projection, draw_projection


def pack_units(codes: Any, bits: int) -> Any:
    """Codes uint8 (..., lanes, rows) as units uint8 (..., lanes/32, rows/unit_rows, unit_bytes)."""
    xp = namespace(codes)
    *lead, lanes, rows = codes.shape
    # (..., L, 4 blocks of 8 lanes, 8 lanes i, groups of 8 rows, 8 rows r)
    x = codes.reshape(*lead, lanes // LANES, 4, 8, rows // 8, 8)
    if bits == 3:
        low = _pack_planes(xp, x & 3, 2)
        low = low.reshape(*low.shape[:-4], rows // 16, 2 * low.shape[-3], 8, 8)
        packed = xp.concatenate([low, _pack_signs(xp, x >> 2)], axis=-3)
    elif bits == 1:
        packed = _pack_signs(xp, x)
    else:
        packed = _pack_planes(xp, x, bits)
    return packed.reshape(*lead, lanes // LANES, rows // unit_rows(bits), unit_bytes(bits))


def _pack_planes(xp: Any, x: Any, bits: int) -> Any:
    """(..., L, 4, 8 i, U, 8 r) codes of 2, 4 or 8 bits as (..., L, U, vectors, 8 i, 8 r) bytes."""
    planes = 8 // bits
    x = x.reshape(*x.shape[:-4], 4 // planes, planes, *x.shape[-3:])
    shifts = (bits * xp.arange(planes, dtype=xp.uint8)).reshape(planes, 1, 1, 1)
    packed = (x << shifts).sum(axis=-4, dtype=x.dtype)
    return xp.moveaxis(packed, -2, -4)


def _pack_signs(xp: Any, x: Any) -> Any:
    """(..., L, 4, 8 i, 2U, 8 r) bits as (..., L, U, 1 vector, 8 i, 8 r) bytes."""
    x = x.reshape(*x.shape[:-2], x.shape[-2] // 2, 2, 8)
    shifts = xp.arange(4, dtype=xp.uint8).reshape(4, 1, 1, 1, 1) + 4 * xp.arange(2, dtype=xp.uint8).reshape(2, 1)
    packed = (x << shifts).sum(axis=(-5, -2), dtype=x.dtype)
    return xp.moveaxis(packed, -2, -3)[..., None, :, :]


def unpack_units(units: Any, bits: int) -> Any:
    """Inverse of :func:`pack_units`: codes uint8 (..., lanes, rows)."""
    xp = namespace(units)
    *lead, blocks, count, _ = units.shape
    x = units.reshape(*lead, blocks, count, unit_bytes(bits) // 64, 8, 8)
    if bits == 3:
        low = x[..., :2, :, :].reshape(*lead, blocks, 2 * count, 1, 8, 8)
        codes = _unpack_planes(xp, low, 2) | (_unpack_signs(xp, x[..., 2:, :, :]) << 2)
    elif bits == 1:
        codes = _unpack_signs(xp, x)
    else:
        codes = _unpack_planes(xp, x, bits)
    return codes.reshape(*lead, blocks * LANES, count * unit_rows(bits))


def _unpack_planes(xp: Any, x: Any, bits: int) -> Any:
    """(..., L, U, V, 8 i, 8 r) bytes as (..., L, 4, 8 i, U, 8 r) codes."""
    planes = 8 // bits
    shifts = (bits * xp.arange(planes, dtype=xp.uint8)).reshape(planes, 1, 1)
    codes = (x[..., None, :, :] >> shifts) & xp.uint8((1 << bits) - 1)
    codes = codes.reshape(*x.shape[:-3], 4, 8, 8)
    return xp.moveaxis(codes, -4, -2)


def _unpack_signs(xp: Any, x: Any) -> Any:
    """(..., L, U, 1, 8 i, 8 r) bytes as (..., L, 4, 8 i, 2U, 8 r) bits."""
    x = x[..., 0, :, :]
    shifts = xp.arange(4, dtype=xp.uint8).reshape(4, 1, 1, 1) + 4 * xp.arange(2, dtype=xp.uint8).reshape(2, 1, 1)
    codes = (x[..., None, None, :, :] >> shifts) & xp.uint8(1)  # (..., L, U, 4, 2, 8 i, 8 r)
    codes = xp.moveaxis(codes, (-5, -3), (-3, -2))  # (..., L, 4, 8 i, U, 2, 8 r)
    return codes.reshape(*codes.shape[:-3], 2 * codes.shape[-3], 8)


def projections(side: SideLayout) -> tuple[Projection, Projection | None]:
    """The projection of a sketched side, and that of its outlier channels if it splits them."""
    codec = side.codec
    assert isinstance(codec, SignSketch)
    main = draw_projection(codec.m, side.width, kind=codec.kind, seed=codec.seed)
    if not codec.outliers:
        return main, None
    return main, draw_projection(codec.outlier_m, side.width, kind=codec.kind, seed=codec.seed, stream=1)


def select_channels(k: Any, side: SideLayout) -> Any:
    return select(k, side, qjl.select_outlier_channels)


def select(k: Any, side: SideLayout, choose: Any) -> Any:
    """Outlier channels (..., outliers) of keys (..., n, d), by an engine's ``select_outlier_channels``."""
    codec = side.codec
    assert isinstance(codec, SignSketch)
    *lead, n, d = k.shape
    chosen = choose(k.reshape(1, math.prod(lead), n, d), codec.outliers, max(n, 1))
    return chosen.reshape(*lead, codec.outliers)


def page_view(x: Any, side: SideLayout) -> Any:
    """(..., P*p, width) float as float32 (..., P, p, width)."""
    xp = namespace(x)
    *lead, n, width = x.shape
    return x.astype(xp.float32).reshape(*lead, n // side.tokens, side.tokens, width)


def write_field(records: Any, side: SideLayout, name: str, data: Any) -> None:
    """Store an array (..., *field shape) as a field of `records` (..., side bytes)."""
    xp = namespace(records)
    f = side.field(name)
    lead = records.shape[:-1]
    raw = xp.ascontiguousarray(data.astype(f.dtype, copy=False)).view(xp.uint8)
    records[..., f.offset : f.offset + f.nbytes] = raw.reshape(*lead, f.nbytes)


def _read(records: Any, side: SideLayout, name: str) -> Any:
    """A field of `records` as an array (..., *field shape)."""
    xp = namespace(records)
    f = side.field(name)
    raw = xp.ascontiguousarray(records[..., f.offset : f.offset + f.nbytes])
    return raw.view(f.dtype).reshape(*records.shape[:-1], *f.shape)


def _pad_axis(x: Any, axis: int, size: int) -> Any:
    """`x` with zeros appended along `axis` up to `size`."""
    xp = namespace(x)
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return xp.pad(x, widths)


def _write_exact(x: Any, side: SideLayout, out: Any) -> None:
    xp = namespace(x)
    raw = xp.ascontiguousarray(x.astype(FLOAT_DTYPES[side.dtype], copy=False))
    pages = raw.reshape(*x.shape[:-2], x.shape[-2] // side.tokens, side.tokens * side.width).view(xp.uint8)
    out[..., : pages.shape[-1]] = pages


def _read_exact(records: Any, side: SideLayout) -> Any:
    x = _read(records, side, "numbers")
    return x.view(FLOAT_DTYPES[side.dtype]).astype(namespace(records).float32)


def encode_keys(k: Any, side: SideLayout, *, channels: Any, out: Any) -> int:
    """Write pages of keys `k` (..., P*p, d) to `out` (..., P, side bytes); number of saturated scales and norms."""
    if isinstance(side.codec, Exact):
        _write_exact(k, side, out)
        return 0
    if isinstance(side.codec, GroupedInts):
        return _encode_int_keys(page_view(k, side), side, out)
    if isinstance(side.codec, TokenInts):
        return _encode_by_token(page_view(k, side), side, out)
    return _encode_sketch(page_view(k, side), side, channels, out)


def _encode_int_keys(x: Any, side: SideLayout, out: Any) -> int:
    xp = namespace(x)
    bits, group, rows = side.spec.bits, side.spec.group, side.spec.rows
    by_channel = xp.swapaxes(x, -1, -2).reshape(*x.shape[:-2], side.width, side.tokens // group, group)
    codes, scale, zero, saturated = kivi.quantize_block(by_channel, bits)
    codes = xp.swapaxes(codes.reshape(*x.shape[:-2], side.width, side.tokens), -1, -2)
    write_field(out, side, "codes", pack_units(_pad_axis(codes, -1, rows), bits))
    write_field(out, side, "scale", _pad_axis(xp.swapaxes(scale, -1, -2), -1, rows))
    write_field(out, side, "zero", _pad_axis(xp.swapaxes(zero, -1, -2), -1, rows))
    return int(saturated)


def _encode_sketch(x: Any, side: SideLayout, channels: Any, out: Any) -> int:
    return encode_sketch(x, side, channels, out, family=qjl, pack=_pack_sign_units)


def _pack_sign_units(signs: Any, m: int, rows: int) -> Any:
    """Packed signs (..., p, ceil(m/8)) as the units of a page with `rows` rows."""
    return pack_units(_pad_axis((unpack_signs(signs, m) > 0).astype(signs.dtype), -1, rows), 1)


def encode_sketch(x: Any, side: SideLayout, channels: Any, out: Any, *, family: Any, pack: Any) -> int:
    """Write pages of keys `x` (..., p, d) with the functions of an engine's qjl module and its packing of signs."""
    xp = namespace(x)
    main, outlier = projections(side)
    if outlier is None:
        parts = [(x, main, "codes", "norms")]
    else:
        if channels is None:
            chosen = select(x, side, family.select_outlier_channels)
        else:
            chosen = xp.broadcast_to(channels[..., None, :], (*x.shape[:-2], channels.shape[-1]))
        write_field(out, side, "channels", chosen)
        is_outlier, zero = _outlier_mask(chosen, side), xp.float32(0)
        parts = [
            (xp.where(is_outlier, zero, x), main, "codes", "norms"),
            (xp.where(is_outlier, x, zero), outlier, "outlier_codes", "outlier_norms"),
        ]
    saturated = 0
    for part, projection, codes, norms in parts:
        signs, norm, clipped = family.sketch_vectors(part, projection.matrix_beside(x))
        write_field(out, side, codes, pack(signs, projection.m, unit_rows(1) * side.field(codes).shape[1]))
        write_field(out, side, norms, norm)
        saturated += clipped
    return saturated


def _outlier_mask(chosen: Any, side: SideLayout) -> Any:
    """Channels (..., outliers) as booleans (..., 1, d)."""
    return qjl.outlier_mask(chosen, side.width)[..., None, :]


def encode_values(v: Any, side: SideLayout, *, out: Any) -> int:
    """Write pages of values `v` (..., P*p, dv) to `out` (..., P, side bytes); number of saturated scales."""
    if isinstance(side.codec, Exact):
        _write_exact(v, side, out)
        return 0
    return _encode_by_token(page_view(v, side), side, out)


def _encode_by_token(x: Any, side: SideLayout, out: Any) -> int:
    """Write pages `x` (..., p, width) whose groups are channels of one token."""
    xp = namespace(x)
    bits, group, width = side.spec.bits, side.spec.group, side.width
    parts = [kivi.quantize_block(x[..., c : c + group], bits) for c in range(0, width, group)]
    codes = xp.swapaxes(xp.concatenate([part[0] for part in parts], axis=-1), -1, -2)
    lanes = side.field("codes").shape[0] * LANES
    write_field(out, side, "codes", pack_units(_pad_axis(codes, -2, lanes), bits))
    write_field(out, side, "scale", xp.stack([part[1] for part in parts], axis=-2))
    write_field(out, side, "zero", xp.stack([part[2] for part in parts], axis=-2))
    return sum(int(part[3]) for part in parts)


def decode_keys(records: Any, side: SideLayout) -> Any:
    """Keys float32 (..., P*p, d) of `records` (..., P, side bytes): <q, k^> is the score of a page."""
    xp = namespace(records)
    if isinstance(side.codec, Exact):
        k = _read_exact(records, side)
    elif isinstance(side.codec, GroupedInts):
        codes = unpack_units(_read(records, side, "codes"), side.spec.bits)[..., : side.width].astype(xp.float32)
        scale, zero = (
            xp.repeat(_read(records, side, f)[..., : side.width].astype(xp.float32), side.spec.group, axis=-2)
            for f in ("scale", "zero")
        )
        k = codes * scale + zero
    elif isinstance(side.codec, TokenInts):
        k = _decode_by_token(records, side)
    else:
        k = _decode_sketch(records, side)
    return k.reshape(*records.shape[:-2], records.shape[-2] * side.tokens, side.width)


def _decode_sketch(records: Any, side: SideLayout) -> Any:
    xp = namespace(records)
    main, outlier = projections(side)
    k = _decode_signs(records, side, main, "codes", "norms")
    if outlier is None:
        return k
    is_outlier = _outlier_mask(_read(records, side, "channels"), side)
    return xp.where(is_outlier, _decode_signs(records, side, outlier, "outlier_codes", "outlier_norms"), k)


def _decode_signs(records: Any, side: SideLayout, projection: Projection, codes: str, norms: str) -> Any:
    """c/m |k| S^T sign(S k): the vector whose product with q is the estimate of <q, k>."""
    xp = namespace(records)
    signs = 2 * unpack_units(_read(records, side, codes), 1)[..., : projection.m].astype(xp.float32) - 1
    norm = _read(records, side, norms).astype(xp.float32)[..., None]
    factor = xp.float32(projection.constant / projection.m)
    return norm * factor * xp.matmul(signs, projection.matrix_beside(records))


def decode_values(records: Any, side: SideLayout) -> Any:
    """Values float32 (..., P*p, dv) of `records` (..., P, side bytes)."""
    v = _read_exact(records, side) if isinstance(side.codec, Exact) else _decode_by_token(records, side)
    return v.reshape(*records.shape[:-2], records.shape[-2] * side.tokens, side.width)


def _decode_by_token(records: Any, side: SideLayout) -> Any:
    """Numbers (..., P, p, width) whose groups are channels of one token."""
    xp = namespace(records)
    codes = unpack_units(_read(records, side, "codes"), side.spec.bits)[..., : side.width, :]
    scale, zero = (
        xp.repeat(_read(records, side, f).astype(xp.float32), side.spec.group, axis=-2)[..., : side.width, :]
        for f in ("scale", "zero")
    )
    return xp.swapaxes(codes.astype(xp.float32) * scale + zero, -1, -2)
