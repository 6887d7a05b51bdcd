"""What the tests of attention over latents on CUDA share: layers moved to the device, and what errors are allowed."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvsketch.cache import Cache
from kvsketch.cuda_raw import palu
from kvsketch.palu import FirstTokens, KeyNorm, Reconstruction, Rope
from kvsketch.testing import spacing
from kvsketch.tests.cuda_attention_cases import moved
from kvsketch.tests.cuda_host.devices import counts
from kvsketch.tests.palu_cases import Layer, attend_rebuilt, make_layer

#: Relative L2 error of a whole result: of float32 sums, and of what tensor cores round to, by coefficients.
SUMS, ROUNDED = 5e-6, {"int16": 2e-4, "int8": 4e-2}


def make_exact_parts(layer: Layer, *, sinks: int, window: int) -> Layer:
    """The layer with the same latents in caches that keep some first and newest ones exact."""
    caches = []
    for old in layer.caches:
        cache = Cache(old.settings.keys, old.settings.values, residual_length=window, sink_tokens=sinks)
        rows = [old.decode(row) for row in range(old.batch)]
        longest = max(len(z[0]) for z, _ in rows)
        valid = np.zeros((old.batch, longest), bool)
        sides: list[Any] = [np.zeros((old.batch, 1, longest, z.shape[-1]), z.dtype) for z in rows[0]]
        for row, latents in enumerate(rows):
            valid[row, longest - len(latents[0][0]) :] = True
            for side, z in zip(sides, latents, strict=True):
                side[row, :, longest - z.shape[1] :] = z
        # What a prompt brings becomes pages when the next tokens come.
        for part in (slice(0, longest - 1), slice(longest - 1, longest)):
            cache.append(*(side[:, :, part] for side in sides), valid=valid[:, part])
        caches.append(cache)
    return Layer(caches, layer.matrices, layer.d, layer.options)


def attend_on_device(cupy: Any, layer: Layer, q: Any, *, mask: Any = None, pages: Any = None, **options: Any) -> Any:
    """Attention of a layer of one slice on the device, back as a NumPy array; the host must not have waited for it.

    `pages` are on the device already, in place of the cache's.
    """

    def there(x: Any) -> Any:
        return cupy.asarray(x) if isinstance(x, np.ndarray) else x

    [cache], [m] = layer.caches, layer.matrices
    held = cache._held("a test")
    s, hq = q.shape[2], q.shape[1]
    rope, norm, first = (layer.options.get(name) for name in ("rope", "key_norm", "first"))
    given = {
        "rope": rope and Rope(there(rope.cos), there(rope.sin), rope.interleaved),
        "positions": there(layer.options.get("positions")),
        "key_norm": norm and KeyNorm(there(norm.weight), norm.eps),
        "first": first and FirstTokens(there(first.k), there(first.v), first.counts),
        "limits": there(held.positions.limits(s, held.lengths)),
        "bias": None if mask is None else there(held.positions.bias(mask, s, hq)),
        "scale": layer.d**-0.5,
        "softcap": None,
        "coefficients": "int16",
    }
    matrices = Reconstruction(m.heads, there(m.up_k), there(m.up_v), there(m.key_bias))
    queries, view = there(q), moved(cupy, cache._view(held))
    if pages is not None:
        view = view._replace(pages=pages)
    counts.reset()
    out = palu.attend(queries, view, matrices, **(given | options))
    assert counts.synchronisations == 0
    return out.get()


def make_queries(b: int, hq: int, s: int, d: int, dtype: Any = np.float32) -> Any:
    return (2 * np.random.default_rng(99).standard_normal((b, hq, s, d))).astype(np.float32).astype(dtype)


def error(found: Any, exact: Any) -> float:
    """Relative L2 error of a whole result."""
    assert found.shape == exact.shape
    size = np.linalg.norm(exact)
    return float(np.linalg.norm(found.astype(np.float64) - exact) / (size or 1.0))


def check(cupy: Any, layer: Layer, q: Any, level: str, **options: Any) -> Any:
    """The result on the device, which must be as accurate as the kernels of `level` are."""
    found = attend_on_device(cupy, layer, q, **options)
    coefficients = options.pop("coefficients", "int16")
    exact = attend_rebuilt(layer, q, **options)
    assert found.dtype == q.dtype
    limit = SUMS if level == "simt" else ROUNDED[coefficients]
    assert error(found, exact) <= limit + 4 * spacing(q.dtype), f"error {error(found, exact):.2e} over {limit:.2e}"
    return found


__all__ = ["attend_on_device", "check", "error", "make_exact_parts", "make_layer", "make_queries"]
