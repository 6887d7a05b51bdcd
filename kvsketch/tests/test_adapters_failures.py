"""What a CompressedCache refuses, and what it leaves behind when a forward fails."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvsketch[hf]'")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'kvsketch[hf]'")

from kvsketch.adapters import attention_function  # noqa: E402
from kvsketch.adapters.transformers_cache import CompressedCache  # noqa: E402
from kvsketch.tests.tiny_models import greedy, random_prompt, tiny_model  # noqa: E402


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


def prefilled(model: Any, tokens: int) -> CompressedCache:
    cache = CompressedCache.for_model(model, "kivi-2")
    with torch.no_grad():
        model(random_prompt(1, tokens), cache=cache)
    return cache


@pytest.mark.parametrize("past", [0, 40])
def test_failed_forward_is_undone_in_the_layers_before(past: int) -> None:
    model = tiny_model()
    cache = CompressedCache.for_model(model, "kivi-2")
    following = random_prompt(1, 8, seed=7)
    with torch.no_grad():
        if past:
            model(random_prompt(1, past), cache=cache)
        projection = model.model.layers[1].self_attn.v_proj
        weight = projection.weight[3, 3].clone()
        projection.weight[3, 3] = float("nan")
        with pytest.raises(ValueError, match=r"layer 1.*values"):
            model(following, cache=cache)
        assert [layer.store.length for layer in cache.compressed] == [past, past]
        projection.weight[3, 3] = weight
        fresh = CompressedCache.for_model(model, "kivi-2")
        if past:
            model(random_prompt(1, past), cache=fresh)
        assert torch.equal(model(following, cache=cache).logits, model(following, cache=fresh).logits)


def test_forward_that_stops_between_layers_is_undone_at_the_next(model: Any) -> None:
    cache = prefilled(model, 40)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(interrupt)
    with torch.no_grad():
        with pytest.raises(KeyboardInterrupt):
            model(random_prompt(1, 3), cache=cache)
        hook.remove()
        with pytest.raises(RuntimeError, match="stopped half-way; the cache is back at its 40 positions"):
            model(random_prompt(1, 3), cache=cache)
        assert cache.padding.length == 40
        logits = model(random_prompt(1, 5), cache=cache).logits
        assert torch.equal(logits, model(random_prompt(1, 5), cache=prefilled(model, 40)).logits)


def test_what_cannot_be_undone_leaves_the_cache_broken_until_reset(model: Any) -> None:
    """150 tokens after 40: the first layer encodes all but 64 of what is due before the second one fails."""
    cache = prefilled(model, 40)

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    hook = model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(fail)
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="out of memory"):
            model(random_prompt(1, 150), cache=cache)
        hook.remove()
        assert cache.get_seq_length() == 190
        hook = model.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            model(random_prompt(1, 150), cache=cache)
        hook.remove()
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"could not be undone .*call reset\(\)"):
                model(random_prompt(1, 1), cache=cache)
        cache.reset()
        assert torch.equal(greedy(model, random_prompt(1, 20), cache)[:, :20], random_prompt(1, 20))


def test_update_without_our_attention_function_is_noticed(model: Any) -> None:
    cache = CompressedCache.for_model(model, "kivi-2")
    model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match=r"layer 0 never reached.*set_attn_implementation\('kvsketch'\)"):
        greedy(model, random_prompt(1, 20), cache)
    with pytest.raises(RuntimeError, match="set_attn_implementation"):
        cache.crop(-1)
    model.set_attn_implementation("kvsketch")
    cache.reset()
    assert greedy(model, random_prompt(1, 20), cache).shape == (1, 32)


def test_keys_changed_behind_the_cache_are_noticed(model: Any) -> None:
    """As a latent cache would: what reaches attention is not what the cache was given."""
    cache = CompressedCache.for_model(model, "kivi-2")
    kwargs: dict[str, Any] = {}
    k = torch.randn(1, 2, 5, 16)
    cache.update(k, k.clone(), 0, kwargs=kwargs)
    with pytest.raises(ValueError, match="changes keys or values between the cache and attention"):
        attention_function.compressed_attention(
            model.model.layers[0].self_attn, torch.randn(1, 4, 5, 16), k * 2, k, None, scaling=0.25, **kwargs
        )
    assert cache.get_seq_length() == 0


def test_handle_on_the_key_tensor_for_transformers_before_5_24(model: Any) -> None:
    ids = random_prompt(1, 50)
    expected, cache = prefilled(model, 50), CompressedCache.for_model(model, "kivi-2")
    update = transformers.Cache.update
    calls = []

    def update_without_kwargs(self: Any, keys: Any, values: Any, layer_idx: int, **_: Any) -> Any:
        calls.append(layer_idx)
        return update(self, keys, values, layer_idx)

    step = random_prompt(1, 2, seed=3)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(transformers.Cache, "update", update_without_kwargs)
        model(ids, cache=cache)
        ours = model(step, cache=cache).logits
    assert calls == [0, 1, 0, 1]
    with torch.no_grad():
        assert torch.equal(ours, model(step, cache=expected).logits)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output_attentions": True}, "output_attentions=True is not supported"),
        ({"is_causal": False}, "is_causal=False is not supported"),
        ({"position_bias": torch.zeros(1, 4, 3, 3)}, "position_bias is not supported"),
    ],
)
def test_what_attention_cannot_honour_is_refused(model: Any, options: dict[str, Any], message: str) -> None:
    cache = CompressedCache.for_model(model, "kivi-2")
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        model(random_prompt(1, 3), cache=cache, **options)
    with torch.no_grad():
        model(random_prompt(1, 3), cache=cache)
    assert cache.get_seq_length() == 3


def test_more_that_attention_refuses() -> None:
    model = tiny_model()
    ids = random_prompt(1, 3)
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    with pytest.raises(ValueError, match=r"model.config.output_attentions = False"):
        model(ids, cache=CompressedCache.for_model(model, "kivi-2"))
    model.config.output_attentions = False
    with pytest.raises(ValueError, match=r"inference only .*call model.eval\(\)"):
        model.train()(ids, cache=CompressedCache.for_model(model, "kivi-2"))
    with pytest.raises(ValueError, match="sliding window of 9 tokens, but the cache treats it as full"):
        attention_function.check_supported(model.eval().model.layers[0].self_attn, sliding_window=9)


def test_arguments_are_checked_when_the_cache_is_made(model: Any) -> None:
    with pytest.raises(ValueError, match=r"unknown method 'kivi-5'; known methods are exact, kivi-4"):
        CompressedCache.for_model(model, "kivi-5")
    with pytest.raises(ValueError, match="outliers=17 is more than the 16 channels of a head"):
        CompressedCache.for_model(model, "keys=sketch:m=64,outliers=17,outlier_m=8;values=exact")
    with pytest.raises(ValueError, match="residual_length must be >= 0, got -1"):
        CompressedCache.for_model(model, "kivi-2", residual_length=-1)
    with pytest.raises(ValueError, match="engine must be None or one of"):
        CompressedCache.for_model(model, "kivi-2", engine="fast")
    with pytest.raises((TypeError, ValueError), match="exact_dtype"):
        CompressedCache.for_model(model, "kivi-2", exact_dtype="int8")


def test_another_batch_size_needs_a_reset(model: Any) -> None:
    cache = prefilled(model, 40)
    with torch.no_grad(), pytest.raises(ValueError, match=r"layer 0: k must have shape \(1, 2, s, 16\).*reset"):
        model(random_prompt(2, 1), cache=cache)
    assert cache.get_seq_length() == 40


def test_unchecked_cache_takes_what_it_gets() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[3, 3] = float("nan")
        cache = CompressedCache.for_model(model, "kivi-2", checked=False)
        model(random_prompt(1, 100), cache=cache)
    assert cache.get_seq_length() == 100


def test_cache_does_not_keep_the_model_alive() -> None:
    model = tiny_model()
    cache = prefilled(model, 40)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    assert cache.get_seq_length() == 40


def test_nothing_is_read_from_a_dict_of_settings(model: Any) -> None:
    """T35: options are copied in, not changed."""
    options = {"residual_length": 64, "sink_tokens": 0}
    CompressedCache.for_model(model, "kivi-2", **options)
    assert options == {"residual_length": 64, "sink_tokens": 0}
