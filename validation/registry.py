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
    "norm_error",
    "outliers",
    "moments",
    "tail",
    "tail_orthogonal",
    "scores",
    "softmax_bias",
)


def load_claims(names: tuple[str, ...] = NAMES) -> list[Claim]:
    """The claims called `names`; ValueError for one that does not exist."""
    unknown = sorted(set(names) - set(NAMES))
    if unknown:
        raise ValueError(f"there is no claim {unknown[0]!r}; the claims are {', '.join(NAMES)}")
    return [importlib.import_module(f"kvsketch.validation.{name}").CLAIM for name in NAMES if name in names]
