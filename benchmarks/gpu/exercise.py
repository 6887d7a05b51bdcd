"""A few calls of everything by one engine, small and ragged, checked against the host: what compute-sanitizer watches.

``python -m benchmarks.gpu.exercise ENGINE [--dry-run] [--plain-memory]``: with plain memory each array is an allocation
of its own, so that an access beyond it is one beyond what was allocated.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np

from benchmarks.gpu.device import Device, opened
from benchmarks.palu import Latents, make_layer, make_rope
from benchmarks.subjects import Shape, make_queries
from kvsketch.attention import CacheView
from kvsketch.cache import Cache
from kvsketch.methods import get_method
from kvsketch.palu import Reconstruction, attend

#: Integers, a sketch, and a sketch with outlier channels.
METHODS = ("kivi-2", "kivi-4", "qjl-256", "keys=sketch:m=64,outliers=4,outlier_m=32;values=ints:bits=3,group=32")
#: Rows, query and key/value heads, head size, and tokens that are appended one after the other.
ROWS, HEADS, D = 2, (8, 2), 64
PIECES = (90, 60, 3)
PADDING = 37
#: Largest difference of float16 results, absolute and relative.
TOLERANCE = 4e-3


def exercise(device: Device, engine: str) -> Iterator[str]:
    """Do it all; a line for each thing that was right, AssertionError for the first that is wrong."""
    for method in METHODS:
        yield _exercise_cache(device, engine, method)
    for bits in (3, None):
        try:
            yield _exercise_latents(device, engine, bits)
        except ValueError as error:
            if "does not offer" not in str(error):
                raise
            yield f"latents: not exercised ({error})"


def _tokens(seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    shape = (2, ROWS, HEADS[1], sum(PIECES), D)
    k, v = rng.standard_normal(shape).astype(np.float16)
    return k, v


def _exercise_cache(device: Device, engine: str, method: str) -> str:
    settings = get_method(method).for_layer(31, 32)
    caches = [
        Cache(settings.keys, settings.values, residual_length=20, sink_tokens=3, engine=each)
        for each in ("reference", engine)
    ]
    here, there = caches
    k, v = _tokens(1)
    valid = np.ones(k.shape[::2][:2], bool)
    valid[1, :PADDING] = False
    first = 0
    for count in PIECES:
        part = slice(first, first + count)
        here.append(k[:, :, part], v[:, :, part], valid=valid[:, part])
        there.append(*(device.cupy.asarray(x[:, :, part]) for x in (k, v)), valid=valid[:, part])
        first += count
    for flushed in (False, True):
        if flushed:
            here.flush()
            there.flush()
        assert _pages(there.view()) == _pages(here.view()), f"{method}: pages differ from the reference's"
        for s in (1, 3):
            q = np.random.default_rng(s).standard_normal((ROWS, HEADS[0], s, D)).astype(np.float16)
            _close(there.attend(device.cupy.asarray(q)), here.attend(q), f"{method}, {s} queries")
    _close(there.decode(1)[0], here.decode(1)[0], f"{method}, decoded")
    return f"{method}: pages equal, attention and decoded keys close, engines {there.report()['engines']}"


def _pages(view: CacheView) -> list[bytes]:
    """The encoded pages of each row."""
    counts = [int(count) for count in view.page_counts]
    return [view.pages[row, :, :count].tobytes() for row, count in enumerate(counts)]


def _exercise_latents(device: Device, engine: str, bits: int | None) -> str:
    shape = Shape(150, D, *HEADS, ROWS)
    layer = make_layer(shape, Latents(0.5, 2, bits))
    q, rope = make_queries(shape), make_rope(shape)
    expected = attend(q, *layer, rope=rope, engine="reference")
    upload = device.cupy.asarray
    caches = [cache.to(0) for cache in layer.caches]
    matrices = [Reconstruction(m.heads, upload(m.up_k), upload(m.up_v)) for m in layer.matrices]
    turned = rope._replace(cos=upload(rope.cos), sin=upload(rope.sin))
    found = attend(upload(q), caches, matrices, rope=turned, engine=engine)
    _close(found, expected, f"latents of {bits} bits")
    return f"latents, {'exact' if bits is None else f'{bits} bits'}: attention close"


def _close(found: Any, expected: Any, what: str) -> None:
    np.testing.assert_allclose(
        found.get().astype(np.float32), expected.astype(np.float32), rtol=TOLERANCE, atol=TOLERANCE, err_msg=what
    )


def main(arguments: list[str]) -> None:
    """Exercise the device by the engine that comes first, a line for each thing."""
    dry_run = "--dry-run" in arguments
    with ExitStack() as stack:
        if dry_run:
            from kvsketch.tests.cuda_host import running

            stack.enter_context(running("check"))
        device = stack.enter_context(opened(dry_run))
        if "--plain-memory" in arguments:
            device.cupy.cuda.set_allocator(None)
        for line in exercise(device, arguments[0]):
            print(line, flush=True)
        device.wait()
    print("exercised without an error")


if __name__ == "__main__":
    main(sys.argv[1:])
