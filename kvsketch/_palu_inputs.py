"""What attention over latents needs besides queries and caches: matrices, rotary tables, norms, exact first tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvsketch._checks import check_integer


@dataclass(frozen=True, eq=False)
class Reconstruction:
    """The matrices that turn a slice's latents back into keys and values of its heads.

    Make it once a layer and slice, and anew when a matrix changes: engines keep what they derive from it. Numbers are
    kept as float32.

    Parameters
    ----------
    heads
        Key/value heads of the slice.
    up_k : (heads * d, r), optional
        Keys are ``up_k @ latent``, head by head. None: latents are the keys themselves, shared by all heads, as after
        folding the matrix into the queries.
    up_v : (heads * dv, rv), optional
        Values are ``up_v @ latent``. None: what attention gives stays latent, for an output projection that it was
        folded into.
    key_bias : (heads * d,), optional
        Added to keys before norm and RoPE.
    """

    heads: int
    up_k: Any
    up_v: Any = None
    key_bias: Any = None

    def __post_init__(self) -> None:
        check_integer("heads", self.heads, low=1)
        for name, letters in (("up_k", "(heads * d, r)"), ("up_v", "(heads * dv, r)"), ("key_bias", "(heads * d,)")):
            x = getattr(self, name)
            if x is None:
                continue
            if x.ndim != letters.count(",") + (name != "key_bias") or not all(x.shape) or x.shape[0] % self.heads:
                raise ValueError(f"{name} must have shape {letters} for {self.heads} heads, got {tuple(x.shape)}")
            object.__setattr__(self, name, np.ascontiguousarray(x, np.float32) if isinstance(x, np.ndarray) else x)
        if self.key_bias is not None and (self.up_k is None or self.key_bias.shape[0] != self.up_k.shape[0]):
            raise ValueError(
                f"key_bias of {self.key_bias.shape[0]} numbers does not fit up_k of "
                f"{None if self.up_k is None else tuple(self.up_k.shape)}; give one for each row of up_k"
            )


class Rope(NamedTuple):
    """Rotary tables by position, as the model makes them: any theta, kind of scaling and number of rotary channels."""

    cos: Any  #: (positions, rotary) float32
    sin: Any  #: (positions, rotary) float32
    interleaved: bool = False  #: channels 2i and 2i + 1 are a pair; else i and i + rotary/2


class KeyNorm(NamedTuple):
    """An RMS norm of each head's rebuilt key, before RoPE."""

    weight: Any  #: (d,) float32
    eps: float


class FirstTokens(NamedTuple):
    """True keys (after RoPE) and values of each row's first tokens, to be used in place of their latents."""

    k: Any  #: (b, h, F, d)
    v: Any  #: (b, h, F, dv)
    counts: Any  #: (b,) how many of the F a row has
