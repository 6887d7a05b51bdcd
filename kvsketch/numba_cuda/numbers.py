"""The numbers of a page as kernels read them: for each codec a function of a side, a page, a token and a channel.

Exact arrays are read as pages too: all tokens of a head are one page of the codec ``Exact``.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from kvsketch._checks import FLOAT_DTYPES
from kvsketch.codecs import Exact, SignSketch
from kvsketch.layout import SideLayout, SideSpec
from kvsketch.numba_cuda.arithmetic import READ, product, read_half
from kvsketch.numba_cuda.units import unit_code
from kvsketch.reference.pages import projections


class Records(NamedTuple):
    """A side of pages, as a kernel's argument."""

    raw: Any  #: (P, side bytes) uint8
    words: Any  #: (P, side bytes / 2) uint16, or an exact side's numbers in their own dtype
    spec: SideSpec


class SketchRecords(NamedTuple):
    """A side of sketched pages, as a kernel's argument."""

    raw: Any
    words: Any
    spec: SideSpec
    matrix: Any  #: (m, d) float32
    outlier_matrix: Any  #: (outlier_m, d) float32; `matrix` again where there are no outlier channels
    factor: Any  #: c/m of the sketch, float32
    outlier_factor: Any


def side_records(records: Any, side: SideLayout, offset: int = 0) -> Records | SketchRecords:
    """`records` (P, bytes) uint8 in C order as the argument for a side that starts at byte `offset` of each."""
    if isinstance(side.codec, Exact):
        dtype = FLOAT_DTYPES[side.dtype]
        return Records(records[:, offset:], records.view(dtype)[:, offset // dtype.itemsize :], side.spec)
    raw, words = records[:, offset:], records.view(np.uint16)[:, offset // 2 :]
    if not isinstance(side.codec, SignSketch):
        return Records(raw, words, side.spec)
    main, outlier = projections(side)
    second = main if outlier is None else outlier
    factors = [np.float32(p.constant / p.m) for p in (main, second)]
    return SketchRecords(raw, words, side.spec, main.matrix_beside(records), second.matrix_beside(records), *factors)


def exact_records(x: Any) -> Records:
    """Exact numbers `x` (b, h, t, width), t > 0, as one page a head."""
    b, h, t, width = x.shape
    words = x.reshape(b * h, t * width)
    spec = SideSpec(*(0,) * len(SideSpec._fields))._replace(tokens=t, width=width)
    return Records(words, words, spec)


def number_of(side: SideLayout) -> Any:
    """The function of (side records, page, token, channel) that reads a number of `side`, in float32."""
    if isinstance(side.codec, Exact):
        return exact_number(side.dtype)
    if isinstance(side.codec, SignSketch):
        return sketch_number
    return number_by_token if side.by_token else number_by_channel


@cache
def exact_number(dtype: str) -> Any:
    """What reads a number of an exact side of `dtype`."""
    read = READ[dtype]

    @cuda.jit(device=True)
    def number(side, page, token, c):
        return read(side.words[page, token * side.spec.width + c])

    return number


@cuda.jit(device=True)
def number_by_channel(side, page, token, c):
    """A number of integer keys: tokens are lanes, and groups are tokens of one channel."""
    spec = side.spec
    code = unit_code(side.raw, page, spec.codes, spec.bits, spec.rows, token, c)
    return scaled(side, page, code, token // spec.group * spec.rows + c)


@cuda.jit(device=True)
def number_by_token(side, page, token, c):
    """A number of integer values, and of latents: channels are lanes, and groups are channels of one token."""
    spec = side.spec
    code = unit_code(side.raw, page, spec.codes, spec.bits, spec.rows, c, token)
    return scaled(side, page, code, c // spec.group * spec.tokens + token)


@cuda.jit(device=True)
def scaled(side, page, code, group):
    """``code * scale + zero`` with the scale and zero of a group."""
    scale = read_half(side.words[page, side.spec.scale // 2 + group])
    zero = read_half(side.words[page, side.spec.zero // 2 + group])
    return product(np.float32(code), scale) + zero


@cuda.jit(device=True)
def sketch_number(side, page, token, c):
    """A number of the vector whose product with a query is the estimate of the key's."""
    for i in range(side.spec.outliers):
        if outlier_channel(side, page, i) == c:
            return outlier_number(side, page, token, c)
    return inlier_number(side, page, token, c)


@cuda.jit(device=True)
def inlier_number(side, page, token, c):
    """``c/m |k| S^T sign(S k)`` at a channel."""
    spec = side.spec
    total = signed_sum(side, page, spec.codes, spec.rows, spec.m, token, side.matrix, c)
    return norm_of(side, page, spec.norms, token) * side.factor * total


@cuda.jit(device=True)
def outlier_number(side, page, token, c):
    """The same of the outlier channels' own sketch."""
    spec = side.spec
    total = signed_sum(side, page, spec.outlier_codes, spec.outlier_m, spec.outlier_m, token, side.outlier_matrix, c)
    return norm_of(side, page, spec.outlier_norms, token) * side.outlier_factor * total


@cuda.jit(device=True)
def signed_sum(side, page, offset, rows, m, token, matrix, c):
    """Sum over the rows of a sketch of their signs times column c of `matrix` (m, d)."""
    total = np.float32(0)
    for i in range(m):
        total += sign_of(side, page, offset, rows, token, i) * matrix[i, c]
    return total


@cuda.jit(device=True)
def sign_of(side, page, offset, rows, token, i):
    """Sign i of a token, +1 or -1 in float32."""
    return np.float32(2 * unit_code(side.raw, page, offset, 1, rows, token, i) - 1)


@cuda.jit(device=True)
def norm_of(side, page, offset, token):
    """The norm of a token that is stored from byte `offset` on."""
    return read_half(side.words[page, offset // 2 + token])


@cuda.jit(device=True)
def outlier_channel(side, page, i):
    """The i-th outlier channel of a page."""
    at = side.spec.channels + i * side.spec.channel_bytes
    channel = np.int64(side.raw[page, at])
    if side.spec.channel_bytes == 2:
        channel |= np.int64(side.raw[page, at + 1]) << 8
    return channel
