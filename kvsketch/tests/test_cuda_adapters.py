"""``generate`` with a compressed cache of a model on a CUDA device, which torch and CuPy both pretend here.

The oracle is the same model on the CPU, whose engine has tests of its own.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvsketch[hf]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'kvsketch[hf]'")

from transformers import DynamicCache  # noqa: E402

from kvsketch.adapters.transformers_cache import CompressedCache  # noqa: E402
from kvsketch.tests.cuda_host.devices import counts  # noqa: E402
from kvsketch.tests.cuda_host.fixtures import needs_harness  # noqa: E402
from kvsketch.tests.cuda_torch_fixtures import cuda as cuda  # noqa: E402
from kvsketch.tests.cuda_torch_fixtures import host  # noqa: E402
from kvsketch.tests.cuda_torch_fixtures import plain_attention as plain_attention  # noqa: E402
from kvsketch.tests.tiny_models import greedy, left_padded, random_prompt, tiny_model  # noqa: E402

pytestmark = [needs_harness, pytest.mark.usefixtures("plain_attention")]

METHODS = ["kivi-2", "qjl-256"]


def pages(cache: CompressedCache, layer: int, row: int) -> np.ndarray:
    """The encoded pages of a row, all heads."""
    view = cache.compressed[layer].store.view()
    return host(view.pages)[row, :, : int(view.page_counts[row])]


def assert_same_pages(there: CompressedCache, here: CompressedCache, prompt_pages: list[int]) -> None:
    """Assert that pages of the prompt are the same, and those of later tokens but for what attention rounds to."""
    for layer in range(len(here.compressed)):
        for row, count in enumerate(prompt_pages):
            mine, theirs = pages(there, layer, row), pages(here, layer, row)
            assert mine.shape == theirs.shape
            assert mine.shape[1] > count
            np.testing.assert_array_equal(mine[:, :count], theirs[:, :count])
            # The first layer's keys depend on tokens alone.
            assert (mine == theirs).mean() >= (1 if layer == 0 else 0.99)


def logits_of_steps(model: Any, cache: CompressedCache, ids: Any, mask: Any, tokens: Any) -> np.ndarray:
    """Logits of a prompt and then of `tokens`, one a row and step."""
    device, found = model.device, []
    mask = mask.to(device)
    with torch.no_grad():
        found.append(model(ids.to(device), attention_mask=mask, cache=cache).logits[:, -1])
        for column in tokens.T:
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            found.append(model(column[:, None].to(device), attention_mask=mask, cache=cache).logits[:, -1])
    return np.stack([x.cpu().numpy() for x in found])


@pytest.mark.parametrize("method", METHODS)
def test_generation_on_a_device(method: str, cuda: Any) -> None:
    """A batch with padding, until tokens that were generated are encoded too."""
    ids, mask = left_padded([72, 61])
    model = tiny_model()
    here = CompressedCache.for_model(model, method, residual_length=32, sink_tokens=4)
    expected = greedy(model, ids, here, new=36, attention_mask=mask)
    own = CompressedCache.for_model(model, method, residual_length=32, sink_tokens=4)
    logits = logits_of_steps(model, own, ids, mask, expected[:, 72:77])

    model.to("cuda")
    there = CompressedCache.for_model(model, method, residual_length=32, sink_tokens=4)
    found = greedy(model, ids.to("cuda"), there, new=36, attention_mask=mask.to("cuda"))
    assert torch.equal(found.cpu(), expected)
    assert_same_pages(there, here, [1, 0])
    assert type(there.compressed[0].store.view().window_k) is cuda.ndarray
    total = there.report()["total"]
    assert set(total["engines"].values()) == {"cuda_raw"}
    assert total["kernels"] == {"attention.attend": "mma"}
    assert total["nbytes"] == here.report()["total"]["nbytes"]
    own = CompressedCache.for_model(model, method, residual_length=32, sink_tokens=4)
    np.testing.assert_allclose(
        logits_of_steps(model, own, ids, mask, expected[:, 72:77]), logits, atol=2e-3 * np.abs(logits).max()
    )


def test_beams_on_a_device(cuda: Any) -> None:
    ids, mask = left_padded([70, 50])
    model = tiny_model()
    options = {"num_beams": 2, "new": 6}
    expected = greedy(
        model, ids, CompressedCache.for_model(model, "kivi-2", residual_length=32), attention_mask=mask, **options
    )
    model.to("cuda")
    cache = CompressedCache.for_model(model, "kivi-2", residual_length=32)
    found = greedy(model, ids.to("cuda"), cache, attention_mask=mask.to("cuda"), **options)
    assert torch.equal(found.cpu(), expected)


@torch.no_grad()
def test_rows_and_lengths_change_on_a_device_as_on_the_host(cuda: Any, tmp_path: Path) -> None:
    """Reordered, repeated, selected, cropped, copied, saved and loaded: the same bytes and the same next logits."""
    ids, mask = left_padded([72, 61])
    caches, logits = [], []
    for place in ("cpu", "cuda"):
        model = tiny_model().to(place)
        cache = CompressedCache.for_model(model, "kivi-2", residual_length=32)
        model(ids.to(place), attention_mask=mask.to(place), cache=cache)
        cache.reorder_cache(torch.tensor([1, 0], device=place))
        cache.batch_repeat_interleave(2)
        cache.crop(-3)
        cache.batch_select_indices(torch.tensor([3, 0], device=place))
        cache.save(tmp_path / place)
        loaded = CompressedCache.load(model, tmp_path / place)
        step = torch.tensor([[5], [6]], device=place)
        longer = torch.cat([mask[:, :-3], mask[:, -1:]], 1).to(place)
        for one in (copy.deepcopy(cache), cache, loaded):
            logits.append(model(step, attention_mask=longer, cache=one).logits.cpu().numpy())
            caches.append(one)
        # Written on either side, read on the other.
        other = CompressedCache.load(tiny_model(), tmp_path / place)
        assert {type(layer.store.view().pages) for layer in other.compressed} == {np.ndarray}
    assert (tmp_path / "cpu").read_bytes() == (tmp_path / "cuda").read_bytes()
    for one in logits[1:]:
        np.testing.assert_allclose(one, logits[0], atol=2e-3 * np.abs(logits[0]).max())
    for one in caches[1:]:
        for layer in range(2):
            for row in range(2):
                np.testing.assert_array_equal(pages(one, layer, row), pages(caches[0], layer, row))


@torch.no_grad()
def test_layers_of_transformers_are_saved_from_a_device(cuda: Any, tmp_path: Path) -> None:
    """A sliding window beside full attention."""
    kinds: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"]}
    model = tiny_model("Qwen2", sliding_window=16, use_sliding_window=True, **kinds).to("cuda")
    ids = random_prompt(1, 40)
    cache = CompressedCache.for_model(model, "kivi-2", residual_length=32)
    model(ids.to("cuda"), cache=cache)
    cache.save(tmp_path / "cache")
    loaded = CompressedCache.load(model, tmp_path / "cache")
    assert loaded.layers[0].keys.device.type == "cuda"
    step = torch.tensor([[5]], device="cuda")
    assert torch.equal(*(model(step, cache=one).logits.cpu() for one in (cache, loaded)))


@torch.no_grad()
def test_a_dense_cache_of_a_device_is_compressed_there(cuda: Any) -> None:
    model = tiny_model().to("cuda")
    ids, mask = (x.to("cuda") for x in left_padded([100, 61]))
    dense = DynamicCache(config=model.config)
    model(ids, attention_mask=mask, cache=dense)
    taken = CompressedCache.from_dense(model, dense, "kivi-2", attention_mask=mask, residual_length=32)
    own = CompressedCache.for_model(model, "kivi-2", residual_length=32)
    model(ids, attention_mask=mask, cache=own)
    for row in range(2):
        np.testing.assert_array_equal(pages(taken, 1, row), pages(own, 1, row))


@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_layers_do_not_wait_for_a_device(padded: bool, cuda: Any) -> None:
    """A step that encodes nothing waits for its mask, where it has one, as transformers does; no layer waits by itself.

    A layer sends counts of tokens alone.
    """
    model = tiny_model().to("cuda")
    cache = CompressedCache.for_model(model, "kivi-2", residual_length=32, checked=False)
    ids, mask = (x.to("cuda") for x in left_padded([70, 60]))
    for new in (ids, ids[:, :1], ids[:, :1]):
        counts.reset()
        model(new, attention_mask=mask if padded else None, cache=cache)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    waits = [place for place in counts.places if not place.startswith("array() at ")]
    assert {re.sub(r".* at |:.*", "", place) for place in waits} == (
        {"transformers/masking_utils.py", "adapters/padding.py"} if padded else set()
    )
    assert counts.synchronisations == (2 if padded else 0)
    assert counts.uploads <= 2 * (2 if padded else 1)


def test_errors_of_a_model_on_a_device(cuda: Any) -> None:
    model = tiny_model()
    ids = random_prompt(1, 40)
    cache = CompressedCache.for_model(model, "kivi-2")
    with torch.no_grad():
        model(ids, cache=cache)
        model.to("cuda")
        with pytest.raises(ValueError, match="layer 0 holds tokens on cpu, but new ones are on cuda:0; move the model"):
            model(ids.to("cuda"), cache=cache)
        other = CompressedCache.for_model(model, "kivi-2", engine="numba_cpu")
        model(ids.to("cuda"), cache=other)
        with pytest.raises(ValueError, match="engine='numba_cpu' does not run on cupy arrays"):
            model(ids[:, :1].to("cuda"), cache=other)
        model.model.layers[1].self_attn.k_proj.weight[0, 0] = torch.nan
        fresh = CompressedCache.for_model(model, "kivi-2", checked=True)
        with pytest.raises(ValueError, match="layer 1: keys"):
            model(ids.to("cuda"), cache=fresh)
        assert fresh.get_seq_length() == 0
