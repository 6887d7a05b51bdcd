"""Decode steps of a cache in two halves: what the host decides, and what the device does.

The second half asks nothing of the host on a device, so it can be captured in a CUDA graph and launched again after
each first half.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsketch._attend import softmax_scale
from kvsketch._contents import CacheSizes, Contents
from kvsketch._dispatch import array_library, engine_for, engine_module, namespace, on_device_of
from kvsketch._token_checks import check_tokens, is_checked
from kvsketch.attention import HeldView

_numbers = count(1)


@dataclass
class Steps:
    """What the steps over some contents have used: see :meth:`PreparedSteps.prepare_step`."""

    number: int = 0  #: of the buffers, no other's
    place: Any = None  #: where they are
    captured: int = 0  #: the number under which a step was captured in a CUDA graph last
    #: By query heads and coefficients; they keep the memory that their kernels use.
    made: dict[tuple[int, str], Any] = field(default_factory=dict)

    @property
    def is_captured(self) -> bool:
        """Whether there may be a graph for the buffers as they are."""
        return self.captured == self.number

    @property
    def nbytes(self) -> int:
        """Bytes of that memory."""
        return sum(int(step.nbytes) for step in self.made.values())


class PreparedSteps(CacheSizes):
    """The steps of a :class:`kvsketch.cache.Cache`."""

    checked: bool | None
    name: str
    coefficients: str

    if TYPE_CHECKING:
        append: Any
        attend: Any

        def _held(self, call: str) -> Contents: ...
        def _view(self, contents: Contents) -> HeldView: ...
        def _check_fits(self, contents: Contents, k: Any, v: Any) -> None: ...

    def prepare_step(self) -> int:
        """The host's half of a step of one token a row: encode what is due, make room, count the token to come.

        Exactly one :meth:`step` has to follow, or on a device one launch of a CUDA graph that has captured one. On a
        device the token counts from here on. Anything else that is done with the cache instead takes that back, and the
        step has to be prepared again; but where a step was captured since buffers last moved, nobody can tell whether
        the graph was launched, and the token stays counted: drop it by ``crop(-1)`` if it was not.

        Returns
        -------
        A number that changes when a buffer has moved. A graph that was captured under another number would write to
        memory that is no longer the cache's: capture again. After :meth:`reserve` none moves for the tokens that there
        is room for, unless pages were due then.

        Raises
        ------
        ValueError
            For an empty cache; on a device also for ``checked=True``, as looking at numbers waits for it, and for an
            engine that cannot count there.
        """
        contents = self._held("prepare_step")
        module = self._step_module(contents)
        with on_device_of(contents.pages.pages):
            contents.make_ready(1, padded=False, engine=self.engine)
            contents.send_counts()
            steps = contents.steps = contents.steps or Steps()
            place = _place(contents)
            if steps.place != place:
                # Here rather than in a step, which may be captured.
                for key in steps.made:
                    steps.made[key] = module.make_device_step(self._device_view(contents), *key)
                steps.number, steps.place = next(_numbers), place
            if module is not None:
                contents.count_token()
        contents.step_ready = True
        return steps.number

    def step(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        out: Any = None,
        scale: float | None = None,
        softcap: float | None = None,
        sink_logits: Any = None,
    ) -> Any:
        """The device's half of a step: append a token to every row and attend with its queries.

        The same as :meth:`append` and :meth:`attend`, after :meth:`prepare_step`. On a device it launches kernels and
        does nothing else, once a first step has compiled them and made the memory that they use between them; the cache
        keeps that. A graph reads and writes `q`, `k`, `v`, `out` and `sink_logits` where they are: keep them, and the
        cache, as long as the graph.

        Parameters
        ----------
        q : (b, hq, 1, d) float32, float16 or bfloat16
        k, v : (b, h, 1, d) and (b, h, 1, dv)
            No row's token is padding.
        out : (b, hq, 1, dv), optional
            Where to write the result, in the dtype of `q`; a new array by default.
        scale, softcap, sink_logits
            See :func:`kvsketch.attention.attend`.

        On a device all arrays are in C order, and `sink_logits` float32.

        Returns
        -------
        `out`
        """
        contents = self._held("step")
        if not contents.step_ready:
            raise ValueError(f"{self.name}: this step was not prepared; call prepare_step once before each step")
        scale = self._check_step(contents, q, k, v, out, scale, softcap, sink_logits)
        options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sink_logits": sink_logits}
        module = self._step_module(contents)
        if module is None:
            self.append(k, v)
            result = self.attend(q, **options)
            if out is None:
                return result
            out[...] = result
            return out
        view, key = self._device_view(contents), (int(q.shape[1]), self.coefficients)
        with on_device_of(contents.pages.pages):
            found = contents.steps.made.get(key)
            if found is None:
                found = contents.steps.made[key] = module.make_device_step(view, *key)
            if out is None:
                out = namespace(q).empty((*q.shape[:3], v.shape[3]), dtype=q.dtype)
            found.store(view, k, v)
            contents.step_ready, contents.queries = False, q.shape[1] // k.shape[1]
            found.attend(view, q, out, **options)
            if module.is_captured():
                contents.steps.captured = contents.steps.number
        return out

    def _step_module(self, contents: Contents) -> Any:
        """The engine's module of steps on a device, None for NumPy; ValueError where it has none."""
        pages = contents.pages.pages
        if isinstance(pages, np.ndarray):
            return None
        if is_checked(self.checked, pages):
            raise ValueError(
                f"{self.name}: looking for NaN and infinity waits for the device, which a step must not; build "
                "the cache with checked=False, or append and attend"
            )
        engine = engine_for("attention.attend", pages, engine=self.engine)
        module = engine_module(engine, "device_step")
        if module is None:
            raise ValueError(f"engine={engine!r} has no steps on a device; leave engine=None, or append and attend")
        return module

    def _device_view(self, contents: Contents) -> HeldView:
        assert contents.device_counts is not None
        return self._view(contents).with_counts(contents.device_counts.array)

    def _check_step(
        self,
        contents: Contents,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        scale: float | None,
        softcap: float | None,
        sink_logits: Any,
    ) -> float:
        """Raise unless all fits; the scale."""
        check_tokens(k, v, None)
        self._check_fits(contents, k, v)
        view = self._view(contents)
        view.check_queries(q)
        for name, x in (("q", q), ("k", k)):
            if x.shape[2] != 1:
                raise ValueError(f"{name} must have one token a row, got shape {tuple(x.shape)}; append and attend")
        given = {"q": q, "k": k, "v": v, "out": out, "sink_logits": sink_logits}
        arrays = {name: x for name, x in given.items() if x is not None}
        array_library(view.pages, *arrays.values())
        expected = (*q.shape[:3], v.shape[3])
        if out is not None and (tuple(out.shape) != expected or out.dtype != q.dtype):
            raise ValueError(f"out must be {q.dtype} of shape {expected}, got {out.dtype} of {tuple(out.shape)}")
        scale = softmax_scale(q, scale, softcap, sink_logits)
        if isinstance(q, np.ndarray):
            return scale
        for name, x in arrays.items():
            if not x.flags.c_contiguous or x.device != view.pages.device:
                raise ValueError(f"{name} must be in C order on the cache's device; copy it before the step")
        if sink_logits is not None and sink_logits.dtype != np.float32:
            raise ValueError(f"sink_logits must be float32 on a device, got {sink_logits.dtype}; convert them before")
        return scale


def has_device_steps(cache: PreparedSteps, hq: int) -> bool:
    """Whether the cache lies on a device where it can take steps of `hq` query heads."""
    contents = cache._contents
    pages = None if contents is None else contents.pages.pages
    if pages is None or isinstance(pages, np.ndarray) or is_checked(cache.checked, pages):
        return False
    engine = engine_for("attention.attend", pages, engine=cache.engine)
    module = engine_module(engine, "device_step")
    return module is not None and hq // cache.heads <= module.MOST_RATIO


def _place(contents: Contents) -> Any:
    """Where the buffers of contents are, and their sizes."""
    exact, counts = contents.exact, contents.device_counts
    arrays = [contents.pages.pages, exact.sink_k, exact.sink_v, exact.window_k, exact.window_v]
    if counts is not None:
        arrays.append(counts.array)
    return tuple((x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr, x.shape) for x in arrays)
