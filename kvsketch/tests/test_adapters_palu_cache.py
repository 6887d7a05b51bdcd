"""The cache of latents in ``generate``: batches, padding, beams, cropping, copies; its bytes and its errors."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvsketch[hf]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'kvsketch[hf]'")

from transformers import DynamicCache  # noqa: E402

from kvsketch.adapters.palu import PaluCache  # noqa: E402
from kvsketch.adapters.palu_store import LatentStore  # noqa: E402
from kvsketch.layout import page_layout  # noqa: E402
from kvsketch.tests.palu_models import CHANGES, converted, palu_model  # noqa: E402
from kvsketch.tests.tiny_models import greedy, left_padded, random_prompt  # noqa: E402


def cut_model(name: str = "Llama", **changes: Any) -> Any:
    return converted(name, 0.5, **changes)


@pytest.mark.parametrize("first_tokens", [0, 1])
@pytest.mark.parametrize("name", CHANGES)
def test_rows_of_a_padded_batch_are_those_rows_alone(name: str, first_tokens: int) -> None:
    """Also with quantized latents: what a row stores depends on no other row, nor on padding."""
    model = cut_model(name, granularity="head", first_tokens=first_tokens, latent_bits=4)
    lengths = [90, 41]
    ids, mask = left_padded(lengths)
    together = PaluCache.for_model(model)
    tokens = greedy(model, ids, together, attention_mask=mask, new=40)
    for row, length in enumerate(lengths):
        alone = PaluCache.for_model(model)
        expected = greedy(model, ids[row : row + 1, -length:], alone, new=40)
        assert torch.equal(tokens[row : row + 1, -expected.shape[1] :], expected)
        for one, both in zip(alone.compressed, together.compressed, strict=True):
            own, other = (layer.store for layer in (one, both))
            assert isinstance(own, LatentStore)
            assert isinstance(other, LatentStore)
            for a, b in zip(own.slices, other.slices, strict=True):
                for mine, theirs in zip(a.decode(0), b.decode(row), strict=True):
                    # Latents come from matrix products of other shapes: a code may be rounded the other way.
                    assert mine.shape == theirs.shape
                    assert np.abs(mine - theirs).mean() < 1e-3


@pytest.mark.parametrize("bits", [None, 3])
def test_bytes_are_the_formula(bits: int | None) -> None:
    """Pages of 32 tokens for what was due before the last step, exact latents behind, true first tokens, positions."""
    model = cut_model("Llama", first_tokens=2, latent_bits=bits)
    cache = PaluCache.for_model(model)
    greedy(model, random_prompt(1, 150), cache, new=30)
    tokens = 150 + 29
    store = cache.compressed[0].store
    layout = page_layout(store.settings.keys, store.settings.values, 16, 16)
    pages = (tokens - 1) // 32
    layer = pages * layout.record_bytes + (tokens - 32 * pages) * 2 * 16 * 4 + 2 * 2 * 2 * 16 * 4
    assert store.nbytes == layer
    assert cache.nbytes == 2 * layer + 4 * tokens
    report = cache.report()
    assert report["total"]["nbytes"] == cache.nbytes
    assert report["total"]["tokens"] == tokens
    assert report["total"]["bits"] == pytest.approx(8 * cache.nbytes / (2 * 2 * 2 * 16 * tokens))
    assert report["total"]["dense_nbytes_16"] == 2 * 2 * 2 * 2 * 16 * tokens
    assert report["total"]["table_nbytes"] == 2 * 4 * 16 * tokens
    assert set(report["total"]["engines"]) == {"pages.encode_keys", "pages.encode_values", "palu.attend"}
    assert report["layers"][0]["exact_tokens"] == tokens - 32 * pages
    for layer_ in cache.compressed:
        layer_.store.flush()
    assert cache.nbytes == model.palu.cache_nbytes(model, tokens)


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_quantized_latents_are_smaller_and_lose_less_with_more_bits(name: str) -> None:
    model = cut_model(name)
    ids = random_prompt(1, 200)
    results = {}
    for bits in (None, 8, 4, 2):
        cache = PaluCache.for_model(model, latent_bits=bits)
        with torch.no_grad():
            model(ids[:, :128], cache=cache)
            results[bits] = (torch.cat([model(x, cache=cache).logits for x in ids[:, 128:].split(8, 1)], 1), cache)
    errors = {bits: float((x - results[None][0]).abs().mean()) for bits, (x, _) in results.items()}
    sizes = {bits: cache.nbytes for bits, (_, cache) in results.items()}
    assert 0 < errors[8] < errors[4] < errors[2]
    assert sizes[2] < sizes[4] < sizes[8] < sizes[None]
    with torch.no_grad():
        dense = model(ids, use_cache=False).logits[:, 128:]
    assert (results[None][0] - dense).abs().max() < 1e-4


def test_beams_and_several_answers() -> None:
    model = cut_model("Qwen3")
    ids, mask = left_padded([50, 23])
    for options in ({"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}):
        options |= {"attention_mask": mask, "new": 30}
        expected = greedy(model, ids, **options)
        assert torch.equal(greedy(model, ids, PaluCache.for_model(model), **options), expected)


def test_prompt_lookup_crops_and_gives_the_same_tokens() -> None:
    model = cut_model("Llama", first_tokens=2)
    ids = random_prompt(1, 12).repeat(1, 6)
    expected = greedy(model, ids, new=40)
    cache = PaluCache.for_model(model)
    assert torch.equal(greedy(model, ids, cache, new=40, prompt_lookup_num_tokens=5), expected)
    # What is left after all crops is as long as what was never cropped.
    [rope] = cache.ropes.values()
    assert rope.positions.tolist() == [list(range(cache.get_seq_length()))]


def test_turns_copies_and_reset() -> None:
    model = cut_model("Qwen2", latent_bits=8)
    ids = random_prompt(1, 70)
    cache = PaluCache.for_model(model)
    tokens = greedy(model, ids, cache, new=20)
    more = torch.cat([tokens, random_prompt(1, 10, seed=4)], 1)
    twin = copy.deepcopy(cache)
    second = greedy(model, more, cache, new=20)
    assert torch.equal(greedy(model, more, twin, new=20), second)
    assert cache.get_seq_length() == second.shape[1] - 1
    cache.reset()
    assert cache.nbytes == 0
    assert torch.equal(greedy(model, ids, cache, new=20), tokens)


@torch.no_grad()
def test_rows_can_be_repeated_selected_and_reordered() -> None:
    model = cut_model("Llama", first_tokens=3)
    ids, mask = left_padded([40, 17])
    cache = PaluCache.for_model(model)
    model(ids, attention_mask=mask, cache=cache)
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 0, 1, 1]))
    cache.batch_select_indices(torch.tensor([0, 2]))
    own = PaluCache.for_model(model)
    model(ids[[1, 0]], attention_mask=mask[[1, 0]], cache=own)
    step = random_prompt(2, 1, seed=7)
    longer = torch.cat([mask[[1, 0]], torch.ones(2, 1, dtype=mask.dtype)], 1)
    got, expected = (model(step, attention_mask=longer, cache=c).logits for c in (cache, own))
    assert torch.equal(got, expected)
    assert cache.nbytes == own.nbytes


@torch.no_grad()
def test_crop_and_append_again_is_as_never_appended() -> None:
    model = cut_model("Llama", first_tokens=2)
    ids = random_prompt(1, 60)
    cache = PaluCache.for_model(model)
    model(ids, cache=cache)
    cache.crop(-59)
    assert cache.get_seq_length() == 1
    other = torch.cat([ids[:, :1], random_prompt(1, 20, seed=8)], 1)
    expected = model(other, use_cache=False).logits[:, 1:]
    assert (model(other[:, 1:], cache=cache).logits - expected).abs().max() < 1e-4


@torch.no_grad()
def test_positions_are_the_models_own() -> None:
    """Positions that a caller gives, with a gap, reach the rebuilt keys; a dense cache is the oracle."""
    model = cut_model("Llama")
    ids = random_prompt(1, 30)
    first, second = torch.arange(20)[None], torch.arange(100, 110)[None]
    results = []
    for cache in (PaluCache.for_model(model), DynamicCache(config=model.config)):
        model(ids[:, :20], position_ids=first, cache=cache)
        results.append(model(ids[:, 20:], position_ids=second, cache=cache).logits)
    assert (results[0] - results[1]).abs().max() < 1e-4


@torch.no_grad()
def test_a_failed_forward_leaves_the_cache_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = cut_model("Llama", latent_bits=4)
    ids = random_prompt(1, 80)
    cache, untouched = PaluCache.for_model(model), PaluCache.for_model(model)
    for one in (cache, untouched):
        model(ids[:, :70], cache=one)
    monkeypatch.setattr(cache.compressed[1], "_attend", None)
    with pytest.raises(TypeError):
        model(ids[:, 70:], cache=cache)
    monkeypatch.undo()
    assert cache.get_seq_length() == 70
    # Pages that were due are encoded by the failed forward too, as they would be by any next one.
    for one in (cache, untouched):
        for layer in one.compressed:
            layer.store.flush()
    assert cache.nbytes == untouched.nbytes
    got, expected = (model(ids[:, 70:], cache=one).logits for one in (cache, untouched))
    assert torch.equal(got, expected)


@torch.no_grad()
def test_numbers_that_are_not_finite_are_refused_with_their_layer() -> None:
    model = cut_model("Llama")
    model.model.layers[1].self_attn.k_down.weight[0, 0] = torch.nan
    cache = PaluCache.for_model(model)
    with pytest.raises(ValueError, match="layer 1, slice 0"):
        model(random_prompt(1, 8), cache=cache)
    assert cache.get_seq_length() == 0


def test_caches_and_models_that_do_not_belong_together() -> None:
    model, dense = cut_model(), palu_model("Llama")
    with pytest.raises(ValueError, match="LlamaForCausalLM is not converted by Palu"):
        PaluCache.for_model(dense)
    cache = PaluCache.for_model(model)
    with pytest.raises(ValueError, match="by a model that is not converted"):
        dense(random_prompt(1, 8), cache=cache)
    with pytest.raises(ValueError, match="cannot be made from a dense cache"):
        PaluCache.from_dense(model, None)
    with pytest.raises(ValueError, match="bits must be one of"):
        PaluCache.for_model(model, latent_bits=5)
    with pytest.raises(ValueError, match="needs latent_bits"):
        PaluCache.for_model(model, latent_bits=None, latent_group=32)


@torch.no_grad()
def test_what_a_cache_of_latents_cannot_do_is_said() -> None:
    model = cut_model()
    ids = random_prompt(1, 8)
    cache = PaluCache.for_model(model)
    with pytest.raises(ValueError, match="position_ids must be"):
        model(ids, position_ids=torch.full((1, 8), -1), cache=cache)
    with pytest.raises(ValueError, match="cannot be saved"):
        cache.save("somewhere")
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    with pytest.raises(ValueError, match="output_attentions"):
        model(ids, cache=cache)
