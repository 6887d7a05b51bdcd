"""How one side of a cache (its keys or its values) is stored: small frozen settings that validate themselves.

``Exact`` keeps the numbers, ``SignSketch`` is QJL (arXiv 2406.03482) and holds keys only, ``GroupedInts`` is KIVI
(arXiv 2402.02750), ``TokenInts`` is for the latents of Palu (arXiv 2407.21118). Their bytes are laid out by
:mod:`kvsketch.layout`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

from kvsketch._checks import check_bits, check_choice, check_integer

Side = Literal["keys", "values"]

KEY_GROUPS = (32, 64, 128)


@dataclass(frozen=True)
class Exact:
    """Numbers kept as they came, in the dtype they came in."""

    def check_width(self, side: Side, width: int) -> None:
        """Every head size fits."""

    def page_tokens(self, side: Side) -> int:
        return 32


@dataclass(frozen=True)
class GroupedInts:
    """Asymmetric integers of `bits` bits, a float16 scale and zero for each group of `group` numbers (KIVI).

    Keys are grouped along tokens of one channel, so `group` is 32, 64 or 128; values along channels of one token, so
    `group` is any multiple of 8, and a last group may be shorter.
    """

    bits: int = 2
    group: int = 32

    def __post_init__(self) -> None:
        check_bits(self.bits)
        check_integer("group", self.group, low=8)
        if self.group % 8:
            raise ValueError(f"group must be a multiple of 8, got {self.group}")

    def check_width(self, side: Side, width: int) -> None:
        if side == "keys" and self.group not in KEY_GROUPS:
            raise ValueError(f"group={self.group} does not fit keys, which take group in {list(KEY_GROUPS)} tokens")

    def page_tokens(self, side: Side) -> int:
        return max(32, self.group) if side == "keys" else 32


@dataclass(frozen=True)
class TokenInts:
    """Asymmetric integers of `bits` bits, grouped along the channels of one token, keys and values alike.

    For latents of a low-rank projection: what a rotation has spread over all of a token's numbers has one scale and
    zero (`group` None), or one for each `group` of them, a multiple of 8; a last group may be shorter. Keys in their
    own channels differ from channel to channel and are better held by :class:`GroupedInts`.
    """

    bits: int = 3
    group: int | None = None

    def __post_init__(self) -> None:
        check_bits(self.bits)
        if self.group is None:
            return
        check_integer("group", self.group, low=8)
        if self.group % 8:
            raise ValueError(f"group must be a multiple of 8, got {self.group}; leave it out for one group a token")

    def check_width(self, side: Side, width: int) -> None:
        """Every width fits."""

    def page_tokens(self, side: Side) -> int:
        return 32


@dataclass(frozen=True)
class SignSketch:
    """Signs of an `m`-row random projection and the norm of each key (QJL). Holds keys only.

    With `outliers` > 0 that many channels of largest norm are split off and sketched on their own with `outlier_m`
    rows; they are chosen for each page (``outlier_channels="page"``) or once from the prompt (``"prompt"``).
    `kind` and `seed` fix the projection, the same for all heads.
    """

    m: int = 256
    kind: str = "orthogonal"
    outliers: int = 0
    outlier_m: int = 0
    outlier_channels: str = "page"
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("m", self.m, low=1)
        check_choice("kind", self.kind, ("gaussian", "orthogonal", "hadamard"))
        check_integer("outliers", self.outliers, low=0)
        check_integer("outlier_m", self.outlier_m, low=0)
        check_choice("outlier_channels", self.outlier_channels, ("page", "prompt"))
        check_integer("seed", self.seed, low=0)
        if (self.outliers > 0) != (self.outlier_m > 0):
            raise ValueError(
                f"outliers={self.outliers} and outlier_m={self.outlier_m} go together: "
                "give both a positive number, or neither"
            )

    def check_width(self, side: Side, width: int) -> None:
        if side == "values":
            raise ValueError("a SignSketch holds keys only; store values with GroupedInts or Exact")
        if self.outliers > width:
            raise ValueError(f"outliers={self.outliers} is more than the {width} channels of a head")

    def page_tokens(self, side: Side) -> int:
        return 32


Codec = Exact | GroupedInts | TokenInts | SignSketch

#: The name of each codec in text, as in ``keys=ints:bits=2,group=32``.
CODEC_NAMES: dict[str, Callable[..., Codec]] = {
    "exact": Exact,
    "ints": GroupedInts,
    "latents": TokenInts,
    "sketch": SignSketch,
}


def codec_name(codec: Codec) -> str:
    """Short name of a codec's kind: ``"exact"``, ``"ints"``, ``"latents"`` or ``"sketch"``."""
    return next(name for name, kind in CODEC_NAMES.items() if type(codec) is kind)


def codec_settings(codec: Codec) -> dict[str, Any]:
    """The settings of a codec by name, its kind under ``"codec"``; inverse of :func:`codec_from_settings`."""
    return {"codec": codec_name(codec)} | {f.name: getattr(codec, f.name) for f in fields(codec)}


def codec_from_settings(settings: dict[str, Any]) -> Codec:
    """The codec that :func:`codec_settings` described. ValueError names an unknown kind or setting."""
    settings = dict(settings)
    kind = CODEC_NAMES.get(settings.pop("codec", None))
    if kind is None:
        raise ValueError(f"unknown codec in {settings}; known codecs are {list(CODEC_NAMES)}")
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    for name in settings:
        if name not in known:
            raise ValueError(f"codec {codec_name(kind())!r} has no setting {name!r}; its settings are {known}")
    return kind(**settings)
