"""What tests of decode steps on a device share: an example, and a loop that captures."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvsketch.cache import Cache
from kvsketch.tests.cache_cases import make_cache, make_tokens
from kvsketch.tests.cuda_host.devices import counts
from kvsketch.tests.cuda_host.stand_in import available
from kvsketch.tests.page_cases import DTYPES

B, H, HQ, D, DV = 2, 2, 8, 24, 40
SETTINGS = {"residual_length": 20, "sink_tokens": 3}
#: Whether the harness counts what waits, and knows what was freed.
COUNTS = not available()
#: Float16 results of both sides are rounded, and so are the coefficients of the CPU's kernels.
TOLERANCE = 4e-3


class Tokens(NamedTuple):
    """Tokens of an example: keys, values and queries."""

    k: Any
    v: Any
    q: Any

    def step(self, i: int) -> tuple[Any, Any, Any]:
        """Queries, keys and values of a token."""
        return tuple(np.ascontiguousarray(x[:, :, i : i + 1]) for x in (self.q, self.k, self.v))  # type: ignore[return-value]


def make_example(n: int, dtype: str = "float16") -> Tokens:
    k, v = make_tokens(1, B, H, n, d=D, dv=DV, dtype=DTYPES[dtype])
    q = np.random.default_rng(2).standard_normal((B, HQ, n, D)).astype(DTYPES[dtype])
    return Tokens(k, v, q)


def begin(cupy: Any, pair: str, tokens: Tokens, n: int, **options: Any) -> tuple[Cache, Cache]:
    """Caches on the host and on the device after `n` positions, of which the second row's first ones are padding."""
    here = make_cache(pair, **SETTINGS)
    there = make_cache(pair, checked=False, **SETTINGS, **options)
    k, v = tokens.k[:, :, :n], tokens.v[:, :, :n]
    valid = np.ones((B, n), bool)
    valid[1, : n // 3] = False
    here.append(k, v, valid=valid)
    there.append(cupy.asarray(k), cupy.asarray(v), valid=valid)
    return here, there


def step_eagerly(cupy: Any, cache: Cache, step: tuple[Any, Any, Any]) -> Any:
    """What a step gives that no graph has captured, on the host."""
    cache.prepare_step()
    return cache.step(*map(cupy.asarray, step)).get()


class Captured:
    """A loop that captures a step when buffers have moved and else launches what it has."""

    def __init__(self, cupy: Any, cache: Cache, dtype: Any = np.float16) -> None:
        self.cache = cache
        self.given = [cupy.zeros((B, heads, 1, width), dtype) for heads, width in ((HQ, D), (H, D), (H, DV))]
        self.out = cupy.empty((B, HQ, 1, DV), dtype)
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.graph: Any = None
        self.buffers = 0
        self.captures = 0

    def __call__(self, step: tuple[Any, Any, Any], **options: Any) -> Any:
        with self.stream:
            for array, numbers in zip(self.given, step, strict=True):
                array.set(numbers)
            counts.reset()
            buffers = self.cache.prepare_step()
            if self.graph is None and not self.captures:
                # The first step compiles kernels and makes what they use.
                self.cache.step(*self.given, out=self.out, **options)
                self.captures = 1
                return self.out.get()
            if buffers != self.buffers or self.graph is None:
                self.stream.begin_capture()
                self.cache.step(*self.given, out=self.out, **options)
                self.graph = self.stream.end_capture()
                self.captures += 1
            self.buffers = buffers
            self.graph.launch(self.stream)
            self.waits = counts.synchronisations, counts.uploads
            return self.out.get()
