"""Which positions of a padded batch hold tokens, and what else a forward's mask hides."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import numpy as np
import torch

from kvsketch.adapters.torch_dlpack import array_from_tensor


class Step(NamedTuple):
    """What one forward's mask says about `s` new positions.

    `valid` (b, s): False marks padding, which is not stored; None means that there is none. `mask`
    (b or 1, hq or 1, s, n): what the model hides, or adds to scores, beyond padding and causality; None for nothing.
    """

    valid: np.ndarray[Any, Any] | None
    mask: Any


_PLAIN = Step(None, None)


class Padding:
    """Valid positions of a batch, shared by all layers of a cache.

    transformers hands the same mask to every layer of a forward, so it is read once: for the first layer, and again
    only when another layer brings another mask. A position that no query of its own forward sees is padding.
    """

    def __init__(self) -> None:
        self.length = 0
        #: (b, length) bool, or None while no padding was seen.
        self.valid: torch.Tensor | None = None
        self._step = _PLAIN
        self._mask: weakref.ref[torch.Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A weak reference cannot be pickled, and a copy of the cache begins with a forward of its own.
        return {"length": self.length, "valid": self.valid, "_step": _PLAIN, "_mask": None}

    def read(self, mask: torch.Tensor | None, *, batch: int, new: int, past: int) -> Step:
        """What `mask` (b or 1, hq or 1, s, >= past + s) says of `new` = s positions after the first `past`."""
        first = past == self.length
        if not first and past + new != self.length:
            raise RuntimeError(
                f"a layer holds {past} positions where the cache has seen {self.length}; call reset() on the cache"
            )
        if mask is None:
            if first:
                self.advance(None, batch, new)
                self._step, self._mask = _PLAIN, None
            # Positions known as padding stay hidden: the cache does not store them.
            return _PLAIN if self._step.valid is None else Step(self._step.valid, None)
        if not first and self._mask is not None and self._mask() is mask:
            return self._step
        self._step = self._interpret(mask, batch, new, past, first)
        self._mask = weakref.ref(mask)
        return self._step

    def _interpret(self, mask: torch.Tensor, batch: int, new: int, past: int, first: bool) -> Step:
        total = past + new
        if mask.ndim != 4 or mask.shape[0] not in (1, batch) or mask.shape[2] != new or mask.shape[3] < total:
            raise ValueError(
                f"attention_mask must have shape (b, 1, s, n) = ({batch}, 1, {new}, {total}), got {tuple(mask.shape)}"
            )
        given = mask = mask[..., :total]
        # What is padding is decided on the host: one read of a mask a forward.
        mask = mask.cpu()
        visible = mask if mask.dtype is torch.bool else mask > torch.finfo(mask.dtype).min / 2
        if first:
            seen = visible[:, :, -1, past:].any(1)
            if not seen.all():
                seen = visible[..., past:].any(2).any(1)
            self.advance(seen.expand(batch, new), batch, new)
        valid = None if self.valid is None else self.valid[:, past:total]
        hides_more = not self._is_plain(mask, visible, new, past)
        return Step(
            None if valid is None or bool(valid.all()) else array_from_tensor("attention_mask", valid),
            _score_mask(given) if hides_more else None,
        )

    def _is_plain(self, mask: torch.Tensor, visible: torch.Tensor, new: int, past: int) -> bool:
        """Whether `mask` hides exactly the future and the padding, and adds nothing to what it shows."""
        if mask.shape[1] != 1 or (mask.dtype is not torch.bool and bool(mask.masked_fill(~visible, 0).any())):
            return False
        expected = torch.ones(1, new, past + new, dtype=torch.bool)
        if new > 1:
            expected = expected.tril(past)
        if self.valid is not None:
            expected = expected & self.valid[:, None]
        shape = torch.broadcast_shapes(expected.shape, visible[:, 0].shape)
        return torch.equal(visible[:, 0].expand(shape), expected.expand(shape))

    def advance(self, seen: torch.Tensor | None, batch: int, new: int) -> None:
        if seen is not None and bool(seen.all()):
            seen = None
        if seen is not None or self.valid is not None:
            past = torch.ones(batch, self.length, dtype=torch.bool) if self.valid is None else self.valid
            seen = torch.ones(batch, new, dtype=torch.bool) if seen is None else seen
            self.valid = torch.cat([past, seen], dim=1)
        self.length += new

    def select(self, rows: torch.Tensor) -> None:
        """Row r becomes the former row ``rows[r]``."""
        if self.valid is not None:
            self.valid = self.valid[rows]
        self._forget()

    def crop(self, length: int) -> None:
        """Keep the first `length` positions."""
        self.length = length
        if self.valid is not None:
            self.valid = self.valid[:, :length]
            if bool(self.valid.all()):
                self.valid = None
        self._forget()

    def _forget(self) -> None:
        self._step, self._mask = _PLAIN, None


def _score_mask(mask: torch.Tensor) -> Any:
    """Boolean masks as they are, additive ones in float32."""
    return array_from_tensor("attention_mask", mask if mask.dtype is torch.bool else mask.float())
