"""The usual step of a decode loop, one token a row, by an engine that stores the token and attends in one call.

:meth:`Cache.append <kvsketch.cache.Cache.append>` and :meth:`Cache.attend <kvsketch.cache.Cache.attend>` say what a
step does. Half of what the two calls take is Python, which after a layer of a model runs from cold caches.
"""

from __future__ import annotations

from typing import Any

from kvsketch._contents import Contents
from kvsketch._dispatch import engine_for, engine_module
from kvsketch.cache import Cache

#: What an engine's step answers when it changed nothing.
UNUSUAL = -1


def prepared_step(cache: Cache, hq: int) -> Any:
    """Steps of `hq` query heads over the cache as it is; None where the ordinary calls have to take them.

    Made anew after anything that may have replaced a buffer: a page that became due, crop, reorder and so on. That an
    engine has none for such contents is asked once.
    """
    contents = cache._contents
    if contents is None or contents.positions.valid is not None:
        return None
    settings, changes = (hq, cache.coefficients, cache.engine), contents.changes
    known, seen, step = contents.prepared
    if known != settings or (step is not None and seen != changes):
        step = _prepare(contents, *settings)
        contents.prepared = settings, changes, step
        contents.queries = hq // contents.given[3]
    return step


def _prepare(contents: Contents, hq: int, coefficients: str, engine: str | None) -> Any:
    module = engine_module(engine_for("attention.attend", contents.pages.pages, engine=engine), "step")
    return None if module is None else module.make_step(contents, hq, coefficients)


def take_step(cache: Cache, step: Any, q: int, k: int, v: int, out: int, scale: float, softcap: float | None) -> bool:
    """Append k (b, h, 1, d) and v (b, h, 1, dv) and attend with q (b, hq, 1, d), at addresses and in C order.

    `step` comes from :func:`prepared_step`; all three have its dtype. Writes float32 (b, hq, 1, dv) to the address
    `out`. False: nothing was done, and the ordinary calls have to take the step or to say what is wrong with it.
    """
    left = step.take(q, k, v, out, scale, softcap, cache.checked is not False)
    if left == UNUSUAL:
        return False
    cache._contents.positions.append(1)  # type: ignore[union-attr]
    if left:
        step.attend_parts(left, out, scale, softcap)
    return True
