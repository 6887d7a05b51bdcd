"""KIVI: grouped asymmetric integers for keys and values (Liu et al., arXiv 2402.02750, section 3.2).

A group of g numbers X is stored as integer codes of `bits` bits, a scale and a zero (equations of the paper's
section 3.1)::

    zero  = min(X)
    scale = (max(X) - min(X)) / (2^bits - 1)
    code  = clip(round((x - zero) / scale), 0, 2^bits - 1)
    x^    = code * scale + zero

Keys are grouped along tokens (each group belongs to one channel), values along channels (each belongs to one token):
outliers sit in a few channels of keys, and an error in a value reaches the output in proportion to its token's weight.

What every engine computes, bit for bit:

- min, max, scale and the division are float32; rounding is half to even.
- scale and zero are rounded to float16 (-0.0 becomes 0.0) and the codes are computed from the rounded ones, which the
  reader will use. A group whose scale rounds to 0 has scale 0 and codes 0 and is recovered as its zero.
- scale and zero beyond the range of float16 saturate at 65504 and -65504, numbers are clamped to that range before
  their codes are computed, and saturations are counted.
- Infinities count as the largest float32. A group with a NaN has scale 0, codes 0 and zero NaN: all of it is recovered
  as NaN, and no other group is touched.

A last group may be shorter. The error is bounded by :func:`kvsketch.bounds.quantizer_error_bound`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvsketch._checks import (
    FLOAT_DTYPES,
    check_bits,
    check_choice,
    check_float,
    check_gqa,
    check_integer,
    check_ndim,
)
from kvsketch._dispatch import implementation

__all__ = ["GroupedCodes", "dequantize_groups", "key_scores", "quantize_groups", "weighted_values"]

AXES = ("tokens", "channels")


@dataclass(frozen=True, eq=False)
class GroupedCodes:
    """A quantized array of shape (..., n, d).

    Attributes
    ----------
    codes : uint8 (..., n, ceil(d * bits / 8))
        Each token's codes as one bit stream over its channels (:func:`kvsketch.bitpack.pack_codes`).
    scale, zero : float16
        (..., ceil(n / group), d) when groups run along tokens, (..., n, ceil(d / group)) along channels.
    bits, group : int
        Bits of a code, numbers of a group.
    axis : str
        ``"tokens"`` or ``"channels"``: where groups run.
    size : int
        d, which the packed codes do not tell.
    saturated : int
        How many scales and zeros were beyond the range of float16.
    """

    codes: Any
    scale: Any
    zero: Any
    bits: int
    group: int
    axis: str
    size: int
    saturated: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape (..., n, d) of the quantized array."""
        return (*self.codes.shape[:-1], self.size)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zeros."""
        return int(self.codes.nbytes + self.scale.nbytes + self.zero.nbytes)


def quantize_groups(x: Any, *, bits: int, group: int, axis: str, engine: str | None = None) -> GroupedCodes:
    """Quantize an array in groups of consecutive tokens or channels, by the rule at the top of this module.

    Parameters
    ----------
    x : array (..., n, d), float32, float16 or bfloat16
        Keys or values; n may be 0. Groups never span leading axes.
    bits : int
        1, 2, 3, 4 or 8.
    group : int
        Numbers of a group, at least 1; the last group of a row of groups may be shorter.
    axis : str
        ``"tokens"`` for keys (a group is `group` tokens of one channel), ``"channels"`` for values.

    Raises
    ------
    TypeError, ValueError
        When the dtype, the number of axes, `bits`, `group` or `axis` is not one of these.
    """
    check_float("x", x)
    if x.ndim < 2 or x.shape[-1] == 0:
        raise ValueError(f"x must have shape (..., n, d) with d >= 1, got {tuple(x.shape)}")
    bits, group = check_bits(bits), check_integer("group", group, low=1)
    check_choice("axis", axis, AXES)
    return implementation("kivi.quantize_groups", x, engine=engine)(x, bits=bits, group=group, axis=axis)


def dequantize_groups(codes: GroupedCodes, *, dtype: str = "float32", engine: str | None = None) -> Any:
    """Recover ``code * scale + zero`` in float32, then cast to `dtype`: array (..., n, d).

    A result beyond the range of float16 saturates at 65504 when `dtype` is ``"float16"``.

    Raises
    ------
    TypeError, ValueError
        When `codes` is not a :class:`GroupedCodes` or `dtype` is not float32, float16 or bfloat16.
    """
    _check_codes(codes)
    check_choice("dtype", dtype, tuple(FLOAT_DTYPES))
    return implementation("kivi.dequantize_groups", codes.codes, engine=engine)(codes, dtype=dtype)


def key_scores(q: Any, codes: GroupedCodes, *, engine: str | None = None) -> Any:
    """Inner products of queries with quantized keys, straight from the codes.

    For each group of tokens ``<q, k^_j> = sum_c (q_c scale_c) code_jc + sum_c q_c zero_c``; the second sum is shared
    by the group's tokens. Sums are float32.

    Parameters
    ----------
    q : array (b, hq, s, d), float32, float16 or bfloat16
    codes : GroupedCodes of shape (b, h, n, d), grouped along tokens
        h must divide hq: query heads i*hq/h .. (i+1)*hq/h - 1 read key head i.

    Returns
    -------
    array (b, hq, s, n) in q's dtype, without a factor 1/sqrt(d).

    Raises
    ------
    TypeError, ValueError
        When shapes, head counts, dtypes or the axis of the groups do not fit.
    """
    _check_product("q", q, "d", codes, "tokens")
    if q.shape[-1] != codes.size:
        raise ValueError(f"q has {q.shape[-1]} channels but the quantized keys have {codes.size}")
    return implementation("kivi.key_scores", q, codes.codes, engine=engine)(q, codes)


def weighted_values(p: Any, codes: GroupedCodes, *, engine: str | None = None) -> Any:
    """Weighted sums of quantized values, straight from the codes.

    For channel c in channel group G ``out_c = sum_j (p_j scale_jG) code_jc + sum_j p_j zero_jG``; the second sum is
    shared by the group's channels. Sums are float32.

    Parameters
    ----------
    p : array (b, hq, s, n), float32, float16 or bfloat16
        Weights of the n tokens, usually softmax probabilities.
    codes : GroupedCodes of shape (b, h, n, dv), grouped along channels
        h must divide hq.

    Returns
    -------
    array (b, hq, s, dv) in p's dtype.

    Raises
    ------
    TypeError, ValueError
        When shapes, head counts, dtypes or the axis of the groups do not fit.
    """
    _check_product("p", p, "n", codes, "channels")
    if p.shape[-1] != codes.shape[-2]:
        raise ValueError(f"p weighs {p.shape[-1]} tokens but codes hold {codes.shape[-2]}")
    return implementation("kivi.weighted_values", p, codes.codes, engine=engine)(p, codes)


def _check_codes(codes: Any) -> None:
    if not isinstance(codes, GroupedCodes):
        raise TypeError(f"codes must be a GroupedCodes, got {type(codes).__qualname__}; make one with quantize_groups")


def _check_product(name: str, x: Any, last: str, codes: GroupedCodes, axis: str) -> None:
    _check_codes(codes)
    check_float(name, x)
    check_ndim(name, x, f"(b, hq, s, {last})")
    check_ndim("codes", codes.codes, "(b, h, n, bytes)")
    if codes.axis != axis:
        raise ValueError(f"codes are grouped along {codes.axis}; quantize them with axis={axis!r} for this product")
    if x.shape[0] != codes.shape[0]:
        raise ValueError(f"{name} has batch {x.shape[0]} but codes have batch {codes.shape[0]}")
    check_gqa(x.shape[1], codes.shape[1])
