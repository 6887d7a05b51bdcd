"""``generate`` on a compressed cache: every way of decoding that transformers offers gives the tokens it should.

The oracle of `exact` is transformers' own DynamicCache; of a lossy method the same method used one token at a time.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvsketch[hf]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'kvsketch[hf]'")

import numpy as np  # noqa: E402

from kvsketch.adapters.transformers_cache import CompressedCache  # noqa: E402
from kvsketch.tests.tiny_models import greedy, left_padded, random_prompt, tiny_model  # noqa: E402

#: Prompts below, at and above R = 32 and 2 R, so that some encode nothing and some encode pages (T37).
LENGTHS = [5, 32, 50, 133]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


def records(cache: CompressedCache, row: int) -> list[np.ndarray[Any, Any]]:
    """The encoded pages of a row, layer by layer."""
    views = [layer.store.view() for layer in cache.compressed]
    return [view.pages[row, :, : int(view.page_counts[row])].copy() for view in views]


@pytest.mark.parametrize("length", LENGTHS)
def test_exact_greedy_tokens_are_those_of_transformers(model: Any, length: int) -> None:
    ids = random_prompt(1, length)
    cache = CompressedCache.for_model(model, "exact")
    assert torch.equal(greedy(model, ids, cache, new=50), greedy(model, ids, new=50))
    assert cache.get_seq_length() == length + 49


def test_exact_tokens_of_a_left_padded_batch(model: Any) -> None:
    ids, mask = left_padded([133, 40, 7])
    cache = CompressedCache.for_model(model, "exact")
    ours = greedy(model, ids, cache, new=40, attention_mask=mask)
    assert torch.equal(ours, greedy(model, ids, new=40, attention_mask=mask))


@pytest.mark.parametrize("method", ["kivi-2", "qjl-512"])
def test_row_of_a_padded_batch_is_the_row_alone(model: Any, method: str) -> None:
    lengths = [133, 70, 33]
    ids, mask = left_padded(lengths)
    cache = CompressedCache.for_model(model, method)
    together = greedy(model, ids, cache, new=40, attention_mask=mask)
    for row, length in enumerate(lengths):
        single = CompressedCache.for_model(model, method)
        alone = greedy(model, ids[row : row + 1, -length:], single, new=40)
        assert torch.equal(together[row, -alone.shape[1] :], alone[0])
        for ours, expected in zip(records(cache, row), records(single, 0), strict=True):
            assert ours.shape[1] > 0
            np.testing.assert_array_equal(ours, expected)


def test_compression_changes_what_is_stored_not_how_long(model: Any) -> None:
    ids = random_prompt(1, 200)
    cache = CompressedCache.for_model(model, "kivi-2", residual_length=32)
    greedy(model, ids, cache, new=20)
    total = cache.report()["total"]
    assert total["tokens"] == 219
    assert total["exact_tokens"] <= 4 + 32 + 31
    assert total["nbytes"] < 0.45 * total["dense_nbytes_model"]


def test_sampling_with_one_seed_gives_the_tokens_of_transformers(model: Any) -> None:
    ids = random_prompt(2, 60)
    options: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 20, "new": 30}
    torch.manual_seed(5)
    expected = greedy(model, ids, **options)
    torch.manual_seed(5)
    ours = greedy(model, ids, CompressedCache.for_model(model, "exact"), **options)
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("chunk", [7, 64])
def test_chunked_prefill(model: Any, chunk: int) -> None:
    ids, mask = left_padded([133, 50])
    expected = greedy(model, ids, attention_mask=mask)
    cache = CompressedCache.for_model(model, "exact")
    assert torch.equal(greedy(model, ids, cache, attention_mask=mask, prefill_chunk_size=chunk), expected)
    lossy = CompressedCache.for_model(model, "kivi-2")
    greedy(model, ids, lossy, attention_mask=mask, prefill_chunk_size=chunk)
    assert lossy.get_seq_length() == 133 + 11
    assert [int(c) for c in lossy.compressed[0].store.page_counts] == [3, 0]


def test_many_turns_of_one_cache(model: Any) -> None:
    ids = random_prompt(1, 80)
    cache = CompressedCache.for_model(model, "exact")
    ours, expected = ids, ids
    for turn in range(3):
        question = random_prompt(1, 20 + turn, seed=9 + turn)
        ours = greedy(model, torch.cat([ours, question], 1), cache, new=8)
        expected = greedy(model, torch.cat([expected, question], 1), new=8)
        assert torch.equal(ours, expected)
        assert cache.get_seq_length() == ours.shape[1] - 1


@pytest.mark.parametrize("length", LENGTHS)
def test_beam_search(model: Any, length: int) -> None:
    ids, mask = left_padded([length, max(1, length - 4)])
    options = {"num_beams": 3, "attention_mask": mask, "new": 20}
    cache = CompressedCache.for_model(model, "exact")
    assert torch.equal(greedy(model, ids, cache, **options), greedy(model, ids, **options))


def test_beams_of_a_lossy_cache_equal_beams_of_its_decoded_rows(model: Any) -> None:
    """With beams that never differ in their past, three beams are three copies of one greedy row (T30)."""
    cache = CompressedCache.for_model(model, "kivi-2")
    ids = random_prompt(1, 133)
    model(ids, cache=cache)
    cache.batch_repeat_interleave(3)
    step = torch.tensor([[5], [6], [7]])
    for order in ([2, 2, 0], [1, 0, 2]):
        model(step, cache=cache)
        cache.reorder_cache(torch.tensor(order))
        step = step[order] + 10
    history = torch.tensor([[7, 17], [7, 17], [5, 15]])[[1, 0, 2]]
    for row in range(3):
        alone = CompressedCache.for_model(model, "kivi-2")
        model(ids, cache=alone)
        for token in history[row].tolist():
            model(torch.tensor([[token]]), cache=alone)
        for ours, single in zip(cache.compressed, alone.compressed, strict=True):
            for x, y in zip(ours.store.decode(row), single.store.decode(0), strict=True):
                np.testing.assert_allclose(x, y, atol=1e-4)


@pytest.mark.parametrize("method", ["exact", "kivi-2"])
def test_prompt_lookup_gives_the_greedy_tokens(model: Any, method: str) -> None:
    pattern = random_prompt(1, 12)
    ids = pattern.repeat(1, 11)
    expected = greedy(model, ids, CompressedCache.for_model(model, method), new=40)
    cache = CompressedCache.for_model(model, method)
    ours = greedy(model, ids, cache, new=40, prompt_lookup_num_tokens=5)
    # A lossy draft is verified against the cache as it was before the draft, up to 5 tokens earlier than one by one.
    if method == "exact":
        assert torch.equal(ours, expected)
        assert cache.get_seq_length() == ours.shape[1] - 1
    assert ours.shape == expected.shape


def test_assistant_model_gives_the_greedy_tokens(model: Any) -> None:
    assistant = tiny_model(seed=3, num_hidden_layers=1)
    ids = random_prompt(1, 133)
    ours = greedy(model, ids, CompressedCache.for_model(model, "exact"), new=30, assistant_model=assistant)
    assert torch.equal(ours, greedy(model, ids, new=30))


def test_several_sequences_of_one_prompt(model: Any) -> None:
    ids = random_prompt(1, 133)
    options = {"do_sample": True, "num_return_sequences": 3, "new": 20}
    torch.manual_seed(2)
    expected = greedy(model, ids, **options)
    torch.manual_seed(2)
    assert torch.equal(greedy(model, ids, CompressedCache.for_model(model, "exact"), **options), expected)


@pytest.mark.parametrize("length", LENGTHS)
def test_reset_and_reuse_with_another_batch_size(model: Any, length: int) -> None:
    cache = CompressedCache.for_model(model, "kivi-2")
    first = random_prompt(1, length)
    expected = greedy(model, first, cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.nbytes == 0
    ids, mask = left_padded([length, max(1, length // 2), length])
    greedy(model, ids, cache, attention_mask=mask)
    cache.reset()
    assert torch.equal(greedy(model, first, cache), expected)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_copies_of_a_prefilled_cache_go_their_own_ways(model: Any, duplicate: Any) -> None:
    ids = random_prompt(1, 133)
    prefix = CompressedCache.for_model(model, "kivi-2")
    with torch.no_grad():
        model(ids, cache=prefix)
    before = prefix.nbytes
    for seed in (11, 12):
        full = torch.cat([ids, random_prompt(1, 9, seed=seed)], 1)
        twin = duplicate(prefix)
        fresh = CompressedCache.for_model(model, "kivi-2")
        with torch.no_grad():
            model(ids, cache=fresh)
        assert torch.equal(greedy(model, full, twin), greedy(model, full, fresh))
        assert twin.compressed[0].owner is twin
    assert prefix.get_seq_length() == 133
    assert prefix.nbytes == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models(dtype: Any) -> None:
    half = tiny_model(dtype=dtype)
    ids = random_prompt(1, 133)
    cache = CompressedCache.for_model(half, "exact")
    with torch.no_grad():
        ours = half(ids, cache=cache).logits[:, -1]
        expected = half(ids).logits[:, -1]
        assert torch.equal(ours, expected)
        step = half(random_prompt(1, 1), cache=cache).logits[:, -1].float()
        dense = half(torch.cat([ids, random_prompt(1, 1)], 1)).logits[:, -1].float()
    # Rounding of a 2-layer model in 8 (11) bits: logits of size about 5 agree to a few units in their last place.
    tolerance = 0.15 if dtype is torch.bfloat16 else 0.02
    assert (step - dense).abs().max() < tolerance * dense.abs().max()
    report = cache.report()["total"]
    assert report["key_bits"] == 16
    lossy = CompressedCache.for_model(half, "kivi-2")
    greedy(half, ids, lossy, new=40)
    assert lossy.nbytes < 0.6 * lossy.report()["total"]["dense_nbytes_16"]


def test_exact_dtype_halves_what_exact_tokens_take(model: Any) -> None:
    ids = random_prompt(1, 60)
    cache = CompressedCache.for_model(model, "exact", exact_dtype=torch.float16, max_tokens=128)
    assert greedy(model, ids, cache, new=8).shape == (1, 68)
    assert cache.report()["total"]["bits"] == 16


def test_the_former_argument_name(model: Any) -> None:
    ids = random_prompt(1, 40)
    cache = CompressedCache.for_model(model, "exact")
    with warnings.catch_warnings():
        # transformers 5.24 renamed the argument to `cache` and says so; 5.23 knows the former name only.
        warnings.simplefilter("ignore", FutureWarning)
        ours = model.generate(ids, past_key_values=cache, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(ours, greedy(model, ids, new=8))
    assert cache.get_seq_length() == 47


def test_other_caches_of_the_same_model_go_on_working(model: Any) -> None:
    ids, mask = left_padded([60, 30])
    model.set_attn_implementation("sdpa")
    expected = greedy(model, ids, attention_mask=mask)
    CompressedCache.for_model(model, "kivi-2")
    assert torch.equal(greedy(model, ids, attention_mask=mask), expected)
    assert torch.equal(greedy(model, ids, attention_mask=mask, use_cache=False), expected)


def test_engines_agree(model: Any) -> None:
    ids = random_prompt(1, 133)
    caches = {name: CompressedCache.for_model(model, "kivi-2", engine=name) for name in ("reference", "numba_cpu")}
    tokens = [greedy(model, ids, cache) for cache in caches.values()]
    assert torch.equal(*tokens)
    for name, cache in caches.items():
        assert set(cache.report()["total"]["engines"].values()) == {name}
