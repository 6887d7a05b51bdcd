"""Decode steps of a model: most are taken in one call, and nothing shows which were."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvsketch[hf]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'kvsketch[hf]'")

from kvsketch.adapters import decode_step, layers  # noqa: E402
from kvsketch.adapters.transformers_cache import CompressedCache  # noqa: E402
from kvsketch.cache import Cache  # noqa: E402
from kvsketch.tests.cuda_host.arrays import ndarray  # noqa: E402
from kvsketch.tests.cuda_host.fixtures import needs_harness  # noqa: E402
from kvsketch.tests.tiny_models import greedy, left_padded, random_prompt, tiny_model  # noqa: E402


class Counted:
    """Stands in for the adapter's step and counts what it answers; takes none while it is off."""

    def __init__(self, on: bool) -> None:
        self.on, self.taken, self.left = on, 0, 0

    def __call__(self, *arguments: Any) -> Any:
        out = decode_step.take_usual_step(*arguments) if self.on else None
        self.taken += out is not None
        self.left += out is None
        return out


def decode(monkeypatch: pytest.MonkeyPatch, model: Any, ids: Any, method: str, on: bool, **options: Any) -> Any:
    """Greedy tokens, the cache and the counted steps."""
    counted = Counted(on)
    monkeypatch.setattr(layers, "take_usual_step", counted)
    cache = CompressedCache.for_model(model, method)
    return greedy(model, ids, cache, **options), cache, counted


@pytest.mark.parametrize(
    ("method", "dtype", "rows"),
    [
        ("kivi-2", torch.float32, 1),
        ("kivi-4", torch.bfloat16, 2),
        ("exact", torch.float16, 1),
        ("qjl-256", torch.float32, 1),
    ],
)
def test_generate_takes_the_usual_step_and_gives_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch, method: str, dtype: Any, rows: int
) -> None:
    model, ids = tiny_model(dtype=dtype), random_prompt(rows, 200)
    options = {"new": 60, "return_dict_in_generate": True, "output_logits": True}
    with_steps, _, counted = decode(monkeypatch, model, ids, method, True, **options)
    without, _, never = decode(monkeypatch, model, ids, method, False, **options)
    assert (never.taken, never.left) == (0, 2 * 59)
    # A few steps encode a page or move the window, in each of the two layers.
    assert counted.taken == 0 if method == "qjl-256" else counted.taken >= 2 * 54
    assert counted.taken + counted.left == 2 * 59
    assert torch.equal(with_steps.sequences, without.sequences)
    for ours, expected in zip(with_steps.logits, without.logits, strict=True):
        assert torch.equal(ours, expected)


def test_soft_capped_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("Gemma2", head_dim=16, attn_logit_softcapping=2.0, layer_types=["full_attention"] * 2)
    ids = random_prompt(1, 150)
    ours, _, counted = decode(monkeypatch, model, ids, "kivi-2", True, new=20)
    assert counted.taken >= 2 * 17
    assert torch.equal(ours, decode(monkeypatch, model, ids, "kivi-2", False, new=20)[0])


def test_a_padded_batch_takes_the_ordinary_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, mask = left_padded([150, 70])
    _, _, counted = decode(monkeypatch, tiny_model(), ids, "kivi-2", True, new=8, attention_mask=mask)
    assert counted.taken == 0


def test_steps_after_crop_copy_and_reorder(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt, token = tiny_model(), random_prompt(2, 150), random_prompt(2, 1, seed=5)

    def logits(on: bool) -> tuple[list[Any], int]:
        counted = Counted(on)
        monkeypatch.setattr(layers, "take_usual_step", counted)
        cache = CompressedCache.for_model(model, "kivi-2")
        model(prompt, cache=cache)
        results = []
        for change in (
            lambda c: c,
            lambda c: c.crop(-2),
            lambda c: c.reorder_cache(torch.tensor([1, 1])),
            lambda c: c.batch_repeat_interleave(2),
            lambda c: c.batch_select_indices(torch.tensor([0, 3])),
            copy.deepcopy,
        ):
            changed = change(cache)
            cache = cache if changed is None else changed
            rows = cache.compressed[0].store.batch
            for _ in range(3):
                results.append(model(token.repeat(rows // 2, 1), cache=cache).logits)
        return results, counted.taken

    with torch.no_grad():
        ours, taken = logits(True)
        expected, none = logits(False)
    assert taken >= 2 * 15
    assert none == 0
    for a, b in zip(ours, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("side", ["k_proj", "v_proj"])
def test_bad_number_in_a_later_layer_undoes_the_step_in_the_earlier_one(
    monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    model, token = tiny_model(), random_prompt(1, 1, seed=5)
    messages, after = [], []
    with torch.no_grad():
        for on in (True, False):
            counted = Counted(on)
            monkeypatch.setattr(layers, "take_usual_step", counted)
            cache = CompressedCache.for_model(model, "kivi-2")
            model(random_prompt(1, 150), cache=cache)
            model(token, cache=cache)
            before = counted.taken
            projection = getattr(model.model.layers[1].self_attn, side)
            weight = projection.weight[3, 3].clone()
            projection.weight[3, 3] = float("nan")
            with pytest.raises(ValueError, match="layer 1") as caught:
                model(token, cache=cache)
            projection.weight[3, 3] = weight
            # Layer 0 took the step in one call, layer 1 could not.
            assert counted.taken == before + on
            assert [layer.store.length for layer in cache.compressed] == [151, 151]
            assert not cache.broken
            messages.append(str(caught.value))
            after.append(model(token, cache=cache).logits)
    assert messages[0] == messages[1]
    assert torch.equal(*after)


def test_tensors_that_do_not_lie_in_order_take_the_ordinary_calls() -> None:
    cache = CompressedCache.for_model(tiny_model(), "kivi-2")
    store = cache.compressed[0].store
    k, v = torch.randn(2, 1, 2, 150, 16, generator=torch.Generator().manual_seed(0)).numpy()
    store.append(k, v)
    store.flush()
    q, k, v = torch.ones(1, 4, 1, 16), torch.ones(1, 2, 1, 16), torch.ones(1, 2, 1, 16)
    apart = torch.ones(1, 2, 1, 32)[..., ::2]
    step = decode_step.take_usual_step
    for tensors in (
        (q, apart, v),
        (q, k, apart),
        (q.double(), k, v),
        (q, k.half(), v),
        (q, k, v[..., :8]),
        (q[:, :3], k, v),
        (torch._neg_view(q), k, v),
        (q, k.to("meta"), v),
        (torch.nn.Parameter(q), k, v),
    ):
        assert step(store, *tensors, 0.25, None) is None
    assert step(store, q, k, v, None, None) is None
    assert step(store, q, k, v, 0.25, -1.0) is None
    assert store.length == 150
    assert step(store, q, k, v, 0.25, None) is not None
    assert store.length == 151


@needs_harness
@pytest.mark.usefixtures("cupy")
def test_a_model_on_a_device_takes_prepared_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody looks at numbers, and not before the prompt is there; torch's tensors stand in for CUDA's."""
    model, ids = tiny_model(), random_prompt(2, 70)
    expected = greedy(model, ids, CompressedCache.for_model(model, "kivi-2", residual_length=32), new=6)
    usual = layers.array_from_tensor, layers.tensor_from_array
    monkeypatch.setattr(layers, "array_from_tensor", lambda name, x: ndarray(usual[0](name, x)))
    monkeypatch.setattr(layers, "tensor_from_array", lambda x: usual[1](x.get()))
    taken, step = [], Cache.step

    def counted(self: Cache, *args: Any, **options: Any) -> Any:
        taken.append(self)
        return step(self, *args, **options)

    monkeypatch.setattr(Cache, "step", counted)
    for checked in (True, False):
        taken.clear()
        cache = CompressedCache.for_model(model, "kivi-2", residual_length=32, checked=checked)
        assert torch.equal(greedy(model, ids, cache, new=6), expected)
        assert len(taken) == (0 if checked else 2 * 5)
        assert cache.get_seq_length() == 75
