"""What the page and attention tests share: numbers to store, and what must be read back, in float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from kvsketch import pages, qjl
from kvsketch.attention import CacheView
from kvsketch.bitpack import unpack_signs
from kvsketch.codecs import Codec, Exact, GroupedInts, TokenInts
from kvsketch.layout import SideLayout, page_layout
from kvsketch.rotation import draw_projection

#: Relative L2 error that rounding queries and weights to coefficients of a kind may add to a result.
ROUNDING = {"int16": 1.5e-4, "int8": 4e-2}

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def make_numbers(shape: tuple[int, ...], seed: int = 0, dtype: str = "float32") -> Any:
    """Normal numbers (..., n, width), each channel with a mean and a spread of its own, so that no zero is 0."""
    rng = np.random.default_rng(seed)
    mean, spread = rng.standard_normal(shape[-1]), rng.uniform(0.3, 2, shape[-1])
    return (mean + spread * rng.standard_normal(shape)).astype(np.float32).astype(DTYPES[dtype])


def recovered(groups: Any, bits: int) -> Any:
    """What integers of `bits` bits keep of groups (..., g) of ordinary size: KIVI's rule, result in float64."""
    groups, levels = groups.astype(np.float32), np.float32(2**bits - 1)
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    zero = low.astype(np.float16).astype(np.float32)
    scale = ((high - low) / levels).astype(np.float16).astype(np.float32)
    flat = scale == 0
    codes = np.clip(np.rint((groups - zero) / np.where(flat, np.float32(1), scale)), 0, levels)
    return np.where(flat, 0, codes).astype(np.float64) * scale + zero


def split_sizes(size: int, group: int) -> list[slice]:
    """Runs of `group` in `size`, the last one maybe shorter."""
    return [slice(first, min(first + group, size)) for first in range(0, size, group)]


def stored_numbers(x: Any, side: SideLayout, channels: Any = None) -> Any:
    """What a side keeps of whole pages `x` (..., P*p, width), float64, without the help of its pages."""
    codec = side.codec
    if isinstance(codec, Exact):
        return x.astype(DTYPES[side.dtype]).astype(np.float64)
    if isinstance(codec, (GroupedInts, TokenInts)):
        width = codec.group or x.shape[-1]
        if side.side == "keys" and isinstance(codec, GroupedInts):
            turned = np.swapaxes(x, -1, -2)
            parts = [recovered(turned[..., s], codec.bits) for s in split_sizes(x.shape[-2], width)]
            return np.swapaxes(np.concatenate(parts, axis=-1), -1, -2)
        parts = [recovered(x[..., s], codec.bits) for s in split_sizes(x.shape[-1], width)]
        return np.concatenate(parts, axis=-1)
    *lead, n, d = x.shape
    keys, projections = sketch_of(x, side, channels)
    parts = [(keys.signs, keys.norms), (keys.outlier_signs, keys.outlier_norms)]
    estimates = []
    for (signs, norms), projection in zip(parts, projections, strict=False):
        matrix = projection.matrix.astype(np.float64)
        factor = norms.astype(np.float64)[..., None] * (projection.constant / projection.m)
        estimates.append(factor * (unpack_signs(signs, projection.m, engine="reference") @ matrix))
    if codec.outliers:
        outlying = (keys.channels[..., None] == np.arange(d)).any(axis=-2)
        outlying = np.repeat(outlying, side.tokens, axis=2)
        return np.where(outlying, estimates[1], estimates[0]).reshape(*lead, n, d)
    return estimates[0].reshape(*lead, n, d)


def sketch_of(x: Any, side: SideLayout, channels: Any = None) -> tuple[Any, tuple[Any, ...]]:
    """Keys (..., P*p, d) sketched by :mod:`kvsketch.qjl`, as a batch of one, and the projections."""
    codec: Any = side.codec
    x = x.reshape(1, -1, *x.shape[-2:])
    main = draw_projection(codec.m, side.width, kind=codec.kind, seed=codec.seed)
    if not codec.outliers:
        return qjl.sketch_keys(x, main, page=side.tokens, engine="reference"), (main,)
    outlier = draw_projection(codec.outlier_m, side.width, kind=codec.kind, seed=codec.seed, stream=1)
    if channels is not None:
        channels = channels.reshape(1, -1, codec.outliers)
    keys = qjl.sketch_keys(
        x,
        main,
        outliers=codec.outliers,
        outlier_projection=outlier,
        channels=channels,
        page=side.tokens,
        engine="reference",
    )
    return keys, (main, outlier)


class Row(NamedTuple):
    """Tokens of one row: exact first ones, pages, exact last ones."""

    sinks: int
    pages: int
    window: int


def make_view(
    keys: Codec,
    values: Codec,
    *,
    d: int,
    dv: int,
    h: int,
    rows: list[Row],
    dtype: str = "float32",
    seed: int = 0,
    channels: Any = None,
) -> tuple[CacheView, list[tuple[Any, Any]]]:
    """A cache with the given rows, and the tokens that it holds: k (h, n, d) and v (h, n, dv) in float64 for each row.

    What lies beyond a row's counts is NaN, in pages too. `channels` (h, outliers): those of the prompt's outliers.
    """
    layout = page_layout(keys, values, d, dv, key_dtype=dtype, value_dtype=dtype)
    sinks, count, window = (max(sizes) for sizes in zip(*rows, strict=True))
    b, p = len(rows), layout.page_tokens
    exact = [
        np.full((b, h, capacity, width), np.nan, np.float32).astype(DTYPES[dtype])
        for capacity in (sinks + 1, window + 3)
        for width in (d, dv)
    ]
    records = np.full((b, h, count + 1, layout.record_bytes), 255, np.uint8)
    starts = np.arange(b) % 3
    tokens = []
    for r, row in enumerate(rows):
        n = row.sinks + row.pages * p + row.window
        k, v = (make_numbers((h, n, width), seed + 2 * r + i, dtype) for i, width in enumerate((d, dv)))
        first, last = slice(row.sinks), slice(row.sinks + row.pages * p, n)
        encoded = slice(row.sinks, row.sinks + row.pages * p)
        for x, sink, recent in ((k, exact[0], exact[2]), (v, exact[1], exact[3])):
            sink[r, :, first] = x[:, first]
            recent[r, :, starts[r] : starts[r] + row.window] = x[:, last]
        here = records[r, :, : row.pages]
        key_records = here[..., : layout.value_offset]
        pages.encode_keys(k[:, encoded], layout.keys, channels=channels, out=key_records, engine="reference")
        pages.encode_values(v[:, encoded], layout.values, out=here[..., layout.value_offset :], engine="reference")
        kept = []
        for x, side, chosen in ((k, layout.keys, channels), (v, layout.values, None)):
            parts = [x[:, first], stored_numbers(x[:, encoded], side, chosen), x[:, last]] if row.pages else [x]
            kept.append(np.concatenate([part.astype(np.float64) for part in parts], axis=1))
        tokens.append((kept[0], kept[1]))
    counts = [np.array(sizes, np.int64) for sizes in zip(*rows, strict=True)]
    sink_k, sink_v, window_k, window_v = exact
    view = CacheView(layout, records, counts[1], sink_k, sink_v, counts[0], window_k, window_v, starts, counts[2])
    return view, tokens


def attend_exactly(
    q: Any,
    tokens: list[tuple[Any, Any]],
    *,
    limits: Any = None,
    bias: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: Any = None,
) -> tuple[Any, float]:
    """Attention in float64, the softmax of each query written out; and the size of the terms that errors grow with."""
    q = q.astype(np.float64)
    _, hq, s, d = q.shape
    scale = d**-0.5 if scale is None else scale
    out, size = np.zeros((*q.shape[:3], tokens[0][1].shape[-1])), 0.0
    for r, (k, v) in enumerate(tokens):
        h, n = k.shape[:2]
        for head in range(hq):
            keys, values = k[head // (hq // h)], v[head // (hq // h)]
            for i in range(s):
                seen = np.arange(n) < (n - s + i + 1 if limits is None else limits[r, i])
                scores = scale * (keys @ q[r, head, i])
                if softcap is not None:
                    scores = softcap * np.tanh(scores / softcap)
                if bias is not None:
                    added = bias[r, 0 if bias.shape[1] == 1 else head, i, :n]
                    seen, scores = seen & (added > -np.inf), scores + np.where(added > -np.inf, added, 0)
                if not seen.any():
                    continue
                extra = -np.inf if sink_logits is None else float(sink_logits[head])
                top = max(scores[seen].max(), extra)
                weights = np.exp(scores[seen] - top)
                out[r, head, i] = weights @ values[seen] / (weights.sum() + np.exp(extra - top))
                terms = abs(scale) * (np.abs(keys[seen]) @ np.abs(q[r, head, i])).max()
                size = max(size, float(np.abs(values[seen]).max() * max(1.0, terms)))
    return out, size


def assert_rounded(actual: Any, exact: Any, coefficients: str, *, terms: float = 1.0) -> None:
    """Assert that results (b, hq, s, dv) are as near to float64 ones as rounded coefficients allow.

    In L2 the error of the whole, and twice that of each query, is at most :data:`ROUNDING`, for scores whose products
    sum to up to 32 in size; for larger `terms` it grows with them, as the error of scores does.
    """
    assert actual.shape == exact.shape
    limit = ROUNDING[coefficients] * max(1.0, terms / 32)
    error, size = np.linalg.norm(actual.astype(np.float64) - exact, axis=-1), np.linalg.norm(exact, axis=-1)
    whole = float(np.linalg.norm(size))
    assert np.linalg.norm(error) <= limit * whole, f"error {np.linalg.norm(error) / whole:.2e}, limit {limit:.2e}"
    usual = whole / max(int(np.count_nonzero(size)), 1) ** 0.5
    worst = (error - 2 * limit * np.maximum(size, usual)).max(initial=0)
    assert worst <= 0, f"a query's error is {worst / usual:.2e} above the limit"
