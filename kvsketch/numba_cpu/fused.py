"""The compiled part of fused attention: one run of tokens of one head.

A part keeps a running maximum, sum and weighted mix in one scratch buffer; scores are in units of log2. The pages'
codecs are kernels of their own (:mod:`kvsketch.numba_cpu.integers`, :mod:`kvsketch.numba_cpu.sketches`), called by
address.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvsketch.layout import KIND_EXACT, KIND_INTS, SideSpec
from kvsketch.numba_cpu._compile import kernel, kernel_part
from kvsketch.numba_cpu.emit import LANES
from kvsketch.numba_cpu.exact import as_floats, mix_floats, number_bytes, score_floats
from kvsketch.numba_cpu.integers import TILE
from kvsketch.numba_cpu.join import join
from kvsketch.numba_cpu.simd import (
    address_of,
    call_kernel,
    load_float,
    load_long,
    make_load_longs,
    stay_apart,
    store_float,
    store_long,
    take_next,
)
from kvsketch.numba_cpu.softmax import (
    LOG2E,
    add_bias,
    cap_scores,
    fill_floats,
    hide_scores,
    largest_score,
    scale_floats,
    weigh_scores,
)

#: Numbers in what score kernels are told besides: what comes with the queries, then the row and the first token.
EXTRA = 9
#: Where they find these two, in bytes.
ROW_AT, POSITION_AT = 8 * (EXTRA - 2), 8 * (EXTRA - 1)


class Plan(NamedTuple):
    """What a layout and a number of queries ask for."""

    key_spec: SideSpec
    value_spec: SideSpec
    score: int  #: address of the kernel that scores pages, 0 where exact keys are scored as they are
    exact_score: int  #: of the one that scores exact tokens, or 0 likewise
    mix: int  #: address of the mix kernel, 0 for exact values
    work: int  #: bytes that these kernels work in
    q_pitch: int  #: bytes of a query's channels, padded with zeros; 0 where all kernels take packed queries
    key_pitch: int  #: bytes of an exact key as float32
    value_pitch: int  #: bytes of an exact value as float32
    mix_pitch: int  #: bytes of a query's mix of encoded values, two numbers a channel


class Inputs(NamedTuple):
    """Addresses and sizes of a step's arrays, all in C order.

    Like a plan it reaches a compiled function as the address of its numbers, int64: a tuple takes it microseconds.
    """

    q: int  #: (b, h, Q, d), still to be scaled to units of log2 (of the soft cap where there is one)
    runs: int  #: of tokens that a head is split into
    q_type: int  #: kvsketch.layout.DTYPE_CODES
    sketch: int  #: (b, h, ...) float32: its sketch (Q, m) for keys that are sketched, packed rows for latents
    sketch_step: int  #: bytes of a head's; 0: none
    extra: int  #: int64 (EXTRA,), see :mod:`kvsketch.numba_cpu.sketches` and :mod:`kvsketch.numba_cpu.rebuild`
    keys: int  #: int64, the fields of the key side
    values: int  #: int64, those of the value side
    limits: int  #: (b, s) int64, tokens that a query sees; 0: causal
    skip: int  #: (b,) int64, first tokens that no query sees; 0: none
    s: int
    queries: int  #: Q, those of a key/value head
    b: int
    bias: int  #: (b, bias_heads, s, bias_tokens) float32, or 0
    bias_heads: int
    bias_tokens: int
    pages: int  #: (b, h, capacity, step) bytes
    h: int
    capacity: int
    step: int
    page_counts: int  #: (b,) int64, like the other counts
    sink_k: int  #: (b, h, sink_room, d)
    sink_v: int
    sink_room: int
    sink_counts: int
    window_k: int  #: (b, h, window_room, d)
    window_v: int
    window_room: int
    window_starts: int
    window_counts: int


_load_inputs = make_load_longs(len(Inputs._fields))
_load_spec = make_load_longs(len(SideSpec._fields))
_load_rest = make_load_longs(len(Plan._fields) - 2)
_SPEC_BYTES = 8 * len(SideSpec._fields)


@kernel_part()
def load_inputs(at):  # type: ignore[no-untyped-def]
    """The inputs whose numbers are at an address."""
    return Inputs(*_load_inputs(at))


@kernel_part()
def load_plan(at):  # type: ignore[no-untyped-def]
    """The plan whose numbers, from :func:`plan_numbers`, are at an address."""
    values = at + _SPEC_BYTES
    return Plan(SideSpec(*_load_spec(at)), SideSpec(*_load_spec(values)), *_load_rest(values + _SPEC_BYTES))


def plan_numbers(plan: Plan) -> np.ndarray[Any, Any]:
    """A plan as int64 numbers."""
    return np.array((*plan.key_spec, *plan.value_spec, *plan[2:]), np.int64)


class Scratch(NamedTuple):
    """Addresses of what a part keeps; pitches are in :class:`Plan`."""

    q: Any  #: (Q, channels), scaled and padded
    scores: Any  #: (Q, TILE)
    highest: Any  #: (Q,)
    totals: Any  #: (Q,)
    mix: Any  #: (Q, 2*channels) of encoded values
    base: Any  #: (Q, groups), what the zeros of integer values add
    plain: Any  #: (Q, channels) of exact values
    tile: Any  #: exact tokens as float32
    work: Any  #: what kernels of pages work in


@kernel_part()
def _length(inputs, plan, row):  # type: ignore[no-untyped-def]
    """Tokens of a row."""
    exact = load_long(inputs.sink_counts + 8 * row) + load_long(inputs.window_counts + 8 * row)
    return exact + load_long(inputs.page_counts + 8 * row) * plan.key_spec.tokens


@kernel_part()
def _update_softmax(scratch, plan, inputs, queries, count, position, row, head, softcap):  # type: ignore[no-untyped-def]
    """Turn scores of `count` tokens into weights and rescale what was mixed before; whether any token is seen."""
    s, any_seen, length = inputs.s, False, _length(inputs, plan, row)
    whole = (count + LANES - 1) // LANES * LANES
    for i in range(queries):
        scores = scratch.scores + 4 * TILE * i
        limit = load_long(inputs.limits + 8 * (row * s + i % s)) if inputs.limits != 0 else length - s + 1 + i % s
        seen = max(0, min(count, limit - position))
        if softcap > 0:
            cap_scores(scores, seen, softcap)
        if inputs.bias != 0:
            query_head = 0 if inputs.bias_heads == 1 else (head * queries + i) // s
            line = (row * inputs.bias_heads + query_head) * s + i % s
            add_bias(scores, inputs.bias + 4 * (line * inputs.bias_tokens + position), seen)
        if inputs.skip != 0:
            hide_scores(scores, 0, min(seen, load_long(inputs.skip + 8 * row) - position))
        hide_scores(scores, seen, whole)
        before = load_float(scratch.highest + 4 * i)
        highest = largest_score(scores, whole, before)
        if highest == -np.inf:
            fill_floats(scores, whole, np.float32(0))
            continue
        any_seen = True
        total = load_float(scratch.totals + 4 * i)
        if highest > before:
            decay = np.float32(2.0 ** (before - highest))
            store_float(scratch.highest + 4 * i, highest)
            total *= decay
            if decay != 1:
                scale_floats(scratch.mix + plan.mix_pitch * i, plan.mix_pitch // 4, decay)
                scale_floats(scratch.plain + plan.value_pitch * i, plan.value_pitch // 4, decay)
                groups = plan.value_spec.groups
                for part in range(i * groups, (i + 1) * groups):
                    store_float(scratch.base + 4 * part, load_float(scratch.base + 4 * part) * decay)
        store_float(scratch.totals + 4 * i, total + weigh_scores(scores, whole, highest))
    return any_seen


@kernel_part()
def _score_exact(keys, count, spec, plan, inputs, q, queries, scores, tile, work, extra):  # type: ignore[no-untyped-def]
    """Scores of `count` exact keys at an address."""
    if plan.exact_score != 0:
        call_kernel(
            plan.exact_score,
            (keys, 0, count, inputs.keys, q, plan.q_pitch, queries, scores, 4 * TILE, work, extra),
        )
        return
    if 4 * spec.width != plan.key_pitch or number_bytes(spec.dtype) != 4:
        as_floats(keys, spec.dtype, count, spec.width, tile, plan.key_pitch)
        keys = tile
    score_floats(keys, plan.key_pitch, count, q, plan.q_pitch, queries, scores, 4 * TILE)


@kernel_part()
def _mix_exact(values, count, spec, plan, weights, queries, tile, plain):  # type: ignore[no-untyped-def]
    """Add `count` exact values at an address."""
    if 4 * spec.width != plan.value_pitch or number_bytes(spec.dtype) != 4:
        as_floats(values, spec.dtype, count, spec.width, tile, plan.value_pitch)
        values = tile
    mix_floats(values, plan.value_pitch, count, weights, 4 * TILE, queries, plain, plan.value_pitch)


@kernel_part()
def _attend_exact(keys, values, count, position, row, head, q, queries, plan, inputs, extra, softcap, scratch):  # type: ignore[no-untyped-def]
    """Take in exact tokens, given as the addresses of their keys and values."""
    stay_apart()
    key_bytes = plan.key_spec.width * number_bytes(plan.key_spec.dtype)
    value_bytes = plan.value_spec.width * number_bytes(plan.value_spec.dtype)
    for first in range(0, count, TILE):
        here = min(TILE, count - first)
        store_long(extra + POSITION_AT, position + first)
        _score_exact(
            keys + first * key_bytes, here, plan.key_spec, plan, inputs, q, queries, scratch.scores, scratch.tile,
            scratch.work, extra,
        )  # fmt: skip
        if _update_softmax(scratch, plan, inputs, queries, here, position + first, row, head, softcap):
            _mix_exact(
                values + first * value_bytes, here, plan.value_spec, plan, scratch.scores, queries,
                scratch.tile, scratch.plain,
            )  # fmt: skip


@kernel_part()
def _attend_pages(
    start, count, position, row, head, q, queries, plan, inputs, extra, softcap, scratch
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Take in `count` encoded pages, from the address of the first."""
    stay_apart()
    tokens, pitch, step = plan.key_spec.tokens, 4 * TILE, inputs.step
    per_tile = TILE // tokens
    for first in range(0, count, per_tile):
        here, page = min(per_tile, count - first), start + first * step
        store_long(extra + POSITION_AT, position + first * tokens)
        if plan.score == 0:
            for index in range(here):
                _score_exact(
                    page + index * step, tokens, plan.key_spec, plan, inputs, q, queries,
                    scratch.scores + 4 * tokens * index, scratch.tile, scratch.work, extra,
                )  # fmt: skip
        else:
            call_kernel(
                plan.score,
                (page, step, here, inputs.keys, q, plan.q_pitch, queries, scratch.scores, pitch, scratch.work, extra),
            )
        at = position + first * tokens
        if _update_softmax(scratch, plan, inputs, queries, here * tokens, at, row, head, softcap):
            page += plan.key_spec.nbytes
            if plan.value_spec.kind == KIND_EXACT:
                for index in range(here):
                    _mix_exact(
                        page + index * step, tokens, plan.value_spec, plan, scratch.scores + 4 * tokens * index,
                        queries, scratch.tile, scratch.plain,
                    )  # fmt: skip
            else:
                call_kernel(
                    plan.mix,
                    (
                        page, step, here, inputs.values, scratch.scores, pitch, queries,
                        scratch.mix, plan.mix_pitch, scratch.base, scratch.work,
                    ),
                )  # fmt: skip


@kernel_part()
def _finish(scratch, plan, queries, state, out):  # type: ignore[no-untyped-def]
    """A part's maxima and sums to `state` (Q, 2), its mix, still to be divided by the sums, to `out` (Q, dv)."""
    stay_apart()
    groups, group = plan.value_spec.groups, plan.value_spec.group
    for i in range(queries):
        state[i, 0] = load_float(scratch.highest + 4 * i)
        state[i, 1] = load_float(scratch.totals + 4 * i)
        mix, plain = scratch.mix + plan.mix_pitch * i, scratch.plain + plan.value_pitch * i
        for c in range(out.shape[1]):
            number = load_float(plain + 4 * c)
            if groups > 0:
                number += load_float(mix + 8 * c) + load_float(mix + 8 * c + 4)
                number += load_float(scratch.base + 4 * (i * groups + c // group))
            out[i, c] = number


@kernel_part()
def _carve(start, plan, queries):  # type: ignore[no-untyped-def]
    """A part's scratch from a 64-byte aligned address on, as laid out by :func:`scratch_bytes`."""
    q = start
    scores = q + plan.q_pitch * queries
    mix = scores + 4 * TILE * queries
    plain = mix + plan.mix_pitch * queries
    tile = plain + plan.value_pitch * queries
    work = tile + TILE * max(plan.key_pitch, plan.value_pitch)
    highest = work + (plan.work + 63) // 64 * 64
    totals = highest + 4 * queries
    return Scratch(q, scores, highest, totals, mix, totals + 4 * queries, plain, tile, work)


def scratch_bytes(plan: Plan, queries: int) -> int:
    numbers = queries * (plan.q_pitch + 4 * TILE + plan.mix_pitch + plan.value_pitch + 8 + 4 * plan.value_spec.groups)
    return numbers + TILE * max(plan.key_pitch, plan.value_pitch) + plan.work + 192


@kernel_part()
def _clear(scratch, plan, queries):  # type: ignore[no-untyped-def]
    """Nothing seen yet."""
    groups = plan.value_spec.groups
    for i in range(queries):
        store_float(scratch.highest + 4 * i, -np.float32(np.inf))
        store_float(scratch.totals + 4 * i, np.float32(0))
        fill_floats(scratch.mix + plan.mix_pitch * i, plan.mix_pitch // 4, np.float32(0))
        fill_floats(scratch.plain + plan.value_pitch * i, plan.value_pitch // 4, np.float32(0))
        for part in range(groups):
            store_float(scratch.base + 4 * (i * groups + part), np.float32(0))


@kernel_part()
def attend_part(inputs, plan, row, head, run, unit, softcap, buffer, state, out):  # type: ignore[no-untyped-def]
    """One run of tokens of one head."""
    stay_apart()
    queries, runs, key_spec, value_spec = inputs.queries, inputs.runs, plan.key_spec, plan.value_spec
    scratch = _carve((address_of(buffer) + 63) // 64 * 64, plan, queries)
    _clear(scratch, plan, queries)
    place = row * inputs.h + head
    q, width = scratch.q, key_spec.width
    if plan.q_pitch > 0:
        numbers = inputs.q + number_bytes(inputs.q_type) * width * queries * place
        as_floats(numbers, inputs.q_type, queries, width, q, plan.q_pitch)
        if unit != 1:
            scale_floats(q, plan.q_pitch // 4 * queries, unit)
    given = np.empty(EXTRA, np.int64)
    extra = address_of(given)
    if inputs.sketch_step > 0:
        for i in range(EXTRA):
            given[i] = load_long(inputs.extra + 8 * i)
        given[0] = inputs.sketch + inputs.sketch_step * place
    elif key_spec.kind == KIND_INTS:
        store_float(extra, np.float32(softcap * LOG2E if softcap > 0 else 1))
    store_long(extra + ROW_AT, row)
    key_bytes = key_spec.width * number_bytes(key_spec.dtype)
    value_bytes = value_spec.width * number_bytes(value_spec.dtype)
    sinks, pages = load_long(inputs.sink_counts + 8 * row), load_long(inputs.page_counts + 8 * row)
    if run == 0:
        first = place * inputs.sink_room
        _attend_exact(
            inputs.sink_k + first * key_bytes, inputs.sink_v + first * value_bytes, sinks, 0,
            row, head, q, queries, plan, inputs, extra, softcap, scratch,
        )  # fmt: skip
    first, last = pages * run // runs, pages * (run + 1) // runs
    _attend_pages(
        inputs.pages + (place * inputs.capacity + first) * inputs.step, last - first,
        sinks + first * key_spec.tokens, row, head, q, queries, plan, inputs, extra, softcap, scratch,
    )  # fmt: skip
    if run == runs - 1:
        first = place * inputs.window_room + load_long(inputs.window_starts + 8 * row)
        _attend_exact(
            inputs.window_k + first * key_bytes, inputs.window_v + first * value_bytes,
            load_long(inputs.window_counts + 8 * row), sinks + pages * key_spec.tokens,
            row, head, q, queries, plan, inputs, extra, softcap, scratch,
        )  # fmt: skip
    _finish(scratch, plan, queries, state, out)
    # An array lives as long as it is used: kernels know its address only.
    given[0] = 0


@kernel()
def attend_parts(counter, total, inputs_at, plan_at, unit, softcap, room, states, mixes, sink_logits, sums, out):  # type: ignore[no-untyped-def]
    """Parts (row, head, run), counted in that order, as many as this thread gets.

    states (b, h, runs, Q, 2), mixes (b, h, runs, Q, dv); `room` bytes of scratch a thread. One thread that has had all
    parts also joins them (:mod:`kvsketch.numba_cpu.join`), with states and mixes of its own; `out` is 0 when
    there may be others. Queries are multiplied by `unit`.
    """
    inputs, plan = load_inputs(inputs_at), load_plan(plan_at)
    h, runs = inputs.h, inputs.runs
    if out != 0:
        states = np.empty((inputs.b, h, runs, inputs.queries, 2), np.float32)
        mixes = np.empty((inputs.b, h, runs, inputs.queries, plan.value_spec.width), np.float32)
    buffer = np.empty(room, np.uint8)
    part = take_next(counter)
    while part < total:
        row, head, run = part // (h * runs), part // runs % h, part % runs
        attend_part(
            inputs, plan, row, head, run, unit, softcap, buffer, states[row, head, run], mixes[row, head, run]
        )  # fmt: skip
        part = take_next(counter)
    if out != 0:
        join(states, mixes, sink_logits, inputs.s, sums, out)
