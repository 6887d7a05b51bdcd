"""Tuning a converted model: only down projections change, by what was trained, and the loss on the text falls."""

from __future__ import annotations

import copy
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvsketch[hf]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'kvsketch[hf]'")
pytest.importorskip("peft", reason="peft is not installed: pip install 'kvsketch[tune]'")

from kvsketch.adapters import palu_tuning  # noqa: E402
from kvsketch.adapters.palu import PaluCache, load, save_pretrained  # noqa: E402
from kvsketch.adapters.palu_original import check_original  # noqa: E402
from kvsketch.adapters.palu_tuning import TARGETS, TuningSettings, tune  # noqa: E402
from kvsketch.tests.palu_models import CHANGES, converted, palu_model  # noqa: E402
from kvsketch.tests.tiny_models import greedy, random_prompt  # noqa: E402
from kvsketch.tests.tiny_text_model import VOCABULARY, tiny_tokenizer  # noqa: E402

TEXT = topics["assignment"]
#: A short text again and again, so that a few steps are enough to see the loss fall.
SETTINGS = TuningSettings(steps=12, window=48, rank=4, learning_rate=1e-2)
WORDS = {"model_changes": {"vocab_size": VOCABULARY}}


def states(model: Any) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    assert list(before) == list(after)
    assert all(before[name].dtype == after[name].dtype for name in before)
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize("first_tokens", [0, 1])
@pytest.mark.parametrize("name", CHANGES)
def test_only_down_projections_change_and_by_the_rank_asked_for(name: str, first_tokens: int) -> None:
    model = converted(name, 0.5, granularity="head", first_tokens=first_tokens, **WORDS)
    before = states(model)
    wanted = [p.requires_grad for p in model.parameters()]
    losses = tune(model, tiny_tokenizer(), TEXT, settings=SETTINGS)
    assert len(losses) == SETTINGS.steps
    after = model.state_dict()
    names = changed(before, after)
    assert names == {n for n in before if n.split(".")[-2] in TARGETS}
    for n in names:
        assert torch.linalg.matrix_rank((after[n] - before[n]).double(), rtol=1e-4) <= SETTINGS.rank
    assert [p.requires_grad for p in model.parameters()] == wanted
    assert model.palu.tuning == {"steps": 12, "rank": 4, "loss": "next-token", "learning_rate": 1e-2} | {
        "window": 48,
        "seed": 0,
    }


def test_the_loss_on_the_text_falls() -> None:
    model = converted("Llama", 0.5, **WORDS)
    ids = tiny_tokenizer()(TEXT, return_tensors="pt")["input_ids"][:, :48]

    def loss() -> float:
        with torch.no_grad():
            return float(torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:]))

    before = loss()
    text = tiny_tokenizer().decode(ids[0])
    losses = tune(model, tiny_tokenizer(), text, settings=SETTINGS)
    # One window: the first step's loss is the model's own, labels shifted by one.
    assert losses[0] == pytest.approx(before, rel=1e-5)
    assert loss() < losses[-1] < losses[0] - 0.02


def test_distillation_brings_the_model_nearer_to_the_original() -> None:
    original = palu_model("Llama", vocab_size=VOCABULARY)
    model = converted("Llama", 0.5, **WORDS)
    ids = tiny_tokenizer()(TEXT, return_tensors="pt")["input_ids"][:, :48]
    before = states(original)
    with torch.no_grad():
        p, q = (m(ids).logits[0].double().log_softmax(-1) for m in (original, model))
    expected = float((p.exp() * (p - q)).sum(1).mean())
    losses = tune(
        *(model, tiny_tokenizer(), tiny_tokenizer().decode(ids[0])),
        settings=TuningSettings(steps=12, window=48, rank=4, learning_rate=1e-2, loss="distillation"),
        original=original,
    )
    assert losses[0] == pytest.approx(expected, rel=1e-3)
    assert losses[-1] < 0.9 * losses[0]
    assert changed(before, original.state_dict()) == set()


def test_the_merged_model_is_the_trained_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits just before merging and after it, and the additions really take part in the former."""
    model = converted("Qwen3", 0.5, granularity="head", **WORDS)
    ids = random_prompt(2, 30)
    logits = {}
    train = palu_tuning._train

    def look(*arguments: Any) -> list[float]:
        losses = train(*arguments)
        with torch.no_grad():
            logits["trained"] = model(ids).logits
        return losses

    monkeypatch.setattr(palu_tuning, "_train", look)
    with torch.no_grad():
        logits["before"] = model(ids).logits
        tune(model, tiny_tokenizer(), TEXT, settings=SETTINGS)
        logits["merged"] = model(ids).logits
    assert (logits["trained"] - logits["before"]).abs().max() > 0.1
    torch.testing.assert_close(logits["merged"], logits["trained"], rtol=1e-4, atol=1e-4)


def test_one_seed_gives_one_model_and_leaves_torchs_own_generator_alone() -> None:
    models = [converted("Llama", 0.5, **WORDS) for _ in range(3)]
    state = torch.get_rng_state()
    for model, seed in zip(models, (0, 0, 1), strict=True):
        tune(model, tiny_tokenizer(), TEXT, settings=TuningSettings(steps=2, window=48, seed=seed))
    assert torch.equal(torch.get_rng_state(), state)
    assert changed(states(models[0]), models[1].state_dict()) == set()
    assert changed(states(models[0]), models[2].state_dict()) != set()


def test_every_window_is_read_once_before_any_is_read_again() -> None:
    windows = [torch.tensor([[i]]) for i in range(5)]
    drawn = [int(w) for w in palu_tuning._shuffled(windows, TuningSettings(steps=12))]
    assert sorted(drawn[:5]) == sorted(drawn[5:10]) == list(range(5))
    assert drawn[:5] != drawn[5:10]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tuned_folder_loads_and_generates(dtype: str, tmp_path: Path) -> None:
    save_pretrained(converted("Llama", 0.5, latent_bits=4, rotate=True, **WORDS), tmp_path / "converted")
    model = load(tmp_path / "converted", dtype=dtype)
    before = states(model)
    frequencies = model.model.rotary_emb.inv_freq.clone()
    tune(model, tiny_tokenizer(), TEXT, settings=SETTINGS)
    assert {name.split(".")[-2] for name in changed(before, model.state_dict())} == set(TARGETS)
    assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)
    save_pretrained(model, tmp_path / "tuned")
    loaded = load(tmp_path / "tuned")
    assert loaded.palu == model.palu
    assert changed(states(model), loaded.state_dict()) == set()
    ids = random_prompt(1, 60)
    tokens = [greedy(m, ids, PaluCache.for_model(m), new=20) for m in (model, loaded)]
    assert torch.equal(*tokens)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_what_fails_half_way_leaves_the_model_as_it_was(error: type[BaseException]) -> None:
    model = converted("Llama", 0.5, **WORDS)
    before, conversion = states(model), model.palu

    def stop(description: str, completed: int, total: int | None) -> None:
        if completed == 5:
            raise error("stopped")

    with pytest.raises(error, match="stopped"):
        tune(model, tiny_tokenizer(), TEXT, settings=SETTINGS, progress=stop)
    assert changed(before, model.state_dict()) == set()
    assert model.palu is conversion
    assert all(type(module.k_down) is torch.nn.Linear for module in conversion.attention_modules(model))


def test_a_loss_that_is_not_finite_stops() -> None:
    model = converted("Llama", 0.5, **WORDS)
    with torch.no_grad():
        model.lm_head.weight[3] = float("inf")
    with pytest.raises(ValueError, match=r"the loss is (nan|inf) at step 0; give a smaller learning_rate"):
        tune(model, tiny_tokenizer(), TEXT, settings=SETTINGS)


def test_mistakes_are_named() -> None:
    model, original = converted("Llama", 0.5, **WORDS), palu_model("Llama", vocab_size=VOCABULARY)
    with pytest.raises(ValueError, match="is not converted by Palu"):
        tune(original, tiny_tokenizer(), TEXT, settings=SETTINGS)
    with pytest.raises(ValueError, match=r"the text has .* tokens"):
        tune(model, tiny_tokenizer(), "a = b", settings=SETTINGS)
    with pytest.raises(ValueError, match=r"original must be the model .* got NoneType for loss='distillation'"):
        tune(model, tiny_tokenizer(), TEXT, settings=TuningSettings(loss="distillation"))
    with pytest.raises(ValueError, match="None for other losses, got LlamaForCausalLM for loss='next-token'"):
        tune(model, tiny_tokenizer(), TEXT, settings=SETTINGS, original=original)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps"),
        ({"rank": 0}, "rank"),
        ({"loss": "both"}, "loss must be"),
        ({"learning_rate": 0.0}, "learning_rate must be above 0, got 0.0"),
        ({"learning_rate": float("nan")}, "learning_rate must be above 0, got nan"),
        ({"window": 1}, "window"),
        ({"seed": -1}, "seed"),
    ],
)
def test_settings_are_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TuningSettings(**changes)


@pytest.mark.parametrize("first_tokens", [0, 1])
@pytest.mark.parametrize("name", CHANGES)
def test_the_original_is_known_by_what_conversion_leaves_alone(name: str, first_tokens: int) -> None:
    model, original = converted(name, 0.5, first_tokens=first_tokens), palu_model(name)
    check_original(model, original)
    check_original(copy.deepcopy(model).to(torch.bfloat16), original)
    with pytest.raises(ValueError, match="itself converted by Palu"):
        check_original(model, model)
    other = copy.deepcopy(original)
    with torch.no_grad():
        other.get_input_embeddings().weight[5, 0] += 0.1
    with pytest.raises(ValueError, match="are not those of the converted model"):
        check_original(model, other)
    with pytest.raises(ValueError, match="are not those of the converted model"):
        check_original(model, palu_model("Llama", hidden_size=32) if name != "Llama" else palu_model("GPT2"))
