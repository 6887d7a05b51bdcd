"""Positions of cached tokens, and the cosines and sines that their model turns keys by."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

#: Bytes of a token's position.
POSITION_BYTES = 4


class RopeTable:
    """Where each cached token stands, and cosines and sines by position, as the model itself computed them.

    Keys are rebuilt without RoPE and turned at their own positions. Taking the model's numbers serves every kind of
    RoPE that transformers has; where a kind changes with the length (``dynamic``, ``longrope``), a token keeps the
    numbers of the forward that it came with, as a dense cache keeps its key.
    """

    def __init__(self) -> None:
        #: (b, length) int32: the position of each token, padding included.
        self.positions: np.ndarray[Any, Any] | None = None
        self._cos = np.zeros((0, 0), np.float32)
        self._sin = np.zeros((0, 0), np.float32)
        self._rows = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the positions."""
        return 0 if self.positions is None else int(self.positions.nbytes)

    @property
    def table_nbytes(self) -> int:
        """Bytes of cosines and sines in use, which all rows and layers share."""
        return 2 * self._rows * self._cos.shape[1] * self._cos.itemsize

    @property
    def cos(self) -> np.ndarray[Any, Any]:
        """(positions, rotary) float32."""
        return self._cos[: self._rows]

    @property
    def sin(self) -> np.ndarray[Any, Any]:
        """(positions, rotary) float32."""
        return self._sin[: self._rows]

    def append(
        self, rope: tuple[torch.Tensor, torch.Tensor], position_ids: torch.Tensor | None, *, batch: int, past: int
    ) -> None:
        """Add s tokens at `position_ids` (b or 1, s) with the cosines and sines (b or 1, s, rotary) of `rope`."""
        s = rope[0].shape[1]
        if position_ids is None:
            raise ValueError(
                "the model gave its attention no position_ids; a PaluCache needs them to turn keys by RoPE"
            )
        if position_ids.ndim != 2 or position_ids.shape[1] != s or bool((position_ids < 0).any()):
            raise ValueError(
                f"position_ids must be (b, {s}) and not negative, got shape {tuple(position_ids.shape)} with "
                f"{int(position_ids.min())} as the smallest"
            )
        given = position_ids.cpu().numpy()
        new = np.broadcast_to(given.astype(np.int32), (batch, s))
        if past and (self.positions is None or self.positions.shape[1] < past):
            raise RuntimeError("positions of earlier tokens are missing; call reset() on the cache")
        kept = () if self.positions is None or not past else (self.positions[:, :past],)
        self._make_room(int(given.max()) + 1, rope[0].shape[-1])
        for table, numbers in ((self._cos, rope[0]), (self._sin, rope[1])):
            table[given] = numbers.detach().float().cpu().numpy()[: len(given)]
        self.positions = np.concatenate([*kept, new], axis=1)

    def _make_room(self, rows: int, rotary: int) -> None:
        if rows > len(self._cos) or rotary != self._cos.shape[1]:
            for name in ("_cos", "_sin"):
                old = getattr(self, name)
                table = np.zeros((rows + rows // 4, rotary), np.float32)
                if old.shape[1] == rotary:
                    table[: len(old)] = old
                setattr(self, name, table)
        self._rows = max(self._rows, rows)

    def crop(self, length: int) -> None:
        """Keep the first `length` positions."""
        if self.positions is not None:
            self.positions = self.positions[:, :length].copy() if length else None

    def select(self, rows: Any) -> None:
        """Row r becomes the former row ``rows[r]``."""
        if self.positions is not None:
            self.positions = self.positions[rows]

    def compact(self, valid: Any) -> Any:
        """Positions of each row's tokens without padding, (b, longest row) int32: `valid` (b, length) bool, or None."""
        if valid is None or self.positions is None:
            return self.positions
        counts = valid.sum(1)
        compact = np.zeros((len(valid), int(counts.max(initial=0))), np.int32)
        for row, count in enumerate(counts):
            compact[row, :count] = self.positions[row, valid[row]]
        return compact
