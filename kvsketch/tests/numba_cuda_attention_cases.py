"""The attention that the engine ``numba_cuda`` is tested with; see :mod:`kvsketch.tests.numba_cuda_cases`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from kvsketch.attention import CacheView, attend
from kvsketch.cache import Cache
from kvsketch.codecs import Codec, Exact, GroupedInts, SignSketch, TokenInts
from kvsketch.palu import attend as attend_latents
from kvsketch.tests.cuda_host.devices import without_waiting
from kvsketch.tests.numba_cuda_cases import CASES, Case, Device, Near, case, numbers
from kvsketch.tests.page_cases import DTYPES, Row, attend_exactly, make_view
from kvsketch.tests.palu_cases import attend_rebuilt, make_layer

INTS = GroupedInts(2, 32)
#: Keys and values, d and dv: every kind of codec on either side, more channels than a tile has, and one channel.
PAIRS: tuple[tuple[Codec, Codec, int, int], ...] = (
    (INTS, INTS, 4, 3),
    (GroupedInts(3, 64), GroupedInts(3, 8), 3, 10),
    (GroupedInts(8, 32), GroupedInts(1, 8), 1, 1),
    (TokenInts(4), TokenInts(2, 8), 34, 9),
    (SignSketch(m=10, seed=2), INTS, 4, 3),
    (SignSketch(m=6, kind="gaussian", outliers=2, outlier_m=3), Exact(), 5, 2),
    (SignSketch(m=3, outliers=1, outlier_m=2), Exact(), 260, 1),
    (Exact(), GroupedInts(4, 8), 4, 3),
    (Exact(), Exact(), 3, 2),
)
#: Rows without pages, window, first tokens or anything, and with more tokens than one split has.
ROWS = [Row(0, 1, 0), Row(2, 2, 3), Row(1, 0, 2), Row(0, 0, 0)]


def on_device(view: CacheView, device: Device) -> CacheView:
    """A view whose arrays are on the device, the counts on the host."""
    names = ("pages", "sink_k", "sink_v", "window_k", "window_v")
    return view._replace(**{name: device(getattr(view, name)) for name in names})


def attended(
    device: Device,
    engine: str,
    keys: Codec,
    values: Codec,
    d: int,
    dv: int,
    *,
    rows: list[Row],
    q: tuple[int, int] = (2, 1),
    dtype: str = "float32",
    h: int = 1,
    **options: Any,
) -> Iterator[Any]:
    """Attention of q's (heads, positions) over rows, and what it is in float64."""
    view, tokens = make_view(keys, values, d=d, dv=dv, h=h, rows=rows, dtype=dtype)
    queries = numbers(len(rows), q[0], q[1], d, dtype=dtype, seed=7)
    exact, size = attend_exactly(queries, tokens, **options)
    given = {name: device(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    result = attend(device(queries), on_device(view, device), engine=engine, **given)
    yield Near(result, exact, size)


def every_codec(pair: tuple[Codec, Codec, int, int], device: Device, engine: str) -> Iterator[Any]:
    yield from attended(device, engine, *pair, rows=[Row(1, 1, 2)] if pair[2] > 200 else ROWS)


CASES.update({f"attend {pair[0]} {pair[1]}": Case("attention.attend", partial(every_codec, pair)) for pair in PAIRS})


@case("attention.attend")
def attend_dtypes(device: Device, engine: str) -> Iterator[Any]:
    for dtype in DTYPES:
        yield from attended(device, engine, Exact(), INTS, 3, 2, rows=[Row(1, 1, 2)], dtype=dtype)


@case("attention.attend")
def attend_heads_and_positions(device: Device, engine: str) -> Iterator[Any]:
    """More queries than a tile has; several key/value heads; positions that see nothing."""
    yield from attended(device, engine, INTS, INTS, 2, 2, rows=[Row(1, 1, 2)], q=(6, 4), h=2)
    yield from attended(device, engine, Exact(), Exact(), 2, 2, rows=[Row(1, 0, 1), Row(0, 0, 0)], q=(1, 3))


@case("attention.attend")
def attend_masks(device: Device, engine: str) -> Iterator[Any]:
    rows, rng = [Row(2, 1, 3), Row(0, 0, 2)], np.random.default_rng(3)
    limits = np.array([[0, 40, 2**40], [1, -3, 2]])
    for heads in (1, 4):
        bias = rng.standard_normal((2, heads, 3, 39)).astype(np.float32)
        bias[rng.random(bias.shape) < 0.3] = -np.inf
        bias[:, :, 1] = -np.inf
        yield from attended(device, engine, INTS, INTS, 2, 2, rows=rows, q=(4, 3), h=2, bias=bias)
    yield from attended(device, engine, INTS, INTS, 2, 2, rows=rows, q=(4, 3), h=2, limits=limits)


@case("attention.attend")
def attend_options(device: Device, engine: str) -> Iterator[Any]:
    logits = np.array([3.5, -np.inf], np.float32)
    for options in ({"scale": -0.7}, {"softcap": 1.5}, {"scale": 2.0, "softcap": 3.0, "sink_logits": logits}):
        yield from attended(device, engine, INTS, INTS, 2, 2, rows=[Row(1, 1, 1), Row(0, 0, 0)], **options)


@case("attention.attend")
def attend_nothing(device: Device, engine: str) -> Iterator[Any]:
    """No queries, no heads of queries, no rows; and arrays without room."""
    view, _ = make_view(INTS, INTS, d=2, dv=3, h=1, rows=[Row(1, 1, 1)])
    here = on_device(view, device)
    for shape in ((1, 1, 0, 2), (1, 0, 1, 2)):
        yield attend(device(np.zeros(shape, np.float32)), here, engine=engine)
    rowless = view._replace(**{name: getattr(view, name)[:0] for name in view._fields[1:]})
    yield attend(device(np.zeros((0, 1, 1, 2), np.float32)), on_device(rowless, device), engine=engine)
    empty: dict[str, Any] = {
        name: getattr(view, name)[:, :, :0] for name in ("pages", "sink_k", "sink_v", "window_k", "window_v")
    }
    counts: dict[str, Any] = {name: np.zeros(1, np.int64) for name in ("page_counts", "sink_counts", "window_counts")}
    bare = view._replace(**empty, **counts)
    yield attend(device(np.ones((1, 1, 1, 2), np.float32)), on_device(bare, device), engine=engine)


@case("attention.attend")
def attend_strided(device: Device, engine: str) -> Iterator[Any]:
    view, tokens = make_view(INTS, INTS, d=2, dv=3, h=2, rows=[Row(1, 1, 2)])
    turned: dict[str, Any] = {name: np.asfortranarray(getattr(view, name)) for name in ("window_k", "window_v")}
    q = numbers(1, 2, 1, 2)
    exact, size = attend_exactly(q, tokens)
    yield Near(attend(device(q), on_device(view._replace(**turned), device), engine=engine), exact, size)


@case("attention.attend")
def attend_without_waiting(device: Device, engine: str) -> Iterator[Any]:
    """Where the counts of rows lie on the device, the host neither waits for it nor sends it anything."""
    view, tokens = make_view(INTS, INTS, d=2, dv=3, h=1, rows=ROWS)
    here = view.layout, *(device(x) for x in view[1:])
    q = numbers(len(ROWS), 2, 2, 2)
    given, (exact, size) = device(q), attend_exactly(q, tokens)
    with without_waiting():
        result = attend(given, CacheView(*here), engine=engine)
    yield Near(result, exact, size)


@case("attention.attend")
def a_cache_is_filled_and_attended_to(device: Device, engine: str) -> Iterator[Any]:
    """A cache of this engine: its pages, and a step over it."""
    settings: dict[str, Any] = {"residual_length": 0, "sink_tokens": 1, "engine": engine}
    cache = Cache(GroupedInts(2, 32), GroupedInts(2, 32), **settings)
    k, v, q = (device(numbers(1, 1, n, 3, seed=n)) for n in (35, 36, 1))
    cache.append(k, v[:, :, :35])
    yield cache._contents.pages.pages[:, :, :1]  # type: ignore[union-attr]
    exact = Cache(GroupedInts(2, 32), GroupedInts(2, 32), **settings | {"engine": "reference"})
    exact.append(numbers(1, 1, 35, 3, seed=35), numbers(1, 1, 36, 3, seed=36)[:, :, :35])
    decoded = [x[None].astype(np.float64) for x in exact.decode(0)]
    result, size = attend_exactly(numbers(1, 1, 1, 3, seed=1), [(decoded[0][0], decoded[1][0])])
    yield Near(cache.attend(q), result, size)


LATENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rope": {"rotary": 4, "bias": True, "norm": True},
    "interleaved rope": {"rotary": 2, "interleaved": True, "b": 2, "valid": np.arange(40) >= np.array([[0], [5]])},
    "positions": {"rotary": 4, "positions": np.arange(40)[None, ::-1] + 2},
    "first tokens": {"rotary": 4, "first": 3},
    "latent queries": {"up_k": False, "up_v": False, "d": 3},
    "exact latents": {"keys": Exact(), "values": TokenInts(2, 8), "dtype": DTYPES["bfloat16"]},
    "two slices": {"slices": 2, "value_ranks": (2, 3)},
}


@case("palu.attend", "plain")
@case("palu.attend", "rope")
@case("palu.attend", "interleaved rope")
@case("palu.attend", "positions")
@case("palu.attend", "first tokens")
@case("palu.attend", "latent queries")
@case("palu.attend", "exact latents")
@case("palu.attend", "two slices")
def latents(name: str, device: Device, engine: str) -> Iterator[Any]:
    sizes: dict[str, Any] = {"heads": 2, "d": 4, "dv": 3, "ranks": (3,), "value_ranks": (2,), "n": 40}
    layer = make_layer(**sizes | LATENTS[name])
    h, d = 2 * len(layer.caches), layer.d
    q = numbers(len(layer.valid), 2 * h, 1, d, seed=3)
    exact = attend_rebuilt(layer, q)
    matrices = [type(m)(m.heads, *_moved(device, (m.up_k, m.up_v, m.key_bias))) for m in layer.matrices]
    options = {name: _moved(device, x) for name, x in layer.options.items()}
    caches = layer.caches
    if engine != "reference":
        caches = [cache.to(0) for cache in caches]
    result = attend_latents(device(q), caches, matrices, engine=engine, **options)
    yield Near(result, exact, 8 * float(np.abs(exact).max()))


def _moved(device: Device, x: Any) -> Any:
    """Arrays on the device, in tuples too; other things as they are."""
    if isinstance(x, np.ndarray):
        return device(x)
    if isinstance(x, tuple):
        items = [_moved(device, item) for item in x]
        return type(x)(*items) if hasattr(x, "_fields") else items
    return x
