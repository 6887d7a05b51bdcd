"""A CompressedCache as an object: reports, crops, files, conversions, and what it refuses."""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvsketch[hf]'")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'kvsketch[hf]'")

import numpy as np  # noqa: E402

from kvsketch.adapters import attention_function, transformers_cache  # noqa: E402
from kvsketch.adapters.transformers_cache import CompressedCache  # noqa: E402
from kvsketch.tests.tiny_models import SIZES, greedy, left_padded, random_prompt, tiny_model  # noqa: E402


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


def prefilled(model: Any, method: str = "kivi-2", tokens: int = 133, **options: Any) -> CompressedCache:
    cache = CompressedCache.for_model(model, method, **options)
    with torch.no_grad():
        model(random_prompt(1, tokens), cache=cache)
    return cache


def assert_same_contents(ours: CompressedCache, expected: CompressedCache) -> None:
    assert ours.get_seq_length() == expected.get_seq_length()
    for x, y in zip(ours.compressed, expected.compressed, strict=True):
        assert x.store.lengths.tolist() == y.store.lengths.tolist()
        assert x.store.page_counts.tolist() == y.store.page_counts.tolist()
        for row in range(x.store.batch):
            for a, b in zip(x.store.decode(row), y.store.decode(row), strict=True):
                np.testing.assert_array_equal(a, b)


# -- report -----------------------------------------------------------------------------------------------------------


def test_report_counts_live_buffers(model: Any) -> None:
    """T26: bytes from the arrays that are there; 8 kivi-2 pages take their records, the rest its numbers."""
    cache = prefilled(model, tokens=300)
    cache.compressed[0].store.flush()
    cache.compressed[1].store.flush()
    report = cache.report()
    assert report["method"] == "kivi-2"
    assert [entry["layer"] for entry in report["layers"]] == [0, 1]
    heads, width, pages = 2, 16, 8
    exact = 300 - 32 * pages
    record = cache.compressed[0].store.view().layout.record_bytes
    layer_nbytes = heads * (pages * record + exact * 2 * width * 4)
    total = report["total"]
    assert total["nbytes"] == cache.nbytes == 2 * layer_nbytes
    assert total["tokens"] == 300
    assert total["exact_tokens"] == exact
    assert total["encoded_tokens"] == 32 * pages
    assert total["dense_nbytes_16"] == 2 * 2 * heads * 300 * 2 * width
    assert total["dense_nbytes_model"] == 2 * total["dense_nbytes_16"]
    assert total["bits"] == pytest.approx(8 * layer_nbytes / (heads * 300 * 2 * width))
    assert total["allocated_nbytes"] >= total["nbytes"]
    assert total["engines"]["attention.attend"] == "numba_cpu"


def test_report_of_an_empty_cache(model: Any) -> None:
    total = CompressedCache.for_model(model, "qjl-256").report()["total"]
    assert total["nbytes"] == total["tokens"] == 0
    assert total["bits"] == 0.0


def test_tables_are_counted_once(model: Any) -> None:
    """Both layers share one projection of 256 by 16 float32 numbers."""
    cache = prefilled(model, "qjl-256")
    report = cache.report()
    assert report["total"]["table_nbytes"] == 4 * 256 * 16
    assert report["total"]["nbytes"] == sum(entry["nbytes"] for entry in report["layers"])


# -- crop, rows -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [20, 36, 60, 133])
@pytest.mark.parametrize("drop", [1, 7, 19])
def test_cropped_cache_never_saw_what_was_dropped(model: Any, tokens: int, drop: int) -> None:
    ids = random_prompt(1, tokens)
    cache = prefilled(model, tokens=tokens)
    cache.crop(-drop)
    fresh = CompressedCache.for_model(model, "kivi-2")
    with torch.no_grad():
        model(ids[:, :-drop], cache=fresh)
        following = random_prompt(1, 40, seed=6)
        ours, expected = model(following, cache=cache).logits, model(following, cache=fresh).logits
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    assert cache.get_seq_length() == fresh.get_seq_length()


def test_crop_into_codes_is_refused_and_changes_nothing(model: Any) -> None:
    cache = prefilled(model, tokens=200)
    expected = prefilled(model, tokens=200)
    with pytest.raises(ValueError, match="crop to 60 would drop 140 tokens"):
        cache.crop(-140)
    with pytest.raises(ValueError, match="crop takes minus the tokens to drop, got 5; give a negative number"):
        cache.crop(5)
    cache.crop(0)
    assert_same_contents(cache, expected)
    cache.crop(-200)
    assert cache.get_seq_length() == 0
    assert torch.equal(greedy(model, random_prompt(3, 50), cache)[:, :50], random_prompt(3, 50))


def test_rows_are_selected_repeated_and_reordered(model: Any) -> None:
    ids, mask = left_padded([133, 60, 90])
    cache = CompressedCache.for_model(model, "kivi-2")
    with torch.no_grad():
        model(ids, attention_mask=mask, cache=cache)
    rows = [cache.compressed[0].store.decode(row)[0] for row in range(3)]
    cache.batch_select_indices(torch.tensor([True, False, True]))
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 0, 1, 2]))
    assert cache.padding.valid.sum(1).tolist() == [90, 133, 133, 90]
    for row, source in enumerate([2, 0, 0, 2]):
        np.testing.assert_array_equal(cache.compressed[0].store.decode(row)[0], rows[source])
    with torch.no_grad():
        later = torch.cat([mask[[2, 0, 0, 2]], torch.ones(4, 1, dtype=torch.int64)], 1)
        model(random_prompt(4, 1), attention_mask=later, cache=cache)
    decoded = [cache.compressed[1].store.decode(row)[0][:, -1] for row in (1, 2)]
    assert np.abs(decoded[0] - decoded[1]).max() > 0


# -- conversion and files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [20, 64, 65, 200])
@pytest.mark.parametrize("method", ["kivi-2", "qjl-paper"])
def test_from_dense_is_what_a_first_forward_leaves(model: Any, tokens: int, method: str) -> None:
    dense = transformers.DynamicCache()
    ids = random_prompt(1, tokens)
    with torch.no_grad():
        model(ids, cache=dense)
    cache = CompressedCache.from_dense(model, dense, method, residual_length=32)
    expected = prefilled(model, method, tokens, residual_length=32)
    assert_same_contents(cache, expected)
    assert dense.get_seq_length() == tokens
    step = torch.cat([ids, random_prompt(1, 3, seed=4)], 1)
    assert torch.equal(greedy(model, step, cache), greedy(model, step, expected))


def test_from_dense_with_padding_and_with_sliding_layers(model: Any) -> None:
    ids, mask = left_padded([133, 60])
    dense = transformers.DynamicCache()
    cache = CompressedCache.for_model(model, "kivi-2")
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        model(ids, attention_mask=mask, position_ids=positions, cache=dense)
        model(ids, attention_mask=mask, position_ids=positions, cache=cache)
    ours = CompressedCache.from_dense(model, dense, "kivi-2", attention_mask=mask)
    assert ours.compressed[0].store.lengths.tolist() == [133, 60]
    assert torch.equal(ours.padding.valid, cache.padding.valid)
    layers = ["sliding_attention", "full_attention"]
    sliding = tiny_model("Ministral", sliding_window=24, layer_types=layers, head_dim=16)
    ids = random_prompt(2, 133)
    for dense in (transformers.DynamicCache(), transformers.DynamicCache(config=sliding.config)):
        with torch.no_grad():
            sliding(ids, cache=dense)
        full = torch.cat([ids, random_prompt(2, 3)], 1)
        exact = CompressedCache.from_dense(sliding, dense, "exact")
        assert torch.equal(greedy(sliding, full, exact), greedy(sliding, full))


def test_from_dense_names_what_does_not_fit(model: Any) -> None:
    with pytest.raises(ValueError, match="dense_cache is empty"):
        CompressedCache.from_dense(model, transformers.DynamicCache(config=model.config))
    with pytest.raises(ValueError, match="dense_cache must be a transformers Cache of 2 layers"):
        CompressedCache.from_dense(model, transformers.DynamicCache())
    dense = transformers.DynamicCache()
    with torch.no_grad():
        model(random_prompt(1, 20), cache=dense)
    with pytest.raises(ValueError, match=r"attention_mask must have shape \(b, n\) = \(1, 20\), got \(1, 19\)"):
        CompressedCache.from_dense(model, dense, attention_mask=torch.ones(1, 19))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_cache_goes_on_where_it_was(tmp_path: Path, dtype: Any) -> None:
    layers = ["sliding_attention", "full_attention"]
    model = tiny_model("Ministral", sliding_window=24, layer_types=layers, head_dim=16, dtype=dtype)
    ids, mask = left_padded([133, 60])
    cache = CompressedCache.for_model(model, "kivi-4", residual_length=32)
    tokens = greedy(model, ids, cache, attention_mask=mask)
    cache.save(tmp_path / "cache.safetensors")
    loaded = CompressedCache.load(model, tmp_path / "cache.safetensors")
    assert_same_contents(loaded, cache)
    assert loaded.method == cache.method
    assert torch.equal(loaded.padding.valid, cache.padding.valid)
    more = torch.cat([tokens, random_prompt(2, 5)], 1)
    longer = torch.cat([mask, torch.ones(2, more.shape[1] - mask.shape[1], dtype=torch.int64)], 1)
    ours = greedy(model, more, loaded, attention_mask=longer)
    assert torch.equal(ours, greedy(model, more, cache, attention_mask=longer))


def test_loading_for_another_model_or_from_other_bytes_is_refused(model: Any, tmp_path: Path) -> None:
    """T42."""
    path = tmp_path / "cache.safetensors"
    prefilled(model, "qjl-paper").save(path)
    assert_same_contents(CompressedCache.load(model, path), prefilled(model, "qjl-paper"))
    with pytest.raises(ValueError, match="num_hidden_layers=2, this one has 3"):
        CompressedCache.load(tiny_model(num_hidden_layers=3), path)
    with pytest.raises(ValueError, match="num_key_value_heads=2, this one has 4"):
        CompressedCache.load(tiny_model(num_key_value_heads=4), path)
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(ValueError, match="damaged"):
        CompressedCache.load(model, path)


# -- examples, and attention that sdpa lacks ---------------------------------------------------------------------------


def test_example_of_the_docstring_runs() -> None:
    """T36."""
    failed, tried = doctest.testmod(transformers_cache)
    assert tried > 5
    assert failed == 0


def test_soft_capped_attention_in_tiles_is_that_of_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval().model.layers[0].self_attn
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 9, 16, generator=generator)
    k, v = torch.randn(2, 2, 14, 16, generator=generator), torch.randn(2, 2, 14, 24, generator=generator)
    sinks = torch.randn(4, generator=generator)
    scores = (q.double() @ k.double().repeat_interleave(2, 1).transpose(-1, -2)) / 4
    scores = (torch.tanh(scores / 3) * 3).masked_fill(~torch.ones(9, 14, dtype=torch.bool).tril(5), -torch.inf)
    weights = torch.cat([scores, sinks.double().reshape(1, 4, 1, 1).expand(2, 4, 9, 1)], -1).softmax(-1)[..., :-1]
    expected = (weights @ v.double().repeat_interleave(2, 1)).transpose(1, 2).float()
    for tile in (1 << 24, 1):
        monkeypatch.setattr(attention_function, "_TILE_SCORES", tile)
        out, _ = attention_function.dense_attention(module, q, k, v, None, scaling=0.25, softcap=3.0, s_aux=sinks)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
