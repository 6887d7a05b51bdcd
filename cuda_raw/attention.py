"""Fused decode attention over compressed pages: scores, online softmax and values in one pass over the records.

Kernels in turn: queries to float32 in units of log2, for sketched keys their products with the projection, splits of
the pages, splits of the exact tokens, and what joins them by log-sum-exp. How many splits there are is planned on the
host, what each of them is follows from the counts on the device: nothing waits for it.
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
from kvsketch.cuda_raw._places import dtype_code
from kvsketch.cuda_raw.attention_plan import (
    PageKernel,
    Splits,
    make_shapes,
    multiprocessors,
    plan_splits,
)
from kvsketch.cuda_raw.attention_simt import exact_kernel, sketch_widths
from kvsketch.layout import KIND_SKETCH, PageLayout, SideLayout
from kvsketch.reference import attention as reference
from kvsketch.reference.pages import projections

LOG2_E = float(np.log2(np.e))
#: With more query rows than this on a key/value head, tiles are decoded once and multiplied by cuBLAS. Up to it the
#: kernels take the rows in tiles, each of which reads the cache once.
FUSED_QUERIES = 128
COMBINE_FILE, COMBINE_THREADS, PREPARE_THREADS = "attention_combine.cu", 128, 256
#: Of sketch_queries there: queries and rows of the projection that a block takes.
SKETCH_QUERIES, SKETCH_ROWS = 8, 64


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
        return reference.tiles_level(queries, FUSED_QUERIES)
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


class Plan(NamedTuple):
    """The kernels of an attention, how tokens are split over their blocks, and the tables of sketched keys."""

    pages: PageKernel
    exact: PageKernel
    splits: Splits
    tables: Tables


class Tokens(NamedTuple):
    """The tokens of a :class:`~kvsketch.attention.CacheView` as the kernels take them, contiguous."""

    layout: PageLayout
    counts: Any  #: (4, b) int64 on the device
    pages: Any
    sink_k: Any
    sink_v: Any
    window_k: Any
    window_v: Any


class Work(NamedTuple):
    """Memory between the kernels."""

    rows: Any  #: (b, hq, s, d) float32: queries in units of log2
    sketched: Any  #: (b, h, Q, sketch_width) float32: S q, or one number
    partial: Any  #: (b, h, splits, Q, dv + 2) float32


def plan_attention(
    layout: PageLayout,
    sizes: tuple[int, int, int, int],
    most: tuple[int, int, int],
    coefficients: str,
    device: int,
    *,
    held: int | None = None,
) -> Plan:
    """Kernels for queries of `sizes` (b, h, hq, s), rows having at most `most` pages, first and window tokens.

    `held` is the pages of all rows and heads, where that is known: see :func:`plan_splits`.
    """
    b, h, hq, s = sizes
    count, generation = hq // h * s, architecture()
    kernel = chosen_kernel(layout, count, generation, coefficients)[0]
    splits = plan_splits(
        layout, *most, held=held,
        heads=b * h, tiles=-(-count // kernel.queries), step=kernel.tokens, multiprocessors=multiprocessors(device),
    )  # fmt: skip
    dummy = dummy_array(device, "float32")
    sketches = layout.keys.spec.kind == KIND_SKETCH
    tables = _tables(layout.keys, device) if sketches else Tables(dummy, dummy, 0.0, 0.0)
    return Plan(kernel, exact_kernel(layout, count, generation), splits, tables)


def new_work(layout: PageLayout, sizes: tuple[int, int, int, int], plan: Plan, device: int) -> Work:
    """Memory on the current device, number `device`, for an attention with queries of `sizes` (b, h, hq, s)."""
    import cupy

    b, h, hq, s = sizes
    count, width = hq // h * s, sketch_widths(layout.keys.spec)[0]
    rows = cupy.empty((b, hq, s, layout.keys.width), dtype=np.float32)
    sketched = cupy.empty((b, h, count, width), dtype=np.float32) if width else dummy_array(device, "float32")
    partial = cupy.empty((b, h, plan.splits.splits, count, layout.values.width + 2), dtype=np.float32)
    return Work(rows, sketched, partial)


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
    xp, layout, device = namespace(q), view.layout, int(q.device.id)
    b, hq, s, _ = q.shape
    out = xp.empty((b, hq, s, layout.values.width), dtype=q.dtype)
    if out.size == 0:
        return out
    counts = view.counts
    pages, sinks, _, window = counts.max(axis=1).tolist()
    sizes = (b, view.pages.shape[1], hq, s)
    held = int(counts[0].sum()) * sizes[1]
    plan = plan_attention(layout, sizes, (pages, sinks, window), coefficients, device, held=held)
    tokens = Tokens(
        layout,
        xp.asarray(counts) if view.device_counts is None else view.device_counts,
        *(xp.ascontiguousarray(x) for x in (view.pages, view.sink_k, view.sink_v, view.window_k, view.window_v)),
    )
    launch_attention(
        xp.ascontiguousarray(q), tokens, out, plan, new_work(layout, sizes, plan, device),
        limits=None if limits is None else xp.ascontiguousarray(limits, dtype=xp.int64),
        bias=None if bias is None else xp.ascontiguousarray(bias, dtype=xp.float32),
        scale=scale, softcap=softcap,
        sink_logits=None if sink_logits is None else xp.ascontiguousarray(sink_logits, dtype=xp.float32),
    )  # fmt: skip
    return out


def launch_attention(
    q: Any,
    tokens: Tokens,
    out: Any,
    plan: Plan,
    work: Work,
    *,
    limits: Any,
    bias: Any,
    scale: float,
    softcap: float | None,
    sink_logits: Any,
) -> None:
    """The kernels of an attention into `out` (b, hq, s, dv), and nothing else: all arrays are contiguous.

    ``tokens.counts`` are read when the kernels run, and may be no more than was planned for.
    """
    layout, splits, tables = tokens.layout, plan.splits, plan.tables
    (b, hq, s, d), (_, h, capacity, _) = q.shape, tokens.pages.shape
    ratio, device = hq // h, int(q.device.id)
    count = ratio * s
    dummy = dummy_array(device, "float32")
    _prepare_queries(q, work.rows, scale / softcap if softcap else scale * LOG2_E)
    sketch_width, outlier_width = sketch_widths(layout.keys.spec)
    if sketch_width:
        grid = (-(-b * h * count // SKETCH_QUERIES), -(-sketch_width // SKETCH_ROWS), 1)
        numbers = (np.int64(b * h * count), np.int32(d), np.int32(sketch_width))
        args = (work.rows, tables.table, work.sketched, *numbers)
        launch(COMBINE_FILE, "sketch_queries", grid, (SKETCH_ROWS, 1, 1), args)
    shapes = make_shapes(
        layout,
        splits,
        (
            *(("b", b), ("h", h), ("s", s), ("ratio", ratio), ("queries", count), ("capacity", capacity)),
            *(("sink_room", tokens.sink_k.shape[2]), ("window_room", tokens.window_k.shape[2])),
            *(("has_limits", limits is not None), ("bias_heads", 0 if bias is None else bias.shape[1])),
            *(("bias_tokens", 0 if bias is None else bias.shape[3]), ("cap", softcap * LOG2_E if softcap else 0.0)),
            *(("sketch_width", sketch_width), ("outlier_width", outlier_width)),
            *(("factor", tables.factor), ("outlier_factor", tables.outlier_factor)),
        ),
    )
    masks = (
        tokens.counts,
        dummy_array(device, "int64") if limits is None else limits,
        dummy if bias is None else bias,
        work.partial,
        shapes,
    )
    sketch = (work.sketched, tables.table, tables.outlier_table)
    _launch(plan.pages, splits.page_splits, (work.rows, *sketch, tokens.pages, *masks), (count, h, b))
    exact = (tokens.sink_k, tokens.sink_v, tokens.window_k, tokens.window_v)
    _launch(plan.exact, splits.splits - splits.page_splits, (work.rows, *exact, *masks), (count, h, b))
    logits = dummy if sink_logits is None else sink_logits
    launch(
        COMBINE_FILE, "combine_splits", (count, h, b), (COMBINE_THREADS, 1, 1),
        (work.partial, tokens.counts, logits, out, *map(np.int32, (dtype_code(out), sink_logits is not None)), shapes),
    )  # fmt: skip


def _launch(kernel: PageKernel, splits: int, args: tuple[Any, ...], sizes: tuple[int, int, int]) -> None:
    count, h, b = sizes
    blocks = splits * -(-count // kernel.queries)
    launch(kernel.file, kernel.expression, (blocks, h, b), (kernel.threads, 1, 1), args, shared=kernel.shared)


def prepared_queries(q: Any, unit: float) -> Any:
    """Queries times `unit`, in float32: rows (b, h, Q, d) in memory."""
    xp = namespace(q)
    rows = xp.empty(q.shape, dtype=xp.float32)
    _prepare_queries(xp.ascontiguousarray(q), rows, unit)
    return rows


def _prepare_queries(q: Any, rows: Any, unit: float) -> None:
    n = prod(q.shape)
    launch(
        COMBINE_FILE, "prepare_queries", (-(-n // PREPARE_THREADS), 1, 1), (PREPARE_THREADS, 1, 1),
        (q, rows, np.float32(unit), np.int64(n), np.int32(dtype_code(q))),
    )  # fmt: skip
