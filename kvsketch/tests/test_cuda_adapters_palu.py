"""``generate`` with a model converted by Palu on a CUDA device, which torch and CuPy both pretend here."""

from __future__ import annotations

import copy
import re
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvsketch[hf]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'kvsketch[hf]'")


from kvsketch.adapters.palu import PaluCache, convert  # noqa: E402
from kvsketch.numba_cpu._tiers import TIER  # noqa: E402
from kvsketch.tests.cuda_host.devices import counts  # noqa: E402
from kvsketch.tests.cuda_host.fixtures import needs_harness  # noqa: E402
from kvsketch.tests.cuda_host.torch_double import on_cuda  # noqa: E402
from kvsketch.tests.cuda_torch_fixtures import cuda as cuda  # noqa: E402
from kvsketch.tests.cuda_torch_fixtures import host  # noqa: E402
from kvsketch.tests.cuda_torch_fixtures import plain_attention as plain_attention  # noqa: E402
from kvsketch.tests.palu_models import converted, palu_model, plain  # noqa: E402
from kvsketch.tests.tiny_models import greedy, left_padded, random_prompt  # noqa: E402

pytestmark = [needs_harness, pytest.mark.usefixtures("plain_attention")]

#: Models with RoPE, with RoPE behind a norm of keys, and without RoPE; latents exact or not; first tokens kept or not.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama, 4 bits, first tokens": ("Llama", {"latent_bits": 4, "first_tokens": 2}),
    "Llama, exact, a slice a head": ("Llama", {"granularity": "head", "first_tokens": 0}),
    "Qwen3, 3 bits": ("Qwen3", {"latent_bits": 3, "first_tokens": 0}),
    "Qwen2, exact, first tokens": ("Qwen2", {"first_tokens": 1}),
    "GPT2, 4 bits": ("GPT2", {"latent_bits": 4, "first_tokens": 0}),
    "GPT2, exact, first tokens": ("GPT2", {"first_tokens": 1}),
}


def assert_close_latents(there: PaluCache, here: PaluCache) -> bool:
    """Assert that two caches hold the same tokens, their latents alike but for codes that rounding turned: none?"""
    same = True
    stores: list[list[Any]] = [[layer.store for layer in cache.compressed] for cache in (there, here)]
    for mine, theirs in zip(*stores, strict=True):
        for a, b in zip(mine.slices, theirs.slices, strict=True):
            np.testing.assert_array_equal(a.page_counts, b.page_counts)
            same = same and bool((host(a.view().pages) == b.view().pages).all())
            for row in range(b.batch):
                for x, y in zip(a.decode(row), b.decode(row), strict=True):
                    assert np.abs(host(x) - y).mean() < 1e-3
        if theirs.first_keys is not None:
            for name in ("first_keys", "first_values"):
                x, y = (getattr(one, name) for one in (mine, theirs))
                np.testing.assert_allclose(host(x), y, atol=1e-4)
    return same


@pytest.mark.parametrize("case", CASES)
def test_generation_on_a_device(case: str, cuda: Any) -> None:
    """A batch with padding, until tokens that were generated are encoded too; then a step's logits."""
    name, settings = CASES[case]
    model = converted(name, 0.5, **settings)
    ids, mask = left_padded([40, 29])
    caches, tokens, logits = [], [], []
    for place in ("cpu", "cuda"):
        model.to(place)
        cache = PaluCache.for_model(model)
        tokens.append(greedy(model, ids.to(place), cache, new=30, attention_mask=mask.to(place)).cpu())
        step, longer = tokens[0][:, -1:], torch.cat([mask, torch.ones(2, 30, dtype=mask.dtype)], 1)
        with torch.no_grad():
            found = model(step.to(place), attention_mask=longer.to(place), cache=cache).logits
        logits.append(found.cpu().numpy())
        caches.append(cache)
    assert torch.equal(*tokens)
    # A code that rounding turned moves a latent by a whole step.
    tolerance = 1e-3 if assert_close_latents(caches[1], caches[0]) else 1e-2
    np.testing.assert_allclose(logits[1], logits[0], atol=tolerance * np.abs(logits[0]).max())
    here, there = (cache.report()["total"] for cache in caches)
    assert set(there["engines"].values()) == {"cuda_raw"}
    op = "attention.attend" if case == "GPT2, 4 bits" else "palu.attend"
    assert (there["kernels"], here["kernels"]) == ({op: "mma"}, {op: TIER})
    for size in ("nbytes", "table_nbytes", "tokens", "key_bits"):
        assert there[size] == here[size]


@torch.no_grad()
def test_rows_and_lengths_change_on_a_device_as_on_the_host(cuda: Any) -> None:
    """Reordered, repeated, selected, cropped and copied: the same next logits."""
    ids, mask = left_padded([40, 17])
    logits = []
    for place in ("cpu", "cuda"):
        model = converted("Llama", 0.5, first_tokens=3, latent_bits=4).to(place)
        cache = PaluCache.for_model(model)
        model(ids.to(place), attention_mask=mask.to(place), cache=cache)
        cache.reorder_cache(torch.tensor([1, 0], device=place))
        cache.batch_repeat_interleave(2)
        cache.crop(-3)
        cache.batch_select_indices(torch.tensor([True, False, False, True], device=place))
        twin = copy.deepcopy(cache)
        longer = torch.cat([mask[[1, 0], :-3], mask[:, -2:]], 1).to(place)
        for one in (cache, twin):
            for token in (5, 6):
                step = torch.tensor([[token], [token + 2]], device=place)
                given = longer[:, : one.get_seq_length() + 1]
                logits.append(model(step, attention_mask=given, cache=one).logits.cpu().numpy())
        assert [rope.positions.device.type for rope in (*cache.ropes.values(), *twin.ropes.values())] == [place] * 2
    for i in range(4):
        np.testing.assert_allclose(logits[4 + i], logits[i], atol=3e-3 * np.abs(logits[i]).max())
        np.testing.assert_array_equal(logits[i], logits[i % 2])


def test_beams_on_a_device(cuda: Any) -> None:
    model = converted("Llama", 0.5)
    ids, mask = left_padded([40, 23])
    options = {"num_beams": 2, "new": 6}
    expected = greedy(model, ids, PaluCache.for_model(model), attention_mask=mask, **options)
    model.to("cuda")
    found = greedy(model, ids.to("cuda"), PaluCache.for_model(model), attention_mask=mask.to("cuda"), **options)
    assert torch.equal(found.cpu(), expected)


@torch.no_grad()
def test_a_model_is_converted_on_a_device(cuda: Any) -> None:
    for name in ("Llama", "GPT2"):
        here, there = palu_model(name), palu_model(name).to("cuda")
        for model in (here, there):
            convert(model, settings=plain(0.5, first_tokens=1))
        ours, expected = there.state_dict(), here.state_dict()
        assert ours.keys() == expected.keys()
        for key, tensor in expected.items():
            assert ours[key].device.type == "cuda"
            assert torch.equal(ours[key].cpu(), tensor), key


@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_layers_do_not_wait_for_a_device(padded: bool, cuda: Any) -> None:
    """A step that encodes nothing waits once for its positions, and for its mask where it has one."""
    model = converted("Llama", 0.5, first_tokens=1, latent_bits=4).to("cuda")
    cache = PaluCache.for_model(model, checked=False)
    ids, mask = (x.to("cuda") for x in left_padded([40, 29]))
    for new in (ids, ids[:, :1], ids[:, :1]):
        counts.reset()
        model(new, attention_mask=mask if padded else None, cache=cache)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    sends = re.compile(r"(array\(\)|a copy of the host|an index of the host) at ")
    waits = {re.sub(r".* at |:.*", "", place) for place in counts.places if not sends.match(place)}
    masked = {"transformers/masking_utils.py", "adapters/padding.py"} if padded else set()
    assert waits == {"adapters/palu_rope.py"} | masked
    assert counts.synchronisations == (3 if padded else 1)


@torch.no_grad()
def test_the_kernels_of_another_architecture_are_named() -> None:
    """Without tensor cores, and why."""
    ids = random_prompt(1, 40)
    for name, op in (("Llama", "palu.attend"), ("GPT2", "attention.attend")):
        with on_cuda(compute_capability="75"):
            model = converted(name, 0.5, latent_bits=4, first_tokens=0).to("cuda")
            cache = PaluCache.for_model(model)
            model(ids.to("cuda"), cache=cache)
            assert cache.report()["total"]["kernels"] == {}
            model(ids[:, :1].to("cuda"), cache=cache)
            told = cache.report()["total"]["kernels"]
            assert list(told) == [op]
            assert re.match(r"simt: .*(7\.5|75)", told[op])
            cache.reset()
            assert cache.report()["total"]["kernels"] == {}


@torch.no_grad()
def test_layers_may_lie_on_several_devices() -> None:
    """Each device has its positions, cosines and sines."""
    model = converted("Llama", 0.5, latent_bits=4)
    ids, step = random_prompt(1, 40), torch.tensor([[5]])
    here = PaluCache.for_model(model)
    expected = [model(new, cache=here).logits for new in (ids, step)]
    with on_cuda(count=2):
        model.to("cuda:0")
        model.model.layers[1].to("cuda:1")
        model.model.layers[1].register_forward_pre_hook(_move("cuda:1"), with_kwargs=True)
        model.model.norm.register_forward_pre_hook(_move("cuda:0"), with_kwargs=True)
        there = PaluCache.for_model(model)
        found = [model(new.to("cuda:0"), cache=there).logits.cpu() for new in (ids, step)]
        assert sorted(str(device) for device in there.ropes) == ["cuda:0", "cuda:1"]
        there.crop(-1)
        assert {rope.counts.tolist()[0] for rope in there.ropes.values()} == {40}
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine - theirs).abs().max() < 3e-3 * theirs.abs().max()


def _move(device: str) -> Any:
    """A hook that brings a module's inputs to `device`, as accelerate's do."""

    def hook(_: Any, args: Any, kwargs: Any) -> Any:
        return torch.utils._pytree.tree_map(
            lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, (args, kwargs)
        )

    return hook


@torch.no_grad()
def test_a_cache_stays_on_the_device_of_its_tokens(cuda: Any) -> None:
    model = converted("Llama", 0.5)
    ids = random_prompt(1, 40)
    cache = PaluCache.for_model(model)
    model(ids, cache=cache)
    model(ids[:, :1], cache=cache)
    model.to("cuda")
    with pytest.raises(ValueError, match="holds tokens on cpu, but new ones are on cuda:0"):
        model(ids[:, :1].to("cuda"), cache=cache)
    cache.reset()
    model(ids.to("cuda"), cache=cache)
    model(ids[:, :1].to("cuda"), cache=cache)
    assert cache.get_seq_length() == 41
