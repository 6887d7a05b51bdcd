"""What is measured: shapes, random tokens, and caches of each codec at a shape, made quickly."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from kvsketch._dispatch import namespace
from kvsketch.attention import CacheView, attend
from kvsketch.cache import Cache
from kvsketch.methods import get_method

#: Tokens that are drawn and encoded; a longer cache repeats their pages.
DRAWN_TOKENS = 4096
DATA = ("gaussian", "peaked", "outlier channels", "sinks")


class Shape(NamedTuple):
    """Cached tokens, head size, query and key/value heads, rows."""

    n: int
    d: int = 128
    hq: int = 32
    h: int = 8
    b: int = 1

    @property
    def gqa(self) -> int:
        """Query heads of a key/value head."""
        return self.hq // self.h

    def __str__(self) -> str:
        rows = "" if self.b == 1 else f" rows={self.b}"
        return f"n={self.n} d={self.d} heads={self.hq}/{self.h}{rows}"


#: Where the bars are: 32 query heads on 8 key/value heads of 128 channels, 32768 tokens.
ANCHOR = Shape(32768)


class Subject(NamedTuple):
    """A method and what its coefficients are rounded to."""

    method: str
    coefficients: str = "int16"

    @property
    def name(self) -> str:
        return self.method if self.coefficients == "int16" else f"{self.method} {self.coefficients}"


def parse_subject(name: str) -> Subject:
    """The subject called `name`, a method's name with `` int8`` behind it where that is asked for."""
    method, _, coefficients = name.partition(" ")
    return Subject(method, coefficients or "int16")


#: All codecs: integers with 16-bit and 8-bit coefficients, sketches with and without outlier channels, exact numbers.
SUBJECTS = tuple(
    map(
        parse_subject,
        (
            *("kivi-2", "kivi-2 int8", "kivi-3", "kivi-4", "kivi-4 int8"),
            *("qjl-256", "qjl-256 int8", "qjl-512", "qjl-paper", "exact"),
        ),
    )
)


def make_queries(shape: Shape, *, seed: int = 1) -> Any:
    """Queries (b, hq, 1, d) float32."""
    return np.random.default_rng(seed).standard_normal((shape.b, shape.hq, 1, shape.d), dtype=np.float32)


def make_tokens(shape: Shape, kind: str = "gaussian", *, seed: int = 0) -> tuple[Any, Any]:
    """Keys and values (b, h, n, d) float32.

    "gaussian" independent N(0, 1); "peaked" keys 4 times as long, so that few tokens have most of the weight; "outlier
    channels" 4 channels of the keys 20 times as large; "sinks" the first 4 keys along the mean query with short values,
    so that they take most of the weight.
    """
    rng = np.random.default_rng(seed)
    size = (shape.b, shape.h, shape.n, shape.d)
    k, v = rng.standard_normal(size, dtype=np.float32), rng.standard_normal(size, dtype=np.float32)
    if kind == "peaked":
        k *= 4
    elif kind == "outlier channels":
        k[..., rng.permutation(shape.d)[:4]] *= 20
    elif kind == "sinks":
        mean = make_queries(shape).reshape(shape.b, shape.h, shape.gqa, shape.d).mean(2, keepdims=True)
        k[:, :, :4] = mean * (8 * np.sqrt(shape.d) / np.square(mean).sum(-1, keepdims=True))
        v[:, :, :4] *= 0.1
    elif kind != "gaussian":
        raise ValueError(f"kind must be one of {DATA}, got {kind!r}")
    return k, v


def repeat_tokens(x: Any, n: int) -> Any:
    """Tokens (..., tokens, d) repeated to n, contiguous; NumPy's own memory, which is in large pages where they are."""
    drawn = x.shape[-2]
    out = np.empty((*x.shape[:-2], n, x.shape[-1]), x.dtype)
    for start in range(0, n, drawn):
        out[..., start : start + drawn, :] = x[..., : min(drawn, n - start), :]
    return out


def fill_cache(method: str, k: Any, v: Any, *, max_tokens: int | None = None) -> Cache:
    """A cache of the given tokens (b, h, n, d), all that is due encoded."""
    settings = get_method(method).for_layer(31, 32)
    cache = Cache(
        settings.keys,
        settings.values,
        residual_length=settings.residual_length,
        sink_tokens=settings.sink_tokens,
        max_tokens=max_tokens,
    )
    cache.append(k, v)
    cache.flush()
    return cache


class Stored(NamedTuple):
    """A cache's arrays at some length, and its bytes."""

    view: CacheView
    key_nbytes: int
    value_nbytes: int

    @property
    def nbytes(self) -> int:
        return self.key_nbytes + self.value_nbytes

    def bits(self) -> float:
        """Bits a stored number."""
        h = self.view.pages.shape[1]
        numbers = int(self.view.lengths.sum()) * h * (self.view.sink_k.shape[-1] + self.view.sink_v.shape[-1])
        return 8 * self.nbytes / numbers


def store(method: str, shape: Shape, tokens: tuple[Any, Any] | None = None) -> Stored:
    """A cache of `method` with n tokens a row: the pages of a few thousand random ones, or of `tokens`, repeated.

    Exact first tokens and window are those that a cache of n tokens has.
    """
    drawn = shape.n if shape.n <= DRAWN_TOKENS else DRAWN_TOKENS + shape.n % 128
    k, v = make_tokens(shape._replace(n=drawn)) if tokens is None else (x[:, :, :drawn] for x in tokens)
    cache = fill_cache(method, k, v)
    view = cache.view()
    longer = lengthen(view, shape.n)
    added = int((longer.page_counts - view.page_counts).sum()) * shape.h
    return Stored(
        longer,
        cache.key_nbytes + added * view.layout.keys.nbytes,
        cache.value_nbytes + added * view.layout.values.nbytes,
    )


def lengthen(view: CacheView, n: int, rows: int = 1) -> CacheView:
    """A view of equally long rows made n tokens long, by its pages repeated, with `rows` times as many rows."""
    xp = namespace(view.pages)
    b, h, _, size = view.pages.shape
    held = int(view.page_counts[0])
    count = held + (n - int(view.lengths[0])) // view.layout.page_tokens
    pages = xp.empty((rows, b, h, count, size), xp.uint8)
    for start in range(0, count, held or 1):
        pages[:, :, :, start : start + held] = view.pages[None, :, :, : min(held, count - start)]
    repeated: dict[str, Any] = {
        name: xp.concatenate([getattr(view, name)] * rows) for name in ("sink_k", "sink_v", "window_k", "window_v")
    }
    repeated |= {name: np.tile(getattr(view, name), rows) for name in ("sink_counts", "window_starts", "window_counts")}
    counts = np.full(rows * b, count, np.int64)
    return view._replace(pages=pages.reshape(rows * b, h, count, size), page_counts=counts, **repeated)


def attend_stored(q: Any, stored: Stored, subject: Subject) -> Any:
    """One decode step's attention: queries (b, hq, 1, d) to (b, hq, 1, d)."""
    return attend(q, stored.view, coefficients=subject.coefficients)


def to_bfloat16(x: Any) -> Any:
    """float32 as bfloat16, contiguous."""
    return x.astype(ml_dtypes.bfloat16)


def attend_exactly(q: Any, k: Any, v: Any) -> Any:
    """Attention in float64: q (b, hq, 1, d), k and v (b, h, n, d) to (b, hq, 1, d)."""
    b, hq, _, d = q.shape
    h = k.shape[1]
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    scores = q.reshape(b, h, hq // h, d) @ np.swapaxes(k, -1, -2) / np.sqrt(d)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True) @ v).reshape(b, hq, 1, v.shape[-1])


def relative_error(found: Any, exact: Any) -> float:
    """L2 norm of the error over that of the exact result."""
    return float(np.linalg.norm(found.astype(np.float64) - exact) / np.linalg.norm(exact))
