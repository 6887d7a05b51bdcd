"""Checks of the keys and values that are given to a cache, with errors that say where a bad number is."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvsketch._checks import FLOAT_DTYPES, check_choice, check_float, check_ndim, on_host
from kvsketch._dispatch import array_library, namespace


def float_dtype(name: str, dtype: Any) -> np.dtype[Any]:
    """`dtype`, a name or a dtype, as one of the supported float dtypes; ValueError for others."""
    text = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    return FLOAT_DTYPES[check_choice(name, text, tuple(FLOAT_DTYPES))]


def check_tokens(k: Any, v: Any, valid: Any) -> Any:
    """Raise unless k (b, h, s, d), v (b, h, s, dv) and valid (b, s) fit together; `valid` on the host, or None if all.

    A batch or head count of 0 is refused; s may be 0.
    """
    array_library(k, v)
    check_float("k", k)
    check_float("v", v)
    check_ndim("k", k, "(b, h, s, d)")
    check_ndim("v", v, "(b, h, s, dv)")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k and v must have the same b, h and s, got shapes {tuple(k.shape)} and {tuple(v.shape)}")
    if not k.shape[0] or not k.shape[1]:
        raise ValueError(f"k must have at least one row and one head, got shape {tuple(k.shape)}")
    if valid is None:
        return None
    valid = on_host(valid)
    if valid.dtype != np.bool_ or valid.shape != (k.shape[0], k.shape[2]):
        raise ValueError(
            f"valid must be bool of shape {(k.shape[0], k.shape[2])}, got {valid.dtype} of shape {valid.shape}"
        )
    return None if valid.all() else valid


def cast_tokens(x: Any, dtype: np.dtype[Any]) -> Any:
    """`x` in `dtype`; numbers beyond its range become infinite, without a warning."""
    if x.dtype == dtype:
        return x
    with np.errstate(over="ignore"):
        return x.astype(dtype)


def is_checked(checked: bool | None, x: Any) -> bool:
    """Whether numbers of array `x` are looked at: None says where that does not wait, which is on the host."""
    return isinstance(x, np.ndarray) if checked is None else checked


def check_finite(cache: str, side: str, stored: Any, given: Any, valid: Any, position: int) -> None:
    """Raise ValueError if a valid token of `stored` (b, h, s, width) has a NaN or an infinity.

    `given` is the same before it was cast, `valid` is (b, s) bool or None, `position` the first token's position.
    """
    xp = namespace(stored)
    finite = xp.isfinite(stored)
    if xp.count_nonzero(finite) == finite.size:  # several times faster than all() on one token
        return
    bad = ~finite.all(axis=-1)
    if valid is not None:
        bad &= xp.asarray(valid)[:, None]
    if not bad.any():
        return
    row, head, token = (int(i) for i in xp.argwhere(bad)[0])
    channel = int(xp.argwhere(~finite[row, head, token])[0, 0])
    number = float(given[row, head, token, channel])
    what = f"{number}" if not np.isfinite(number) else f"{number}, which is too large for exact_dtype {stored.dtype}"
    raise ValueError(
        f"{cache}: {side} hold {what} at batch row {row}, head {head}, token position {position + token}, "
        f"channel {channel}; correct the input, or build the cache with checked=False to store it as it is"
    )
