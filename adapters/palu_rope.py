"""Positions of cached tokens, and the cosines and sines that their model turns keys by."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvsketch.adapters.torch_dlpack import array_from_tensor
from kvsketch.palu import Rope

#: Bytes of a token's position.
POSITION_BYTES = 4


class RopeTable:
    """Where each cached token stands, and cosines and sines by position, as the model itself computed them.

    Keys are rebuilt without RoPE and turned at their own positions. Taking the model's numbers serves every kind of
    RoPE that transformers has; where a kind changes with the length (``dynamic``, ``longrope``), a token keeps the
    numbers of the forward that it came with, as a dense cache keeps its key.

    All lies on the device of the model's numbers, but for the counts of tokens.
    """

    def __init__(self) -> None:
        #: (b,) int64, on the host: tokens of each row, without padding.
        self.counts = np.zeros(0, np.int64)
        self._positions = torch.zeros(0, 0, dtype=torch.int32)
        self._cos = self._sin = torch.zeros(0, 0)
        self._rows = 0
        self._arrays: tuple[Rope, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_arrays": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> RopeTable:
        twin = RopeTable()
        twin.__dict__ |= self.__getstate__() | {"counts": self.counts.copy()}
        twin._positions, twin._cos, twin._sin = (x.clone() for x in (self._positions, self._cos, self._sin))
        memo[id(self)] = twin
        return twin

    @property
    def positions(self) -> torch.Tensor:
        """(b, longest row) int32: the position of each token of a row, padding left out; 0 behind a shorter row."""
        return self._positions[:, : int(self.counts.max(initial=0))]

    @property
    def nbytes(self) -> int:
        """Bytes of the positions."""
        return POSITION_BYTES * int(self.counts.sum())

    @property
    def allocated_nbytes(self) -> int:
        """Bytes of the positions, with the room kept for later ones."""
        return POSITION_BYTES * self._positions.numel()

    @property
    def table_nbytes(self) -> int:
        """Bytes of cosines and sines in use, which all rows and layers of a device share."""
        return 2 * self._rows * self._cos.shape[1] * self._cos.element_size()

    def arrays(self) -> tuple[Rope, Any]:
        """The tables and the positions (b, longest row) int64 for :func:`kvsketch.palu.attend`; made once a forward."""
        if self._arrays is None:
            tables = (array_from_tensor("rope", x[: self._rows]) for x in (self._cos, self._sin))
            self._arrays = Rope(*tables), array_from_tensor("positions", self.positions.long().contiguous())
        return self._arrays

    def append(
        self,
        rope: tuple[torch.Tensor, torch.Tensor],
        position_ids: torch.Tensor | None,
        held: Any,
        places: torch.Tensor,
    ) -> None:
        """Add the tokens at `places` (b, s) of rows that hold `held` (b,) tokens; nothing where that was done before.

        Places, on the host, are counted without padding, which has -1. `position_ids` (b or 1, s), with the cosines
        and sines (b or 1, s, rotary) of `rope`, are read by the host, once a forward and device.
        """
        counts = held + (places >= 0).sum(1).numpy()
        if len(self.counts) == len(counts) and (self.counts == counts).all() and (counts != held).any():
            return
        if held.any() and not np.array_equal(self.counts, held):
            raise RuntimeError("positions of earlier tokens are missing; call reset() on the cache")
        b, s = places.shape
        if position_ids is None:
            raise ValueError(
                "the model gave its attention no position_ids; a PaluCache needs them to turn keys by RoPE"
            )
        given = position_ids.cpu()
        if given.ndim != 2 or given.shape[1] != s or bool((given < 0).any()):
            raise ValueError(
                f"position_ids must be (b, {s}) and not negative, got shape {tuple(given.shape)} with "
                f"{int(given.min())} as the smallest"
            )
        device = rope[0].device
        given = given.to(torch.int32)
        self._make_room(int(given.max()) + 1, rope[0].shape[-1], device)
        at = position_ids.to(device, torch.int64)
        for table, numbers in ((self._cos, rope[0]), (self._sin, rope[1])):
            table[at] = numbers.detach().float()[: len(at)]
        self._make_place(b, int(counts.max()), device, bool(held.any()))
        rows, columns = (places >= 0).nonzero(as_tuple=True)
        new = given.expand(b, s)[rows, columns]
        where = (rows, places[rows, columns])
        self._positions[tuple(x.to(device) for x in where)] = new.to(device)
        self.counts, self._arrays = counts, None

    def _make_room(self, rows: int, rotary: int, device: torch.device) -> None:
        if rows > len(self._cos) or rotary != self._cos.shape[1] or device != self._cos.device:
            for name in ("_cos", "_sin"):
                old = getattr(self, name)
                table = torch.zeros(rows + rows // 4, rotary, device=device)
                if old.shape[1] == rotary and old.device == device:
                    table[: len(old)] = old
                setattr(self, name, table)
        self._rows = max(self._rows, rows)

    def _make_place(self, b: int, longest: int, device: torch.device, kept: bool) -> None:
        old = self._positions
        if not kept or longest > old.shape[1]:
            self._positions = torch.zeros(b, longest + longest // 4, dtype=torch.int32, device=device)
            if kept:
                self._positions[:, : old.shape[1]] = old

    def crop(self, counts: Any) -> None:
        """Keep the first `counts` (b,) tokens of each row; of no rows: nothing."""
        if not len(counts):
            self.__init__()  # type: ignore[misc]
        elif len(self.counts):
            self.counts, self._arrays = np.minimum(counts, self.counts), None

    def select(self, rows: Any) -> None:
        """Row r becomes the former row ``rows[r]``."""
        if len(self.counts):
            self.counts, self._arrays = self.counts[rows], None
            self._positions = self._positions[torch.from_numpy(np.asarray(rows)).to(self._positions.device)]
