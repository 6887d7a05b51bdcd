"""Converted models in folders: what is read is what was written, in another process too; anything else is refused."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvsketch[hf]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'kvsketch[hf]'")

from kvsketch.adapters import palu_saving  # noqa: E402
from kvsketch.adapters.palu import PaluCache, is_converted, load, save_pretrained  # noqa: E402
from kvsketch.tests.palu_models import CHANGES, converted, palu_model  # noqa: E402
from kvsketch.tests.tiny_models import greedy, random_prompt  # noqa: E402

READ = """
import sys
import numpy as np, torch
from kvsketch.adapters.palu import load
from kvsketch.tests.tiny_models import random_prompt
torch.set_num_threads(1)
with torch.no_grad():
    np.save(sys.argv[2], load(sys.argv[1])(random_prompt(2, 30)).logits.numpy())
"""


@pytest.mark.parametrize("first_tokens", [0, 1])
@pytest.mark.parametrize("name", CHANGES)
def test_a_loaded_model_is_the_saved_one(name: str, first_tokens: int, tmp_path: Path) -> None:
    model = converted(name, 0.5, granularity="head", first_tokens=first_tokens, latent_bits=3, rotate=True)
    model.generation_config.max_new_tokens = 7
    save_pretrained(model, tmp_path / "out")
    assert is_converted(tmp_path / "out")
    loaded = load(tmp_path / "out")
    assert loaded.palu == model.palu
    assert loaded.generation_config.max_new_tokens == 7
    assert not loaded.training
    own, other = model.state_dict(), loaded.state_dict()
    assert {name: x.dtype for name, x in own.items()} == {name: x.dtype for name, x in other.items()}
    assert all(torch.equal(own[name], other[name]) for name in own)
    ids = random_prompt(1, 40)
    tokens = [greedy(m, ids, PaluCache.for_model(m), new=20) for m in (model, loaded)]
    assert torch.equal(*tokens)


def test_logits_are_identical_in_a_new_process(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = converted("Qwen3", 0.5, model_changes={"tie_word_embeddings": True})
        with torch.no_grad():
            expected = model(random_prompt(2, 30)).logits.numpy()
    finally:
        torch.set_num_threads(threads)
    save_pretrained(model, tmp_path / "out")
    subprocess.run([sys.executable, "-c", READ, tmp_path / "out", tmp_path / "logits.npy"], check=True)
    assert np.array_equal(np.load(tmp_path / "logits.npy"), expected)


def test_dtypes_are_kept_or_changed(tmp_path: Path) -> None:
    model = converted("Llama", 0.5).to(torch.bfloat16)
    save_pretrained(model, tmp_path / "out")
    assert load(tmp_path / "out").dtype is torch.bfloat16
    assert load(tmp_path / "out", dtype="float32").model.layers[0].self_attn.k_down.weight.dtype is torch.float32


def test_frequencies_of_rope_stay_in_float32_whatever_the_dtype(tmp_path: Path) -> None:
    model = converted("Llama", 0.5)
    save_pretrained(model, tmp_path / "out")
    loaded = load(tmp_path / "out", dtype="bfloat16")
    assert loaded.dtype is torch.bfloat16
    assert torch.equal(loaded.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    weight = model.model.layers[0].self_attn.k_down.weight
    assert torch.equal(loaded.model.layers[0].self_attn.k_down.weight, weight.to(torch.bfloat16))


def test_the_models_own_save_pretrained_names_the_right_one(tmp_path: Path) -> None:
    model = converted("Llama", 0.5)
    save_pretrained(model, tmp_path / "out")
    for one in (model, load(tmp_path / "out"), copy.deepcopy(model)):
        with pytest.raises(ValueError, match=r"kvsketch\.adapters\.palu\.save_pretrained"):
            one.save_pretrained(tmp_path / "own")
    assert not (tmp_path / "own").exists()


def test_an_existing_folder_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="out exists already"):
        save_pretrained(converted("Llama"), tmp_path / "out")
    with pytest.raises(ValueError, match="there is no folder"):
        save_pretrained(converted("Llama"), tmp_path / "none" / "out")
    with pytest.raises(ValueError, match="is not converted by Palu"):
        save_pretrained(palu_model("Llama"), tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_fails_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(palu_saving, "_describe", lambda *arguments: {"not": {"json"}})
    with pytest.raises(TypeError):
        save_pretrained(converted("Llama"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_folders_that_are_not_what_this_version_wrote_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "out"
    save_pretrained(converted("Llama", 0.5), path)
    file = path / "palu.json"
    good = json.loads(file.read_text())
    for change, message in (
        ({"version": 2}, "format version 2, this kvsketch reads version 1"),
        ({"format": "other"}, "was not written by kvsketch palu"),
        ({"architecture": "BertModel"}, "'BertModel' is none of LlamaForCausalLM"),
        ({"settings": {"keep": 2}}, "keep must be above 0"),
        ({"layers": [{"layer": 0}]}, "a layer must have"),
        ({"layers": good["layers"][:1]}, r"describes layers \[0\] of 2"),
        ({"layers": [good["layers"][0], good["layers"][1] | {"key_ranks": [8]}]}, "does not fit palu.json"),
    ):
        file.write_text(json.dumps(good | change))
        with pytest.raises(ValueError, match=message):
            load(path)
    file.write_text("{")
    with pytest.raises(ValueError, match="was damaged"):
        load(path)
    file.write_text(json.dumps(good))
    weights = path / "palu.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(ValueError, match="cannot be read"):
        load(path)
    with pytest.raises(ValueError, match="is no folder of a converted model"):
        load(tmp_path)
