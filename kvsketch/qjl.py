"""QJL: keys as the signs of a random projection and a norm (arXiv 2406.03482).

For a projection S (m, d) with constant c, the estimate of a score is (Definition 3.1)

    est(q, k) = c/m |k| sum_i (S q)_i sign((S k)_i)

with sign(0) = +1, and the query itself is not quantized. It is unbiased over S, without the paper's bias where rows are
orthogonal (:func:`kvsketch.bounds.sketch_constant`). With outlier channels (section 4.1 of the paper) a key is split
into the channels of largest norm over a page of tokens and the rest, each part sketched on its own, with its own norm.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from kvsketch._checks import check_channels, check_float, check_gqa, check_integer, check_ndim
from kvsketch._dispatch import array_library, implementation, namespace
from kvsketch.bitpack import packed_bytes
from kvsketch.rotation import Projection

__all__ = ["SketchedKeys", "select_outlier_channels", "sketch_keys", "sketch_scores"]


@dataclass(frozen=True, eq=False)
class SketchedKeys:
    """Sketches of keys k (b, h, n, d).

    Attributes
    ----------
    signs : uint8 (b, h, n, ceil(m/8))
        Signs of S k, or of S k_in with outliers, packed by :func:`kvsketch.bitpack.pack_signs`.
    norms : float16 (b, h, n)
        |k|, or |k_in|; at most 65504.
    outlier_signs, outlier_norms : uint8 (b, h, n, ceil(outlier_m/8)) and float16 (b, h, n), or None
        The same of k_out under the second projection.
    channels : uint8 (uint16 for d > 256) (b, h, ceil(n/page), outliers), or None
        Outlier channels of each page of tokens, increasing.
    m, outlier_m, page : int
        Rows of the two projections and tokens that share outlier channels.
    saturated : int
        Norms that were above 65504 and are stored as 65504.
    """

    signs: Any
    norms: Any
    outlier_signs: Any
    outlier_norms: Any
    channels: Any
    m: int
    outlier_m: int
    page: int
    saturated: int

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(getattr(getattr(self, f.name), "nbytes", 0) for f in fields(self))


def select_outlier_channels(k: Any, outliers: int, *, page: int = 32, engine: str | None = None) -> Any:
    """The channels of largest norm in each page of `page` tokens.

    Parameters
    ----------
    k : float array (b, h, n, d)
    outliers : int
        Channels to take, at most d.
    page : int
        Tokens of a page; the last page may hold fewer. With page >= n there is one page, whose channels can serve all
        later keys (``channels`` of :func:`sketch_keys`).
    engine : str, optional
        Engine to use; the fastest by default.

    Returns
    -------
    int64 array (b, h, ceil(n/page), outliers)
        In increasing order. Norms are compared as float32 sums of squares; ties go to the lowest channel and a channel
        that holds NaN counts as infinite.
    """
    run = implementation("qjl.select_outlier_channels", k, engine=engine)
    check_float("k", k)
    check_ndim("k", k, "(b, h, n, d)")
    page = check_integer("page", page, low=1)
    outliers = check_integer("outliers", outliers, low=0)
    if outliers > k.shape[-1]:
        raise ValueError(f"outliers={outliers} is more than the {k.shape[-1]} channels of k with shape {k.shape}")
    return run(k, outliers, page)


def sketch_keys(
    k: Any,
    projection: Projection,
    *,
    outliers: int = 0,
    outlier_projection: Projection | None = None,
    channels: Any = None,
    page: int = 32,
    engine: str | None = None,
) -> SketchedKeys:
    """Sketch keys: the signs of their projections and their norms.

    Parameters
    ----------
    k : float32, float16 or bfloat16 array (b, h, n, d)
    projection : Projection
        S, from :func:`kvsketch.rotation.draw_projection` (m, d).
    outliers : int
        Channels to split off in each page, the largest by :func:`select_outlier_channels`.
    outlier_projection : Projection, optional
        S_out (outlier_m, d) for the split-off channels, independent of S (``stream=1``). Needed with outliers.
    channels : integer array (b, h, outliers), optional
        Use these channels, strictly increasing, in all pages instead (the paper fixes them from the prompt).
    page : int
        Tokens that share outlier channels; the last page may hold fewer.
    engine : str, optional
        Engine to use; the fastest by default.

    Returns
    -------
    SketchedKeys
        The same bits on every engine: S k and the squared norms are float32 sums over the channels in increasing order,
        each product rounded before it is added. Keys with NaN or infinite numbers spoil their own token alone (an
        infinite norm saturates, NaN stays NaN), and the choice of outliers in their own page and head.
    """
    run = implementation("qjl.sketch_keys", k, engine=engine)
    check_float("k", k)
    check_ndim("k", k, "(b, h, n, d)")
    _check_projection("projection", projection, "k", k)
    page = check_integer("page", page, low=1)
    outliers = check_integer("outliers", outliers, low=0)
    if channels is not None:
        outliers = _check_channels(channels, k, outliers)
    if outliers and outlier_projection is None:
        raise ValueError(f"outliers={outliers} needs an outlier_projection; draw one with stream=1")
    if outlier_projection is not None and not outliers:
        raise ValueError("outlier_projection was given without outliers or channels; give one, or leave it out")
    matrix = projection.matrix_beside(k)
    if outlier_projection is None:
        signs, norms, _, _, saturated = run(k, matrix, None, None, page)
        return SketchedKeys(signs, norms, None, None, None, projection.m, 0, page, saturated)
    _check_projection("outlier_projection", outlier_projection, "k", k)
    if outlier_projection is projection:
        raise ValueError("outlier_projection is the projection itself; draw an independent one with stream=1")
    if channels is None:
        channels = select_outlier_channels(k, outliers, page=page, engine=engine)
    else:
        pages = (*k.shape[:2], -(-k.shape[2] // page), outliers)
        channels = namespace(k).broadcast_to(channels[:, :, None], pages)
    channels = channels.astype("uint8" if k.shape[-1] <= 256 else "uint16")
    outlier_matrix = outlier_projection.matrix_beside(k)
    signs, norms, outlier_signs, outlier_norms, saturated = run(k, matrix, channels, outlier_matrix, page)
    return SketchedKeys(
        signs, norms, outlier_signs, outlier_norms, channels, projection.m, outlier_projection.m, page, saturated
    )


def sketch_scores(
    q: Any,
    keys: SketchedKeys,
    projection: Projection,
    *,
    outlier_projection: Projection | None = None,
    engine: str | None = None,
) -> Any:
    """Estimates of the scores <q, k>, without the factor 1/sqrt(d), from sketched keys.

    Parameters
    ----------
    q : float32, float16 or bfloat16 array (b, hq, s, d)
        Query head i reads key head i // (hq/h); h must divide hq.
    keys : SketchedKeys
        From :func:`sketch_keys` with the same projections.
    projection, outlier_projection : Projection
        What `keys` were sketched with; the second only with outliers.
    engine : str, optional
        Engine to use; the fastest by default.

    Returns
    -------
    array (b, hq, s, n)
        In the dtype of `q`, from float32 sums; beyond its range a score is infinite. With outliers each score is the
        sum of the estimates of <q_in, k_in> and <q_out, k_out>. A zero key or query gives 0.
    """
    run = implementation("qjl.sketch_scores", q, engine=engine)
    check_float("q", q)
    check_ndim("q", q, "(b, hq, s, d)")
    _check_projection("projection", projection, "q", q)
    _check_rows("projection", projection, keys.m, keys.signs)
    b, h, _ = keys.norms.shape
    if q.shape[0] != b:
        raise ValueError(f"q has shape {tuple(q.shape)}, but keys hold a batch of {b}; give both the same batch")
    check_gqa(q.shape[1], h)
    array_library(q, keys.norms)
    matrix = projection.matrix_beside(q)
    if keys.channels is None:
        if outlier_projection is not None:
            raise ValueError("outlier_projection was given, but keys were sketched without outliers; leave it out")
        return run(q, keys, matrix, projection.constant, None, 0.0)
    if outlier_projection is None:
        raise ValueError("keys were sketched with outliers; give their outlier_projection")
    _check_projection("outlier_projection", outlier_projection, "q", q)
    _check_rows("outlier_projection", outlier_projection, keys.outlier_m, keys.outlier_signs)
    outlier_matrix = outlier_projection.matrix_beside(q)
    return run(q, keys, matrix, projection.constant, outlier_matrix, outlier_projection.constant)


def _check_projection(name: str, projection: Any, array_name: str, x: Any) -> None:
    if not isinstance(projection, Projection):
        raise TypeError(f"{name} must be a Projection from draw_projection, got {type(projection).__name__}")
    if projection.d != x.shape[-1]:
        raise ValueError(
            f"{name} is for head size {projection.d}, but {array_name} has shape {tuple(x.shape)}; "
            f"draw it with d={x.shape[-1]}"
        )


def _check_rows(name: str, projection: Projection, m: int, signs: Any) -> None:
    if projection.m != m or signs.shape[-1] != packed_bytes(m, 1):
        raise ValueError(f"{name} has m={projection.m} rows, but keys hold {m} signs; use the one they were made with")


def _check_channels(channels: Any, k: Any, outliers: int) -> int:
    """Number of outlier channels in `channels` (b, h, outliers), which fit `k` (b, h, n, d)."""
    check_ndim("channels", channels, "(b, h, outliers)")
    if channels.shape[:2] != k.shape[:2]:
        raise ValueError(f"channels has shape {channels.shape}, but k has shape {k.shape}; b and h must agree")
    count = channels.shape[2]
    if outliers not in (0, count):
        raise ValueError(f"outliers={outliers}, but channels holds {count} a head; leave outliers out")
    check_channels(channels, k.shape[-1])
    return int(count)
