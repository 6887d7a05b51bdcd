"""Attention over latents against float64 attention over keys and values rebuilt from the decoded latents."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvsketch.cache import Cache
from kvsketch.codecs import Exact, GroupedInts, SignSketch, TokenInts
from kvsketch.palu import FirstTokens, KeyNorm, Reconstruction, Rope, attend, check_latent_codec
from kvsketch.testing import CPU_ENGINES, spacing
from kvsketch.tests.palu_cases import Layer, attend_rebuilt, make_layer, make_rope

per_engine = pytest.mark.parametrize("engine", CPU_ENGINES)

#: Relative L2 error of a whole result: of float32 sums, and of value weights that an engine rounds to int16.
SUMS, ROUNDED = 5e-6, 2e-4


def make_queries(b: int, hq: int, s: int, d: int, dtype: Any = np.float32) -> Any:
    return (2 * np.random.default_rng(99).standard_normal((b, hq, s, d))).astype(np.float32).astype(dtype)


def check(layer: Layer, engine: str, ratio: int = 1, s: int = 1, dtype: Any = np.float32, **options: Any) -> Any:
    heads = sum(m.heads for m in layer.matrices)
    q = make_queries(layer.caches[0].batch, ratio * heads, s, layer.d, dtype)
    exact = attend_rebuilt(layer, q, **options)
    found = layer.attend(q, engine=engine, **options)
    assert found.dtype == q.dtype
    assert found.shape == exact.shape
    limit = SUMS if engine == "reference" else ROUNDED
    error = np.linalg.norm(found.astype(np.float64) - exact)
    assert error <= (limit + 4 * spacing(dtype)) * np.linalg.norm(exact)
    return found


# ---- keys: RoPE, bias, norm ----


@per_engine
@pytest.mark.parametrize(
    ("d", "rotary", "interleaved"),
    [
        (16, 0, False),
        (16, 16, False),
        (64, 64, False),
        (64, 32, False),
        (40, 12, False),
        (80, 20, True),
        (64, 64, True),
    ],
)
@pytest.mark.parametrize("s", [1, 5])
def test_rope_kinds(d, rotary, interleaved, s, engine):
    check(make_layer(d=d, rotary=rotary, interleaved=interleaved), engine, ratio=3, s=s)


@per_engine
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("rotary", [0, 16])
def test_bias_comes_first_then_norm_then_rope(bias, norm, rotary, engine):
    check(make_layer(bias=bias, norm=norm, rotary=rotary, b=2), engine, ratio=2, s=2)


@per_engine
def test_positions_are_those_of_the_tokens(engine):
    """Any positions: with gaps, repeated, and running backwards."""
    n = 200
    rng = np.random.default_rng(3)
    positions = np.stack([np.arange(n) + 7, np.arange(n)[::-1], rng.integers(0, 500, n)]).astype(np.int32)
    check(make_layer(b=3, n=n, rotary=16, positions=positions), engine, s=2)
    check(make_layer(b=1, n=n, rotary=16, positions=positions[:1].astype(np.int64)), engine)


@per_engine
def test_tables_of_scaled_rope_are_taken_as_they_are(engine):
    """An attention factor lies in the tables (yarn): cos and sin of a pair need not be those of an angle."""
    layer = make_layer(rotary=8)
    rope = layer.options["rope"]
    layer.options["rope"] = Rope(1.3 * rope.cos, 1.3 * rope.sin)
    check(layer, engine)


# ---- heads, slices, sizes ----


@per_engine
@pytest.mark.parametrize("ratio", [1, 3, 4])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("s", [1, 3])
def test_query_heads_share_key_heads_in_runs(ratio, heads, s, engine):
    check(make_layer(heads=heads, rotary=16), engine, ratio=ratio, s=s)


@per_engine
@pytest.mark.parametrize("first", [0, 2])
def test_slices_have_their_own_ranks(first, engine):
    layer = make_layer(
        b=2, slices=3, heads=2, ranks=(8, 33, 70), value_ranks=(40, 5, 32), rotary=16, first=first, bias=True
    )
    check(layer, engine, ratio=2, s=2)


@per_engine
@pytest.mark.parametrize(
    ("d", "dv", "rank", "value_rank"),
    [(1, 1, 1, 1), (6, 5, 3, 9), (64, 64, 134, 134), (80, 96, 130, 257), (128, 128, 700, 600)],
)
def test_sizes(d, dv, rank, value_rank, engine):
    rotary = d // 2 // 2 * 2
    layer = make_layer(d=d, dv=dv, ranks=(rank,), value_ranks=(value_rank,), rotary=rotary, n=100)
    check(layer, engine, ratio=2)


@per_engine
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("group", [None, 8, 64])
def test_codecs_of_latents(bits, group, engine):
    layer = make_layer(ranks=(72,), value_ranks=(40,), keys=TokenInts(bits, group), values=TokenInts(bits, group))
    check(layer, engine, ratio=2)


@per_engine
@pytest.mark.parametrize(("keys", "values"), [(Exact(), Exact()), (Exact(), TokenInts(2)), (TokenInts(3), Exact())])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_dtypes(keys, values, dtype, engine):
    layer = make_layer(keys=keys, values=values, dtype=dtype, rotary=16, first=1, ranks=(37,))
    check(layer, engine, ratio=3, s=2, dtype=dtype)


@per_engine
@pytest.mark.parametrize("n", [1, 2, 31, 32, 33, 64, 65, 96, 257, 1100])
@pytest.mark.parametrize("chunks", [False, True])
def test_lengths(n, chunks, engine):
    """Only a window; only pages; pages that do not fill a tile; several runs."""
    layer = make_layer(n=n, rotary=16, first=1, chunks=(n - 1,) if chunks and n > 1 else ())
    check(layer, engine, ratio=2)


@per_engine
def test_a_prompt_of_many_queries_is_causal(engine):
    check(make_layer(n=150, rotary=16, first=1), engine, ratio=2, s=150)
    check(make_layer(n=150, rotary=16, first=1, chunks=(100,)), engine, ratio=2, s=50)


# ---- rows, masks and options ----


def make_valid(kind: str, b: int, n: int) -> Any:
    positions = np.arange(n)
    if kind == "left":
        return positions >= np.array([0, 40, n - 3])[:b, None]
    if kind == "right":
        return positions < np.array([n, 140, 3])[:b, None]
    return np.random.default_rng(1).random((b, n)) < np.array([1.0, 0.5, 0.1])[:b, None]


@per_engine
@pytest.mark.parametrize("kind", ["left", "right", "holes"])
@pytest.mark.parametrize("s", [1, 6])
@pytest.mark.parametrize("first", [0, 4])
def test_ragged_rows(kind, s, first, engine):
    valid = make_valid(kind, 3, 200)
    layer = make_layer(b=3, valid=valid, rotary=16, first=first, chunks=(190,))
    check(layer, engine, ratio=2, s=s)


@per_engine
def test_rows_do_not_see_each_other(engine):
    valid = make_valid("left", 3, 200)
    together = make_layer(b=3, valid=valid, rotary=16, first=2)
    q = make_queries(3, 4, 1, 16)
    found = together.attend(q, engine=engine)
    for row in range(3):
        together.caches[0].select([row])
        first = FirstTokens(*(x[row : row + 1] for x in together.options["first"]))
        alone = Layer(together.caches, together.matrices, 16, {**together.options, "first": first})
        np.testing.assert_allclose(alone.attend(q[row : row + 1], engine=engine), found[row : row + 1], atol=1e-6)
        together = make_layer(b=3, valid=valid, rotary=16, first=2)


@per_engine
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("first", [0, 3])
def test_masks(padded, heads, first, engine):
    b, s, n = 2, 3, 200
    valid = make_valid("left", b, n) if padded else None
    layer = make_layer(b=b, n=n, valid=valid, rotary=16, first=first)
    rng = np.random.default_rng(8)
    hides = rng.random((b, heads, s, n)) < 0.7
    check(layer, engine, ratio=2, s=s, mask=hides)
    added = np.where(hides, rng.standard_normal(hides.shape), -np.inf).astype(np.float32)
    check(layer, engine, ratio=2, s=s, mask=added)
    window = np.arange(n) > n - s + np.arange(s)[:, None] - 20  # sliding: hides the first tokens too
    check(layer, engine, ratio=2, s=s, mask=window[None, None])


@per_engine
@pytest.mark.parametrize("first", [0, 2])
def test_scale_and_softcap(first, engine):
    layer = make_layer(rotary=16, first=first)
    check(layer, engine, ratio=2, s=2, scale=0.4)
    check(layer, engine, ratio=2, s=2, softcap=3.0)


@per_engine
@pytest.mark.parametrize("s", [1, 9])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_bias_without_rope_counts_where_first_tokens_are_exact(softcap, s, engine):
    """It adds the same to the scores of all latents, which softmax would take out again but for the first tokens."""
    check(make_layer(bias=True, first=2), engine, ratio=2, s=s, softcap=softcap)


@per_engine
def test_a_query_that_sees_nothing_gives_zeros(engine):
    layer = make_layer(b=2, n=64, rotary=16, first=1)
    mask = np.ones((2, 1, 2, 64), bool)
    mask[1, :, 1] = False
    found = check(layer, engine, s=2, mask=mask)
    assert not found[1, :, 1].any()
    assert found[1, :, 0].any()


@per_engine
def test_rows_without_tokens_give_zeros(engine):
    valid = np.ones((2, 40), bool)
    valid[1] = False
    found = check(make_layer(b=2, n=40, valid=valid, rotary=16, first=1), engine)
    assert not found[1].any()


# ---- first tokens, and matrices that were folded ----


@per_engine
def test_first_tokens_are_not_read_as_latents(engine):
    """True keys and values far from what the latents hold, with most of the weight."""
    layer = make_layer(rotary=16, first=2)
    first = layer.options["first"]
    layer.options["first"] = FirstTokens(30 * first.k, 100 * first.v, first.counts)
    check(layer, engine, ratio=2)


@per_engine
def test_first_tokens_may_be_fewer_than_there_is_room_for(engine):
    valid = np.zeros((2, 40), bool)
    valid[0, 37:], valid[1, 0] = True, True
    layer = make_layer(b=2, n=40, valid=valid, rotary=16, first=8)
    assert layer.options["first"].counts.tolist() == [3, 1]
    layer.options["first"].k[0, :, 3:] = np.nan
    check(layer, engine, ratio=2)


@per_engine
def test_without_rope_the_matrix_folds_into_the_queries(engine):
    """Scores are then products with the latents themselves, which an ordinary cache can do."""
    layer = make_layer(heads=2, up_v=False)
    m = layer.matrices[0]
    q = make_queries(1, 4, 2, 16)
    plain = layer.attend(q, engine=engine)
    folded = np.einsum("bhsd,hdr->bhsr", q, np.repeat(m.up_k.reshape(2, 16, 20), 2, axis=0))
    latent = Layer(layer.caches, [Reconstruction(2, None)], 20, {})
    scale = 16**-0.5
    np.testing.assert_allclose(latent.attend(folded, scale=scale, engine=engine), plain, atol=3e-4)
    layer.caches[0].engine = engine
    np.testing.assert_allclose(layer.caches[0].attend(folded, scale=scale), plain, atol=3e-4)


@per_engine
def test_values_may_stay_latent(engine):
    layer = make_layer(heads=3, up_v=False, rotary=16, value_ranks=(28,), slices=2)
    assert check(layer, engine, ratio=2).shape == (1, 12, 1, 28)


def test_results_do_not_depend_on_the_number_of_threads():
    from kvsketch.numba_cpu._threads import get_num_threads, set_num_threads

    layer = make_layer(b=2, n=3000, rotary=16, first=1, ranks=(64,), value_ranks=(64,))
    q = make_queries(2, 6, 2, 16)
    before, found = get_num_threads(), []
    try:
        for count in (1, 2, 3):
            set_num_threads(count)
            found.append(layer.attend(q, engine="numba_cpu"))
    finally:
        set_num_threads(before)
    for x in found[1:]:
        np.testing.assert_array_equal(x, found[0])


# ---- what is refused ----


def test_only_codecs_that_fit_latents_are_taken():
    check_latent_codec(Exact())
    check_latent_codec(TokenInts(2))
    with pytest.raises(ValueError, match=r"SignSketch cannot hold latents: .* rebuilt from latents"):
        check_latent_codec(SignSketch())
    with pytest.raises(ValueError, match=r"does not fit latents.*take TokenInts"):
        check_latent_codec(GroupedInts())
    cache = Cache(SignSketch(m=32), Exact())
    cache.append(np.ones((1, 1, 3, 20), np.float32), np.ones((1, 1, 3, 20), np.float32))
    with pytest.raises(ValueError, match="SignSketch cannot hold latents"):
        attend(np.ones((1, 1, 1, 20), np.float32), [cache], [Reconstruction(1, None)])


def cases() -> list[tuple[dict[str, Any], type[Exception], str]]:
    layer = make_layer(b=2, n=40)
    m, cache = layer.matrices[0], layer.caches[0]
    q = make_queries(2, 4, 1, 16)
    short = make_layer(b=2, n=39).caches[0]
    one = np.ones((2, 2, 1, 16), np.float32)
    return [
        ({"q": q[0]}, ValueError, r"q must have shape \(b, hq, s, d\)"),
        ({"q": q.astype(np.float64)}, TypeError, "q has dtype float64"),
        ({"q": make_queries(2, 3, 1, 16)}, ValueError, "q has 3 heads"),
        ({"q": make_queries(2, 4, 41, 16)}, ValueError, "q has 41 positions but the caches hold 40"),
        ({"q": make_queries(1, 4, 1, 16)}, ValueError, r"caches\[0\] must hold latents of 1 rows as one head"),
        ({"q": make_queries(2, 4, 1, 8)}, ValueError, r"up_k must have shape \(16, 20\), got \(32, 20\)"),
        ({"caches": [cache, cache]}, ValueError, "caches and matrices must be of the same slices, got 2 and 1"),
        ({"caches": [Cache(Exact(), Exact())]}, ValueError, r"caches\[0\] must hold latents of 2 rows"),
        ({"caches": [cache, short], "matrices": [m, m]}, ValueError, r"caches\[1\] holds 39 positions"),
        ({"matrices": [Reconstruction(2, m.up_k[:, :19])]}, ValueError, r"must have shape \(32, 20\), got \(32, 19\)"),
        ({"matrices": [Reconstruction(2, m.up_k, m.up_v[:, :9])]}, ValueError, "up_v must have 28 columns"),
        ({"matrices": [Reconstruction(2, None)]}, ValueError, "q must have 20 channels, those of latents"),
        (
            {"q": make_queries(2, 4, 1, 20), "matrices": [Reconstruction(2, None)], "rope": make_rope(40, 16)},
            ValueError,
            "has no up_k, but RoPE and norms are of keys",
        ),
        ({"rope": make_rope(39, 16)}, ValueError, "tokens stand at positions 0 to 39, but rope has tables for 39"),
        ({"rope": make_rope(40, 18)}, ValueError, "an even rotary up to 16"),
        ({"positions": np.zeros((2, 39), np.int32)}, ValueError, r"positions must be integers of shape \(2, 40\)"),
        ({"positions": np.zeros((2, 40))}, ValueError, "positions must be integers"),
        (
            {"positions": np.full((2, 40), -1), "rope": make_rope(40, 16)},
            ValueError,
            "tokens stand at positions -1 to -1",
        ),
        ({"key_norm": KeyNorm(np.ones(8, np.float32), 1e-6)}, ValueError, r"key_norm.weight must have shape \(16,\)"),
        ({"first": FirstTokens(one, one, np.ones(2, int))}, ValueError, r"first must hold k \(2, 2, F, 16\) and v"),
        (
            {"first": FirstTokens(one, np.ones((2, 2, 1, 24), np.float32), np.array([2, 1]))},
            ValueError,
            "first.counts must be 2 numbers from 0 to 1",
        ),
        ({"softcap": 0.0}, ValueError, "softcap must be positive"),
        ({"coefficients": "int4"}, ValueError, "coefficients must be one of"),
        ({"engine": "cuda_raw"}, ValueError, "does not run on numpy"),
    ]


@pytest.mark.parametrize("case", range(len(cases())))
def test_bad_input_is_named(case):
    change, error, message = cases()[case]
    layer = make_layer(b=2, n=40)
    given = {"q": make_queries(2, 4, 1, 16), "caches": layer.caches, "matrices": layer.matrices} | change
    with pytest.raises(error, match=message):
        attend(given.pop("q"), given.pop("caches"), given.pop("matrices"), **given)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, np.ones((4, 2))), "heads must be >= 1, got 0"),
        ((3, np.ones((4, 2))), r"up_k must have shape \(heads \* d, r\) for 3 heads, got \(4, 2\)"),
        ((2, np.ones(4)), "up_k must have shape"),
        ((2, np.ones((4, 2)), np.ones((3, 2))), r"up_v must have shape \(heads \* dv, r\) for 2 heads"),
        ((2, np.ones((4, 2)), None, np.ones(6)), "key_bias of 6 numbers does not fit up_k"),
        ((2, None, None, np.ones(4)), "key_bias of 4 numbers does not fit up_k of None"),
    ],
)
def test_matrices_check_their_shapes(arguments, message):
    with pytest.raises(ValueError, match=message):
        Reconstruction(*arguments)


def test_slices_of_latent_values_must_be_equally_wide():
    layer = make_layer(slices=2, up_v=False, value_ranks=(28, 30))
    with pytest.raises(ValueError, match=r"slices have values of \[28, 30\] numbers; give up_v, or attend to each"):
        layer.attend(make_queries(1, 4, 1, 16))
