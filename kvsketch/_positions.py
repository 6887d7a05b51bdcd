"""Outward positions of a padded batch and the compact positions of each row, which hold no padding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from kvsketch._checks import FLOAT_DTYPES, check_float, check_ndim
from kvsketch._dispatch import namespace


@dataclass
class Positions:
    """Which of the `length` outward positions of each of `b` rows hold a token; the others are padding.

    `valid` is a (b, capacity) bool array on the host, kept only when padding was seen: None means all valid.
    """

    b: int
    length: int = 0
    valid: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes of the map of valid positions that are in use: one a row and position, or none without padding."""
        return 0 if self.valid is None else self.b * self.length

    @property
    def allocated_nbytes(self) -> int:
        return 0 if self.valid is None else int(self.valid.nbytes)

    @property
    def map(self) -> Any:
        """(b, length) bool: the map in use, or None when there is no padding."""
        return None if self.valid is None else self.valid[:, : self.length]

    def make_room(self, s: int, padded: bool) -> None:
        """Make room for `s` more positions, starting a map when they are the first with padding."""
        if self.valid is None and not padded:
            return
        needed = self.length + s
        if self.valid is None or needed > self.valid.shape[1]:
            valid = np.ones((self.b, needed + needed // 4), dtype=np.bool_)
            if self.valid is not None:
                valid[:, : self.length] = self.map
            self.valid = valid

    def append(self, s: int, valid: Any = None) -> None:
        """Add `s` positions, of which `valid` (b, s) hold a token (None: all); there must be room."""
        if self.valid is not None:
            self.valid[:, self.length : self.length + s] = True if valid is None else valid
        self.length += s

    def tokens_from(self, first: int) -> Any:
        """(b,) int64: tokens of each row at position `first` and later."""
        if self.valid is None:
            return np.full(self.b, self.length - first, dtype=np.int64)
        return self.map[:, first:].sum(axis=1, dtype=np.int64)

    def crop(self, length: int) -> None:
        """Keep the first `length` positions."""
        self.length = length
        if self.valid is not None and bool(self.map.all()):
            self.valid = None

    def take(self, rows: Any) -> Positions:
        """New positions of the given rows, which may repeat."""
        return replace(self, b=len(rows), valid=None if self.valid is None else self.valid[rows])

    def put(self, rows: Any, other: Positions) -> None:
        """Overwrite the given rows by those of positions of the same length."""
        if self.valid is not None:
            self.valid[rows] = other.valid

    def limits(self, s: int, lengths: Any) -> Any:
        """How many of its row's tokens each of the newest `s` positions may see: (b, s) int64.

        None when the rows' newest s positions all hold tokens: then the usual causal rule of compact rows holds.
        """
        if self.valid is None:
            return None
        newest = self.map[:, self.length - s :]
        if newest.all():
            return None
        later = newest.sum(axis=1, keepdims=True) - np.cumsum(newest, axis=1)
        return lengths[:, None] - later

    def bias(self, mask: Any, s: int, hq: int) -> Any:
        """A mask over outward positions as what is added to the scores of compact ones, or None when it hides nothing.

        Parameters
        ----------
        mask : (b or 1, hq or 1, s, length), bool (True: visible) or a float that is added, -inf or its dtype's lowest
            number where hidden

        Returns
        -------
        (b, hq or 1, s, longest row) float32, or None when causality and padding already say what the mask says
        """
        check_ndim("mask", mask, "(b, hq, s, length)")
        expected = ((1, self.b), (1, hq), (s,), (self.length,))
        if any(size not in sizes for size, sizes in zip(mask.shape, expected, strict=True)):
            raise ValueError(
                f"mask must have shape ({self.b} or 1, {hq} or 1, {s}, {self.length}), got {tuple(mask.shape)}: "
                "its last axis counts all cached positions, padding and the newest tokens included"
            )
        xp = namespace(mask)
        causal = xp.arange(self.length) <= xp.arange(self.length - s, self.length)[:, None]
        if mask.dtype == xp.bool_:
            acts = ~mask & causal
        else:
            check_float("mask", mask)
            acts = (mask != 0) & causal
        if self.valid is not None:
            acts = acts & xp.asarray(self.map)[:, None, None]
        if not acts.any():
            return None
        if mask.dtype == xp.bool_:
            bias = xp.where(mask, xp.float32(0), xp.float32(-xp.inf))
        else:
            lowest = ml_dtypes.finfo(FLOAT_DTYPES[str(mask.dtype)]).min
            bias = xp.where(mask <= lowest, xp.float32(-xp.inf), mask.astype(xp.float32))
        return self._compact(xp.broadcast_to(bias, (self.b, *bias.shape[1:])))

    def _compact(self, x: Any) -> Any:
        """x (b, ., s, length) without the padded positions of each row: (b, ., s, longest row)."""
        if self.valid is None:
            return x
        xp = namespace(x)
        longest = int(self.tokens_from(0).max())
        compact = xp.zeros((*x.shape[:3], longest), dtype=x.dtype)
        for row in range(self.b):
            columns = xp.asarray(np.flatnonzero(self.map[row]))
            compact[row, :, :, : len(columns)] = x[row][..., columns]
        return compact
