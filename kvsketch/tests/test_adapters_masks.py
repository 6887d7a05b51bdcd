"""Padding and masks: attention through the compressed cache is torch's sdpa over what the cache decodes to (T46)."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvsketch[hf]'")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'kvsketch[hf]'")

from kvsketch.adapters.padding import Padding  # noqa: E402
from kvsketch.adapters.transformers_cache import CompressedCache  # noqa: E402
from kvsketch.tests.tiny_models import left_padded, random_prompt, tiny_model  # noqa: E402

METHODS = ["kivi-2", "keys=sketch:m=64,outliers=4,outlier_m=32;values=ints:bits=4"]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


def decoded_row(cache: CompressedCache, row: int) -> Any:
    """A dense cache of one row, holding what attention over the compressed one sees."""
    dense = transformers.DynamicCache()
    for index, layer in enumerate(cache.compressed):
        layer.store.flush()
        k, v = layer.store.decode(row)
        dense.update(torch.from_numpy(k)[None], torch.from_numpy(v)[None], index)
    return dense


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("new", [1, 5, 40])
def test_left_padded_batch_is_sdpa_on_the_decoded_cache(model: Any, method: str, new: int) -> None:
    lengths = [133, 20, 70]
    ids, mask = left_padded(lengths)
    cache = CompressedCache.for_model(model, method)
    later = random_prompt(3, new, seed=8)
    full_mask = torch.cat([mask, torch.ones_like(later)], 1)
    positions = (full_mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        model(ids, attention_mask=mask, position_ids=positions[:, :133], cache=cache)
        dense = [decoded_row(cache, row) for row in range(3)]
        ours = model(later, attention_mask=full_mask, position_ids=positions[:, 133:], cache=cache).logits
        for row, length in enumerate(lengths):
            place = torch.arange(length, length + new)[None]
            expected = model(later[row : row + 1], position_ids=place, cache=dense[row]).logits
            torch.testing.assert_close(ours[row : row + 1], expected, atol=1e-3, rtol=1e-3)


def test_dropping_the_mask_would_be_seen(model: Any) -> None:
    """The twin of the test above that must fail: without the mask function padding is attended to."""
    ids, mask = left_padded([133, 20])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = []
    for given in (mask, None):
        cache = CompressedCache.for_model(model, "kivi-2")
        with torch.no_grad():
            logits.append(model(ids, attention_mask=given, position_ids=positions, cache=cache).logits[1, -1])
    assert (logits[0] - logits[1]).abs().max() > 0.1


@pytest.mark.parametrize("method", ["exact", "kivi-2"])
def test_right_padding_and_holes(model: Any, method: str) -> None:
    ids = random_prompt(2, 80)
    mask = torch.ones_like(ids)
    mask[0, 60:] = 0
    mask[1, 10:15] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    step = random_prompt(2, 1, seed=4)
    cache = CompressedCache.for_model(model, method)
    full = torch.cat([mask, torch.ones(2, 1, dtype=torch.int64)], 1)
    with torch.no_grad():
        model(ids, attention_mask=mask, position_ids=positions, cache=cache)
        assert cache.compressed[0].store.lengths.tolist() == [60, 75]
        ours = model(step, attention_mask=full, position_ids=positions[:, -1:] + 1, cache=cache).logits
        for row in range(2):
            kept = mask[row].bool()
            alone = CompressedCache.for_model(model, method)
            model(ids[row : row + 1, kept], cache=alone)
            torch.testing.assert_close(ours[row : row + 1], model(step[row : row + 1], cache=alone).logits)


def test_mask_that_hides_more_than_padding(model: Any) -> None:
    """A mask of four axes hides tokens from single queries; booleans and additive floats mean the same."""
    ids, later = random_prompt(1, 70), random_prompt(1, 6, seed=3)
    visible = torch.ones(1, 1, 6, 76, dtype=torch.bool).tril(70)
    visible[..., 10:30] = False
    visible[:, :, 3, :50] = False
    additive = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    with torch.no_grad():
        dense = transformers.DynamicCache()
        model(ids, cache=dense)
        expected = model(later, attention_mask=visible, cache=dense).logits
        for mask in (visible, additive):
            cache = CompressedCache.for_model(model, "exact")
            model(ids, cache=cache)
            ours = model(later, attention_mask=mask, cache=cache).logits
            torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
            assert cache.compressed[0].store.lengths.tolist() == [76]


def test_mask_of_a_wrong_shape_is_named_and_nothing_is_stored(model: Any) -> None:
    cache = CompressedCache.for_model(model, "exact")
    with torch.no_grad():
        model(random_prompt(1, 40), cache=cache)
        with pytest.raises(ValueError, match=r"attention_mask must have shape .*\(1, 1, 2, 42\), got \(1, 1, 2, 41\)"):
            model(random_prompt(1, 2), attention_mask=torch.ones(1, 1, 2, 41, dtype=torch.bool), cache=cache)
        assert [layer.store.length for layer in cache.compressed] == [40, 40]
        assert model(random_prompt(1, 2), cache=cache).logits.shape[1] == 2


def read(padding: Padding, mask: Any, new: int, past: int, batch: int = 2) -> Any:
    return padding.read(mask, batch=batch, new=new, past=past)


def test_padding_reads_a_mask_once_a_forward() -> None:
    padding = Padding()
    prompt = torch.ones(2, 1, 4, 4, dtype=torch.bool).tril()
    prompt[1, :, :, :2] = False
    step = read(padding, prompt, 4, 0)
    assert step.mask is None
    assert step.valid.tolist() == [[True] * 4, [False, False, True, True]]
    assert read(padding, prompt, 4, 0) is step
    one = torch.tensor([[True] * 5, [False, False, True, True, True]])[:, None, None]
    assert read(padding, one, 1, 4) == (None, None)
    assert read(padding, one, 1, 4) == (None, None)
    hides = one.clone()
    hides[0, ..., 0] = False
    again = read(padding, torch.cat([hides, one[..., :1] | True], -1), 1, 5)
    assert again.valid is None
    assert again.mask.shape == (2, 1, 1, 6)
    assert padding.length == 6


def test_padding_follows_rows_and_crops() -> None:
    padding = Padding()
    mask = torch.ones(2, 1, 3, 3, dtype=torch.bool).tril()
    mask[1, :, :, 0] = False
    read(padding, mask, 3, 0)
    padding.select(torch.tensor([1, 1, 0]))
    assert padding.valid.tolist() == [[False, True, True]] * 2 + [[True] * 3]
    read(padding, None, 2, 3, batch=3)
    assert padding.valid.shape == (3, 5)
    padding.select(torch.tensor([False, False, True]))
    padding.crop(4)
    assert padding.valid is None
    with pytest.raises(RuntimeError, match=r"a layer holds 2 positions where the cache has seen 4; call reset\(\)"):
        read(padding, None, 1, 2, batch=1)
