"""What a cache holds, and its sizes: tokens, bytes and bits a number, counted from live data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvsketch._device_counts import DeviceCounts
from kvsketch._dispatch import engine_for, kernel_level, namespace, on_device_of
from kvsketch._exact_store import ExactStore
from kvsketch._page_store import PageStore
from kvsketch._positions import Positions
from kvsketch.codecs import SignSketch
from kvsketch.layout import page_layout
from kvsketch.methods import LayerSettings

#: Operations that a cache asks an engine for.
OPERATIONS = ("pages.encode_keys", "pages.encode_values", "attention.attend")


@dataclass
class Contents:
    """The tokens of a cache; `given` is what they came as: key dtype, value dtype, b, h, d, dv."""

    exact: ExactStore
    pages: PageStore
    positions: Positions
    given: tuple[Any, Any, int, int, int, int]
    #: For which settings and changes a step was prepared, and the step; see :mod:`kvsketch._step`.
    prepared: tuple[Any, Any, Any] = (None, None, None)
    #: Query rows of a key/value head that attended last: hq/h queries of each of s positions.
    queries: int = 0
    #: The counts on a device; what steps there have used; whether one was prepared: see :mod:`kvsketch._prepared_step`.
    device_counts: DeviceCounts | None = None
    steps: Any = None
    step_ready: bool = False

    def __getstate__(self) -> dict[str, Any]:
        # Steps know addresses of this very object's buffers.
        own = ("prepared", "device_counts", "steps", "step_ready")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    @property
    def changes(self) -> int:
        """Grows whenever a buffer may have been replaced."""
        return self.exact.changes + self.pages.changes

    @property
    def lengths(self) -> Any:
        """(b,) int64: tokens of each row, without padding."""
        return self.exact.token_counts + self.pages.counts * self.exact.page

    @property
    def counts(self) -> Any:
        """(4, b) int64: pages, first tokens, starts of the windows and their tokens."""
        exact = self.exact
        return np.array((self.pages.counts, exact.sink_counts, exact.starts, exact.counts), np.int64)

    def send_counts(self) -> Any:
        """The counts beside the tokens, sent there if they have changed; None for NumPy."""
        if isinstance(self.pages.pages, np.ndarray):
            return None
        if self.device_counts is None:
            self.device_counts = DeviceCounts(namespace(self.pages.pages), len(self.pages.counts))
        return self.device_counts.send(self.counts)

    def make_ready(self, s: int, *, padded: bool, engine: str | None) -> None:
        """Encode the pages that are due and make room for `s` more tokens; nothing changes when memory is short."""
        if self.step_ready:
            self.drop_prepared()
        exact, pages = self.exact, self.pages
        due = exact.due()
        encoded = None if due is None else pages.encode(exact, due, engine)
        self.positions.make_room(s, padded)
        exact.make_room(s, None if due is None else due * exact.page)
        if encoded is not None:
            pages.commit(encoded)

    def count_token(self) -> None:
        """Count the token that a step stores on the device, where the same counts are expected."""
        assert self.device_counts is not None
        self.exact.count_token()
        self.positions.append(1)
        self.device_counts.expect(self.counts)

    def drop_prepared(self) -> None:
        """Forget a prepared step, and on a device its count, unless it may have been taken by a graph's launch."""
        ready, self.step_ready = self.step_ready, False
        if ready and self.device_counts is not None and not self.steps.is_captured:
            self.crop(self.positions.length - 1, np.ones_like(self.exact.counts))

    def take(self, rows: Any) -> Contents:
        """New contents of the given rows, which may repeat."""
        given = (*self.given[:2], len(rows), *self.given[3:])
        with on_device_of(self.pages.pages):
            parts = self.exact.take(rows), self.pages.take(rows), self.positions.take(rows)
            return Contents(*parts, given, queries=self.queries)

    def put(self, rows: Any, other: Contents) -> None:
        """Overwrite the given rows by those of contents of the same sizes."""
        with on_device_of(self.pages.pages):
            self.exact.put(rows, other.exact)
            self.pages.put(rows, other.pages)
        self.positions.put(rows, other.positions)

    def crop(self, keep: int, dropped: Any) -> None:
        """Keep the first `keep` positions, which leaves out the last `dropped` (b,) tokens of each row."""
        with on_device_of(self.pages.pages):
            self.exact.crop(dropped)
        self.positions.crop(keep)
        if self.device_counts is not None:
            # The last of these may have been prepared for and never counted there.
            self.device_counts.forget()


def due_pages(n: int, settings: LayerSettings, page: int) -> int:
    """Pages that a row of `n` tokens is due, of `page` tokens each."""
    return max(0, (n - settings.sink_tokens - settings.residual_length) // page)


def new_contents(settings: LayerSettings, k: Any, v: Any, exact_dtype: Any, max_tokens: int | None) -> Contents:
    """Empty contents for tokens like k (b, h, s, d) and v (b, h, s, dv); ValueError when a codec cannot hold them."""
    xp = namespace(k, v)
    b, h, _, d = k.shape
    dv = v.shape[3]
    key_dtype, value_dtype = (x.dtype if exact_dtype is None else exact_dtype for x in (k, v))
    layout = page_layout(settings.keys, settings.values, d, dv, key_dtype=str(key_dtype), value_dtype=str(value_dtype))
    page = layout.page_tokens
    exact = ExactStore.create(
        xp,
        (b, h, d, dv),
        key_dtype,
        value_dtype,
        sinks=settings.sink_tokens,
        page=page,
        residual_length=settings.residual_length,
    )
    capacity = 0 if max_tokens is None else due_pages(max_tokens, settings, page)
    pages = PageStore.create(xp, layout, b, h, capacity)
    return Contents(exact, pages, Positions(b), (k.dtype, v.dtype, b, h, d, dv))


class CacheSizes:
    """Sizes of a cache. Everything counts live data: no capacity that is kept for later, but all padding of records."""

    settings: LayerSettings
    engine: str | None
    coefficients: str
    _contents: Contents | None

    @property
    def is_empty(self) -> bool:
        return self._contents is None

    @property
    def batch(self) -> int:
        """Rows; 0 before the first append, like the other sizes."""
        return 0 if self._contents is None else int(self._contents.given[2])

    @property
    def heads(self) -> int:
        """Key/value heads."""
        return 0 if self._contents is None else int(self._contents.given[3])

    @property
    def d(self) -> int:
        """Channels of a key."""
        return 0 if self._contents is None else int(self._contents.given[4])

    @property
    def dv(self) -> int:
        """Channels of a value."""
        return 0 if self._contents is None else int(self._contents.given[5])

    @property
    def length(self) -> int:
        """Positions of every row, padding included."""
        return 0 if self._contents is None else self._contents.positions.length

    @property
    def lengths(self) -> Any:
        """(b,) int64: tokens of each row, without padding."""
        return np.zeros(0, dtype=np.int64) if self._contents is None else self._contents.lengths

    @property
    def page_counts(self) -> Any:
        """(b,) int64: encoded pages of each row."""
        return np.zeros(0, dtype=np.int64) if self._contents is None else self._contents.pages.counts.copy()

    @property
    def exact_tokens(self) -> Any:
        """(b,) int64: tokens of each row that are kept exact, first ones and window."""
        return np.zeros(0, dtype=np.int64) if self._contents is None else self._contents.exact.token_counts

    @property
    def saturated(self) -> int:
        """Scales, zeros and norms that were beyond float16 and stored as its largest number, since the last reset."""
        return 0 if self._contents is None else int(self._contents.pages.saturated)

    @property
    def key_nbytes(self) -> int:
        """Bytes of the key side: pages, exact tokens, and outlier channels kept beside the pages."""
        if self._contents is None:
            return 0
        exact, pages = self._contents.exact, self._contents.pages
        itemsize = int(exact.window_k.dtype.itemsize)
        per_head = int(pages.counts.sum()) * pages.layout.keys.nbytes + int(self.exact_tokens.sum()) * self.d * itemsize
        return self.heads * per_head + pages.channel_nbytes

    @property
    def value_nbytes(self) -> int:
        """Bytes of the value side: pages and exact tokens."""
        if self._contents is None:
            return 0
        exact, pages = self._contents.exact, self._contents.pages
        itemsize = int(exact.window_v.dtype.itemsize)
        per_head = int(pages.counts.sum()) * pages.layout.values.nbytes
        return self.heads * (per_head + int(self.exact_tokens.sum()) * self.dv * itemsize)

    @property
    def nbytes(self) -> int:
        """Live bytes of everything, the map of padded positions included. Not :attr:`table_nbytes`."""
        padding = 0 if self._contents is None else self._contents.positions.nbytes
        return self.key_nbytes + self.value_nbytes + padding

    @property
    def allocated_nbytes(self) -> int:
        """Bytes of the buffers, with the room that they keep for later, and of what steps on a device keep."""
        if self._contents is None:
            return 0
        c = self._contents
        beside = sum(int(held.nbytes) for held in (c.device_counts, c.steps) if held is not None)
        return c.exact.allocated_nbytes + c.pages.allocated_nbytes + c.positions.allocated_nbytes + beside

    @property
    def table_nbytes(self) -> int:
        """Bytes of the random projections that the keys are sketched with, shared by all caches of the same seed."""
        codec = self.settings.keys
        return 4 * self.d * (codec.m + codec.outlier_m) if isinstance(codec, SignSketch) else 0

    @property
    def key_bits(self) -> float:
        """Bits a stored number of the keys; 0 when there is none."""
        return _bits(self.key_nbytes, int(self.lengths.sum()) * self.heads * self.d)

    @property
    def value_bits(self) -> float:
        """Bits a stored number of the values; 0 when there is none."""
        return _bits(self.value_nbytes, int(self.lengths.sum()) * self.heads * self.dv)

    @property
    def bits_per_value(self) -> float:
        """Bits a stored number: 8 :attr:`nbytes` over the numbers of all tokens, padding not among them."""
        return _bits(self.nbytes, int(self.lengths.sum()) * self.heads * (self.d + self.dv))

    def report(self) -> dict[str, Any]:
        """The sizes by name, next to those of a dense cache of the same tokens, and the engine of each operation.

        `dense_nbytes_16` is a dense cache in a 16-bit dtype, `dense_nbytes_model` one in the dtypes that the tokens
        came in. Both count tokens without padding, which a dense cache stores too. `engines` are those that the
        operations run on. `kernels` says of the last attention which of its engine's kernels it took: vector
        instructions on a CPU (``"avx512-vnni"``, ``"avx2"``, ``"generic"``); on a CUDA device ``"mma"``, tensor cores,
        or ``"simt"`` or ``"decoded tiles"`` and why not those. It is empty before, and where an engine does not tell.
        """
        tokens, exact_tokens = int(self.lengths.sum()), int(self.exact_tokens.sum())
        key_numbers, value_numbers = tokens * self.heads * self.d, tokens * self.heads * self.dv
        given = None if self._contents is None else self._contents.given
        model = 0 if given is None else key_numbers * given[0].itemsize + value_numbers * given[1].itemsize
        on = np.empty(0) if self._contents is None else self._contents.pages.pages
        return {
            "batch": self.batch,
            "length": self.length,
            "tokens": tokens,
            "exact_tokens": exact_tokens,
            "encoded_tokens": tokens - exact_tokens,
            "key_bits": self.key_bits,
            "value_bits": self.value_bits,
            "bits": self.bits_per_value,
            "nbytes": self.nbytes,
            "allocated_nbytes": self.allocated_nbytes,
            "table_nbytes": self.table_nbytes,
            "dense_nbytes_16": 2 * (key_numbers + value_numbers),
            "dense_nbytes_model": model,
            "saturated": self.saturated,
            "engines": {op: engine_for(op, on, engine=self.engine) for op in OPERATIONS},
            "kernels": self._kernels(),
        }

    def _kernels(self) -> dict[str, str]:
        """How the last attention was computed, by operation; see :meth:`report`."""
        contents, op = self._contents, "attention.attend"
        if contents is None or not contents.queries:
            return {}
        layout, pages = contents.pages.layout, contents.pages.pages
        shapes = {"layout": layout, "queries": contents.queries, "coefficients": self.coefficients}
        level = kernel_level(op, pages, engine=self.engine, **shapes)
        return {} if level is None else {op: level}


def _bits(nbytes: int, numbers: int) -> float:
    return 8 * nbytes / numbers if numbers else 0.0
