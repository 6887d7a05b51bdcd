"""Pages of keys and values as bytes: encode and decode the records of docs/layout.md.

Arrays may have any leading axes; the last two are tokens and channels. A number of tokens that is a whole number of
pages gives that many records.
"""

from __future__ import annotations

from typing import Any

from kvsketch._checks import check_channels, check_float
from kvsketch._dispatch import implementation, namespace, on_device_of
from kvsketch.codecs import Side, SignSketch
from kvsketch.layout import SideLayout


def encode_keys(
    k: Any, side: SideLayout, *, channels: Any = None, out: Any = None, engine: str | None = None
) -> tuple[Any, int]:
    """Encode whole pages of keys.

    Parameters
    ----------
    k : (..., P*p, d) float32, float16 or bfloat16
    side : layout of the key side, from :func:`kvsketch.layout.side_layout`
    channels : (..., outliers) integers, optional
        Outlier channels of a sketch, ascending; chosen for each page when left out.
    out : (..., P, side.nbytes) uint8, optional
        Where to write the records; it may be a part of larger records.

    Returns
    -------
    records : (..., P, side.nbytes) uint8
    saturated : number of scales, zeros and norms beyond the range of float16, stored as its largest number
    """
    _check_numbers("k", k, side, "keys")
    if channels is not None:
        outliers = side.codec.outliers if isinstance(side.codec, SignSketch) else 0
        if tuple(channels.shape) != (*k.shape[:-2], outliers):
            raise ValueError(f"channels must have shape {(*k.shape[:-2], outliers)}, got {tuple(channels.shape)}")
        check_channels(channels, side.width)
    records = _records_for(k, side, out)
    run = implementation("pages.encode_keys", k, engine=engine)
    return records, int(run(k, side, channels=channels, out=records))


def encode_values(v: Any, side: SideLayout, *, out: Any = None, engine: str | None = None) -> tuple[Any, int]:
    """Encode whole pages of values `v` (..., P*p, dv); see :func:`encode_keys`."""
    _check_numbers("v", v, side, "values")
    records = _records_for(v, side, out)
    run = implementation("pages.encode_values", v, engine=engine)
    return records, int(run(v, side, out=records))


def decode_keys(records: Any, side: SideLayout, *, engine: str | None = None) -> Any:
    """Decode key records (..., P, side.nbytes) to float32 (..., P*p, d).

    For a sketch this is the vector k^ with <q, k^> equal to the estimate of <q, k> for every q.
    """
    _check_records(records, side, "keys")
    return implementation("pages.decode_keys", records, engine=engine)(records, side)


def decode_values(records: Any, side: SideLayout, *, engine: str | None = None) -> Any:
    """Decode value records (..., P, side.nbytes) to float32 (..., P*p, dv)."""
    _check_records(records, side, "values")
    return implementation("pages.decode_values", records, engine=engine)(records, side)


def select_channels(k: Any, side: SideLayout, *, engine: str | None = None) -> Any:
    """The outlier channels (..., outliers) of keys `k` (..., n, d), as a sketch of ``outlier_channels="prompt"`` does.

    The channels of largest L2 norm over all n tokens, ties to the lowest index, in ascending order.
    """
    check_float("k", k)
    if not isinstance(side.codec, SignSketch) or not side.codec.outliers:
        raise ValueError(f"{side.codec} splits off no outlier channels; give a SignSketch with outliers > 0")
    if k.ndim < 2 or k.shape[-1] != side.width:
        raise ValueError(f"k must have shape (..., n, {side.width}), got {tuple(k.shape)}")
    if not k.shape[-2]:
        raise ValueError(f"k has no tokens to choose outlier channels from, its shape is {tuple(k.shape)}")
    return implementation("pages.select_channels", k, engine=engine)(k, side)


def _check_numbers(name: str, x: Any, side: SideLayout, expected: Side) -> None:
    check_float(name, x)
    _check_side(side, expected)
    if x.ndim < 2 or x.shape[-1] != side.width or x.shape[-2] % side.tokens:
        raise ValueError(
            f"{name} must have shape (..., tokens, {side.width}) with tokens a multiple of the page of {side.tokens}, "
            f"got {tuple(x.shape)}"
        )


def _check_side(side: SideLayout, expected: Side) -> None:
    if side.side != expected:
        raise ValueError(f"side is a layout of {side.side}; give one of {expected}")


def _records_for(x: Any, side: SideLayout, out: Any) -> Any:
    xp = namespace(x)
    shape = (*x.shape[:-2], x.shape[-2] // side.tokens, side.nbytes)
    if out is None:
        with on_device_of(x):
            return xp.zeros(shape, dtype=xp.uint8)
    if out.dtype != xp.uint8 or tuple(out.shape) != shape:
        raise ValueError(f"out must be uint8 of shape {shape}, got {out.dtype} of shape {tuple(out.shape)}")
    out[..., side.used_bytes :] = 0
    return out


def _check_records(records: Any, side: SideLayout, expected: Side) -> None:
    _check_side(side, expected)
    if str(records.dtype) != "uint8" or records.ndim < 2 or records.shape[-1] != side.nbytes:
        raise ValueError(
            f"records must be uint8 of shape (..., P, {side.nbytes}), got {records.dtype} of {tuple(records.shape)}"
        )
