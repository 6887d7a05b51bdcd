"""Attention over latents: keys are rebuilt tile by tile inside a kernel, values are mixed as latents.

Where nothing stands between the matrix and the query (no RoPE, no norm) and the queries are few, the matrix is
multiplied into them instead. Value latents are multiplied by their matrix once a head, after the splits are joined, and
true first tokens join last. Nothing waits for the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from kvsketch._dispatch import namespace
from kvsketch._palu_inputs import FirstTokens, KeyNorm, Reconstruction, Rope
from kvsketch.attention import CacheView
from kvsketch.cuda_raw._compile import architecture, launch
from kvsketch.cuda_raw._places import dtype_code
from kvsketch.cuda_raw.attention import (
    COMBINE_FILE,
    COMBINE_THREADS,
    LOG2_E,
    dummy_array,
    prepared_queries,
)
from kvsketch.cuda_raw.attention_plan import make_shapes, multiprocessors
from kvsketch.cuda_raw.palu_plan import (
    FIRST,
    FIRST_FILE,
    MMA_THREADS,
    MMA_WARPS,
    PREPARE_FILE,
    Keys,
    LatentKernel,
    chosen_kernel,
    make_rebuild,
    plan_kernels,
)
from kvsketch.layout import LANES, PageLayout
from kvsketch.reference import palu as reference
from kvsketch.reference.attention import tiles_level

#: With more query rows than this, all heads together, keys are rebuilt and multiplied by cuBLAS, a tile at a time.
FUSED_QUERIES = 256
FIRST_THREADS = 128
#: Bytes that float4 loads want addresses to be a multiple of.
ALIGNMENT = 16


def plan_keys(
    matrices: Reconstruction,
    d: int,
    queries: int,
    *,
    rope: Rope | None,
    key_norm: KeyNorm | None,
    first: FirstTokens | None,
    softcap: float | None,
) -> Keys:
    """What latents are scored as, for `queries` rows of all heads: keys that are rebuilt, or as they are."""
    shifts = matrices.key_bias is not None and (softcap is not None or first is not None)
    folds = rope is None and key_norm is None and queries // matrices.heads < d and not shifts
    if matrices.up_k is None or folds:
        return Keys(1, queries, whole=True)
    rotary = 0 if rope is None else rope.cos.shape[1]
    return Keys(matrices.heads, d, rotary, rope is not None and bool(rope.interleaved), norm=key_norm is not None)


def kernel_level(*, layout: PageLayout, queries: int, coefficients: str, **given: Any) -> str:
    """How `queries` rows of all heads attend over latents on this device, and why not on tensor cores.

    `given` are the other arguments of :func:`plan_keys`.
    """
    if queries > FUSED_QUERIES:
        return tiles_level(queries, FUSED_QUERIES)
    keys, generation = plan_keys(queries=queries, **given), architecture()
    told = {}
    for exact in (False, True):
        kernel, why = chosen_kernel(layout, keys, queries, generation, coefficients, exact=exact)
        told[exact] = f"{kernel.level}: {why}" if why else kernel.level
    return told[False] if told[False] == told[True] else f"pages {told[False]}; exact latents {told[True]}"


class _Matrices:
    """A slice's matrices as kernels take them: float32 and contiguous, and packed for tensor cores."""

    def __init__(self, matrices: Reconstruction, xp: Any) -> None:
        def numbers(x: Any) -> Any:
            return None if x is None else xp.ascontiguousarray(x, dtype=xp.float32)

        self.up_k, self.up_v, self.key_bias = map(numbers, (matrices.up_k, matrices.up_v, matrices.key_bias))
        self._packed: dict[tuple[Keys, int], tuple[Any, Any]] = {}

    def packed(self, keys: Keys, planes: int) -> tuple[Any, Any]:
        """up_k in the order of `keys`, see :func:`pack_matrix`."""
        found = self._packed.get((keys, planes))
        if found is None:
            found = self._packed[keys, planes] = pack_matrix(self.up_k[None], keys, planes)
        return found


_MATRICES: WeakKeyDictionary[Reconstruction, _Matrices] = WeakKeyDictionary()


def _matrices(matrices: Reconstruction, xp: Any) -> _Matrices:
    found = _MATRICES.get(matrices)
    if found is None:
        found = _MATRICES[matrices] = _Matrices(matrices, xp)
    return found


def pack_matrix(matrix: Any, keys: Keys, planes: int) -> tuple[Any, Any]:
    """Rows of matrix (batch, heads * d, r) as bytes for tensor cores, and their scales and sums (batch, rows, 2)."""
    xp = namespace(matrix)
    batch, _, rank = matrix.shape
    rows, steps = keys.heads * keys.blocks * LANES, -(-rank // LANES)
    words = xp.empty((batch, rows, steps * planes * LANES // 4), dtype=xp.uint32)
    scales = xp.empty((batch, rows, 2), dtype=xp.float32)
    launch(
        PREPARE_FILE, f"pack_matrix<{planes}>", (rows // MMA_WARPS, batch, 1), (MMA_THREADS, 1, 1),
        (matrix, words, scales, np.int32(rank), make_rebuild(keys)),
    )  # fmt: skip
    return words, scales


def split_queries(rows: Any, keys: Keys) -> Any:
    """Queries (b, heads, each, d) float32 as pairs of bfloat16 numbers for tensor cores, in the order of `keys`."""
    xp = namespace(rows)
    b, heads, each, _ = rows.shape
    count = heads * -(-each // 8) * keys.blocks * 2
    fragments = xp.empty((b, count, LANES, 4), dtype=xp.uint32)
    launch(
        PREPARE_FILE, "split_queries", (-(-count // MMA_WARPS), b, 1), (MMA_THREADS, 1, 1),
        (rows, fragments, np.int32(each), np.int32(count), make_rebuild(keys)),
    )  # fmt: skip
    return fragments


def attend(
    q: Any,
    view: CacheView,
    matrices: Reconstruction,
    *,
    rope: Rope | None,
    positions: Any,
    key_norm: KeyNorm | None,
    first: FirstTokens | None,
    limits: Any,
    bias: Any,
    scale: float,
    softcap: float | None,
    coefficients: str,
) -> Any:
    """See :func:`kvsketch.palu.attend`, for one slice.

    With ``"int8"``, numbers of up_k are rounded to bytes as well, relative to the largest of a row.
    """
    s = q.shape[2]
    options: dict[str, Any] = {"rope": rope, "positions": positions, "key_norm": key_norm, "first": first}
    options |= {"bias": bias, "scale": scale, "softcap": softcap, "coefficients": coefficients}
    with q.device:
        if q.shape[1] * s <= FUSED_QUERIES:
            return _attend(q, view, matrices, limits=limits, **options)
        return reference.attend(q, view, matrices, limits=limits, **options)


class _Masks(NamedTuple):
    """What kernels are told of a row's tokens; arrays that are not there are one number each."""

    counts: Any  #: (4, b): pages, first tokens, starts of windows, their tokens
    skip: Any  #: (b): true first tokens, which are not read as latents
    limits: Any
    bias: Any


class _Tables(NamedTuple):
    """What stands between the matrix and the queries; arrays that are not there are one number each."""

    key_bias: Any
    norm: Any
    cos: Any
    sin: Any
    positions: Any


def _attend(
    q: Any,
    view: CacheView,
    matrices: Reconstruction,
    *,
    rope: Rope | None,
    positions: Any,
    key_norm: KeyNorm | None,
    first: FirstTokens | None,
    limits: Any,
    bias: Any,
    scale: float,
    softcap: float | None,
    coefficients: str,
) -> Any:
    xp, layout, device = namespace(q), view.layout, int(q.device.id)
    b, hq, s, d = q.shape
    heads, rank, given = matrices.heads, layout.values.width, _matrices(matrices, xp)
    dv = rank if given.up_v is None else len(given.up_v) // heads
    if b * hq * s == 0:
        return xp.empty((b, hq, s, dv), dtype=q.dtype)
    keys = plan_keys(matrices, d, hq * s, rope=rope, key_norm=key_norm, first=first, softcap=softcap)
    counts = view.counts
    *kernels, splits = plan_kernels(
        layout, keys, hq * s, counts,
        architecture=architecture(), multiprocessors=multiprocessors(device), coefficients=coefficients,
    )  # fmt: skip
    numbers = {
        "b": b, "h": 1, "s": s, "ratio": hq, "queries": hq * s, "capacity": view.pages.shape[2],
        "sink_room": view.sink_k.shape[2], "window_room": view.window_k.shape[2], "has_limits": limits is not None,
        "bias_heads": 0 if bias is None else bias.shape[1], "bias_tokens": 0 if bias is None else bias.shape[3],
        "cap": softcap * LOG2_E if softcap else 0.0,
    }  # fmt: skip
    shapes = make_shapes(layout, splits, tuple(numbers.items()))
    masks = _Masks(
        xp.asarray(counts) if view.device_counts is None else view.device_counts,
        dummy_array(device, "int64") if first is None else xp.asarray(first.counts).astype(xp.int64),
        dummy_array(device, "int64") if limits is None else xp.ascontiguousarray(limits, dtype=xp.int64),
        _floats(bias, device),
    )
    placed = rope is not None and positions is not None
    tables = _Tables(
        _floats(None if keys.whole else given.key_bias, device),
        _floats(None if key_norm is None else key_norm.weight, device),
        _floats(None if rope is None else rope.cos, device),
        _floats(None if rope is None else rope.sin, device),
        xp.ascontiguousarray(positions, dtype=xp.int64) if placed else dummy_array(device, "int64"),
    )
    rows = prepared_queries(q, scale / softcap if softcap else scale * LOG2_E)
    folded = rows.reshape(b, keys.heads, -1, d)
    if keys.whole and given.up_k is not None:
        folded = xp.matmul(rows.reshape(b, heads, -1, d), given.up_k.reshape(heads, d, -1)).reshape(b, 1, hq * s, -1)
    partial = xp.empty((b, 1, splits.splits, hq * s, rank + 2), dtype=xp.float32)
    records, dummy = xp.ascontiguousarray(view.pages), dummy_array(device, "float32")
    exact = tuple(_bytes(x) for x in (view.sink_k, view.sink_v, view.window_k, view.window_v))
    byte = dummy_array(device, "uint8")
    parts = ((records, records, byte, byte), splits.page_splits), (exact, splits.splits - splits.page_splits)
    inputs: dict[str, tuple[Any, ...]] = {}
    for kernel, (latents, count) in zip(kernels, parts, strict=True):
        if not count:
            continue
        numbers = {
            "longest": positions.shape[1] if placed else 0, "eps": 0.0 if key_norm is None else float(key_norm.eps),
            "has_bias": not keys.whole and given.key_bias is not None, "skips": first is not None,
            "exact": latents is exact, "groups": kernel.groups,
        }  # fmt: skip
        if kernel.level not in inputs:
            inputs[kernel.level] = _inputs(kernel, keys, folded, given)
        queries, *matrix = inputs[kernel.level]
        launch(
            kernel.file, kernel.expression, (count * kernel.tiles, kernel.heads, b), (kernel.threads, 1, 1),
            (queries, *latents, *masks, *matrix, *tables, partial, np.int32(kernel.room), shapes,
             make_rebuild(keys, tuple(numbers.items()))),
            shared=kernel.shared,
        )  # fmt: skip
    mixed = xp.empty((b, hq, s, rank), dtype=q.dtype if given.up_v is None and first is None else xp.float32)
    launch(
        COMBINE_FILE, "combine_splits", (hq * s, 1, b), (COMBINE_THREADS, 1, 1),
        (partial, masks.counts, dummy, mixed, np.int32(dtype_code(mixed)), np.int32(0), shapes),
    )  # fmt: skip
    if given.up_v is not None:
        up_v = xp.swapaxes(given.up_v.reshape(heads, dv, rank), 1, 2)
        mixed = xp.matmul(mixed.reshape(b, heads, -1, rank), up_v).reshape(b, hq, s, dv)
    if first is None:
        return mixed.astype(q.dtype, copy=False)
    return _join_first(first, mixed, partial, rows, masks, shapes, q.dtype)


def _inputs(kernel: LatentKernel, keys: Keys, rows: Any, given: _Matrices) -> tuple[Any, ...]:
    """Queries (b, heads, each, d) and the matrix, with the scales of its rows, as a kernel takes them."""
    dummy = dummy_array(int(rows.device.id), "float32")
    if kernel.level == "simt":
        return rows, dummy if keys.whole else given.up_k, dummy
    if keys.whole:
        return dummy, *pack_matrix(rows[:, 0], keys, kernel.planes)
    return split_queries(rows, keys), *given.packed(keys, kernel.planes)


def _join_first(first: FirstTokens, mixed: Any, partial: Any, rows: Any, masks: _Masks, shapes: Any, dtype: Any) -> Any:
    """What latents gave, `mixed` (b, hq, s, dv), joined by true first tokens."""
    xp = namespace(mixed)
    b, hq, s, dv = mixed.shape
    room, sizes = first.k.shape[2], np.zeros((), FIRST)
    sizes["room"], sizes["d"], sizes["dv"], sizes["heads"] = room, rows.shape[3], dv, first.k.shape[1]
    out = xp.empty(mixed.shape, dtype=dtype)
    sizes["key_dtype"], sizes["value_dtype"], sizes["out_dtype"] = map(dtype_code, (first.k, first.v, out))
    launch(
        FIRST_FILE, "join_first", (hq * s, b, 1), (FIRST_THREADS, 1, 1),
        (
            xp.ascontiguousarray(mixed), partial, rows, _bytes(first.k), _bytes(first.v), masks.counts, masks.skip,
            masks.limits, masks.bias, out, shapes, sizes,
        ),
        shared=4 * max(1, room),
    )  # fmt: skip
    return out


def _floats(x: Any, device: int) -> Any:
    """A float32 array for a kernel, aligned; one number for one that is not there."""
    if x is None:
        return dummy_array(device, "float32")
    xp = namespace(x)
    found = xp.ascontiguousarray(x, dtype=xp.float32)
    return found if found.data.ptr % ALIGNMENT == 0 else found.copy()


def _bytes(x: Any) -> Any:
    """The bytes of a float array, which kernels know the dtype of."""
    xp = namespace(x)
    return xp.ascontiguousarray(x).view(xp.uint8)
