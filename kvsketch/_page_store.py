"""The encoded pages of a cache's rows: growable page records, and how window tokens become pages."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from kvsketch._dispatch import implementation, namespace
from kvsketch._exact_store import Changing, ExactStore, take_rows
from kvsketch.codecs import SignSketch
from kvsketch.layout import PageLayout
from kvsketch.pages import select_channels

#: Tokens of a row that are encoded at a time, so that the encoders' temporaries stay bounded.
ENCODE_TOKENS = 4096


#: Page buffers begin at a multiple of this many bytes, so that no vector of a record crosses a cache line.
ALIGN = 64


def new_records(xp: ModuleType, shape: tuple[int, int, int, int]) -> Any:
    """Page records uint8 of `shape`, zeros; aligned to :data:`ALIGN` bytes, as device memory always is."""
    if xp is not np:
        return xp.zeros(shape, dtype=xp.uint8)
    size = math.prod(shape)
    room = np.zeros(size + ALIGN, dtype=np.uint8)
    first = -room.__array_interface__["data"][0] % ALIGN
    return room[first : first + size].reshape(shape)


class Encoded(NamedTuple):
    """Pages that were written behind a store's last ones but are not yet counted; see :meth:`PageStore.commit`."""

    counts: Any  #: (b,) int64
    channels: Any
    saturated: Any


@dataclass
class PageStore(Changing):
    """Page records of b rows, one record a key/value head and page (docs/layout.md); row r has ``counts[r]`` pages.

    `channels` are a sketch's outlier channels in mode "prompt": chosen for each row and head when the row's first page
    is encoded, from all tokens that the row's window then holds. The exact first tokens do not take part: they are
    never sketched, and their norms are not like those of others.
    """

    layout: PageLayout
    pages: Any  #: (b, h, capacity, record_bytes) uint8
    counts: Any  #: (b,) int64, on the host
    channels: Any = None  #: (b, h, outliers) uint16
    #: Numbers that were beyond float16 when stored, since the store was created: an int, or on a device an array of no
    #: axes, so that nobody waits for it.
    saturated: Any = 0

    @classmethod
    def create(cls, xp: ModuleType, layout: PageLayout, b: int, h: int, capacity: int = 0) -> PageStore:
        """A store with no page and room for `capacity`."""
        codec = layout.keys.codec
        channels = None
        if isinstance(codec, SignSketch) and codec.outliers and codec.outlier_channels == "prompt":
            channels = xp.zeros((b, h, codec.outliers), dtype=xp.uint16)
        pages = new_records(xp, (b, h, capacity, layout.record_bytes))
        return cls(layout, pages, np.zeros(b, dtype=np.int64), channels)

    @property
    def channel_nbytes(self) -> int:
        """Bytes of the outlier channels that are kept beside the pages, for rows that have pages."""
        if self.channels is None:
            return 0
        return int((self.counts > 0).sum()) * int(self.channels[0].nbytes)

    @property
    def allocated_nbytes(self) -> int:
        return int(self.pages.nbytes) + (0 if self.channels is None else int(self.channels.nbytes))

    def reserve(self, capacity: int) -> None:
        """Make room for exactly `capacity` pages a row, if there is less."""
        if capacity > self.pages.shape[2]:
            b, h, _, record_bytes = self.pages.shape
            pages = new_records(namespace(self.pages), (b, h, capacity, record_bytes))
            live = int(self.counts.max())
            pages[:, :, :live] = self.pages[:, :, :live]
            self.pages = pages

    def encode(self, exact: ExactStore, due: Any, engine: str | None) -> Encoded:
        """Write the first ``due[r]`` pages of each row's window behind its pages.

        The pages do not count before :meth:`commit`, so that a failure in between leaves the store as it was. Buffers
        that are too small grow by a quarter, or to what is needed when that is more.
        """
        needed, capacity = int((self.counts + due).max()), self.pages.shape[2]
        if needed > capacity:
            self.reserve(max(needed, capacity + capacity // 4))
        channels = None if self.channels is None else self.channels.copy()
        saturated: Any = 0
        uniform = exact.aligned and bool((self.counts == self.counts[0]).all())
        b = len(due)
        for rows in [slice(0, b)] if uniform else [slice(row, row + 1) for row in range(b)]:
            first, count = int(self.counts[rows][0]), int(due[rows][0])
            if count:
                if channels is not None and first == 0:
                    start, end = int(exact.starts[rows][0]), int((exact.starts + exact.counts)[rows][0])
                    window = exact.window_k[rows, :, start:end]
                    channels[rows] = select_channels(window, self.layout.keys, engine=engine)
                chosen = None if channels is None else channels[rows]
                saturated = saturated + self._encode_rows(rows, first, count, exact, chosen, engine)
        return Encoded(due, channels, saturated)

    def _encode_rows(
        self, rows: slice, first: int, count: int, exact: ExactStore, channels: Any, engine: str | None
    ) -> Any:
        """Encode `count` pages of rows with equal counts, to page `first` and on; number of saturations."""
        p, split = self.layout.page_tokens, self.layout.value_offset
        start = int(exact.starts[rows][0])
        step = max(1, ENCODE_TOKENS // p)
        saturated: Any = 0
        for done in range(0, count, step):
            now = min(step, count - done)
            tokens = slice(start + done * p, start + (done + now) * p)
            out = self.pages[rows, :, first + done : first + done + now]
            k, v = exact.window_k[rows, :, tokens], exact.window_v[rows, :, tokens]
            # Not by kvsketch.pages, whose result is an int: on a device that would wait.
            of_keys = implementation("pages.encode_keys", k, engine=engine)
            saturated = saturated + of_keys(k, self.layout.keys, channels=channels, out=out[..., :split])
            of_values = implementation("pages.encode_values", v, engine=engine)
            saturated = saturated + of_values(v, self.layout.values, out=out[..., split:])
        return saturated

    def commit(self, encoded: Encoded) -> None:
        """Count the pages that :meth:`encode` wrote."""
        self.counts = self.counts + encoded.counts
        self.channels = encoded.channels
        self.saturated = self.saturated + encoded.saturated

    def take(self, rows: Any) -> PageStore:
        """A new store of the given rows, which may repeat."""
        channels = None if self.channels is None else take_rows(self.channels, rows)
        pages = new_records(namespace(self.pages), (len(rows), *self.pages.shape[1:]))
        for target, row in enumerate(rows):
            pages[target] = self.pages[row]
        return replace(self, pages=pages, counts=self.counts[rows], channels=channels)

    def put(self, rows: Any, other: PageStore) -> None:
        """Overwrite the given rows by those of a store of the same capacity."""
        self.pages[rows] = other.pages
        self.counts[rows] = other.counts
        if self.channels is not None:
            self.channels[rows] = other.channels
