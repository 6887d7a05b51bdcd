"""The exact tokens of a cache's rows: the first ones (sinks) and a growable window of the newest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np

from kvsketch._dispatch import namespace


def take_rows(array: Any, rows: Any) -> Any:
    """A new array of the given `rows` (first axis) of `array`."""
    return array[namespace(array).asarray(rows)]


class Changing:
    """Counts how often an attribute was set, which tells whether buffers may have moved since some moment."""

    changes = 0

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value
        self.__dict__["changes"] = self.changes + 1


@dataclass
class ExactStore(Changing):
    """Exact keys and values of b rows, each row with its own number of tokens.

    A row's first S tokens go to the sinks, later ones to the window, where row r holds the tokens
    ``starts[r] .. starts[r] + counts[r]``. Encoding drops tokens from the window's front; the room that leaves is used
    again by moving what is left back to the beginning, once every few pages, so that appending a token costs O(1).

    `page` and `residual_length` say what the window holds in the long run, and so how much room it keeps.
    """

    sink_k: Any  #: (b, h, S, d)
    sink_v: Any  #: (b, h, S, dv)
    sink_counts: Any  #: (b,) int64, on the host like the other counts
    window_k: Any  #: (b, h, W, d)
    window_v: Any  #: (b, h, W, dv)
    starts: Any  #: (b,) int64
    counts: Any  #: (b,) int64
    page: int
    residual_length: int
    aligned: bool = True  #: all rows have the same counts and starts, so one slice serves them all

    ARRAYS = ("sink_k", "sink_v", "sink_counts", "window_k", "window_v", "starts", "counts")

    @classmethod
    def create(
        cls,
        xp: ModuleType,
        shape: tuple[int, int, int, int],
        key_dtype: Any,
        value_dtype: Any,
        *,
        sinks: int,
        page: int,
        residual_length: int,
    ) -> ExactStore:
        """An empty store of `shape` (b, h, d, dv); the window gets its room with the first tokens."""
        b, h, d, dv = shape
        return cls(
            sink_k=xp.zeros((b, h, sinks, d), dtype=key_dtype),
            sink_v=xp.zeros((b, h, sinks, dv), dtype=value_dtype),
            sink_counts=np.zeros(b, dtype=np.int64),
            window_k=xp.zeros((b, h, 0, d), dtype=key_dtype),
            window_v=xp.zeros((b, h, 0, dv), dtype=value_dtype),
            starts=np.zeros(b, dtype=np.int64),
            counts=np.zeros(b, dtype=np.int64),
            page=page,
            residual_length=residual_length,
        )

    @property
    def token_counts(self) -> Any:
        """(b,) int64: exact tokens of each row."""
        return self.sink_counts + self.counts

    @property
    def usual_room(self) -> int:
        """Tokens of a row that the window keeps room for in the long run."""
        return self.residual_length + 2 * self.page

    @property
    def allocated_nbytes(self) -> int:
        return sum(int(a.nbytes) for a in (self.sink_k, self.sink_v, self.window_k, self.window_v))

    def due(self, spare: int = 0) -> Any:
        """Pages (b,) int64 that each row has to encode, leaving `spare` tokens beyond the residual; None if none has.

        The window is empty until the sinks are full, so that its length alone decides.
        """
        keep = self.residual_length + spare
        longest = int(self.counts[0]) if self.aligned else int(self.counts.max())
        if longest - keep < self.page:
            return None
        return np.maximum(self.counts - keep, 0) // self.page

    def make_room(self, extra: int, dropped: Any = None) -> None:
        """Forget the first `dropped` (b,) window tokens and make room for `extra` more, or give room back.

        Changes nothing when memory is short.
        """
        starts, counts = self.starts, self.counts
        if dropped is not None:
            starts, counts = starts + dropped, counts - dropped
        if self.aligned:
            live, end = int(counts[0]), int(starts[0]) + int(counts[0])
        else:
            live, end = int(counts.max()), int((starts + counts).max())
        capacity = self.window_k.shape[2]
        wanted = max(live + extra + self.page, self.usual_room)
        if end + extra > capacity or capacity > 2 * wanted:
            fits = live + extra <= capacity <= 2 * wanted
            starts = self._move_window(None if fits else wanted, starts, counts)
        self.starts, self.counts = starts, counts

    def settle(self) -> None:
        """Give the window the room that it keeps from now on, unless pages are due: it may hold too much then."""
        capacity, live = self.window_k.shape[2], int(self.counts.max())
        if not self.usual_room <= capacity <= 2 * self.usual_room:
            self.starts = self._move_window(max(self.usual_room, live + self.page), self.starts, self.counts)

    def _move_window(self, room: int | None, starts: Any, counts: Any) -> Any:
        """Move tokens to the beginning of the window, or of one of `room` tokens; the new starts (b,)."""
        window_k, window_v = self.window_k, self.window_v
        if room is not None:
            window_k, window_v = (
                namespace(a).zeros((*a.shape[:2], room, a.shape[3]), dtype=a.dtype) for a in (window_k, window_v)
            )
        for rows in self._blocks():
            start, count = int(starts[rows][0]), int(counts[rows][0])
            window_k[rows, :, :count] = self.window_k[rows, :, start : start + count]
            window_v[rows, :, :count] = self.window_v[rows, :, start : start + count]
        self.window_k, self.window_v = window_k, window_v
        return np.zeros_like(starts)

    def count_token(self) -> None:
        """Count one more token a row, which somebody else stores: with the first ones where there is room, or last."""
        first = self.sink_counts < self.sink_k.shape[2]
        self.sink_counts, self.counts = self.sink_counts + first, self.counts + ~first

    def append(self, k: Any, v: Any, valid: Any = None) -> None:
        """Store the tokens k (b, h, s, d), v (b, h, s, dv) where `valid` (b, s) is true; there must be room."""
        if valid is None and self.aligned:
            self._append_block(slice(0, len(self.counts)), k, v)
        elif valid is None and int(self.sink_counts.min()) == self.sink_k.shape[2]:
            self._append_behind(k, v)
        else:
            for row in range(len(self.counts)):
                rows = slice(row, row + 1)
                tokens = slice(None) if valid is None else _as_slice(np.flatnonzero(valid[row]))
                self._append_block(rows, k[rows, :, tokens], v[rows, :, tokens])
            self._align()

    def crop(self, dropped: Any) -> None:
        """Forget the last `dropped` (b,) tokens of each row, and overwrite them with zeros."""
        from_window = np.minimum(dropped, self.counts)
        self.counts = self.counts - from_window
        self.sink_counts = self.sink_counts - (dropped - from_window)
        for rows in self._blocks() if self.aligned and (dropped == dropped[0]).all() else _single_rows(len(dropped)):
            end, sinks = int(self.starts[rows][0] + self.counts[rows][0]), int(self.sink_counts[rows][0])
            for array, first in (
                (self.window_k, end),
                (self.window_v, end),
                (self.sink_k, sinks),
                (self.sink_v, sinks),
            ):
                array[rows, :, first:] = 0
        self._align()

    def take(self, rows: Any) -> ExactStore:
        """A new store of the given rows, which may repeat."""
        taken = replace(self, **{name: take_rows(getattr(self, name), rows) for name in self.ARRAYS})
        taken._align()
        return taken

    def put(self, rows: Any, other: ExactStore) -> None:
        """Overwrite the given rows by those of a store of the same capacity."""
        for name in self.ARRAYS:
            getattr(self, name)[rows] = getattr(other, name)
        self._align()

    def set_counts(self, sinks: Any, window: Any) -> None:
        """Declare how many tokens of each row (b,) the sinks and the window, from its beginning, now hold."""
        self.sink_counts, self.counts, self.starts = sinks, window, np.zeros_like(window)
        self._align()

    def _append_block(self, rows: slice, k: Any, v: Any) -> None:
        """Append to rows that have equal counts."""
        first, s = rows.start, k.shape[2]
        held = int(self.sink_counts[first])
        head = min(self.sink_k.shape[2] - held, s)
        if head > 0:
            self.sink_k[rows, :, held : held + head] = k[:, :, :head]
            self.sink_v[rows, :, held : held + head] = v[:, :, :head]
            self.sink_counts[rows] = held + head
            k, v, s = k[:, :, head:], v[:, :, head:], s - head
        if s > 0:
            count = int(self.counts[first])
            end = int(self.starts[first]) + count
            self.window_k[rows, :, end : end + s] = k
            self.window_v[rows, :, end : end + s] = v
            self.counts[rows] = count + s

    def _append_behind(self, k: Any, v: Any) -> None:
        """Append all s tokens to windows of different lengths, without a loop over rows."""
        xp = namespace(k)
        s = k.shape[2]
        columns = xp.asarray((self.starts + self.counts)[:, None] + np.arange(s))
        rows = xp.arange(k.shape[0])[:, None]
        self.window_k[rows, :, columns] = k.swapaxes(1, 2)
        self.window_v[rows, :, columns] = v.swapaxes(1, 2)
        self.counts += s

    def _blocks(self) -> list[slice]:
        """Rows that can be handled by one slice: all of them when aligned, else one by one."""
        return [slice(0, len(self.counts))] if self.aligned else _single_rows(len(self.counts))

    def _align(self) -> None:
        self.aligned = all(bool((a == a[0]).all()) for a in (self.sink_counts, self.starts, self.counts))


def _single_rows(b: int) -> list[slice]:
    return [slice(row, row + 1) for row in range(b)]


def _as_slice(tokens: Any) -> Any:
    """Positions as a slice when they are consecutive, so that taking them copies nothing."""
    if len(tokens) == 0:
        return slice(0, 0)
    first, last = int(tokens[0]), int(tokens[-1])
    return slice(first, last + 1) if last - first + 1 == len(tokens) else tokens
