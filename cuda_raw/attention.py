"""Fused decode attention over compressed pages: scores, online softmax and values in one pass over the records.

Four kernels in turn: queries to float32 in units of log2, splits of the pages, splits of the exact tokens, and what
joins them by log-sum-exp. Nothing waits for the device: the splits follow from the counts, which are on the host.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from kvsketch._dispatch import namespace
from kvsketch.attention import CacheView
from kvsketch.cuda_raw import attention_mma, attention_simt
from kvsketch.cuda_raw._compile import architecture, launch
from kvsketch.cuda_raw.attention_plan import (
    PageKernel,
    Splits,
    make_shapes,
    multiprocessors,
    plan_splits,
)
from kvsketch.cuda_raw.attention_simt import exact_kernel, sketch_widths
from kvsketch.layout import DTYPE_CODES, PageLayout, SideLayout
from kvsketch.reference import attention as reference
from kvsketch.reference.pages import projections

LOG2_E = float(np.log2(np.e))
#: With more query rows than this on a key/value head, tiles are decoded once and multiplied by cuBLAS. Up to it the
#: kernels take the rows in tiles, each of which reads the cache once.
FUSED_QUERIES = 128
COMBINE_FILE, COMBINE_THREADS = "attention_combine.cu", 128


@lru_cache(maxsize=1024)
def chosen_kernel(
    layout: PageLayout, queries: int, architecture: int, coefficients: str = "int16"
) -> tuple[PageKernel, str]:
    """The kernel that attends with `queries` rows a head over a layout's pages, and why it is not on tensor cores."""
    kernel = attention_mma.page_kernel(layout, queries, architecture, coefficients)
    if isinstance(kernel, PageKernel):
        return kernel, ""
    return attention_simt.page_kernel(layout, queries, architecture), kernel


def kernel_level(*, layout: PageLayout, queries: int, coefficients: str) -> str:
    """How `queries` rows of a key/value head attend over pages on this device, and why not on tensor cores."""
    if queries > FUSED_QUERIES:
        return f"decoded tiles: {queries} query rows are more than {FUSED_QUERIES}"
    kernel, why = chosen_kernel(layout, queries, architecture(), coefficients)
    return f"{kernel.level}: {why}" if why else kernel.level


class Tables(NamedTuple):
    """Transposed projections (d, m) of sketched keys, columns padded with zeros, and the estimates' c/m."""

    table: Any
    outlier_table: Any
    factor: float
    outlier_factor: float


@lru_cache(maxsize=64)
def _tables(side: SideLayout, device: int) -> Tables:
    import cupy

    tables, factors = [], []
    for projection, width in zip(projections(side), sketch_widths(side.spec), strict=True):
        table = np.zeros((side.width, width), np.float32)
        if projection is not None:
            table[:, : projection.m] = projection.matrix.T
        tables.append(cupy.asarray(table) if width else dummy_array(device, "float32"))
        factors.append(0.0 if projection is None else projection.constant / projection.m)
    return Tables(*tables, *factors)


@lru_cache(maxsize=64)
def dummy_array(device: int, dtype: str) -> Any:
    """What kernels get for an array that they do not read: one number of that device."""
    import cupy

    return cupy.zeros(1, dtype=dtype)


def attend(
    q: Any,
    view: CacheView,
    *,
    limits: Any,
    bias: Any,
    scale: float,
    softcap: float | None,
    sink_logits: Any,
    coefficients: str,
) -> Any:
    """See :func:`kvsketch.attention.attend`; without tensor cores all is float32, whatever `coefficients` are."""
    options = {"bias": bias, "scale": scale, "softcap": softcap, "sink_logits": sink_logits}
    s = q.shape[2]
    with q.device:
        if q.shape[1] // view.pages.shape[1] * s <= FUSED_QUERIES:
            return _attend(q, view, limits=limits, coefficients=coefficients, **options)
        return reference.attend(q, view, limits=limits, coefficients=coefficients, **options)


def _attend(
    q: Any,
    view: CacheView,
    *,
    limits: Any,
    bias: Any,
    scale: float,
    softcap: float | None,
    sink_logits: Any,
    coefficients: str,
) -> Any:
    xp, layout = namespace(q), view.layout
    b, hq, s, d = q.shape
    _, h, capacity, _ = view.pages.shape
    ratio, device = hq // h, int(q.device.id)
    count = ratio * s
    out = xp.empty((b, hq, s, layout.values.width), dtype=q.dtype)
    if out.size == 0:
        return out
    dummy = dummy_array(device, "float32")
    counts = np.array((view.page_counts, view.sink_counts, view.window_starts, view.window_counts), np.int64)
    pages, sinks, _, window = counts.max(axis=1).tolist()
    generation = architecture()
    kernel = chosen_kernel(layout, count, generation, coefficients)[0]
    exact = exact_kernel(layout, count, generation)
    splits = plan_splits(
        layout, pages, sinks, window,
        heads=b * h, tiles=-(-count // kernel.queries), step=kernel.tokens, multiprocessors=multiprocessors(device),
    )  # fmt: skip
    sketched, tables = dummy, Tables(dummy, dummy, 0.0, 0.0)
    rows = prepared_queries(q, scale / softcap if softcap else scale * LOG2_E)
    sketch_width, outlier_width = sketch_widths(layout.keys.spec)
    if sketch_width:
        tables = _tables(layout.keys, device)
        sketched = xp.matmul(rows.reshape(b * h * count, d), tables.table)
    numbers = {
        "b": b, "h": h, "s": s, "ratio": ratio, "queries": count, "capacity": capacity,
        "sink_room": view.sink_k.shape[2], "window_room": view.window_k.shape[2], "has_limits": limits is not None,
        "bias_heads": 0 if bias is None else bias.shape[1], "bias_tokens": 0 if bias is None else bias.shape[3],
        "cap": softcap * LOG2_E if softcap else 0.0, "sketch_width": sketch_width, "outlier_width": outlier_width,
        "factor": tables.factor, "outlier_factor": tables.outlier_factor,
    }  # fmt: skip
    shapes = make_shapes(layout, splits, tuple(numbers.items()))
    partial = xp.empty((b, h, splits.splits, count, layout.values.width + 2), dtype=xp.float32)
    masks = (
        xp.asarray(counts),
        dummy_array(device, "int64") if limits is None else xp.ascontiguousarray(limits, dtype=xp.int64),
        dummy if bias is None else xp.ascontiguousarray(bias, dtype=xp.float32),
        partial,
        shapes,
    )
    _launch_pages(kernel, rows, sketched, tables, xp.ascontiguousarray(view.pages), masks, splits, (count, h, b))
    _launch_exact(exact, rows, view, masks, splits, (count, h, b))
    logits = dummy if sink_logits is None else xp.ascontiguousarray(sink_logits, dtype=xp.float32)
    launch(
        COMBINE_FILE, "combine_splits", (count, h, b), (COMBINE_THREADS, 1, 1),
        (partial, masks[0], logits, out, dtype_code(out), np.int32(sink_logits is not None), shapes),
    )  # fmt: skip
    return out


def dtype_code(x: Any) -> np.int32:
    """The dtype of an array, as kernels are told it."""
    return np.int32(DTYPE_CODES[str(x.dtype)])


def prepared_queries(q: Any, unit: float) -> Any:
    """Queries times `unit`, in float32: rows (b, h, Q, d) in memory."""
    xp = namespace(q)
    rows, n = xp.empty(q.shape, dtype=xp.float32), prod(q.shape)
    launch(
        COMBINE_FILE, "prepare_queries", (-(-n // 256), 1, 1), (256, 1, 1),
        (xp.ascontiguousarray(q), rows, np.float32(unit), np.int64(n), dtype_code(q)),
    )  # fmt: skip
    return rows


def _launch_pages(
    kernel: PageKernel, rows: Any, sketched: Any, tables: Tables, pages: Any, masks: Any, splits: Splits, sizes: Any
) -> None:
    count, h, b = sizes
    blocks = splits.page_splits * -(-count // kernel.queries)
    launch(
        kernel.file, kernel.expression, (blocks, h, b), (kernel.threads, 1, 1),
        (rows, sketched, tables.table, tables.outlier_table, pages, *masks), shared=kernel.shared,
    )  # fmt: skip


def _launch_exact(kernel: PageKernel, rows: Any, view: CacheView, masks: Any, splits: Splits, sizes: Any) -> None:
    count, h, b = sizes
    xp = namespace(rows)
    arrays = [xp.ascontiguousarray(x) for x in (view.sink_k, view.sink_v, view.window_k, view.window_v)]
    blocks = (splits.splits - splits.page_splits) * -(-count // kernel.queries)
    launch(
        kernel.file, kernel.expression, (blocks, h, b), (kernel.threads, 1, 1),
        (rows, *arrays, *masks), shared=kernel.shared,
    )  # fmt: skip
