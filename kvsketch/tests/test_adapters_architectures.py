"""Models other than Llama: sliding windows, soft-capped scores, learned sinks; and those that cannot be served."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvsketch[hf]'")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'kvsketch[hf]'")

from transformers.cache_utils import DynamicSlidingWindowLayer  # noqa: E402

from kvsketch.adapters.layers import CompressedLayer  # noqa: E402
from kvsketch.adapters.transformers_cache import CompressedCache  # noqa: E402
from kvsketch.tests.tiny_models import SIZES, greedy, left_padded, random_prompt, tiny_model  # noqa: E402

SLIDING = ["sliding_attention", "full_attention"]
MODELS: dict[str, dict[str, Any]] = {
    "Qwen2": {},
    "Qwen3": {"head_dim": 40},
    "Ministral": {"sliding_window": 24, "layer_types": SLIDING, "head_dim": 16},
    "Gemma2": {"head_dim": 24, "sliding_window": 24, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 24},
    "Gemma3": {"head_dim": 24, "sliding_window": 24, "layer_types": SLIDING, "query_pre_attn_scalar": 24},
    "GptOss": {"head_dim": 16, "sliding_window": 24, "num_local_experts": 2, "num_experts_per_tok": 1},
}
NAMES = {"Gemma3": "Gemma3"}


def build(name: str) -> Any:
    changes = dict(MODELS[name])
    if name == "Gemma3":
        config = transformers.Gemma3TextConfig(**(SIZES | changes))
        torch.manual_seed(0)
        return transformers.Gemma3ForCausalLM(config).eval()
    model = tiny_model(name, **changes)
    if name == "GptOss":
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.sinks.copy_(torch.randn(4) + 1)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_exact_tokens_are_those_of_the_models_own_attention(name: str) -> None:
    model = build(name)
    ids, mask = left_padded([70, 31])
    own = model.config._attn_implementation
    expected = greedy(model, ids, attention_mask=mask, new=30)
    cache = CompressedCache.for_model(model, "exact")
    assert torch.equal(greedy(model, ids, cache, attention_mask=mask, new=30), expected)
    # A dense cache goes on working through our attention function, soft cap and sinks included.
    assert torch.equal(greedy(model, ids, attention_mask=mask, new=30), expected)
    kinds = [type(layer) for layer in cache.layers]
    assert CompressedLayer in kinds
    if "sliding_window" in MODELS[name]:
        assert kinds == [DynamicSlidingWindowLayer, CompressedLayer]
    assert own in ("sdpa", "eager")


@pytest.mark.parametrize("name", ["Gemma3", "GptOss"])
def test_full_layers_are_compressed_and_sliding_ones_stay_exact(name: str) -> None:
    """Also past the window (T43), in many turns, and for copies and files."""
    model = build(name)
    ids = random_prompt(1, 133)
    cache = CompressedCache.for_model(model, "kivi-4")
    tokens = greedy(model, ids, cache, new=10)
    sliding, full = cache.report()["layers"]
    assert sliding["encoded_tokens"] == 0
    assert sliding["key_bits"] == 32
    assert sliding["tokens"] == 23
    assert full["encoded_tokens"] == 96
    assert full["key_bits"] < 16
    more = torch.cat([tokens, random_prompt(1, 30, seed=5)], 1)
    twin = copy.deepcopy(cache)
    assert torch.equal(greedy(model, more, cache), greedy(model, more, twin))


@pytest.mark.parametrize("name", ["Gemma2", "GptOss"])
def test_soft_cap_and_sinks_matter(name: str) -> None:
    """The tests above can fail: without the soft cap or the sinks the logits are others."""
    model = build(name)
    ids, step = random_prompt(1, 70), random_prompt(1, 1, seed=2)
    attention = model.model.layers[1].self_attn
    logits = []
    for changed in (False, True):
        cache = CompressedCache.for_model(model, "exact")
        with torch.no_grad():
            model(ids, cache=cache)
            if changed and name == "Gemma2":
                attention.attn_logit_softcapping = None
            elif changed:
                attention.sinks.fill_(-50.0)
            logits.append(model(step, cache=cache).logits)
    assert (logits[0] - logits[1]).abs().max() > 1e-3


def test_prompt_lookup_over_sliding_layers() -> None:
    model = build("Gemma3")
    ids = random_prompt(1, 11).repeat(1, 6)
    expected = greedy(model, ids, new=30)
    cache = CompressedCache.for_model(model, "exact")
    assert torch.equal(greedy(model, ids, cache, new=30, prompt_lookup_num_tokens=4), expected)


def test_crop_past_a_sliding_window_changes_nothing_or_everything() -> None:
    model = build("Gemma3")
    cache = CompressedCache.for_model(model, "exact")
    with torch.no_grad():
        model(random_prompt(1, 70), cache=cache)
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        cache.crop(-3)
    assert cache.layers[1].get_seq_length() == 70
    with torch.no_grad():
        model(random_prompt(1, 1), cache=cache)
    assert cache.get_seq_length() == 71


def test_models_without_full_attention_are_refused() -> None:
    model = tiny_model("Mistral", sliding_window=24)
    with pytest.raises(ValueError, match=r"no full-attention layer to compress .*sliding_attention.*DynamicCache"):
        CompressedCache.for_model(model)
    assert CompressedCache.for_model(tiny_model("Mistral", sliding_window=None), "exact").get_seq_length() == 0


def test_latent_attention_is_refused() -> None:
    config = transformers.DeepseekV3Config(**(SIZES | {"num_key_value_heads": 4, "n_routed_experts": 8}))
    with torch.device("meta"):
        model = transformers.DeepseekV3ForCausalLM(config)
    with pytest.raises(ValueError, match=r"DeepseekV3ForCausalLM caches a latent.*MLA.*DynamicCache"):
        CompressedCache.for_model(model)


def test_encoder_decoders_and_other_things_are_refused() -> None:
    config = transformers.T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=30)
    with pytest.raises(ValueError, match="T5ForConditionalGeneration is an encoder-decoder"):
        CompressedCache.for_model(transformers.T5ForConditionalGeneration(config))
    with pytest.raises(ValueError, match="model must be a transformers model, got Linear"):
        CompressedCache.for_model(torch.nn.Linear(2, 2))


def test_config_is_not_changed_but_for_its_attention() -> None:
    """T35: two models may share a config, which holds what the user put in it."""
    model = tiny_model()
    twin = transformers.LlamaForCausalLM(model.config).eval()
    before = model.config.to_dict()
    for m in (model, twin):
        cache = CompressedCache.for_model(m, "kivi-2")
        greedy(m, random_prompt(1, 70), cache)
    assert model.config.to_dict() == before
