"""What the tests of attention on CUDA share: caches moved to the device, and cases that cover all pairs of settings."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from kvsketch.attention import CacheView, attend
from kvsketch.cache import Cache
from kvsketch.codecs import Codec
from kvsketch.cuda_raw import attention, attention_simt
from kvsketch.cuda_raw.attention_plan import PageKernel
from kvsketch.layout import PageLayout, page_layout
from kvsketch.testing import assert_accurate
from kvsketch.tests.cuda_host.devices import counts
from kvsketch.tests.page_cases import DTYPES, Row, attend_exactly

#: Fields of a view that lie on the device; counts stay on the host.
ON_DEVICE = ("pages", "sink_k", "sink_v", "window_k", "window_v")


def moved(cupy: Any, view: CacheView) -> CacheView:
    """A view's arrays on the device."""
    return view._replace(**{name: cupy.asarray(getattr(view, name)) for name in ON_DEVICE})


def attend_on_device(cupy: Any, q: Any, view: CacheView, **options: Any) -> Any:
    """Attention of NumPy arrays on the device, back as a NumPy array; the host must not have waited for it."""
    given = {name: cupy.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    queries, there = cupy.asarray(q), moved(cupy, view)
    counts.reset()
    out = attend(queries, there, engine="cuda_raw", **given)
    assert counts.synchronisations == 0
    return out.get()


def assert_same_bytes(there: Cache, here: Cache) -> None:
    """Assert that two caches hold the same numbers of tokens and the same bytes of them."""
    views = there.view(), here.view()
    for name in ("page_counts", "sink_counts", "window_counts"):
        np.testing.assert_array_equal(getattr(views[0], name), getattr(views[1], name))
    for row in range(here.batch):
        for name in ON_DEVICE:
            of = {"pages": "page_counts", "sink_k": "sink_counts", "sink_v": "sink_counts"}.get(name, "window_counts")
            count = int(getattr(views[1], of)[row])
            arrays = []
            for view in views:
                start = int(view.window_starts[row]) if of == "window_counts" else 0
                array = getattr(view, name)[row, :, start : start + count]
                arrays.append(array if isinstance(array, np.ndarray) else array.get())
            assert arrays[0].tobytes() == arrays[1].tobytes()


def take_simt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attend over pages without tensor cores, whatever the device has."""

    def chosen(layout: PageLayout, queries: int, architecture: int, coefficients: str) -> tuple[PageKernel, str]:
        return attention_simt.page_kernel(layout, queries, architecture), "a test asked for it"

    monkeypatch.setattr(attention, "chosen_kernel", chosen)


def check(cupy: Any, q: Any, view: CacheView, tokens: list[tuple[Any, Any]], **options: Any) -> Any:
    """The result on the device, which may err as the reference does against float64; `tokens` are the view's."""
    actual = attend_on_device(cupy, q, view, **options)
    exact, size = attend_exactly(q, tokens, **options)
    reference = attend(q, view, engine="reference", **options)
    assert_accurate(actual, exact, reference, size=size)
    return actual


def queries(b: int, hq: int, s: int, d: int, dtype: str = "float32", seed: int = 0) -> Any:
    """Normal queries (b, hq, s, d)."""
    return np.random.default_rng(1000 + seed).standard_normal((b, hq, s, d)).astype(np.float32).astype(DTYPES[dtype])


def row_of(n: int, keys: Codec, values: Codec) -> Row:
    """A row of `n` tokens: as many pages as there is room for, behind two first tokens when that is more than one."""
    page = page_layout(keys, values, 8, 8).page_tokens
    sinks = 2 if n > page + 8 else 0
    pages = (n - sinks) // page
    return Row(sinks, pages, n - sinks - pages * page)


def mask_options(name: str, view: CacheView, hq: int, s: int, seed: int) -> dict[str, Any]:
    """Options of attention by the name of a mask: ``"none"``, ``"limits"``, ``"bias"``, ``"shared bias"``, ``"cap"``,
    ``"logits"`` or ``"all"``."""
    rng, b, n = np.random.default_rng(seed), len(view.page_counts), int(view.lengths.max())
    heads = 1 if name == "shared bias" else hq
    bias = rng.standard_normal((b, heads, s, n + 3)).astype(np.float32)
    bias[rng.random(bias.shape) < 0.4] = -np.inf
    options: dict[str, dict[str, Any]] = {
        "limits": {"limits": rng.integers(0, n + 2, (b, s))},
        "bias": {"bias": bias},
        "cap": {"softcap": 1.5},
        "logits": {"sink_logits": rng.standard_normal(hq).astype(np.float32)},
    }
    options["shared bias"] = options["bias"]
    if name == "all":
        return options["limits"] | options["bias"] | options["cap"] | options["logits"]
    return {} if name == "none" else options[name]


MASKS = ("none", "limits", "bias", "shared bias", "cap", "logits", "all")


def covering_cases(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Mapping[str, Any]], bool], *, tries: int = 40
) -> list[dict[str, Any]]:
    """Cases that between them have every pair of levels of any two factors, where some allowed case has it.

    Greedy: each case is the best of a few random ones around a pair that is still missing.
    """
    rng = np.random.default_rng(0)
    names = tuple(factors)
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }
    cases = []
    while missing:
        wanted = min(missing)
        best: tuple[int, dict[str, int]] = (0, {})
        for _ in range(tries):
            levels = {name: int(rng.integers(len(factors[name]))) for name in names} | dict(wanted)
            if allowed({name: factors[name][level] for name, level in levels.items()}):
                found = sum(pair in missing for pair in itertools.combinations(levels.items(), 2))
                best = max(best, (found, levels), key=lambda choice: choice[0])
        if best[0]:
            cases.append({name: factors[name][level] for name, level in best[1].items()})
            missing -= set(itertools.combinations(best[1].items(), 2))
        missing.discard(wanted)
    return cases
