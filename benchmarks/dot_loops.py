"""Integer dot products of this processor: alone, and in the engine's innermost loops on a page in the nearest cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvsketch.layout import KIND_SKETCH, PageLayout, unit_bytes, unit_rows
from kvsketch.numba_cpu._compile import address, kernel
from kvsketch.numba_cpu._tiers import VECTOR_BYTES
from kvsketch.numba_cpu.dots import COEFFICIENT_BYTES, KEPT, QUERIES, make_mix_block, make_score_block
from kvsketch.numba_cpu.emit import VECTORS, emit_constant, emit_dot_bytes, emit_dot_shorts, emit_load, emit_store
from kvsketch.numba_cpu.integers import shares_groups
from kvsketch.numba_cpu.simd import operation

#: Dot products at once: more than their latency asks for, fewer than there are registers.
CHAINS = 12
#: Pages of values that one loop takes, as the engine does.
PAGES = 8


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _score_depth(layout: PageLayout) -> tuple[int, int, int]:
    """Bits, contraction rows and blocks of 32 tokens of the keys' codes; outlier channels apart."""
    spec = layout.keys.spec
    if spec.kind == KIND_SKETCH:
        return 1, _round_up(spec.m, 16), spec.tokens // 32
    return spec.bits, spec.rows, spec.tokens // 32


def count_dots(layout: PageLayout, coefficients: str, queries: int) -> float:
    """Dot product instructions that one page needs for so many queries, whatever the loops around them."""
    _, rows, blocks = _score_depth(layout)
    values = layout.values.spec
    products = 32 * (rows * blocks + values.tokens * _round_up(values.width, 32) // 32) * queries
    return products / (VECTOR_BYTES // (2 if coefficients == "int16" else 1))


@cache
def make_issue(coefficients: str) -> Callable[[int], None]:
    """A call that does ``CHAINS * count`` dot products, and nothing else."""
    emit_dot, element = (emit_dot_shorts, "int16") if coefficients == "int16" else (emit_dot_bytes, "uint8")

    @intrinsic
    def add_products(_context: Any, source: Any, target: Any, count: Any) -> Any:
        def emit(b: ir.IRBuilder, source: Any, target: Any, count: Any) -> None:
            x, y = (emit_load(b, source, 64 * i, VECTORS[element]) for i in range(2))
            before, body, after = b.block, b.append_basic_block("body"), b.append_basic_block("after")
            b.branch(body)
            b.position_at_end(body)
            turn = b.phi(count.type)
            totals = [b.phi(VECTORS["int32"]) for _ in range(CHAINS)]
            sums = [emit_dot(b, total, x, y) for total in totals]
            following = b.add(turn, ir.Constant(count.type, 1))
            turn.add_incoming(ir.Constant(count.type, 0), before)
            turn.add_incoming(following, body)
            for total, summed in zip(totals, sums, strict=True):
                total.add_incoming(emit_constant(VECTORS["int32"], 0), before)
                total.add_incoming(summed, body)
            b.cbranch(b.icmp_signed("<", following, count), body, after)
            b.position_at_end(after)
            for i, summed in enumerate(sums):
                emit_store(b, target, VECTOR_BYTES * i, summed)

        return operation(types.void(types.intp, types.intp, types.intp), emit)

    @kernel(coefficients)
    def issue(source, target, count):  # type: ignore[no-untyped-def]
        add_products(source, target, count)

    numbers, sums = np.ones(128, np.uint8), np.zeros(VECTOR_BYTES * CHAINS, np.uint8)
    return lambda count: issue(address(numbers), address(sums), count)


@cache
def _make_scores(bits: int, coefficients: str, queries: int) -> Any:
    score_block, step, size = make_score_block(bits, coefficients, queries), unit_bytes(bits), 128 * queries

    @kernel(f"{bits}-{coefficients}-{queries}")
    def scores(page, turn, blocks, units, pitch, scratch, repeats):  # type: ignore[no-untyped-def]
        numbers = scratch + 64 + size
        for index in range(repeats):
            # Not the same page twice: what does not change would be computed once.
            codes = page + index % 2 * turn
            for block in range(blocks):
                at = codes + block * units * step
                score_block(at, 0, units, numbers, pitch, scratch, scratch + 16, scratch + 64, 128)

    return scores


@cache
def _make_mixes(bits: int, coefficients: str, queries: int, shared: bool) -> Any:
    mix_block, step, size = make_mix_block(bits, coefficients, queries, shared), unit_bytes(bits), 256 * queries

    @kernel(f"{bits}-{coefficients}-{queries}-{shared}")
    def mixes(page, turn, blocks, units, pitch, scratch, is_first, repeats):  # type: ignore[no-untyped-def]
        kept = scratch + 64 + size
        at = kept + KEPT
        for index in range(repeats // PAGES):
            codes = page + index % 2 * turn
            for block in range(blocks):
                mix_block(
                    codes + block * units * step, 0, PAGES, 0, units, (at, at, at, at), pitch, scratch, scratch + 64,
                    256, kept, is_first,
                )  # fmt: skip

    return mixes


def make_loops(layout: PageLayout, coefficients: str, queries: int) -> Callable[[int], None]:
    """A call that runs the innermost loops of one page of integers or sketches so many times, a multiple of PAGES."""
    bits, rows, blocks = _score_depth(layout)
    values, size = layout.values.spec, COEFFICIENT_BYTES[coefficients] // 8
    page, scratch = (np.zeros(n, np.uint8) for n in (2 * layout.record_bytes + 64, 1 << 16))
    parts = [(first == 0, min(QUERIES, queries - first)) for first in range(0, queries, QUERIES)]
    score_shape = (blocks, rows // unit_rows(bits), size * rows)
    units, pitch = values.tokens // unit_rows(values.bits), size * values.tokens * PAGES
    mix_shape = (_round_up(values.width, 32) // 32, units, pitch)
    calls = [
        (
            (_make_scores(bits, coefficients, count), score_shape, ()),
            (_make_mixes(values.bits, coefficients, count, shares_groups(values)), mix_shape, (is_first,)),
        )
        for is_first, count in parts
    ]

    def run(repeats: int) -> None:
        start, work = _round_up(address(page), 64), address(scratch)
        for kernels in calls:
            for call, shape, more in kernels:
                call(start, layout.record_bytes, *shape, work, *more, repeats)

    return run
