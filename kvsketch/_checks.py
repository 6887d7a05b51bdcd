"""Argument checks shared by public functions: every message names the argument, what it was and what to do."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

FLOAT_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
BITS = (1, 2, 3, 4, 8)


def on_host(x: Any) -> np.ndarray[Any, Any]:
    """`x` as a NumPy array; what lies on a device is fetched."""
    return x.get() if type(x).__module__.partition(".")[0] == "cupy" else np.asarray(x)


def check_float(name: str, x: Any) -> None:
    """Raise TypeError unless `x` is float32, float16 or bfloat16."""
    dtype = getattr(x, "dtype", None)
    if dtype not in FLOAT_DTYPES.values():
        if dtype is None:
            raise TypeError(f"{name} must be a NumPy or CuPy array, got {type(x).__qualname__}")
        raise TypeError(f"{name} has dtype {dtype}; cast it to one of {list(FLOAT_DTYPES)}")


def check_ndim(name: str, x: Any, letters: str) -> None:
    """Raise ValueError unless `x` has the axes named by `letters`, for instance ``"(b, h, n, d)"``."""
    expected = letters.count(",") + 1
    if x.ndim != expected:
        raise ValueError(f"{name} must have shape {letters}, got {tuple(x.shape)}")


def check_integer(name: str, value: Any, *, low: int, high: int | None = None) -> int:
    """`value` as an int in [low, high]; TypeError or ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < low or (high is not None and value > high):
        limit = f">= {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"{name} must be {limit}, got {value}")
    return int(value)


def check_positive(name: str, value: float) -> float:
    """`value` as a float when it is finite and above 0; ValueError otherwise."""
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a positive number, got {value!r}")
    return float(value)


def check_not_negative(name: str, value: float) -> float:
    """`value` as a float when it is finite and at least 0; ValueError otherwise."""
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be a number of at least 0, got {value!r}")
    return float(value)


def check_probability(name: str, value: float) -> float:
    """`value` as a float when it lies strictly between 0 and 1; ValueError otherwise."""
    if not 0 < value < 1:
        raise ValueError(f"{name} must lie strictly between 0 and 1, got {value!r}")
    return float(value)


def check_bits(bits: Any) -> int:
    """`bits` as an int when it is a supported code width."""
    if isinstance(bits, bool) or bits not in BITS:
        raise ValueError(f"bits must be one of {list(BITS)}, got {bits!r}")
    return int(bits)


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """`value` when it is one of `choices`; ValueError otherwise."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {list(choices)}, got {value!r}")
    return str(value)


def check_gqa(hq: int, h: int) -> int:
    """Query heads per key/value head; ValueError when `h` does not divide `hq`."""
    if h == 0 or hq % h:
        raise ValueError(f"q has {hq} heads, which is not a multiple of the {h} key/value heads")
    return hq // h


def check_channels(channels: Any, width: int) -> None:
    """Raise unless `channels` (..., outliers) strictly increase on the last axis and lie in range(`width`)."""
    if channels.dtype.kind not in "iu":
        raise TypeError(f"channels has dtype {channels.dtype}; it must hold integers")
    signed = channels.astype("int64")
    if channels.size and (
        int(signed.min()) < 0 or int(signed.max()) >= width or bool((signed[..., 1:] <= signed[..., :-1]).any())
    ):
        raise ValueError(f"channels must be strictly increasing numbers from 0 to {width - 1} on the last axis")
