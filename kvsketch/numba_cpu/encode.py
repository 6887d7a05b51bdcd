"""Encoding of pages: which kernel a side takes, where its pages are, and threads.

Numbers are read where they lie, in their dtype, and records are written where they belong; of a prompt, nothing but
scratch of some kilobytes a thread is copied.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from kvsketch._checks import FLOAT_DTYPES
from kvsketch.layout import DTYPE_CODES, KIND_EXACT, KIND_SKETCH, SideLayout
from kvsketch.numba_cpu._compile import address, compile_address, kernel
from kvsketch.numba_cpu._threads import run_parts
from kvsketch.numba_cpu.encode_hadamard import transform_shape
from kvsketch.numba_cpu.encode_ints import int_scratch, make_encode_keys, make_encode_values
from kvsketch.numba_cpu.encode_sketch import make_encode_sketch, sketch_scratch, sketch_tables
from kvsketch.numba_cpu.integers import TOKENS, WIDTH, shares_groups
from kvsketch.numba_cpu.simd import address_of, call_kernel, copy_bytes, load_long, take_next

#: Pages of a head that a thread takes at a time.
PART_PAGES = 8
#: Numbers below which other threads are not woken: it costs more than it saves.
THREADED_NUMBERS = 1 << 17

_NO_ROWS, _NO_CHANNELS = np.zeros(0, np.int64), np.zeros((0, 0), np.int64)
#: Names of the dtypes; asking a dtype takes longer than encoding a page.
_NAMES = {dtype: name for name, dtype in FLOAT_DTYPES.items()}


class _Plan(NamedTuple):
    """How pages of a side are encoded."""

    kernel: int  #: its address
    spec: Any  #: the side's numbers, int64
    scratch: int  #: bytes
    extra: Any  #: what else the kernel needs, int64
    kept: Any  #: what `extra` holds addresses of


@lru_cache(maxsize=64)
def _int_kernel(keys: bool, bits: int, dtype: str, shared: bool) -> int:
    if keys:
        return compile_address(make_encode_keys(bits, dtype), f"{bits}-{dtype}")
    return compile_address(make_encode_values(bits, dtype, shared), f"{bits}-{dtype}-{shared}")


@lru_cache(maxsize=64)
def _sketch_kernel(dtype: str, levels: int, both: bool) -> int:
    return compile_address(make_encode_sketch(dtype, levels, both), f"{dtype}-{levels}-{both}")


def _make_encode_exact(size: int) -> Any:
    """A kernel that copies pages of numbers of `size` bytes."""

    def encode(x, pitch, page_step, out, out_step, count, spec, _extra, _given, _scratch, _found):  # type: ignore[no-untyped-def]
        row = size * load_long(spec + WIDTH)
        for page in range(count):
            for t in range(load_long(spec + TOKENS)):
                copy_bytes(x + page * page_step + t * pitch, row, out + page * out_step + t * row)

    return encode


@lru_cache(maxsize=2)
def _exact_kernel(size: int) -> int:
    return compile_address(_make_encode_exact(size), f"{size}")


@lru_cache(maxsize=256)
def _plan(side: SideLayout, dtype: str) -> _Plan:
    spec = side.spec
    numbers = np.array(spec, np.int64)
    if spec.kind == KIND_EXACT:
        return _Plan(_exact_kernel(4 if spec.dtype == DTYPE_CODES["float32"] else 2), numbers, 0, _NO_ROWS, None)
    if spec.kind != KIND_SKETCH:
        shared = not side.by_token or shares_groups(spec)
        kernel_address = _int_kernel(not side.by_token, spec.bits, dtype, shared)
        return _Plan(kernel_address, numbers, int_scratch(spec), _NO_ROWS, None)
    addresses, kept, transformed = sketch_tables(side)
    levels, both = transform_shape(spec.width) if transformed else (0, False)
    return _Plan(_sketch_kernel(dtype, levels, both), numbers, sketch_scratch(spec), addresses, kept)


@lru_cache(maxsize=1024)
def _offsets(shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """Byte offsets int64 of all elements of an array, in C order."""
    offsets = np.zeros(1, np.int64)
    for size, stride in zip(shape, strides, strict=True):
        offsets = (offsets[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return offsets


@kernel()
def _encode_parts(  # type: ignore[no-untyped-def]
    counter, total, encode, x, heads, pitch, tokens, out, out_heads, out_step, pages, spec, extra, channels, room
):
    """Parts of up to PART_PAGES pages of a head, as many as this thread gets; what saturated in them.

    `heads` and `out_heads` are where each head's numbers and records begin, in bytes from `x` and `out`; `channels`
    int64 (heads or 0, outliers) are given ones.
    """
    scratch, found = np.empty(room + 64, np.uint8), np.zeros(1, np.int64)
    aligned = (address_of(scratch) + 63) // 64 * 64
    parts = (pages + PART_PAGES - 1) // PART_PAGES
    given, given_step = 0, 8 * channels.shape[1]
    part = take_next(counter)
    while part < total:
        head, first = part // parts, part % parts * PART_PAGES
        if channels.shape[0] > 0:
            given = address_of(channels) + head * given_step
        call_kernel(
            encode,
            (
                x + heads[head] + first * tokens * pitch, pitch, tokens * pitch,
                out + out_heads[head] + first * out_step, out_step, min(PART_PAGES, pages - first),
                address_of(spec), address_of(extra), given, aligned, address_of(found),
            ),
        )  # fmt: skip
        part = take_next(counter)
    # Arrays live as long as they are used: kernels know their addresses only.
    return found[0] + scratch.size - room - 64


def encode_side(x: Any, side: SideLayout, out: Any, channels: Any = None) -> int:
    """Write pages of `x` (..., P*p, width) to `out` (..., P, side bytes); number of saturated scales, zeros and norms.

    `channels` (..., outliers) are the outlier channels of a sketch, chosen for each page when left out.
    """
    lead, pages = x.shape[:-2], out.shape[-2]
    heads, out_heads = _offsets(lead, x.strides[:-2]), _offsets(lead, out.strides[:-2])
    total = len(heads) * -(-pages // PART_PAGES)
    if not total:
        return 0
    if side.spec.kind == KIND_EXACT:
        x = x.astype(FLOAT_DTYPES[side.dtype], copy=False)
        heads = _offsets(lead, x.strides[:-2])
    if x.strides[-1] != x.itemsize or out.strides[-1] != 1:
        return _encode_copied(x, side, out, channels)
    given = _NO_CHANNELS
    if channels is not None and side.spec.outliers:
        given = np.array(channels, np.int64).reshape(-1, side.spec.outliers)
    plan = _plan(side, _NAMES[x.dtype])
    found = run_parts(
        _encode_parts, total, plan.kernel, address(x), heads, x.strides[-2], side.tokens, address(out), out_heads,
        out.strides[-2], pages, plan.spec, plan.extra, given, plan.scratch,
        threads=1 if x.size < THREADED_NUMBERS else None,
    )  # fmt: skip
    return int(sum(found))


def _encode_copied(x: Any, side: SideLayout, out: Any, channels: Any) -> int:
    """The same where channels or bytes do not lie side by side."""
    records = out if out.strides[-1] == 1 else np.ascontiguousarray(out)
    saturated = encode_side(np.ascontiguousarray(x), side, records, channels)
    if records is not out:
        out[...] = records
    return saturated
