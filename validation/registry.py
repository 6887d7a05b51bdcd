"""All claims, in the order of the report."""

from __future__ import annotations

import importlib

from kvsketch.validation.claim import Claim

#: Files that hold a claim.
NAMES = (
    "unbiased",
    "unbiased_outliers",
    "unbiased_hadamard",
    "variance",
    "orthogonal_gain",
    "moments",
    "tail",
    "tail_orthogonal",
    "scores",
    "softmax_bias",
    "norm_error",
    "outliers",
    "quantizer",
    "quantizer_textbook",
    "same_codes",
    "kivi_axes",
    "kivi_window",
    "attention_error",
    "bit_budgets",
    "palu_svd",
    "palu_whitening",
    "palu_granularity",
    "palu_rotation",
    "palu_attention",
    "palu_bits",
    "palu_model",
)


def load_claims(names: tuple[str, ...] = NAMES) -> list[Claim]:
    """The claims called `names`; ValueError for one that does not exist."""
    check_names(names)
    return [load_claim(name) for name in NAMES if name in names]


def check_names(names: tuple[str, ...]) -> None:
    """Raise ValueError unless every one of `names` is that of a claim."""
    unknown = sorted(set(names) - set(NAMES))
    if unknown:
        raise ValueError(f"there is no claim {unknown[0]!r}; the claims are {', '.join(NAMES)}")


def load_claim(name: str) -> Claim:
    """The claim called `name`, from its file."""
    return importlib.import_module(f"kvsketch.validation.{name}").CLAIM
