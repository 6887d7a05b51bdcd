"""Windows of text are cut as the documentation says, and a comparison leaves its model alone."""

from __future__ import annotations

import pytest
import torch

from kvsketch.evaluation import compare_methods, text_windows, warm_up
from kvsketch.methods import METHODS
from kvsketch.tests.tiny_models import greedy, random_prompt, tiny_model
from kvsketch.tests.tiny_text_model import tiny_tokenizer

TEXT = "a = b + 1\n" * 40


def test_windows_follow_one_another_from_the_beginning() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer(TEXT)["input_ids"]
    first, second = text_windows(tokenizer, TEXT, prompt_tokens=20, score_tokens=10, windows=2)
    assert first.dtype == torch.int64
    assert first.tolist() == [ids[:31]]
    assert second.tolist() == [ids[31:62]]


def test_spread_windows_come_from_all_over_the_text() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer(TEXT)["input_ids"]
    apart = len(ids) // 3
    assert apart > 31
    windows = text_windows(tokenizer, TEXT, prompt_tokens=20, score_tokens=10, windows=3, spread=True)
    assert [w.tolist() for w in windows] == [[ids[n * apart : n * apart + 31]] for n in range(3)]


def test_opening_token_is_part_of_each_prompt() -> None:
    tokenizer = tiny_tokenizer(opens=True)
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    first, second = text_windows(tokenizer, TEXT, prompt_tokens=20, score_tokens=10, windows=2)
    assert first.tolist() == [[1, *ids[:30]]]
    assert second.tolist() == [[1, *ids[30:60]]]


def test_a_text_that_just_fits_is_taken_and_one_token_less_is_not() -> None:
    tokenizer = tiny_tokenizer()
    n = len(tokenizer(TEXT)["input_ids"])
    assert len(text_windows(tokenizer, TEXT, prompt_tokens=n - 11, score_tokens=10)) == 1
    with pytest.raises(ValueError, match=f"has {n} tokens, but windows=1 .* take {n + 1}; give a longer text"):
        text_windows(tokenizer, TEXT, prompt_tokens=n - 10, score_tokens=10)


def test_comparing_leaves_the_model_as_it_came() -> None:
    model = tiny_model()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    prompt = random_prompt(1, 60)
    expected = greedy(model, prompt)
    attention = model.config._attn_implementation
    warm_up(model, METHODS["kivi-2"])
    assert model.config._attn_implementation == attention
    (row,) = compare_methods(model, [random_prompt(1, 150)], [METHODS["kivi-2"]], prompt_tokens=120)
    assert model.config._attn_implementation == attention
    assert row.kl > 0
    assert torch.equal(greedy(model, prompt), expected)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name])


def test_progress_counts_up_to_its_totals() -> None:
    seen: dict[str, list[tuple[int, int | None]]] = {}
    compare_methods(
        tiny_model(),
        [random_prompt(1, 61 + 33)] * 2,
        [METHODS["exact"]],
        prompt_tokens=60,
        progress=lambda description, completed, total: seen.setdefault(description, []).append((completed, total)),
    )
    assert seen["window 2/2: scoring"] == [(0, 33), (16, 33), (32, 33)]
    assert [completed for completed, _ in seen["Timing decode steps"]] == list(range(34))
    assert list(seen)[:2] == ["window 1/2: reading a prompt of 60 tokens", "window 1/2: compressing by exact"]
