"""What memory gives: a plain read by one thread or several, and a copy."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from benchmarks.sharing import run_shares
from kvsketch.numba_cpu._compile import kernel
from kvsketch.numba_cpu.simd import I64, emit_constant, emit_load, emit_reduce

_LINE = 64
_WORDS = ir.VectorType(I64, _LINE // 8)
#: Lines of a turn of the loop, each with a sum of its own.
_LINES = 4


@intrinsic
def _fold(_context, address, lines):  # type: ignore[no-untyped-def]
    """Exclusive or of the 64-bit words of `lines` lines, a multiple of 4, of 64 bytes from an address."""

    def generate(_context, b, _signature, arguments):  # type: ignore[no-untyped-def]
        address, lines = arguments
        totals = [cgutils.alloca_once_value(b, emit_constant(_WORDS, 0)) for _ in range(_LINES)]
        with cgutils.for_range_slice(b, I64(0), lines, I64(_LINES), inc=True) as (line, _):
            here = b.add(address, b.mul(line, I64(_LINE)))
            for i, total in enumerate(totals):
                b.store(b.xor(b.load(total), emit_load(b, here, i * _LINE, _WORDS)), total)
        result = b.load(totals[0])
        for total in totals[1:]:
            result = b.xor(result, b.load(total))
        return emit_reduce(b, result, ir.IRBuilder.xor)

    return types.int64(types.intp, types.intp), generate


@kernel()
def _fold_blocks(address, first, last):  # type: ignore[no-untyped-def]
    return _fold(address + first * _LINES * _LINE, (last - first) * _LINES)


def read_all(x: Any, *, threads: int = 1) -> int:
    """Read a contiguous array but for what is beyond a multiple of 256 bytes; the exclusive or of its int64 words."""
    total = 0
    for part in run_shares(_fold_blocks, x.nbytes // (_LINE * _LINES), x.ctypes.data, threads=threads):
        total ^= int(part)
    return total


def copy_all(x: Any, out: Any) -> None:
    """Copy a contiguous array to another of as many bytes, with the C library's own function."""
    ctypes.memmove(out.ctypes.data, x.ctypes.data, x.nbytes)


def random_bytes(count: int) -> Any:
    """An array of `count` uint8, written, so that it has memory of its own."""
    return np.resize(np.random.default_rng(0).integers(0, 256, min(count, 1 << 20), np.uint8), count)
