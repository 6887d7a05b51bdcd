"""Methods: presets, method strings, the per-layer rule and the errors of mistaken names."""

from __future__ import annotations

import pickle

import pytest

from kvsketch.codecs import Exact, GroupedInts, SignSketch, TokenInts
from kvsketch.methods import METHODS, LayerSettings, Method, get_method


def test_presets_are_the_documented_ones() -> None:
    assert list(METHODS) == ["exact", "kivi-4", "kivi-3", "kivi-2", "kivi-2-paper", "qjl-paper", "qjl-256", "qjl-512"]
    for name, method in METHODS.items():
        assert method.name == name
        assert get_method(name) is method
        assert get_method(method) is method
        settings = method.for_layer(0, 2)
        assert settings.sink_tokens == (0 if name.endswith("-paper") else 4)
        assert settings.residual_length == (128 if name.endswith("-paper") else 32)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_kivi_presets(bits: int) -> None:
    codec = GroupedInts(bits=bits, group=32)
    assert METHODS[f"kivi-{bits}"].settings == LayerSettings(codec, codec, residual_length=32, sink_tokens=4)


@pytest.mark.parametrize("m", [256, 512])
def test_qjl_presets_have_no_outliers(m: int) -> None:
    assert METHODS[f"qjl-{m}"].settings == LayerSettings(SignSketch(m=m), GroupedInts(bits=2, group=32))


@pytest.mark.parametrize(("layers", "wide"), [(1, 0), (2, 1), (9, 4), (29, 14), (30, 15), (32, 15), (80, 15)])
def test_qjl_paper_rule_by_layer(layers: int, wide: int) -> None:
    chosen = [METHODS["qjl-paper"].for_layer(layer, layers).keys for layer in range(layers)]
    assert chosen[:wide] == [SignSketch(m=512, outliers=8, outlier_m=128)] * wide
    assert chosen[wide:] == [SignSketch(m=256, outliers=8, outlier_m=256)] * (layers - wide)


def test_with_settings_changes_every_layer_and_keeps_the_original() -> None:
    method = METHODS["qjl-paper"].with_settings(residual_length=0, sink_tokens=7)
    for layer in range(4):
        settings = method.for_layer(layer, 4)
        assert (settings.residual_length, settings.sink_tokens) == (0, 7)
        assert settings.keys == METHODS["qjl-paper"].for_layer(layer, 4).keys
    assert METHODS["qjl-paper"].settings.residual_length == 128
    assert METHODS["kivi-2"].with_settings() == METHODS["kivi-2"]
    with pytest.raises(ValueError, match="residual_length must be >= 0, got -1"):
        METHODS["kivi-2"].with_settings(residual_length=-1)


def test_method_string_spells_any_combination() -> None:
    text = "keys=sketch:m=256,outliers=8,outlier_m=256;values=ints:bits=2,group=32"
    method = get_method(text)
    assert method.name == text
    assert method.settings == LayerSettings(SignSketch(m=256, outliers=8, outlier_m=256), GroupedInts(bits=2, group=32))
    spaced = get_method(" values = exact ; keys = ints : bits = 8 , group = 64 ;sink_tokens=0; residual_length = 5;")
    assert spaced.settings == LayerSettings(GroupedInts(bits=8, group=64), Exact(), residual_length=5, sink_tokens=0)
    latents = get_method("keys=latents:bits=3;values=latents:bits=2,group=64;residual_length=0;sink_tokens=0")
    assert latents.settings == LayerSettings(TokenInts(3), TokenInts(2, group=64), residual_length=0, sink_tokens=0)
    words = get_method(
        "keys=sketch:kind=hadamard,m=64,seed=3,outliers=2,outlier_m=32,outlier_channels=prompt;values=exact"
    )
    assert words.settings.keys == SignSketch(
        m=64, kind="hadamard", outliers=2, outlier_m=32, outlier_channels="prompt", seed=3
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kivi-5", "unknown method 'kivi-5'; known methods are exact, kivi-4, .*qjl-512"),
        ("", "known methods are exact"),
        ("keys=ints", "lacks values"),
        ("values=ints", "lacks keys"),
        ("keys=int;values=exact", "names no codec; known codecs are exact, ints, latents, sketch"),
        ("keys=ints:bit=2;values=exact", r"has no setting 'bit'; its settings are \['bits', 'group'\]"),
        ("keys=latents:group=none;values=exact", "group must be an integer, got 'none'"),
        ("keys=latents:group=12;values=exact", "group must be a multiple of 8, got 12"),
        ("keys=exact:bits=2;values=exact", "codec 'exact' of keys has no setting 'bits'"),
        ("keys=ints:bits=two;values=exact", "bits must be an integer, got 'two'"),
        ("keys=ints:bits=5;values=exact", "bits must be one of"),
        ("keys=ints:bits=2,bits=4;values=exact", "gives 'bits' twice"),
        ("keys=exact;keys=ints;values=exact", "gives 'keys' twice"),
        ("keys=exact;values=exact;window=3", "has no part 'window'; its parts are"),
        ("keys=exact;values=exact;sink_tokens=-2", "sink_tokens must be >= 0"),
        ("keys=exact;values=exact;residual_length=x", "residual_length must be an integer"),
        ("keys=exact;values=sketch:m=64", "holds keys only"),
        ("keys=ints:group=40;values=exact", "group=40 does not fit keys"),
        ("keys=sketch:m=0;values=exact", "m must be >= 1"),
        ("keys=sketch:m=64,outliers=8;values=exact", "go together"),
    ],
)
def test_mistakes_are_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_method(text)


def test_other_types_are_refused() -> None:
    with pytest.raises(TypeError, match="method must be a name"):
        get_method(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="keys must be one of"):
        LayerSettings("ints", Exact())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="layer must be between 0 and 3"):
        METHODS["exact"].for_layer(4, 4)


def test_methods_pickle() -> None:
    for method in METHODS.values():
        assert pickle.loads(pickle.dumps(method)) == method
    assert isinstance(get_method("exact"), Method)
