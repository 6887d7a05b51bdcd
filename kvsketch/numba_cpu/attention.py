"""Fused attention over compressed pages in Numba: scores, online softmax and values in one pass.

Work is split over rows, key/value heads and runs of tokens; each part keeps a running maximum, sum and weighted mix,
and the parts of a head are joined by log-sum-exp. The split depends on the shapes alone, so results do not depend on
the number of threads. Scores are kept in units of log2.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from kvsketch.attention import CacheView
from kvsketch.layout import KIND_EXACT, KIND_SKETCH, SideLayout
from kvsketch.numba_cpu._compile import kernel, kernel_part, writable
from kvsketch.numba_cpu._threads import run_parts
from kvsketch.numba_cpu.lanes import (
    exp2,
    load,
    max_all,
    multiply_add,
    prefetch,
    splat,
    stay_apart,
    store,
    store_lane_sums,
    sum_all,
    take_next,
)
from kvsketch.numba_cpu.pages import UNIT
from kvsketch.numba_cpu.tiles import mix_exact, mix_ints, number_bytes, score_exact, score_ints, score_sketch
from kvsketch.reference import attention as reference
from kvsketch.reference.pages import projections

LOG2E = math.log2(math.e)
#: Tokens whose scores are computed before the softmax is updated; a whole number of pages of any size.
TILE = 128
#: A run of tokens is at least this long, and rows, heads and runs together make about this many parts.
RUN_TOKENS, PARTS = 512, 32
#: Pages that are asked for ahead of their use.
AHEAD = 4
#: Products (queries by tokens by channels) below which other threads are not woken.
THREADED_WORK = 1 << 21
#: The lowest bias that stays finite in units of log2.
LOWEST_BIAS = np.float32(np.finfo(np.float32).min / 2)
#: With more query rows than this on a key/value head, tiles are decoded once and multiplied by a matrix product.
FUSED_QUERIES = 128


class Queries(NamedTuple):
    """The queries of a step, scaled to units of log2 (of the soft cap where there is one)."""

    q: Any  #: (b, h, Q, rows) channels padded with zeros
    sketch: Any  #: (b, h, Q, m) their sketch, empty for keys that are not sketched
    table: Any  #: (d, m) transposed projection
    outlier_table: Any  #: (d, outlier_m) that of the outlier channels
    factor: Any  #: c/m of the estimate
    outlier_factor: Any  #: c/m of the outlier channels' estimate


class Mask(NamedTuple):
    """What a query sees."""

    limits: Any  #: (b, s) tokens
    bias: Any  #: (b, 1 or hq, s, n), or without rows
    softcap: Any  #: 0 for none


@kernel_part()
def _update_softmax(scores, state, mix, base, plain, count, position, row, head, limits, bias, softcap):  # type: ignore[no-untyped-def]
    """Turn scores of `count` tokens into weights and rescale what was mixed before; whether any token is seen."""
    queries, s = scores.shape[0], limits.shape[1]
    any_seen = False
    for i in range(queries):
        seen = max(0, min(count, limits[row, i % s] - position))
        if softcap > 0:
            for t in range(seen):
                scores[i, t] = np.float32(softcap * LOG2E) * np.tanh(scores[i, t])
        if bias.shape[0] > 0:
            query_head = 0 if bias.shape[1] == 1 else (head * queries + i) // s
            for t in range(seen):
                # Only -inf hides: the lowest float32 must not become -inf on its way to log2.
                added = bias[row, query_head, i % s, position + t]
                scores[i, t] += max(added, LOWEST_BIAS) * np.float32(LOG2E) if added > -np.inf else added
        for t in range(seen, TILE):
            scores[i, t] = -np.inf
        highest = state[i, 0]
        for t in range(0, TILE, 64):
            highest = max(highest, max_all(load(scores, i * TILE + t)))
        if highest == -np.inf:
            total = np.float32(0)
            for t in range(0, TILE, 64):
                total += sum_all(load(scores, i * TILE + t))
            if total == -np.inf:
                scores[i] = 0
                continue
            # A query or key that is not a number: let it show.
            highest = np.float32(0)
        any_seen = True
        if highest > state[i, 0]:
            decay = np.float32(2.0 ** (state[i, 0] - highest))
            state[i, 0] = highest
            state[i, 1] *= decay
            for c in range(mix.shape[1]):
                mix[i, c] *= decay
            for part in range(base.shape[1]):
                base[i, part] *= decay
            for c in range(plain.shape[1]):
                plain[i, c] *= decay
        one, shift = splat(np.float32(1)), splat(-highest)
        for t in range(0, TILE, 64):
            weights = exp2(multiply_add(load(scores, i * TILE + t), one, shift))
            store(scores, i * TILE + t, weights)
            state[i, 1] += sum_all(weights)
    return any_seen


@kernel_part()
def _attend_exact(
    keys, values, key_spec, value_spec, position, row, head, q, limits, bias, softcap,
    scores, state, mix, base, plain,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Take in exact tokens, given as the bytes of their keys and values."""
    stay_apart()
    key_bytes, value_bytes = number_bytes(key_spec), number_bytes(value_spec)
    count = keys.size // key_bytes
    for first in range(0, count, TILE):
        here = min(TILE, count - first)
        k = keys[first * key_bytes : (first + here) * key_bytes]
        score_exact(k, key_spec, q, scores, 0)
        if _update_softmax(scores, state, mix, base, plain, here, position + first, row, head, limits, bias, softcap):
            mix_exact(values[first * value_bytes : (first + here) * value_bytes], value_spec, scores, 0, plain)


@kernel_part()
def _attend_pages(
    records, start, record_bytes, count, key_spec, value_spec, position, row, head,
    q, sketch, table, outlier_table, factor, outlier_factor, limits, bias, softcap,
    tile, scale, zero, folded, constants, sums, scores, state, mix, base, plain,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Take in `count` encoded pages, one after the other from byte `start` of `records`."""
    stay_apart()
    tokens = key_spec.tokens
    key_bytes, value_bytes = tokens * number_bytes(key_spec), tokens * number_bytes(value_spec)
    step = TILE // tokens
    for first in range(0, count, step):
        last = min(first + step, count)
        for page in range(first, last):
            k, target = start + page * record_bytes, (page - first) * tokens
            for line in range(k + AHEAD * record_bytes, k + (AHEAD + 1) * record_bytes, 64):
                prefetch(records, line)
            if key_spec.kind == KIND_EXACT:
                score_exact(records[k : k + key_bytes], key_spec, q, scores, target)
            elif key_spec.kind == KIND_SKETCH:
                score_sketch(
                    records, k, key_spec, q, sketch, table, outlier_table, factor, outlier_factor,
                    tile, scale, folded, constants, sums, scores, target,
                )  # fmt: skip
            else:
                score_ints(records, k, key_spec, q, tile, scale, zero, folded, constants, scores, target)
        total, here = (last - first) * tokens, position + first * tokens
        if _update_softmax(scores, state, mix, base, plain, total, here, row, head, limits, bias, softcap):
            for page in range(first, last):
                v, target = start + page * record_bytes + key_spec.nbytes, (page - first) * tokens
                if value_spec.kind == KIND_EXACT:
                    mix_exact(records[v : v + value_bytes], value_spec, scores, target, plain)
                else:
                    mix_ints(
                        records, v, value_spec, tile, scale, zero, folded, constants, scores, target, mix, base
                    )  # fmt: skip


@kernel_part()
def _finish(mix, base, plain, spec, out):  # type: ignore[no-untyped-def]
    """Sum the rows of the mix, add the groups' bases and exact values: out (Q, dv), still to be divided by the sums."""
    stay_apart()
    sums = np.empty((spec.width + 7) // 8 * 8, np.float32)
    for i in range(out.shape[0]):
        for lane in range(0, spec.width, 8):
            store_lane_sums(sums, lane, load(mix, i * mix.shape[1] + 8 * lane), np.float32(0))
        for c in range(spec.width):
            out[i, c] = sums[c] + plain[i, c]
            if spec.groups > 0:
                out[i, c] += base[i, c // spec.group]


@kernel_part()
def aligned_floats(rows, columns):  # type: ignore[no-untyped-def]
    """Zeros float32 (rows, columns) that start on a 64-byte line, so that a vector is not split over two."""
    room = np.zeros(rows * columns + 16, np.float32)
    skip = (-room.ctypes.data // 4) % 16
    return room[skip : skip + rows * columns].reshape(rows, columns)


@kernel_part()
def _attend_part(queries, view, key_spec, value_spec, mask, row, head, run, runs, state, out):  # type: ignore[no-untyped-def]
    """One run of tokens of one head: its maximum and sum to `state` (Q, 2), its undivided mix to `out` (Q, dv)."""
    stay_apart()
    h, capacity, record_bytes = view.pages.shape[1:]
    count = state.shape[0]
    q, sketch = queries.q[row, head], queries.sketch[row, head]
    rows = max(q.shape[1], queries.table.shape[1], queries.outlier_table.shape[1], value_spec.tokens)
    value_units = (value_spec.width + 31) // 32 * (value_spec.tokens // 8)
    tile = aligned_floats(1, max(rows // 8, value_units) * UNIT)[0]
    scale, zero, folded = aligned_floats(1, rows)[0], aligned_floats(1, rows)[0], aligned_floats(count, rows)
    constants, sums, scores = np.zeros(count, np.float32), aligned_floats(count, 32), aligned_floats(count, TILE)
    mix = aligned_floats(count, (value_spec.width + 7) // 8 * 64)
    base, plain = np.zeros((count, value_spec.groups), np.float32), aligned_floats(count, value_spec.width)
    state[:, 0] = -np.inf
    state[:, 1] = 0
    key_bytes, value_bytes = number_bytes(key_spec), number_bytes(value_spec)
    sinks, pages = view.sink_counts[row], view.page_counts[row]
    if run == 0:
        _attend_exact(
            view.sink_k[row, head, : sinks * key_bytes], view.sink_v[row, head, : sinks * value_bytes],
            key_spec, value_spec, 0, row, head, q, mask.limits, mask.bias, mask.softcap,
            scores, state, mix, base, plain,
        )  # fmt: skip
    first, last = pages * run // runs, pages * (run + 1) // runs
    _attend_pages(
        view.pages.reshape(-1), ((row * h + head) * capacity + first) * record_bytes, record_bytes, last - first,
        key_spec, value_spec, sinks + first * key_spec.tokens, row, head, q, sketch,
        queries.table, queries.outlier_table, queries.factor, queries.outlier_factor,
        mask.limits, mask.bias, mask.softcap,
        tile, scale, zero, folded, constants, sums, scores, state, mix, base, plain,
    )  # fmt: skip
    if run == runs - 1:
        start, end = view.window_starts[row], view.window_starts[row] + view.window_counts[row]
        _attend_exact(
            view.window_k[row, head, start * key_bytes : end * key_bytes],
            view.window_v[row, head, start * value_bytes : end * value_bytes],
            key_spec, value_spec, sinks + pages * key_spec.tokens, row, head, q,
            mask.limits, mask.bias, mask.softcap, scores, state, mix, base, plain,
        )  # fmt: skip
    _finish(mix, base, plain, value_spec, out)


@kernel()
def _attend_parts(counter, total, queries, view, key_spec, value_spec, mask, states, mixes):  # type: ignore[no-untyped-def]
    """Parts (row, head, run), counted in that order, as many as this thread gets.

    The view's exact arrays are bytes (b, h, bytes); states (b, h, runs, Q, 2), mixes (b, h, runs, Q, dv).
    """
    h, runs = states.shape[1:3]
    part = take_next(counter)
    while part < total:
        row, head, run = part // (h * runs), part // runs % h, part % runs
        _attend_part(
            queries, view, key_spec, value_spec, mask, row, head, run, runs,
            states[row, head, run], mixes[row, head, run],
        )  # fmt: skip
        part = take_next(counter)


@kernel()
def _join_parts(states, mixes, sink_logits, s, out):  # type: ignore[no-untyped-def]
    """Join the runs of each head by log-sum-exp: out float32 (b, h, Q, dv). sink_logits (hq,) in log2, or empty."""
    b, h, runs, count, dv = mixes.shape
    weights = np.empty(runs, np.float32)
    for row in range(b):
        for head in range(h):
            for i in range(count):
                sink = sink_logits[(head * count + i) // s] if sink_logits.size > 0 else np.float32(-np.inf)
                highest = sink
                for run in range(runs):
                    highest = max(highest, states[row, head, run, i, 0])
                if highest == -np.inf:
                    weights[:] = 0
                    total = np.float32(1)
                else:
                    total = np.float32(2.0 ** (sink - highest))
                    for run in range(runs):
                        weights[run] = np.float32(2.0 ** (states[row, head, run, i, 0] - highest))
                        total += weights[run] * states[row, head, run, i, 1]
                for c in range(dv):
                    mixed = np.float32(0)
                    for run in range(runs):
                        mixed += weights[run] * mixes[row, head, run, i, c]
                    out[row, head, i, c] = mixed / total


_NO_BIAS = np.zeros((0, 0, 0, 0), np.float32)
_NO_LOGITS = np.zeros(0, np.float32)
_NO_TABLES = (*(np.zeros((0, 0), np.float32),) * 2, np.float32(0), np.float32(0))


def attend(
    q: Any, view: CacheView, *, limits: Any, bias: Any, scale: float, softcap: float | None, sink_logits: Any
) -> Any:
    b, hq, s, d = q.shape
    h, dv = view.pages.shape[1], view.layout.values.width
    count = hq // h * s
    if count > FUSED_QUERIES:
        return reference.attend(
            q, view, limits=limits, bias=bias, scale=scale, softcap=softcap, sink_logits=sink_logits
        )
    if b * count == 0:
        return np.zeros((b, hq, s, dv), q.dtype)
    sketched = view.layout.keys.spec.kind == KIND_SKETCH
    tables = _padded_projections(view.layout.keys) if sketched else _NO_TABLES
    scaled = np.zeros((b, h, count, _round_up(d, 16)), np.float32)
    unit = np.float32(scale / softcap if softcap else scale * LOG2E)
    np.multiply(q.reshape(b, h, count, d), unit, out=scaled[..., :d], casting="unsafe")
    sketch = scaled[..., :d] @ tables[0] if sketched else scaled[..., :0]
    runs = _run_count(view, b * h)
    states = np.empty((b, h, runs, count, 2), np.float32)
    mixes = np.empty((b, h, runs, count, dv), np.float32)
    run_parts(
        _attend_parts,
        b * h * runs,
        Queries(scaled, np.ascontiguousarray(sketch), *tables),
        CacheArrays(
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
        view.layout.keys.spec,
        view.layout.values.spec,
        Mask(
            writable(np.ascontiguousarray(limits, dtype=np.int64)),
            _NO_BIAS if bias is None else writable(np.ascontiguousarray(bias, dtype=np.float32)),
            float(softcap or 0),
        ),
        states,
        mixes,
        threads=1 if b * hq * s * int(limits.max()) * (d + dv) < THREADED_WORK else None,
    )
    logits = _NO_LOGITS if sink_logits is None else np.asarray(sink_logits, np.float32) * np.float32(LOG2E)
    out = np.empty((b, h, count, dv), np.float32)
    _join_parts(states, mixes, logits, s, out)
    return out.reshape(b, hq, s, dv).astype(q.dtype, copy=False)


class CacheArrays(NamedTuple):
    """The arrays of a :class:`kvsketch.attention.CacheView`, the exact ones as bytes (b, h, bytes)."""

    pages: Any
    page_counts: Any
    sink_k: Any
    sink_v: Any
    sink_counts: Any
    window_k: Any
    window_v: Any
    window_starts: Any
    window_counts: Any


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
def _padded_projections(side: SideLayout) -> tuple[Any, Any, Any, Any]:
    """Transposed projections (d, m) and (d, outlier_m), columns padded to 16 with zeros, and the estimates' c/m."""
    tables, factors = [], []
    for projection in projections(side):
        m = 0 if projection is None else projection.m
        table = np.zeros((side.width, _round_up(m, 16)), np.float32)
        if projection is not None:
            table[:, :m] = projection.matrix.T
        tables.append(table)
        factors.append(np.float32(0 if projection is None else projection.constant / m))
    return tables[0], tables[1], factors[0], factors[1]
