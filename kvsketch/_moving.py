"""A cache copied between the host's memory and a CUDA device's, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsketch._contents import Contents
from kvsketch._page_store import new_records

if TYPE_CHECKING:
    from kvsketch.cache import Cache

#: The arrays of a cache that lie on its device; counts and the map of padding stay on the host.
_EXACT = ("sink_k", "sink_v", "window_k", "window_v")


def moved(cache: Cache, device: str | int) -> Cache:
    """See :meth:`kvsketch.cache.Cache.to`."""
    scope, upload = _destination(device)
    twin = object.__new__(type(cache))
    twin.__dict__.update(cache.__dict__)
    if cache._contents is not None:
        with scope:
            twin._contents = _converted(cache._held("to"), upload)
    return twin


def _destination(device: str | int) -> tuple[AbstractContextManager[Any], Callable[[Any], Any]]:
    """What to do a copy in, and the function that copies an array there."""
    if device == "cpu":
        return nullcontext(), _to_host
    if isinstance(device, bool) or not isinstance(device, int):
        raise ValueError(f'device must be "cpu" or the number of a CUDA device, got {device!r}')
    try:
        import cupy
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("CUDA devices need CuPy: pip install 'kvsketch[cuda13]'", name=error.name) from error
    count = cupy.cuda.runtime.getDeviceCount()
    if not 0 <= device < count:
        raise ValueError(f"device={device} does not exist; there are {count} CUDA devices")
    return cupy.cuda.Device(device), cupy.array


def _to_host(x: Any) -> Any:
    return x.copy() if isinstance(x, np.ndarray) else x.get()


def _converted(contents: Contents, upload: Callable[[Any], Any]) -> Contents:
    pages = contents.pages
    records = upload(pages.pages)
    if isinstance(records, np.ndarray):
        aligned = new_records(np, records.shape)
        aligned[...] = records
        records = aligned
    channels = None if pages.channels is None else upload(pages.channels)
    held = contents.exact
    arrays = {name: getattr(held, name) for name in held.ARRAYS}
    exact = replace(held, **{name: upload(x) if name in _EXACT else x.copy() for name, x in arrays.items()})
    moved_pages = replace(
        pages, pages=records, counts=pages.counts.copy(), channels=channels, saturated=int(pages.saturated)
    )
    positions = contents.positions.take(np.arange(len(pages.counts)))
    return Contents(exact, moved_pages, positions, contents.given, queries=contents.queries)
