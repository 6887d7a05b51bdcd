"""Fused attention over compressed pages in Numba: scores, online softmax and values in one pass.

Work is split over rows, key/value heads and runs of tokens, and the parts of a head are joined by log-sum-exp. The
split depends on the shapes alone, so results do not depend on the number of threads.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from kvsketch.attention import CacheView
from kvsketch.layout import KIND_EXACT, KIND_INTS, KIND_SKETCH, LANES, PageLayout, SideLayout
from kvsketch.numba_cpu import integers, simd, sketches
from kvsketch.numba_cpu._compile import compile_address, writable
from kvsketch.numba_cpu._threads import run_parts
from kvsketch.numba_cpu.coefficients import padded
from kvsketch.numba_cpu.fused import Inputs, Plan, attend_parts, join_parts, scratch_bytes
from kvsketch.numba_cpu.softmax import LOG2E
from kvsketch.reference import attention as reference
from kvsketch.reference.pages import projections

#: A run of tokens is at least this long, and rows, heads and runs together make about this many parts.
RUN_TOKENS, PARTS = 512, 32
#: Products (queries by tokens by channels) below which other threads are not woken.
THREADED_WORK = 1 << 21
#: With more query rows than this on a key/value head, tiles are decoded once and multiplied by a matrix product.
FUSED_QUERIES = 128

_NO_BIAS = np.zeros((0, 0, 0, 0), np.float32)
_NO_LOGITS = np.zeros(0, np.float32)
_NO_TABLES = (*(np.zeros((0, 0), np.float32),) * 2, np.zeros(2, np.float32))


@lru_cache(maxsize=64)
def _score_kernel(kind: int, bits: int, coefficients: str) -> int:
    """Address of the kernel that scores pages of a codec."""
    if kind == KIND_SKETCH:
        return compile_address(sketches.make_sketch_score(coefficients), coefficients)
    return compile_address(integers.make_score(bits, coefficients), f"{bits}-{coefficients}")


@lru_cache(maxsize=64)
def _mix_kernel(bits: int, coefficients: str, shared: bool) -> int:
    """Address of the kernel that adds pages of values of a codec."""
    return compile_address(integers.make_mix(bits, coefficients, shared), f"{bits}-{coefficients}-{shared}")


@lru_cache(maxsize=256)
def _make_plan(layout: PageLayout, queries: int, coefficients: str) -> Plan:
    keys, values = layout.keys.spec, layout.values.spec
    score = mix = work = 0
    if keys.kind != KIND_EXACT:
        score = _score_kernel(keys.kind, keys.bits, coefficients)
        sketched = keys.kind == KIND_SKETCH
        work = sketches.sketch_scratch(keys, queries) if sketched else integers.score_scratch(keys)
    if values.kind == KIND_INTS:
        shared = values.group % LANES == 0 or values.groups == 1
        mix = _mix_kernel(values.bits, coefficients, shared)
        work = max(work, integers.mix_scratch(values))
    key_pitch, value_pitch = (4 * _round_up(spec.width, simd.LANES) for spec in (keys, values))
    mix_pitch = 8 * _round_up(values.width, LANES) if values.kind == KIND_INTS else 0
    return Plan(keys, values, score, mix, work, 4 * padded(keys.width), key_pitch, value_pitch, mix_pitch)


@lru_cache(maxsize=256)
def _fields(side: SideLayout) -> Any:
    """The numbers of a side as kernels find them."""
    return np.array(side.spec, np.int64)


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
    b, hq, s, d = q.shape
    h, dv = view.pages.shape[1], view.layout.values.width
    count = hq // h * s
    if count > FUSED_QUERIES:
        return reference.attend(
            q, view, limits=limits, bias=bias, scale=scale, softcap=softcap, sink_logits=sink_logits,
            coefficients=coefficients,
        )  # fmt: skip
    if b * count == 0:
        return np.zeros((b, hq, s, dv), q.dtype)
    plan = _make_plan(view.layout, count, coefficients)
    sketched = view.layout.keys.spec.kind == KIND_SKETCH
    tables = _padded_projections(view.layout.keys) if sketched else _NO_TABLES
    scaled = np.zeros((b, h, count, plan.q_pitch // 4), np.float32)
    unit = np.float32(scale / softcap if softcap else scale * LOG2E)
    np.multiply(q.reshape(b, h, count, d), unit, out=scaled[..., :d], casting="unsafe")
    sketch = np.ascontiguousarray(scaled[..., :d] @ tables[0]) if sketched else scaled[..., :0]
    # The address of S q comes first; it is filled in where a head's is known.
    extra = [0, 4 * sketch.shape[-1], *(x for t in tables[:2] for x in (t.ctypes.data, 4 * t.shape[-1]))]
    runs = _run_count(view, b * h)
    states = np.empty((b, h, runs, count, 2), np.float32)
    mixes = np.empty((b, h, runs, count, dv), np.float32)
    run_parts(
        attend_parts,
        b * h * runs,
        Inputs(
            scaled,
            sketch,
            _fields(view.layout.keys),
            _fields(view.layout.values),
            np.array([*extra, tables[2].ctypes.data], np.int64),
            writable(np.ascontiguousarray(limits, dtype=np.int64)),
            _NO_BIAS if bias is None else writable(np.ascontiguousarray(bias, dtype=np.float32)),
            float(softcap or 0),
            writable(view.pages),
            writable(view.page_counts),
            _as_bytes(view.sink_k),
            _as_bytes(view.sink_v),
            writable(view.sink_counts),
            _as_bytes(view.window_k),
            _as_bytes(view.window_v),
            writable(view.window_starts),
            writable(view.window_counts),
        ),
        plan,
        scratch_bytes(plan, count),
        states,
        mixes,
        threads=1 if b * hq * s * int(limits.max()) * (d + dv) < THREADED_WORK else None,
    )
    logits = _NO_LOGITS if sink_logits is None else np.asarray(sink_logits, np.float32) * np.float32(LOG2E)
    out = np.empty((b, h, count, dv), np.float32)
    join_parts(states, mixes, logits, s, out)
    return out.reshape(b, hq, s, dv).astype(q.dtype, copy=False)


def _run_count(view: CacheView, heads: int) -> int:
    """Runs of tokens that each head's pages are split into; a function of shapes alone."""
    tokens = int(view.page_counts.max()) * view.layout.page_tokens
    return max(1, min(-(-tokens // RUN_TOKENS), -(-PARTS // heads)))


def _as_bytes(x: Any) -> Any:
    """(b, h, tokens, width) numbers as uint8 (b, h, bytes), without a copy when they are contiguous."""
    if not x.size:
        return np.zeros((*x.shape[:2], 0), np.uint8)
    x = writable(x if x.flags.c_contiguous else np.ascontiguousarray(x))
    return x.reshape(x.shape[0], x.shape[1], -1).view(np.uint8)


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
