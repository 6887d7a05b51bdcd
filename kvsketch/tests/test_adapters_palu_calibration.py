"""Palu's calibration: its means against plain autograd, its file, and text or models that do not do."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvsketch[hf]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'kvsketch[hf]'")

from kvsketch.adapters import palu_calibration  # noqa: E402
from kvsketch.adapters.palu import CalibrationSettings, PaluSettings, calibrate, convert  # noqa: E402
from kvsketch.tests.palu_models import palu_model  # noqa: E402
from kvsketch.tests.tiny_text_model import VOCABULARY, tiny_tokenizer  # noqa: E402

TEXT = topics["assignment"]
SETTINGS = CalibrationSettings(tokens=120, gradient_tokens=80, window=40, skip=1)
TOKENIZER = tiny_tokenizer()


def model_of(name: str) -> Any:
    return palu_model(name, vocab_size=VOCABULARY)


def taken_apart(model: Any, ids: Any, name: str) -> tuple[Any, list[Any], list[Any]]:
    """Inputs (s, in) of the second layer, gradients (s, out) at its keys and values, and those of their weights.

    Found by adding zeros to the projections, whose gradients autograd gives, and by autograd of the weights themselves.
    """
    fused = name == "GPT2"
    attention = model.transformer.h[1].attn if fused else model.model.layers[1].self_attn
    projections = [attention.c_attn] if fused else [attention.k_proj, attention.v_proj]
    inputs: list[Any] = []
    added: list[Any] = []

    def add(module: Any, given: Any, output: Any) -> Any:
        inputs.append(given[0].detach()[0])
        added.append(torch.zeros_like(output, requires_grad=True))
        return output + added[-1]

    handles = [projection.register_forward_hook(add) for projection in projections]
    logits = model(ids).logits[0]
    # Summed over the 39 tokens that have a next one; each label is the token after its prediction.
    loss = -sum(logits[i].log_softmax(0)[ids[0, i + 1]] for i in range(ids.shape[1] - 1))
    weights = [projection.weight for projection in projections]
    *gradients, _ = torch.autograd.grad(loss, [*added, *weights]), None
    for handle in handles:
        handle.remove()
    outputs, of_weights = gradients[0][: len(added)], gradients[0][len(added) :]
    if fused:
        outputs = [outputs[0][..., 64:128], outputs[0][..., 128:]]
        of_weights = [of_weights[0][:, 64:128].T, of_weights[0][:, 128:].T]
    return inputs[0], [x[0] for x in outputs], list(of_weights)


def calibrated_windows() -> list[Any]:
    """The three windows (1, 40) that are read under SETTINGS, from all over the text."""
    ids = TOKENIZER(TEXT, verbose=False)["input_ids"]
    return [torch.tensor([ids[start : start + 40]]) for start in (0, len(ids) // 3, len(ids) // 3 * 2)]


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "GPT2"])
def test_means_are_those_of_plain_autograd(name: str) -> None:
    model = model_of(name)
    found = calibrate(model, TOKENIZER, TEXT, settings=SETTINGS).layers[1]
    ids = calibrated_windows()
    grams, errors, fishers = [], [], []
    for number in range(3):
        h, gradients, _ = taken_apart(model, ids[number], name)
        grams.append((h[1:].T @ h[1:]).detach())
        if number != 1:
            errors.append([g[1:].T @ g[1:] for g in gradients])
            fishers.append([(g[1:].T @ h[1:]).square() for g in gradients])
    np.testing.assert_allclose(found.gram, sum(grams) / (3 * 39), rtol=1e-3, atol=1e-5)
    for side, what in enumerate(("key", "value")):
        error = sum(e[side] for e in errors) / (2 * 39)
        scale = float(error.abs().max())
        np.testing.assert_allclose(getattr(found, f"{what}_error"), error, atol=1e-4 * scale)
        fisher = (sum(f[side] for f in fishers) / 2).sqrt().mean(1)
        np.testing.assert_allclose(getattr(found, f"{what}_fisher"), fisher, rtol=1e-3)


def test_fisher_without_skipped_tokens_is_that_of_the_weights() -> None:
    model = model_of("Llama")
    settings = CalibrationSettings(tokens=40, gradient_tokens=40, window=40)
    found = calibrate(model, TOKENIZER, TEXT, settings=settings).layers[1]
    ids = torch.tensor([TOKENIZER(TEXT, verbose=False)["input_ids"][:40]])
    _, _, of_weights = taken_apart(model, ids, "Llama")
    for fisher, gradient in zip((found.key_fisher, found.value_fisher), of_weights, strict=True):
        np.testing.assert_allclose(fisher, gradient.abs().mean(1), rtol=1e-3)


def test_the_model_is_left_as_it_was() -> None:
    model = model_of("Llama").train()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    calibrate(model, TOKENIZER, TEXT, settings=SETTINGS)
    assert model.training
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(palu_calibration, "SAVE_SECONDS", 0.0)
    file = tmp_path / "sums"
    expected = calibrate(model_of("Llama"), TOKENIZER, TEXT, settings=SETTINGS)
    seen: list[int] = []

    def interrupt(description: str, completed: int, total: int | None) -> None:
        seen.append(completed)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(model_of("Llama"), TOKENIZER, TEXT, settings=SETTINGS, file=file, progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["sums"]
    found = calibrate(model_of("Llama"), TOKENIZER, TEXT, settings=SETTINGS, file=file, progress=interrupt)
    assert seen == [0, 1, 2, 2, 3]
    assert found.fingerprint == expected.fingerprint
    for index, layer in expected.layers.items():
        for mine, other in zip(layer, found.layers[index], strict=True):
            assert np.array_equal(mine, other)


def test_a_file_of_another_run_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "sums"
    calibrate(model_of("Llama"), TOKENIZER, TEXT, settings=SETTINGS, file=file)
    other = model_of("Llama")
    with torch.no_grad():
        other.model.layers[0].self_attn.k_proj.weight[0, 0] += 1
    for model, text, settings in (
        (other, TEXT, SETTINGS),
        (model_of("Llama"), TEXT[10:], SETTINGS),
        (model_of("Llama"), TEXT, CalibrationSettings(tokens=120, gradient_tokens=80, window=40)),
    ):
        with pytest.raises(ValueError, match="another model, text or settings"):
            calibrate(model, TOKENIZER, text, settings=settings, file=file)
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(ValueError, match="was damaged"):
        calibrate(model_of("Llama"), TOKENIZER, TEXT, settings=SETTINGS, file=file)


def test_too_little_text_says_how_much_there_is() -> None:
    with pytest.raises(ValueError, match=r"calibration reads 32768 tokens, but its text has \d+; give a longer text"):
        calibrate(model_of("Llama"), TOKENIZER, TEXT)


def test_activations_that_are_not_finite_are_named() -> None:
    model = model_of("Llama")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[:] = torch.inf
    with pytest.raises(ValueError, match="layer 1 has activations or gradients that are not finite"):
        calibrate(model, TOKENIZER, TEXT, settings=CalibrationSettings(tokens=80, gradient_tokens=40, window=40))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 100}, "tokens must be >= 512"),
        ({"window": 1}, "window must be >= 2"),
        ({"skip": 511}, "skip must be between"),
    ],
)
def test_settings_that_make_no_sense(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CalibrationSettings(**changes)


@pytest.mark.parametrize("rule", ["fisher", "fisher-uniform", "balanced"])
@pytest.mark.parametrize("factors", ["two-sided", "whitened"])
def test_every_recipe_keeps_what_was_asked_and_calibrated_factors_lose_less(rule: str, factors: str) -> None:
    """Loss on the calibrated text: better than plain factors of the same ranks, as its statistics are of this text."""
    calibration = calibrate(model_of("Llama"), TOKENIZER, TEXT, settings=SETTINGS)
    ids = torch.cat(calibrated_windows())

    def loss(kind: str) -> float:
        settings = PaluSettings(keep=0.5, granularity="head", ranks=rule, factors=kind, block=4, first_tokens=0)
        model = convert(model_of("Llama"), calibration, settings=settings)
        assert model.palu.kept(model) == 0.5
        assert model.palu.calibration == calibration.fingerprint
        with torch.no_grad():
            dense, cut = (m(ids).logits.log_softmax(-1) for m in (model_of("Llama"), model))
        return float((dense.exp() * (dense - cut)).sum(-1).mean())

    if rule == "balanced":
        # Singular values of plain factors are of another scale in each projection; their ranks are not the same.
        assert loss(factors) > 0
    else:
        assert loss(factors) < loss("plain")


def test_a_calibration_of_another_model_is_refused() -> None:
    calibration = calibrate(
        palu_model("Llama", vocab_size=VOCABULARY, num_hidden_layers=3), TOKENIZER, TEXT, settings=SETTINGS
    )
    with pytest.raises(ValueError, match="calibration is of layers"):
        convert(model_of("Llama"), calibration)
