"""Attention over latents on CUDA, with and without tensor cores, over shapes that cover all pairs of settings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvsketch.codecs import Codec, Exact, TokenInts
from kvsketch.cuda_raw import palu, palu_plan
from kvsketch.cuda_raw.palu_instances import MMA, PALU
from kvsketch.layout import PageLayout, page_layout
from kvsketch.testing import assert_same
from kvsketch.tests.cuda_attention_cases import covering_cases
from kvsketch.tests.cuda_host import running
from kvsketch.tests.cuda_host.fixtures import needs_compiler
from kvsketch.tests.cuda_host.stand_in import installed
from kvsketch.tests.cuda_palu_cases import attend_on_device, check, make_exact_parts, make_queries
from kvsketch.tests.page_cases import DTYPES
from kvsketch.tests.palu_cases import Layer, make_layer

pytestmark = needs_compiler

CAPABILITIES = {"simt": "75", "mma": "90"}
#: Codecs of keys and values: each number of bits and of groups, and exact latents, on either side.
CODECS: tuple[tuple[Codec, Codec], ...] = (
    (TokenInts(1), TokenInts(8)),
    (TokenInts(2), TokenInts(3)),
    (TokenInts(3), TokenInts(2, 24)),
    (TokenInts(4), TokenInts(1)),
    (TokenInts(8), Exact()),
    (TokenInts(1, 64), TokenInts(4)),
    (TokenInts(2, 24), TokenInts(3, 8)),
    (TokenInts(3, 8), Exact()),
    (TokenInts(4, 32), TokenInts(1, 64)),
    (TokenInts(8, 40), TokenInts(2)),
    (Exact(), TokenInts(4, 32)),
    (Exact(), TokenInts(8, 40)),
    (Exact(), Exact()),
)
#: Rotary channels of a head of d, and whether pairs are neighbours.
ROPES: dict[str, Any] = {
    "none": lambda d: (0, False),
    "halves": lambda d: (d, False),
    "neighbours": lambda d: (d, True),
    "part": lambda d: (d // 4 * 2, True),
    "odd part": lambda d: (max(2, d // 4 - 2), False),
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "level": tuple(CAPABILITIES),
    "codecs": CODECS,
    "d": (8, 64, 80, 128),
    "rank": (8, 40, 96),
    "value_rank": (8, 40, 96),
    "heads": (1, 2, 3),
    "ratio": (1, 3, 8),
    "s": (1, 2, 5),
    "n": (31, 33, 200),
    "rope": tuple(ROPES),
    "between": ("nothing", "bias", "norm", "both"),
    "dtype": tuple(DTYPES),
    "exact": ("few", "more"),
    "first": (0, 2),
    "up_v": (True, False),
    "coefficients": ("int16", "int8"),
    "mask": ("none", "bias", "shared bias", "cap"),
    "blocks": ("few", "many"),
}


def allowed(case: Any) -> bool:
    """True first tokens have no latents to be mixed with, and large cases take long; kernels are declared."""
    return (
        (case["up_v"] or not case["first"])
        and case["heads"] * case["ratio"] * case["s"] * case["n"] <= 8000
        and (
            case["level"] == "simt"
            or planes(page_layout(*case["codecs"], case["rank"], case["value_rank"]), case["coefficients"]) in MMA
        )
    )


def planes(layout: PageLayout, coefficients: str) -> tuple[int, int, int]:
    """Bytes that latents of keys, of values, and numbers of the matrix are on tensor cores."""
    of_keys, of_values = (palu_plan.side_planes(side.spec) for side in (layout.keys, layout.values))
    return of_keys, of_values, palu_plan.PLANES[coefficients]


CASES = covering_cases(FACTORS, allowed, tries=80)


def layer_of(case: Any, seed: int) -> Layer:
    """A layer of two rows, one with padding, whose tokens of a second layer in three stand anywhere."""
    n, rng = case["n"], np.random.default_rng(seed)
    rotary, interleaved = ROPES[case["rope"]](case["d"])
    valid = np.ones((2, n), bool)
    valid[1, : n // 3] = False
    layer = make_layer(
        b=2, heads=case["heads"], d=case["d"], dv=24, ranks=(case["rank"],), value_ranks=(case["value_rank"],), n=n,
        keys=case["codecs"][0], values=case["codecs"][1], valid=valid, dtype=DTYPES[case["dtype"]],
        rotary=rotary, interleaved=interleaved, positions=rng.integers(0, 300, (2, n)) if seed % 3 == 1 else None,
        bias=case["between"] in ("bias", "both"), norm=case["between"] in ("norm", "both"),
        first=case["first"], up_v=case["up_v"], seed=seed, chunks=(n - 1,),
    )  # fmt: skip
    return make_exact_parts(layer, sinks=3, window=40) if case["exact"] == "more" else layer


def options_of(case: Any, seed: int) -> dict[str, Any]:
    if case["mask"] in ("none", "cap"):
        return {"softcap": 2.0} if case["mask"] == "cap" else {}
    rng, heads = np.random.default_rng(seed), 1 if case["mask"] == "shared bias" else case["heads"] * case["ratio"]
    mask = rng.standard_normal((2, heads, case["s"], case["n"])).astype(np.float32)
    mask[rng.random(mask.shape) < 0.3] = -np.inf
    return {"mask": mask}


def instantiations(case: Any, layer: Layer) -> set[tuple[str, str]]:
    """What a case executes."""
    [cache], [matrices] = layer.caches, layer.matrices
    rope, norm, first = (layer.options.get(name) for name in ("rope", "key_norm", "first"))
    softcap = 2.0 if case["mask"] == "cap" else None
    queries = case["heads"] * case["ratio"] * case["s"]
    keys = palu.plan_keys(matrices, layer.d, queries, rope=rope, key_norm=norm, first=first, softcap=softcap)
    view = cache._view(cache._held("a test"))
    architecture, coefficients = int(CAPABILITIES[case["level"]]), case["coefficients"]
    found = set()
    for exact, count in ((False, view.page_counts.max()), (True, (view.sink_counts + view.window_counts).max())):
        if not count:
            continue
        kernel, why = palu_plan.chosen_kernel(view.layout, keys, queries, architecture, coefficients, exact=exact)
        assert kernel.level == case["level"]
        assert bool(why) == (kernel.level == "simt")
        found.add((kernel.file, kernel.expression))
        if kernel.level == "mma":
            found.add(("palu_prepare.cu", f"pack_matrix<{kernel.planes}>"))
            if not keys.whole:
                found.add(("palu_prepare.cu", "split_queries"))
    return found | ({("palu_first.cu", "join_first")} if first else set())


def test_the_cases_execute_every_instantiation() -> None:
    assert set().union(*(instantiations(case, layer_of(case, i)) for i, case in enumerate(CASES))) == set(PALU)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "values", "coefficients"),
    [
        (TokenInts(3), TokenInts(2), "int8"),
        (TokenInts(4), TokenInts(8, 24), "int16"),
        (TokenInts(1, 8), TokenInts(2), "int16"),
    ],
    ids=str,
)
def test_kernels_that_are_not_declared(cupy: Any, keys: Codec, values: Codec, coefficients: str) -> None:
    assert planes(page_layout(keys, values, 40, 40), coefficients) not in MMA
    layer = make_layer(b=2, d=40, n=200, heads=2, keys=keys, values=values, ranks=(40,), value_ranks=(40,), rotary=40)
    for s in (1, 5):
        with running("check"):
            check(cupy, layer, make_queries(2, 6, s, 40), "mma", coefficients=coefficients)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_every_pair_of_settings(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[number]
    monkeypatch.setattr(palu, "multiprocessors", lambda _: 0 if case["blocks"] == "few" else 1000)
    layer, options = layer_of(case, number), options_of(case, number)
    q = make_queries(2, case["heads"] * case["ratio"], case["s"], case["d"], DTYPES[case["dtype"]])
    options["coefficients"] = case["coefficients"]
    with installed(compute_capability=CAPABILITIES[case["level"]]) as cupy:
        with running("check"):
            checked = check(cupy, layer, q, case["level"], **options)
        with running("fast", "random", seed=number):
            assert_same(attend_on_device(cupy, layer, q, **options), checked)
