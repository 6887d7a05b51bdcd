"""Attention over latents is the attention of the keys and values that they stand for.

The sum of w_t (B z_t) over tokens t is B times the sum of w_t z_t: the values' matrix may be applied to what attention
gives, once a head, and a linear layer that follows may take it in. RoPE turns keys by their tokens' places, so that
their matrix cannot be moved to the queries: keys are rebuilt, turned and only then multiplied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvsketch.codecs import Codec, Exact, TokenInts
from kvsketch.statistical_tests import check_at_most
from kvsketch.validation.claim import HOLDS, Claim, Figure, Outcome, Setting, Twin
from kvsketch.validation.palu_layers import (
    HEADS,
    RATIO,
    SIZE,
    TOKENS,
    Layer,
    cache_of,
    cut,
    distance,
    make_layer,
    stored,
)

#: Name, new tokens, channels that RoPE turns, and whether its pairs are neighbours.
LAYERS = (
    ("RoPE", 1, SIZE, False),
    ("RoPE on half the channels, neighbours", 1, SIZE // 2, True),
    ("RoPE, three new tokens", 3, SIZE, False),
    ("no RoPE", 1, 0, False),
)
FULL, KEY_RANK, VALUE_RANK = HEADS * SIZE, 20, 12
#: Numbers that the output projection gives.
OUTPUTS = 24
#: Relative distances: of results summed in float32; of a weight, the exponential of such a sum; and where an engine may
#: round the weights of quantized latents to int16.
SUMS, WEIGHTS, ROUNDED = 5e-6, 5e-5, 2e-4

#: The output projection (hq, outputs, d) with the values' matrix (h, d, r) taken in; twins bring their own.
Fold = Callable[[Any, Any], Any]


def fold(output: Any, up: Any) -> Any:
    """(hq, outputs, r): each query head's part times the matrix of its key/value head."""
    return output @ np.repeat(up, RATIO, axis=0)


def fold_exchanged(output: Any, up: Any) -> Any:
    """Each query head takes the matrix of another key/value head."""
    return fold(output, up[::-1])


def project(output: Any, heads: Any) -> Any:
    """(s, outputs) from what each head gives, (hq, s, x), by its part (hq, outputs, x) of a linear layer."""
    return np.einsum("hox,hsx->so", output, heads)


def check_full_rank(setting: Setting, name: str, layer: Layer, rank: int, shift: int) -> Outcome:
    """Attention and its weights over all directions are those over the true keys and values."""
    keys, values = (layer.inputs @ weight.T for weight in (layer.weight_k, layer.weight_v))
    (down_k, up_k), (down_v, up_v) = (cut(weight, rank) for weight in (layer.weight_k, layer.weight_v))
    cache = cache_of(setting, layer.inputs @ down_k.T, layer.inputs @ down_v.T, Exact())
    apart = distance(layer.attend(setting, cache, up_k, up_v, shift=shift), layer.attend_dense(keys, values))
    # Value latents that are unit vectors: what attention gives, as latents, are the tokens' weights themselves.
    units = cache_of(setting, layer.inputs @ down_k.T, np.eye(TOKENS), Exact())
    weights, true = layer.attend(setting, units, up_k, None, shift=shift), layer.weights(keys)
    seen = true > 0
    changed = float(np.abs(weights[seen] / true[seen] - 1).max(initial=np.abs(weights[~seen]).max(initial=0)))
    return Outcome(
        [
            check_at_most(f"full rank, {name}: relative distance from dense attention", apart, SUMS),
            check_at_most(f"full rank, {name}: largest relative change of a weight", changed, WEIGHTS, n=seen.sum()),
        ],
        [Figure(f"full rank, {name}: relative distance from dense attention", "0", "rounding", f"{apart:.1e}")],
    )


def check_folding(setting: Setting, name: str, layer: Layer, codec: Codec, folding: Fold) -> Outcome:
    """The values' matrix applied to each token, to what attention gives, and within the output projection."""
    (down_k, up_k), (down_v, up_v) = cut(layer.weight_k, KEY_RANK), cut(layer.weight_v, VALUE_RANK)
    cache = cache_of(setting, layer.inputs @ down_k.T, layer.inputs @ down_v.T, codec)
    key_latents, value_latents = stored(cache)
    output = setting.generator("palu attention", "output").standard_normal((HEADS * RATIO, OUTPUTS, SIZE))
    each_token = layer.attend_dense(key_latents @ up_k.T, value_latents @ up_v.T)
    once = layer.attend(setting, cache, up_k, up_v)
    latent = layer.attend(setting, cache, up_k, None)
    folded = folding(output, up_v.reshape(HEADS, SIZE, VALUE_RANK))
    limit = SUMS if codec == Exact() else ROUNDED
    what = f"{name}, {'exact latents' if codec == Exact() else 'latents of 4 bits'}: relative distance of values"
    apart = distance(once, each_token)
    within = distance(project(folded, latent), project(output, each_token))
    return Outcome(
        [
            check_at_most(f"{what} multiplied once a head from those of each token", apart, limit),
            check_at_most(f"{what} multiplied in the output projection from those of each token", within, limit),
        ],
        [Figure(f"{what}, once a head / in the output projection", "0", "rounding", f"{apart:.1e} / {within:.1e}")],
    )


def check_layers(setting: Setting, *, rank: int = FULL, shift: int = 0, folding: Fold = fold) -> Outcome:
    outcome = Outcome()
    for name, s, rotary, interleaved in LAYERS:
        layer = make_layer(setting.generator("palu attention", name), s=s, rotary=rotary, interleaved=interleaved)
        found = [check_full_rank(setting, name, layer, rank, shift)]
        found += [check_folding(setting, name, layer, codec, folding) for codec in (Exact(), TokenInts(4))]
        for part in found:
            outcome.checks += part.checks
            outcome.figures += part.figures
    return outcome


def run(setting: Setting) -> Outcome:
    return check_layers(setting)


CLAIM = Claim(
    name="palu_attention",
    title="Attention over latents is the attention of the keys and values that they stand for",
    source="Palu, sections on the factors and on rebuilding keys",
    published="values' matrices can be fused into the output projection; keys are rebuilt tile by tile and turned by "
    "RoPE in the kernel",
    proved="sum_t w_t (B z_t) = B sum_t w_t z_t, and W = B A at full rank: no change but rounding",
    finding="With all directions kept, attention over latents is dense attention but for rounding, with and without "
    "RoPE. Below full rank it is attention over the keys and values that the latents stand for, and it "
    "makes no difference whether the values' matrix is applied to each token, once a head, or in the output "
    "projection. What Palu loses it loses in cutting the rank, not in computing with latents.",
    verdict=HOLDS,
    run=run,
    twins=(
        Twin("keys turned for the next place", lambda setting: check_layers(setting, shift=1)),
        Twin("one direction short of full rank", lambda setting: check_layers(setting, rank=FULL - 1)),
        Twin("matrices of heads exchanged", lambda setting: check_layers(setting, folding=fold_exchanged)),
    ),
)
