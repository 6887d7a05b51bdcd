"""What a conversion by Palu is told, and what it makes of it: factors and ranks of every slice of every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvsketch._checks import BITS, check_choice, check_integer
from kvsketch._progress import Progress, no_progress
from kvsketch.adapters.palu_calibration import Calibration
from kvsketch.adapters.palu_models import AttentionLayer, float64_array
from kvsketch.palu import Factors, allocate_ranks, draw_rotation, factorise, rotate

FACTORS = ("two-sided", "whitened", "plain")
RANKS = ("balanced", "uniform", "fisher", "fisher-uniform")
FISHER_RANKS = ("fisher", "fisher-uniform")
SIDES = ("key", "value")


@dataclass(frozen=True)
class PaluSettings:
    """How a model is converted; the defaults are the best recipe measured.

    Parameters
    ----------
    keep
        Share of the numbers of keys and values that the latents keep, in (0, 1].
    granularity
        Heads factored together: ``"joint"`` (all of a layer), ``"head"`` (each alone) or ``"group:N"``.
    ranks
        Rule of :func:`kvsketch.palu.allocate_ranks`.
    factors
        Method of :func:`kvsketch.palu.factorise`.
    block
        Ranks are multiples of this, where a slice is wide enough.
    rotate
        Fuse a rotation into the factors, which spreads the latents' outliers: for latents of few bits.
    seed
        Of the rotations.
    first_tokens
        A row's first tokens whose true keys and values are kept: the original projections then stay in the model.
    latent_bits, latent_group
        Bits of a cached latent, and the latents that share a scale and zero (None: all of a slice); no bits: exact.
    """

    keep: float = 0.7
    granularity: str = "joint"
    ranks: str = "balanced"
    factors: str = "two-sided"
    block: int = 32
    rotate: bool = False
    seed: int = 0
    first_tokens: int = 1
    latent_bits: int | None = None
    latent_group: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.keep, (int, float)) or not 0 < self.keep <= 1:
            raise ValueError(f"keep must be above 0 and at most 1, got {self.keep!r}")
        check_choice("ranks", self.ranks, RANKS)
        check_choice("factors", self.factors, FACTORS)
        check_integer("block", self.block, low=1)
        check_integer("seed", self.seed, low=0)
        check_integer("first_tokens", self.first_tokens, low=0)
        if self.latent_bits is not None and self.latent_bits not in BITS:
            raise ValueError(f"latent_bits must be None or one of {list(BITS)}, got {self.latent_bits!r}")
        if self.latent_bits is None and self.latent_group is not None:
            raise ValueError(f"latent_group={self.latent_group} needs latent_bits; give both, or neither")
        if self.latent_group is not None:
            check_integer("latent_group", self.latent_group, low=8)
        self.slice_heads(1)

    @property
    def needs_calibration(self) -> bool:
        """Whether factors or ranks depend on activations or gradients."""
        return self.factors != "plain" or self.ranks in FISHER_RANKS

    def slice_heads(self, h: int) -> int:
        """Heads of a slice in a layer of `h` key/value heads."""
        if self.granularity == "joint":
            return h
        if self.granularity == "head":
            return 1
        kind, _, size = self.granularity.partition(":")
        if kind != "group" or not size.isdecimal() or int(size) < 1:
            raise ValueError(f"granularity must be 'joint', 'head' or 'group:N', got {self.granularity!r}")
        return int(size)


@dataclass(frozen=True)
class LayerPlan:
    """The slices of one layer: the rank of each one's keys and values, and which up factors are folded away.

    `fold_keys`: the query projection gives queries of latents. `fold_values`: the output projection takes latents.
    """

    layer: int
    slice_heads: int
    key_ranks: tuple[int, ...]
    value_ranks: tuple[int, ...]
    fold_keys: bool = False
    fold_values: bool = False

    @property
    def slices(self) -> int:
        return len(self.key_ranks)


class SliceFactors(NamedTuple):
    """Factors of one side of one slice in float64: `down` (r, in) and `up` (heads of the slice * d, r)."""

    down: np.ndarray[Any, Any]
    up: np.ndarray[Any, Any]


class LayerFactors(NamedTuple):
    """A layer's plan and its slices' factors."""

    plan: LayerPlan
    keys: tuple[SliceFactors, ...]
    values: tuple[SliceFactors, ...]


def check_granularity(layers: Sequence[AttentionLayer], settings: PaluSettings) -> None:
    """Raise ValueError unless the heads of every layer divide into slices."""
    for layer in layers:
        if layer.h % settings.slice_heads(layer.h):
            raise ValueError(
                f"granularity={settings.granularity!r} does not divide the {layer.h} key/value heads of layer "
                f"{layer.index}; give a divisor of {layer.h}"
            )


def factor_layers(
    layers: Sequence[AttentionLayer],
    calibration: Calibration | None,
    settings: PaluSettings,
    progress: Progress = no_progress,
) -> list[LayerFactors]:
    """Factor all slices of `layers`, share the ranks out over all of them, and cut and rotate the factors."""
    check_granularity(layers, settings)
    if settings.needs_calibration and calibration is None:
        raise ValueError(
            f"factors={settings.factors!r} with ranks={settings.ranks!r} need a calibration; give one, or use "
            "factors='plain' and ranks='balanced' or 'uniform'"
        )
    found: list[Factors] = []
    importance: list[float] = []
    projections: list[int] = []
    for number, layer in enumerate(layers):
        progress("Factoring", number, len(layers))
        for side in SIDES:
            for part in _parts(layer, settings):
                found.append(_factor_slice(layer, side, part, calibration, settings))
                projections.append(2 * number + SIDES.index(side))
                if settings.ranks in FISHER_RANKS and calibration is not None:
                    fisher = getattr(calibration.layers[layer.index], f"{side}_fisher")
                    importance.append(float(fisher[part].mean()))
    progress("Factoring", len(layers), len(layers))
    ranks = allocate_ranks(
        [f.spectrum for f in found],
        settings.keep,
        rule=settings.ranks,
        importance=importance or None,
        projections=projections if settings.ranks == "fisher-uniform" else None,
        block=settings.block,
        widths=[len(f.up) for f in found],
    )
    cut = iter([_cut(f, rank, settings) for f, rank in zip(found, ranks, strict=True)])
    result = []
    for layer in layers:
        count = layer.h // settings.slice_heads(layer.h)
        keys, values = (tuple(next(cut) for _ in range(count)) for _ in SIDES)
        result.append(LayerFactors(_plan(layer, settings, keys, values), keys, values))
    return result


def _parts(layer: AttentionLayer, settings: PaluSettings) -> list[slice]:
    """Rows of a key or value weight that belong to each slice."""
    rows = settings.slice_heads(layer.h) * layer.d
    return [slice(start, start + rows) for start in range(0, layer.h * layer.d, rows)]


def _factor_slice(
    layer: AttentionLayer, side: str, part: slice, calibration: Calibration | None, settings: PaluSettings
) -> Factors:
    projection = layer.k if side == "key" else layer.v
    gram = error = None
    if settings.factors != "plain" and calibration is not None:
        statistics = calibration.layers[layer.index]
        gram = statistics.gram
        if settings.factors == "two-sided":
            error = getattr(statistics, f"{side}_error")[part, part]
    try:
        return factorise(float64_array(projection.weight[part]), gram, error_weight=error, method=settings.factors)
    except ValueError as reason:
        raise ValueError(f"the {side} projection of layer {layer.index} cannot be factored: {reason}") from reason


def _cut(factors: Factors, rank: int, settings: PaluSettings) -> SliceFactors:
    down, up = factors.cut(rank)
    if settings.rotate:
        down, up = rotate(down, up, draw_rotation(rank, seed=settings.seed))
    return SliceFactors(down, up)


def _plan(
    layer: AttentionLayer,
    settings: PaluSettings,
    keys: tuple[SliceFactors, ...],
    values: tuple[SliceFactors, ...],
) -> LayerPlan:
    """Fold an up factor where the folded matrix is not larger than the two: mean rank <= d D / (D - d).

    With exact first tokens queries and outputs are needed in the heads' own width, and keys with RoPE cannot be folded.
    """
    ranks = [tuple(len(f.down) for f in side) for side in (keys, values)]
    width, folds = layer.q.weight.shape[1], settings.first_tokens == 0

    def small(side: tuple[int, ...]) -> bool:
        return folds and sum(side) * (width - layer.d) <= layer.d * width * len(side)

    return LayerPlan(
        *(layer.index, settings.slice_heads(layer.h), ranks[0], ranks[1]),
        fold_keys=not layer.rope and small(ranks[0]),
        fold_values=small(ranks[1]),
    )
