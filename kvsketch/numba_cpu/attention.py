"""Fused attention over compressed pages in Numba: scores, online softmax and values in one pass.

Work is split over rows, key/value heads and runs of tokens, and the parts of a head are joined by log-sum-exp. The
split depends on the shapes alone, so results do not depend on the number of threads.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from kvsketch._checks import FLOAT_DTYPES
from kvsketch.attention import CacheView
from kvsketch.layout import (
    DTYPE_CODES,
    KIND_EXACT,
    KIND_INTS,
    KIND_LATENTS,
    KIND_SKETCH,
    LANES,
    PageLayout,
    SideLayout,
    SideSpec,
)
from kvsketch.numba_cpu import emit, integers, latents, sketches
from kvsketch.numba_cpu._compile import address, compile_address
from kvsketch.numba_cpu._threads import get_num_threads, run_parts
from kvsketch.numba_cpu._tiers import TIER
from kvsketch.numba_cpu.coefficients import padded
from kvsketch.numba_cpu.fused import EXTRA, Inputs, Plan, attend_parts, plan_numbers, scratch_bytes
from kvsketch.numba_cpu.join import join_parts
from kvsketch.numba_cpu.softmax import LOG2E
from kvsketch.reference import attention as reference
from kvsketch.reference.pages import projections

#: A run of tokens is at least this long, and rows, heads and runs together make about this many parts.
RUN_TOKENS, PARTS = 512, 32
#: Products (queries by tokens by channels) below which other threads are not woken.
THREADED_WORK = 1 << 21
#: More than any work.
ALONE = 1 << 62
#: With more query rows than this on a key/value head, tiles are decoded once and multiplied by a matrix product.
FUSED_QUERIES = 128

TYPES = {dtype: DTYPE_CODES[name] for name, dtype in FLOAT_DTYPES.items()}
NO_LOGITS = np.zeros(0, np.float32)
_NO_SKETCH = np.zeros((0, 0, 0, 0), np.float32)
_LATER = np.zeros((0, 0, 0, 0, 0), np.float32)


@lru_cache(maxsize=64)
def _score_kernel(kind: int, bits: int, coefficients: str) -> int:
    """Address of the kernel that scores pages of a codec."""
    if kind == KIND_SKETCH:
        return compile_address(sketches.make_sketch_score(coefficients), coefficients)
    if kind == KIND_LATENTS:
        return compile_address(latents.make_score(bits), f"{bits}")
    return compile_address(integers.make_score(bits, coefficients), f"{bits}-{coefficients}")


@lru_cache(maxsize=64)
def _mix_kernel(bits: int, coefficients: str, shared: bool) -> int:
    """Address of the kernel that adds pages of values of a codec."""
    return compile_address(integers.make_mix(bits, coefficients, shared), f"{bits}-{coefficients}-{shared}")


def _score_scratch(keys: SideSpec, queries: int) -> int:
    """Bytes that the kernel of :func:`_score_kernel` works in."""
    if keys.kind == KIND_SKETCH:
        return sketches.sketch_scratch(keys, queries)
    return latents.score_scratch(keys) if keys.kind == KIND_LATENTS else integers.score_scratch(keys)


class Prepared(NamedTuple):
    """What a layout and a number of queries need at every step."""

    plan: Plan
    at: int  #: address of the plan's numbers
    room: int  #: bytes of scratch a thread
    keys: int  #: address of the fields of the key side
    values: int  #: of those of the value side
    extra: int  #: of what the sketch kernel needs
    tables: tuple[Any, Any, Any] | None  #: of sketched keys
    kept: list[Any]  #: the arrays at those addresses


def mix_plan(values: SideSpec, coefficients: str) -> tuple[int, int]:
    """Address of the kernel that adds pages of values, 0 for exact ones, and the bytes that it works in."""
    if values.kind != KIND_INTS:
        return 0, 0
    return _mix_kernel(values.bits, coefficients, integers.shares_groups(values)), integers.mix_scratch(values)


def value_pitches(values: SideSpec) -> tuple[int, int]:
    """Bytes of an exact value as float32, and of a query's mix of encoded values."""
    return 4 * _round_up(values.width, emit.LANES), (
        8 * _round_up(values.width, LANES) if values.kind == KIND_INTS else 0
    )


@lru_cache(maxsize=256)
def prepare(layout: PageLayout, queries: int, coefficients: str) -> Prepared:
    """What attention of so many queries a head over pages of a layout needs."""
    keys, values = layout.keys.spec, layout.values.spec
    score = 0
    mix, work = mix_plan(values, coefficients)
    if keys.kind != KIND_EXACT:
        score = _score_kernel(keys.kind, keys.bits, coefficients)
        work = max(work, _score_scratch(keys, queries))
    value_pitch, mix_pitch = value_pitches(values)
    key_pitch = 4 * _round_up(keys.width, emit.LANES)
    plan = Plan(keys, values, score, 0, mix, work, 4 * padded(keys.width), key_pitch, value_pitch, mix_pitch)
    tables, extra = None, np.zeros(EXTRA, np.int64)
    if keys.kind == KIND_SKETCH:
        tables = _padded_projections(layout.keys)
        # S q itself comes first; the kernel fills in a head's.
        pitches = [4 * table.shape[1] for table in tables[:2]]
        extra[1:7] = [pitches[0], address(tables[0]), pitches[0], address(tables[1]), pitches[1], address(tables[2])]
    return finish_preparing(plan, layout, queries, extra, tables)


def finish_preparing(plan: Plan, layout: PageLayout, queries: int, extra: Any, tables: Any = None) -> Prepared:
    """A plan with the arrays whose addresses its kernels get."""
    kept = [plan_numbers(plan), np.array(layout.keys.spec, np.int64), np.array(layout.values.spec, np.int64), extra]
    plan_at, keys_at, values_at, extra_at = (address(x) for x in kept)
    return Prepared(plan, plan_at, scratch_bytes(plan, queries), keys_at, values_at, extra_at, tables, kept)


def kernel_level(*, queries: int, **_: Any) -> str:
    """How `queries` rows of a key/value head attend: the tier of vector instructions, see ``_tiers``."""
    if queries > FUSED_QUERIES:
        return reference.tiles_level(queries, FUSED_QUERIES)
    return TIER


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
    given, (b, hq, s, d) = q, q.shape
    h, dv = view.pages.shape[1], view.layout.values.width
    count = hq // h * s
    if count > FUSED_QUERIES:
        return reference.attend(
            q, view, limits=limits, bias=bias, scale=scale, softcap=softcap, sink_logits=sink_logits,
            coefficients=coefficients,
        )  # fmt: skip
    if b * count == 0:
        return np.zeros((b, hq, s, dv), q.dtype)
    prepared = prepare(view.layout, count, coefficients)
    unit = scale / softcap if softcap else scale * LOG2E
    if prepared.plan.key_spec.kind in (KIND_SKETCH, KIND_LATENTS):
        q, unit = q.reshape(b, h, count, d) * np.float32(unit), 1.0
        q = q.astype(np.float32, order="C", copy=False)
        tables = prepared.tables
        sketch = latents.pack_rows(q) if tables is None else np.ascontiguousarray(q @ tables[0])
    else:
        q, sketch = np.ascontiguousarray(q), _NO_SKETCH
    logits = NO_LOGITS if sink_logits is None else np.asarray(sink_logits, np.float32) * np.float32(LOG2E)
    out = attend_prepared(prepared, view, q, sketch, unit, s, count, limits, bias, softcap, logits)
    return out.reshape(b, hq, s, dv).astype(given.dtype, copy=False)


def attend_prepared(
    prepared: Prepared,
    view: CacheView,
    q: Any,
    sketch: Any,
    unit: float,
    s: int,
    count: int,
    limits: Any,
    bias: Any,
    softcap: float | None,
    logits: Any = NO_LOGITS,
    skip: Any = None,
    sums: Any = None,
    work: int = 1,
) -> Any:
    """Attention of `count` queries a head: float32 (b, h, count, dv); `q`, `sketch` and `skip` as in :class:`Inputs`.

    `sums` (b, h, count) float32 is filled with the log2 of the queries' sums, unless it is None; `work` says how many
    times the usual number of products a token takes.
    """
    plan = prepared.plan
    b, h, capacity, step = view.pages.shape
    d, dv = plan.key_spec.width, plan.value_spec.width
    # What is named here is kept until the kernels, which get addresses, are done.
    if limits is not None:
        limits = np.ascontiguousarray(limits, np.int64)
    if bias is not None:
        bias = np.ascontiguousarray(bias, np.float32)
    counts = np.array((view.page_counts, view.sink_counts, view.window_starts, view.window_counts), np.int64)
    sink_k, sink_v = np.ascontiguousarray(view.sink_k), np.ascontiguousarray(view.sink_v)
    window_k, window_v = np.ascontiguousarray(view.window_k), np.ascontiguousarray(view.window_v)
    pages, at = np.ascontiguousarray(view.pages), address(counts)
    tokens = max(counts[0].tolist()) * plan.key_spec.tokens
    runs = run_count(tokens, b * h)
    bias_shape = (0, 0, 0, 0) if bias is None else bias.shape
    inputs = Inputs(
        address(q), runs, TYPES[q.dtype], address(sketch), sketch.nbytes // (b * h), prepared.extra, prepared.keys,
        prepared.values, 0 if limits is None else address(limits), 0 if skip is None else address(skip), s, count, b,
        0 if bias is None else address(bias), bias_shape[1], bias_shape[3],
        address(pages), h, capacity, step, at, address(sink_k), address(sink_v), sink_k.shape[2], at + 8 * b,
        address(window_k), address(window_v), window_k.shape[2], at + 16 * b, at + 24 * b,
    )  # fmt: skip
    out = np.empty((b, h, count, dv), np.float32)
    numbers = np.array(inputs, np.int64)
    fixed = (address(numbers), prepared.at, np.float32(unit), float(softcap or 0), prepared.room)
    ends = (0 if sums is None else address(sums), address(out))
    if b * h * count * (tokens + window_k.shape[2]) * (d + dv) * work < threaded_work():
        run_parts(attend_parts, b * h * runs, *fixed, _LATER, _LATER, logits, *ends, threads=1)
    else:
        attend_threaded((b, h, runs, count, dv), s, fixed, logits, *ends)
    return out


def threaded_work() -> int:
    """Products below which one thread works alone."""
    return THREADED_WORK if get_num_threads() > 1 else ALONE


def attend_threaded(shape: tuple[int, ...], s: int, fixed: tuple[Any, ...], logits: Any, sums: int, out: int) -> None:
    """Attend on all threads: `shape` is (b, h, runs, Q, dv), `fixed` what kernels take before the parts' results."""
    states, mixes = np.empty((*shape[:4], 2), np.float32), np.empty(shape, np.float32)
    run_parts(attend_parts, shape[0] * shape[1] * shape[2], *fixed, states, mixes, logits, 0, 0)
    join_parts(states, mixes, logits, s, sums, out)


def run_count(tokens: int, heads: int) -> int:
    """Runs of tokens that each head's pages are split into; a function of shapes alone."""
    return max(1, min(-(-tokens // RUN_TOKENS), -(-PARTS // heads)))


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


@lru_cache(maxsize=64)
def _padded_projections(side: SideLayout) -> tuple[Any, Any, Any]:
    """Transposed projections (d, m) and (d, outlier_m), columns padded to 16 with zeros, and the estimates' c/m."""
    tables, factors = [], np.zeros(2, np.float32)
    for i, projection in enumerate(projections(side)):
        m = 0 if projection is None else projection.m
        table = np.zeros((side.width, _round_up(m, 16)), np.float32)
        if projection is not None:
            table[:, :m] = projection.matrix.T
            factors[i] = projection.constant / m
        tables.append(table)
    return tables[0], tables[1], factors
