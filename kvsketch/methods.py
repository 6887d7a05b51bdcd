"""Named compression methods: what each layer of a model stores its keys and values with.

A method is a preset (``"kivi-2"``) or a string that spells any combination of codecs out, for instance
``"keys=sketch:m=256,outliers=8,outlier_m=256;values=ints:bits=2,group=32;residual_length=32;sink_tokens=4"``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from kvsketch._checks import check_integer
from kvsketch.codecs import CODEC_NAMES, Codec, Exact, GroupedInts, Side, SignSketch, TokenInts
from kvsketch.layout import MAX_WIDTH

DEFAULT_RESIDUAL_LENGTH = 32
DEFAULT_SINK_TOKENS = 4


def _check_codec(side: Side, codec: object) -> None:
    """Raise TypeError or ValueError unless `codec` is a codec that can hold `side` at some head size."""
    if not isinstance(codec, Codec):
        raise TypeError(
            f"{side} must be one of {[c.__name__ for c in (Exact, GroupedInts, TokenInts, SignSketch)]}, got {codec!r}"
        )
    codec.check_width(side, MAX_WIDTH)


@dataclass(frozen=True)
class LayerSettings:
    """What one layer's cache is built with: a codec a side, the exact window and the exact first tokens.

    `residual_length` newest tokens at least, and the first `sink_tokens` of a row, stay exact.
    """

    keys: Codec
    values: Codec
    residual_length: int = DEFAULT_RESIDUAL_LENGTH
    sink_tokens: int = DEFAULT_SINK_TOKENS

    def __post_init__(self) -> None:
        _check_codec("keys", self.keys)
        _check_codec("values", self.values)
        check_integer("residual_length", self.residual_length, low=0)
        check_integer("sink_tokens", self.sink_tokens, low=0)

    def with_settings(self, residual_length: int | None = None, sink_tokens: int | None = None) -> LayerSettings:
        """The same codecs with another exact window or number of exact first tokens; None keeps what it has."""
        return LayerSettings(
            self.keys,
            self.values,
            self.residual_length if residual_length is None else residual_length,
            self.sink_tokens if sink_tokens is None else sink_tokens,
        )


@dataclass(frozen=True)
class Method:
    """A named choice of :class:`LayerSettings` for every layer of a model.

    Layers use `settings`, but for the first ``min(early_layers, layers // 2)`` ones, which use `early` when given
    (the rule of the QJL paper's code, arXiv 2406.03482).
    """

    name: str
    settings: LayerSettings
    early: LayerSettings | None = None
    early_layers: int = 0

    def for_layer(self, layer: int, layers: int) -> LayerSettings:
        """Settings of layer `layer` (from 0) of a model of `layers` layers."""
        check_integer("layers", layers, low=1)
        check_integer("layer", layer, low=0, high=layers - 1)
        if self.early is not None and layer < min(self.early_layers, layers // 2):
            return self.early
        return self.settings

    def with_settings(self, residual_length: int | None = None, sink_tokens: int | None = None) -> Method:
        """The same method with another exact window or number of exact first tokens; None keeps what it has."""
        early = None if self.early is None else self.early.with_settings(residual_length, sink_tokens)
        return replace(self, settings=self.settings.with_settings(residual_length, sink_tokens), early=early)


@dataclass(frozen=True)
class LatentMethod:
    """A named cache of latents, of a model converted by Palu: `options` of ``PaluCache.for_model``."""

    name: str
    options: dict[str, Any]


def _qjl_paper() -> Method:
    """The published setting of QJL: R = 128, 8 outlier channels, wider sketches in the first layers."""
    values = GroupedInts(bits=2, group=32)
    early = LayerSettings(SignSketch(m=512, outliers=8, outlier_m=128), values, residual_length=128, sink_tokens=0)
    later = LayerSettings(SignSketch(m=256, outliers=8, outlier_m=256), values, residual_length=128, sink_tokens=0)
    return Method("qjl-paper", later, early=early, early_layers=15)


#: Presets by name. ``kivi-B`` stores B-bit integers in groups of 32, ``qjl-M`` an M-row sketch of each key and 2-bit
#: values; a name that ends in ``-paper`` has the published settings, the others keep 4 first tokens exact.
METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("exact", LayerSettings(Exact(), Exact())),
        Method("kivi-4", LayerSettings(GroupedInts(bits=4), GroupedInts(bits=4))),
        Method("kivi-3", LayerSettings(GroupedInts(bits=3), GroupedInts(bits=3))),
        Method("kivi-2", LayerSettings(GroupedInts(bits=2), GroupedInts(bits=2))),
        Method(
            "kivi-2-paper",
            LayerSettings(GroupedInts(bits=2), GroupedInts(bits=2), residual_length=128, sink_tokens=0),
        ),
        _qjl_paper(),
        Method("qjl-256", LayerSettings(SignSketch(m=256), GroupedInts(bits=2))),
        Method("qjl-512", LayerSettings(SignSketch(m=512), GroupedInts(bits=2))),
    )
}


def get_method(method: str | Method) -> Method:
    """The method called `method`, or spelled out by it; a :class:`Method` is returned as it is.

    Parameters
    ----------
    method
        A name of :data:`METHODS`, or ``keys=CODEC;values=CODEC[;residual_length=R][;sink_tokens=N]`` where CODEC is
        ``exact``, ``ints[:bits=2,group=32]``, ``latents[:bits=3,group=32]`` (one group a token without `group`) or
        ``sketch[:m=256,kind=orthogonal,outliers=8,outlier_m=256,...]``.

    Raises
    ------
    ValueError
        For an unknown name, codec or setting; the message lists the known ones.
    """
    if isinstance(method, Method):
        return method
    if not isinstance(method, str):
        raise TypeError(f"method must be a name, a method string or a Method, got {method!r}")
    if "=" in method:
        return Method(method, _parse_settings(method))
    if method not in METHODS:
        raise ValueError(
            f"unknown method {method!r}; known methods are {', '.join(METHODS)}, "
            "or spell one out, e.g. 'keys=ints:bits=4,group=32;values=ints:bits=2,group=32'"
        )
    return METHODS[method]


def _parse_settings(text: str) -> LayerSettings:
    parts: dict[str, str] = {}
    known = [f.name for f in fields(LayerSettings)]
    for part in filter(None, (p.strip() for p in text.split(";"))):
        name, _, value = (p.strip() for p in part.partition("="))
        if name not in known:
            raise ValueError(f"method string {text!r} has no part {name!r}; its parts are {known}")
        if name in parts:
            raise ValueError(f"method string {text!r} gives {name!r} twice; give it once")
        parts[name] = value
    missing = [side for side in ("keys", "values") if side not in parts]
    if missing:
        raise ValueError(f"method string {text!r} lacks {' and '.join(missing)}; add e.g. '{missing[0]}=exact'")
    numbers = {name: _parse_integer(name, value) for name, value in parts.items() if name not in ("keys", "values")}
    return LayerSettings(_parse_codec("keys", parts["keys"]), _parse_codec("values", parts["values"]), **numbers)


def _parse_codec(side: str, text: str) -> Codec:
    name, _, rest = (p.strip() for p in text.partition(":"))
    if name not in CODEC_NAMES:
        raise ValueError(f"{side}={text!r} names no codec; known codecs are {', '.join(CODEC_NAMES)}")
    kind: Callable[..., Codec] = CODEC_NAMES[name]
    types = {f.name: f.type for f in fields(kind)}  # type: ignore[arg-type]
    settings: dict[str, int | str] = {}
    numbers = ("int", "int | None")
    for part in filter(None, (p.strip() for p in rest.split(","))):
        setting, _, value = (p.strip() for p in part.partition("="))
        if setting not in types:
            raise ValueError(f"codec {name!r} of {side} has no setting {setting!r}; its settings are {list(types)}")
        if setting in settings:
            raise ValueError(f"{side}={text!r} gives {setting!r} twice; give it once")
        settings[setting] = _parse_integer(setting, value) if types[setting] in numbers else value
    return kind(**settings)


def _parse_integer(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{name} must be an integer, got {value!r}") from None
