"""Conversion by Palu: at full rank nothing changes, for every architecture; models and settings that do not fit."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvsketch[hf]'")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'kvsketch[hf]'")

from kvsketch.adapters.palu import PaluCache, PaluSettings, convert  # noqa: E402
from kvsketch.adapters.palu_models import attention_layers  # noqa: E402
from kvsketch.adapters.transformers_cache import CompressedCache  # noqa: E402
from kvsketch.tests.palu_models import CHANGES, converted, palu_model, plain  # noqa: E402
from kvsketch.tests.tiny_models import greedy, left_padded, random_prompt, tiny_model  # noqa: E402

#: Largest difference of float32 logits of size about 10 that come by other products.
ROUNDING = 1e-4


@torch.no_grad()
def logits(model: Any, ids: Any, mask: Any = None) -> Any:
    return model(ids, attention_mask=mask).logits


@pytest.mark.parametrize("first_tokens", [0, 2])
@pytest.mark.parametrize("granularity", ["joint", "head"])
@pytest.mark.parametrize("name", CHANGES)
def test_full_rank_is_the_dense_model(name: str, granularity: str, first_tokens: int) -> None:
    ids, mask = left_padded([50, 31])
    dense = palu_model(name)
    model = converted(name, granularity=granularity, first_tokens=first_tokens)
    seen = mask.bool()
    assert (logits(model, ids, mask) - logits(dense, ids, mask))[seen].abs().max() < ROUNDING
    expected = greedy(dense, ids, attention_mask=mask, new=40)
    assert torch.equal(greedy(model, ids, PaluCache.for_model(model), attention_mask=mask, new=40), expected)
    # With transformers' own cache, or none, the model works as before.
    assert torch.equal(greedy(model, ids, attention_mask=mask, new=40), expected)
    assert torch.equal(greedy(model, ids, attention_mask=mask, new=8, use_cache=False), expected[:, : ids.shape[1] + 8])


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_rotation_folds_and_granularity_change_a_cut_model_by_rounding_only(name: str) -> None:
    """Per head the up factors are folded away; the same factors unfolded, as for exact first tokens, give the same."""
    ids = random_prompt(2, 40)
    plainly = converted(name, 0.5, granularity="head", first_tokens=0)
    rotated = converted(name, 0.5, granularity="head", first_tokens=0, rotate=True)
    assert plainly.palu.plans[0].fold_values
    assert plainly.palu.plans[0].fold_keys == (name == "GPT2")
    given = logits(plainly, ids)
    assert (logits(rotated, ids) - given).abs().max() < ROUNDING
    assert (given - logits(palu_model(name), ids)).abs().max() > 0.1
    unfolded = converted(name, 0.5, granularity="head", first_tokens=1)
    with torch.no_grad():
        for module in unfolded.palu.attention_modules(unfolded):
            module.first_tokens = 0
    assert (logits(unfolded, ids) - given).abs().max() < ROUNDING


def test_exact_first_tokens_have_their_true_keys_and_values() -> None:
    """When all tokens are first ones, any rank gives the dense model; the next token's keys are not exact any more."""
    ids, mask = left_padded([12, 7])
    dense = palu_model("Qwen3")
    model = converted("Qwen3", 0.25, first_tokens=12)
    difference = (logits(model, ids, mask) - logits(dense, ids, mask))[mask.bool()]
    assert difference.abs().max() < ROUNDING
    longer = random_prompt(1, 16)
    assert (logits(model, longer) - logits(dense, longer))[:, 15].abs().max() > 0.01


@pytest.mark.parametrize("rope", [{"rope_type": "yarn", "factor": 4.0}, {"rope_type": "linear", "factor": 2.0}])
def test_kinds_of_rope_are_the_models_own(rope: dict[str, Any]) -> None:
    changes = {"rope_parameters": rope | {"rope_theta": 500.0, "original_max_position_embeddings": 256}}
    changes["rope_parameters"].update({"original_max_position_embeddings": 256} if rope["rope_type"] == "yarn" else {})
    ids = random_prompt(1, 60)
    expected = greedy(palu_model("Llama", **changes), ids, new=40)
    model = converted("Llama", model_changes=changes)
    assert torch.equal(greedy(model, ids, PaluCache.for_model(model), new=40), expected)


def test_a_cut_model_generates_the_same_by_its_own_cache_and_a_dense_one() -> None:
    ids, mask = left_padded([70, 31])
    model = converted("Qwen2", 0.5, granularity="head")
    expected = greedy(model, ids, attention_mask=mask, new=40)
    assert torch.equal(greedy(model, ids, PaluCache.for_model(model), attention_mask=mask, new=40), expected)
    compressed = CompressedCache.for_model(model, "exact")
    assert torch.equal(greedy(model, ids, compressed, attention_mask=mask, new=40), expected)


def test_weights_are_replaced_and_counted() -> None:
    """keep = .5 of two kv heads of 16 in 64 inputs: rank 16 a side, so values are folded (16 <= 16 * 64 / 48).

    Exact first tokens need the original projections, and the values' up factor.
    """
    for first_tokens, more in ((0, 0), (1, 32 * 16 + 2 * 64 * 32)):
        model = converted("Llama", 0.5, first_tokens=first_tokens)
        layer = 64 * 64 + (64 * 16 + 32 * 16) + 64 * 16 + 64 * 64 + more
        assert model.palu.nbytes_before == 2 * 4 * 64 * (64 + 32 + 32 + 64)
        assert model.palu.nbytes_after(model) == 2 * 4 * layer
        assert model.palu.kept(model) == 0.5
        names = {name.split(".")[0] for name in model.model.layers[0].self_attn.state_dict()}
        assert ("k_proj" in names) == bool(first_tokens)


def test_only_full_attention_layers_are_converted() -> None:
    changes = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True}
    changes |= {"sliding_window": 24}
    ids = random_prompt(1, 60)
    expected = greedy(palu_model("Qwen2", **changes), ids, new=20)
    model = converted("Qwen2", model_changes=changes)
    assert [plan.layer for plan in model.palu.plans] == [1]
    assert torch.equal(greedy(model, ids, PaluCache.for_model(model), new=20), expected)


def test_gradients_reach_the_down_factors() -> None:
    model = converted("Llama", 0.5)
    ids = random_prompt(1, 20)
    model(ids, labels=ids, use_cache=False).loss.backward()
    for module in model.palu.attention_modules(model):
        assert float(module.k_down.weight.grad.abs().max()) > 0


UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    ("Gemma2", {"head_dim": 16}, "Gemma2ForCausalLM, which Palu does not convert; it converts LlamaForCausalLM"),
    ("Mistral", {"sliding_window": 64}, "model.config.sliding_window = None"),
]


@pytest.mark.parametrize(("name", "changes", "message"), UNSUPPORTED)
def test_other_models_are_refused_with_what_is_supported(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention_layers(tiny_model(name, **changes))


def test_latent_attention_is_refused() -> None:
    config = transformers.DeepseekV3Config(
        **{"vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1},
        **{"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16},
        **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 1},
    )
    with pytest.raises(ValueError, match="caches a latent"):
        attention_layers(transformers.DeepseekV3ForCausalLM(config))


def test_tied_quantized_and_converted_projections_are_refused() -> None:
    model = palu_model("Llama")
    model.model.layers[1].self_attn.v_proj = model.model.layers[0].self_attn.v_proj
    with pytest.raises(ValueError, match="the v projection of layer 1 is tied to the v projection of layer 0"):
        convert(model, settings=plain())
    model = palu_model("Llama")
    model.model.layers[1].self_attn.k_proj = torch.nn.Sequential(model.model.layers[1].self_attn.k_proj)
    with pytest.raises(ValueError, match="the k projection of layer 1 is a Sequential, quantized or wrapped"):
        convert(model, settings=plain())
    with pytest.raises(ValueError, match="converted by Palu already"):
        convert(converted("Llama"), settings=plain())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keep": 0}, "keep must be above 0"),
        ({"keep": 1.01}, "keep must be above 0"),
        ({"granularity": "group:0"}, "granularity must be 'joint', 'head' or 'group:N'"),
        ({"ranks": "even"}, "ranks must be one of"),
        ({"factors": "cholesky"}, "factors must be one of"),
        ({"latent_bits": 5}, "latent_bits must be None or one of"),
        ({"latent_group": 32}, "needs latent_bits"),
        ({"latent_bits": 3, "latent_group": 4}, "latent_group must be >= 8"),
    ],
)
def test_settings_that_make_no_sense(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PaluSettings(**changes)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (plain(granularity="group:3"), "'group:3' does not divide the 2 key/value heads of layer 0"),
        (plain(0.1), "less than a first block"),
        (PaluSettings(), "need a calibration"),
        (plain(ranks="fisher"), "need a calibration"),
    ],
)
def test_settings_that_do_not_fit_the_model_leave_it_as_it_was(settings: PaluSettings, message: str) -> None:
    model = palu_model("Llama")
    with pytest.raises(ValueError, match=message):
        convert(model, settings=settings)
    assert len(attention_layers(model)) == 2


def test_weights_that_are_not_finite_are_named() -> None:
    model = palu_model("Llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="the key projection of layer 1 cannot be factored: weight holds NaN"):
        convert(model, settings=plain())
