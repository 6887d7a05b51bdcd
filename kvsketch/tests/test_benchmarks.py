"""The benchmarks measure what they say: right results, ratios within rounds, what asv finds."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import kvsketch
from kvsketch.numba_cpu._threads import get_num_threads, set_num_threads
from kvsketch.tests.tiny_models import random_prompt, tiny_model

ROOT = Path(kvsketch.__file__).parents[1]
if not (ROOT / "benchmarks" / "__main__.py").exists():
    pytest.skip("kvsketch is installed without its tree", allow_module_level=True)
sys.path.insert(0, str(ROOT))

from benchmarks import bench_decode, bench_encode, generate, model_runs, start, subjects, timing  # noqa: E402
from benchmarks.__main__ import app, chosen_subjects  # noqa: E402
from benchmarks.bandwidth import copy_all, random_bytes, read_all  # noqa: E402
from benchmarks.decode import measure_decode, measure_errors  # noqa: E402
from benchmarks.dense_flash import dense_flash  # noqa: E402
from benchmarks.encode import CACHES, SIDES, measure_encode  # noqa: E402
from benchmarks.generate import measure_generate, reserved_share  # noqa: E402
from benchmarks.machine import flush_bytes, last_cache_bytes  # noqa: E402
from benchmarks.palu import Latents, break_even, entrant_name, measure_palu  # noqa: E402
from benchmarks.rivals import rival, rival_names, tensor  # noqa: E402
from benchmarks.rows import Row  # noqa: E402
from benchmarks.scaling import Sweep, measure_sweep  # noqa: E402
from benchmarks.subjects import DATA, Shape, Subject, attend_exactly, relative_error, to_bfloat16  # noqa: E402
from benchmarks.threads import measure_threads  # noqa: E402
from benchmarks.timing import Entrant, Race, fit_power, quartiles, run_race  # noqa: E402

TINY = Shape(160, 64, 8, 2)
SUBJECTS = (Subject("kivi-2"), Subject("kivi-2", "int8"))


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    threads = torch.get_num_threads(), get_num_threads()
    yield
    torch.set_num_threads(threads[0])
    set_num_threads(threads[1])


@pytest.fixture(autouse=True)
def _small_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "flush_bytes", lambda: 1 << 20)


def draw(shape: Shape, seed: int = 0) -> tuple[Any, Any, Any]:
    """Queries (1, hq, 1, d), keys and values (1, h, n, d) float32, keys with a spread that makes some weights large."""
    k, v = subjects.make_tokens(shape, "peaked", seed=seed)
    return subjects.make_queries(shape), k, v


# -- what is measured gives right results -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "shape", [Shape(304, 64, 8, 2), Shape(16, 128, 5, 1), Shape(128, 64, 2, 2), Shape(96, 128, 27, 3)]
)
def test_dense_flash_is_exact_attention(shape: Shape, dtype: str) -> None:
    q, k, v = draw(shape)
    if dtype == "bf16":
        k, v = to_bfloat16(k), to_bfloat16(v)
    exact = attend_exactly(q, k, v)[0, :, 0]
    for threads in (1, 2):
        assert relative_error(dense_flash(q[0, :, 0], k[0], v[0], threads=threads), exact) < 2e-6


def test_dense_flash_refuses_what_it_would_compute_wrongly() -> None:
    q, k, v = draw(TINY)
    for arguments in ((q, k[:, :, :15], v[:, :, :15]), (q[..., :32], k[..., :32], v[..., :32]), (q, k, to_bfloat16(v))):
        with pytest.raises(ValueError, match="do not fit"):
            dense_flash(*(x[0, :, 0] if x.shape[1] == TINY.hq else x[0] for x in arguments))


@pytest.mark.parametrize("shape", [TINY, TINY._replace(h=8)])
def test_every_rival_is_exact_attention(shape: Shape) -> None:
    q, k, v = draw(shape)
    half = tuple(map(to_bfloat16, (q, k, v)))
    tensors = {"fp32": tuple(map(tensor, (q, k, v))), "bf16": tuple(map(tensor, half))}
    names = rival_names(shape.gqa)
    assert len(names) == (6 if shape.gqa > 1 else 4)
    for name in names:
        exact = attend_exactly(*(half if name.endswith("bf16") else (q, k, v)))
        error = relative_error(rival(name, tensors)().float().numpy(), exact)
        assert error < (3e-2 if name.endswith("bf16") else 1e-5), name


def test_reads_and_copies_touch_every_byte() -> None:
    x = random_bytes(3 << 20)
    for threads in (1, 2, 3):
        assert read_all(x, threads=threads) == np.bitwise_xor.reduce(x.view(np.int64))
        for changed in (0, x.size // 2, x.size - 1):
            y = x.copy()
            y[changed] ^= 255
            assert read_all(y, threads=threads) != read_all(x)
    out = np.zeros_like(x)
    copy_all(x, out)
    np.testing.assert_array_equal(out, x)


@pytest.mark.parametrize("method", ["kivi-2", "exact"])
def test_stored_tokens_are_those_of_a_cache_of_that_length(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subjects, "DRAWN_TOKENS", 128)
    for n in (300, 128, 40):
        shape = TINY._replace(n=n)
        k, v = subjects.make_tokens(shape)
        cache, stored = subjects.fill_cache(method, k, v), subjects.store(method, shape)
        assert (stored.nbytes, stored.bits()) == (cache.nbytes, pytest.approx(cache.bits_per_value))
        view, own = stored.view, cache.view()
        np.testing.assert_array_equal(view.lengths, own.lengths)
        np.testing.assert_array_equal(view.window_counts, own.window_counts)
        assert view.pages.shape[2] == view.page_counts[0] == own.page_counts[0]
        if n == 300:
            np.testing.assert_array_equal(view.pages[0, 0, 0], view.pages[0, 0, 4])
            assert (view.pages[0, 0, 0] != view.pages[0, 0, 1]).any()


def test_errors_are_against_attention_over_the_decoded_cache() -> None:
    errors = measure_errors(SUBJECTS, TINY._replace(n=320))
    assert [(e["name"], e["data"]) for e in errors] == [(s.name, kind) for kind in DATA for s in SUBJECTS]
    for int16, int8 in zip(errors[::2], errors[1::2], strict=True):
        # What the codes lose is a hundred times as much as what 16-bit coefficients do: it is not in here.
        assert 0 < int16["error"] < 1e-3
        assert int16["error"] < int8["error"] < 0.2


# -- races ------------------------------------------------------------------------------------------------------------


def test_ratios_are_taken_within_rounds() -> None:
    race = Race({"a": [2.0, 30.0, 4.0, 50.0, 6.0], "b": [1.0, 10.0, 4.0, 100.0, 2.0]})
    ratio = race.ratio("a", "b")
    assert ratio == quartiles([2.0, 3.0, 1.0, 0.5, 3.0])
    assert ratio.median == 2.0
    assert statistics.median(race.seconds["a"]) / statistics.median(race.seconds["b"]) == 1.5
    few = Race({"a": [2.0, 30.0], "b": [1.0, 10.0, 4.0, 100.0, 2.0]})
    assert few.ratio("a", "b").median == 2.5
    assert race.best(["a", "b"]) == "b"
    shares = Race({"a": [11.0, 12.0, 9.0], "b": [9.0, 9.0, 9.0], "floor": [8.0, 8.0, 8.0]})
    assert shares.share_ratio("a", "b", "floor") == quartiles([3.0, 4.0, 1.0])
    assert shares.share_ratio("a", "floor", "floor") is None


def test_a_race_runs_in_turns_from_another_entrant_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(timing, "read_all", lambda x: calls.append("flush"))
    entrants = [
        Entrant(name, lambda n=name: calls.append(n), lambda n=name: calls.append(f"prepare {n}"), rounds)  # type: ignore[misc]
        for name, rounds in (("a", None), ("b", 2), ("c", None))
    ]
    race = run_race(entrants, rounds=4, warm_up=2)
    runs = [c for c in calls if len(c) == 1]
    assert "".join(runs) == "ca" + "cab" + "abc" + "bca" + "ca" + "ac"
    assert calls[:6] == ["prepare c", "flush", "c", "prepare a", "flush", "a"]
    assert {name: len(seconds) for name, seconds in race.seconds.items()} == {"a": 4, "b": 2, "c": 4}


def test_a_race_beside_a_busy_process_or_on_an_unsteady_machine_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = timing._contention(0.01, 0.0, [1.0, 1.01, 1.02, 1.0])
    assert quiet == ""
    assert "another process used 40% of a core" in timing._contention(0.4, 0.0, [])
    assert "the host took 20% of the time" in timing._contention(0.0, 0.2, [])
    assert "varied by" in timing._contention(0.0, 0.0, [1.0, 1.5, 1.0, 2.0, 1.0])
    monkeypatch.setattr(timing.Neighbours, "busiest_share", lambda self: 0.5)
    race = run_race([Entrant("a", lambda: None)], rounds=2)
    assert "50%" in race.contended


def test_flush_reads_twice_the_last_cache() -> None:
    assert flush_bytes() >= max(2 * last_cache_bytes(), 96 << 20)


def test_power_law_is_found() -> None:
    sizes = [64, 128, 256, 512]
    fit = fit_power(sizes, [3 * n**0.75 for n in sizes])
    assert fit == pytest.approx((0.75, 3.0, 1.0))
    assert fit_power(sizes, [1.0, 2.0, 4.0, 16.0]).largest_miss > 1.2


# -- commands ---------------------------------------------------------------------------------------------------------


def check_rows(rows: list[Row]) -> None:
    """Times in order, and the same after a round trip through JSON."""
    for row in rows:
        assert 0 < row.time.first_quartile <= row.time.median <= row.time.third_quartile
        assert Row.from_json(json.loads(json.dumps(row.to_json()))) == row


def test_decode_rows() -> None:
    rows = measure_decode(TINY, SUBJECTS, rounds=3)
    check_rows(rows)
    by_kind: dict[str, list[Row]] = {}
    for row in rows:
        by_kind.setdefault(row.kind, []).append(row)
    assert [len(by_kind[kind]) for kind in ("kvsketch", "torch", "dense", "memory")] == [2, 6, 2, 4]
    for row in by_kind["kvsketch"]:
        assert set(row.ratios) == {"best torch", "dense bf16", "dense fp32", "read"}
        assert row.rivals["best torch"] in [r.name for r in by_kind["torch"]]
        assert row.bits is not None
        assert 4 < row.bits < 32


def test_palu_rows() -> None:
    shape, kinds = Shape(192, 64, 6, 2), [Latents(0.5, 2), Latents(0.5, 1, None)]
    rows = measure_palu(shape, kinds, rounds=3)
    check_rows(rows)
    latents = [row for row in rows if row.kind == "palu"]
    assert [row.name for row in latents] == [entrant_name(kind, rope) for kind in kinds for rope in (True, False)]
    for row in latents:
        assert {"dense bf16", "dense fp32", "kivi-2"} == set(row.ratios) - {"product"}
        assert ("product" in row.ratios) == row.name.endswith(", RoPE")
    # Half of the numbers at 3 bits with a scale and zero of 16 bits for 64 of them; exact ones are float32.
    assert [row.bits for row in latents] == [1.75, 1.75, 16.0, 16.0]


def test_break_even_is_interpolated() -> None:
    assert break_even([1000, 4000], [0.5, 2.0]) == pytest.approx(2000)
    assert break_even([4000, 1000, 16000], [0.25, 2.0, 4.0]) == pytest.approx(8000)
    assert break_even([1000, 4000], [1.5, 2.0]) == 1000
    assert break_even([1000, 4000], [1.5, 0.9]) is None


def test_encode_rows() -> None:
    rows = measure_encode(Shape(64, 64, 4, 2), rounds=3)
    check_rows(rows)
    assert len(rows) == 2 + len(SIDES) + len(CACHES)
    assert all(("memcpy" in row.ratios) == (row.kind == "kvsketch") for row in rows)
    assert {row.name: row.bits for row in rows if row.name in SIDES}["keys, 2 bits"] == 3.0


def test_scaling_and_threads_rows() -> None:
    shapes = tuple(TINY._replace(n=n) for n in (160, 320))
    rows, fit = measure_sweep(Sweep("n", "kivi-2", (160, 320), SUBJECTS[:1] * 2, shapes), rounds=3)
    check_rows(rows)
    assert [row.name for row in rows] == ["n=160", "n=320"]
    assert fit.factor > 0
    rows = measure_threads(TINY, SUBJECTS[:1], rounds=3)
    check_rows(rows)
    assert [row.threads for row in rows] == [1, 2] * 4
    assert all(("one thread" in row.ratios) == (row.threads == 2) for row in rows)


def test_processes_share_a_folder_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import json, os, pathlib; p = pathlib.Path(os.environ['NUMBA_CACHE_DIR']) / 'kernel'; was = p.exists(); "
        "p.touch(); print(json.dumps({'imports': 0.1, 'first_use': 0.1 if was else 9.0}))"
    )
    monkeypatch.setattr(start, "_PROGRAM", program)
    starts = start.measure_start(("kivi-2",), processes=3)
    assert [s.first_use for s in starts] == [9.0, 0.1, 0.1]
    assert all(s.total > 0 for s in starts)
    monkeypatch.setattr(start, "_PROGRAM", "raise SystemExit('no kernel')")
    with pytest.raises(RuntimeError, match="no kernel"):
        start.measure_start()


def test_subjects_of_the_command_line() -> None:
    assert [s.name for s in chosen_subjects("kivi-2 int8, exact", False)] == ["kivi-2 int8", "exact"]
    assert {s.name for s in chosen_subjects(None, True)} < {s.name for s in chosen_subjects(None, False)}
    result = CliRunner().invoke(app, ["decode", "--subjects", "kivi-9"])
    assert result.exit_code == 2
    assert "kivi-9" in result.output


def test_generation_rows_and_absent_rivals(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = ("quanto", {"nbits": 2}, "no_such_module", None)
    monkeypatch.setattr(model_runs, "QUANTIZED", {"a": missing, "fp8": ("fp8", {}, None, None), "c": (*missing[:3], 8)})
    monkeypatch.setattr(model_runs.importlib.util, "find_spec", lambda name: None)
    rows, absent = measure_generate(
        tiny_model(),
        random_prompt(1, 150),
        ("kivi-2",),
        rounds=3,
        threads=1,
        rivals=("a", "fp8", "c", *model_runs.LLAMA),
    )
    check_rows(rows)
    assert [row.name for row in rows] == ["empty context", "DynamicCache", "kivi-2", "fp8"]
    assert "no_such_module" in absent["a"]
    assert absent["c"] == "not at more than 8 tokens"
    assert set(absent) == {"a", "c", *model_runs.LLAMA}
    assert {"dense", "floor"} <= set(rows[2].ratios)
    assert rows[2].extra["tokens_per_s"] == pytest.approx(1e3 / rows[2].time.median)
    assert rows[1].nbytes >= 2 * 150 * rows[1].shape.h * rows[1].shape.d * 4


def test_a_requantizing_step_quantizes_all_and_leaves_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    class Layer:
        residual_length = 128

    class Quantized:
        layers = (Layer(), Layer())

    seen: list[int] = []
    cache = Quantized()
    monkeypatch.setattr(model_runs, "read_tokens", lambda m, t, c: seen.extend(x.residual_length for x in c.layers))
    model_runs._requantizing_step(None, torch.zeros(1, 1), cache)
    assert seen == [1, 1]
    assert [layer.residual_length for layer in cache.layers] == [128, 128]


def test_a_slow_step_that_a_rival_cannot_do_is_noted() -> None:
    def fail() -> None:
        raise RuntimeError("sizes differ\nand more")

    absent: dict[str, str] = {}
    run = model_runs.Run("hqq", "transformers", lambda: None, lambda: None, lambda: 0, fail)
    assert generate._slow_milliseconds(run, absent) is None
    assert absent == {"hqq, a step that quantizes anew": "sizes differ"}


def test_reserved_share_counts_all_buffers() -> None:
    assert 0.15 < reserved_share(rows=2, tokens=1024) < 0.5


# -- asv --------------------------------------------------------------------------------------------------------------


def test_asv_finds_the_benchmarks_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    discovery = pytest.importorskip("asv_runner.discovery")
    lines = (ROOT / "asv.conf.json").read_text().splitlines()
    settings = json.loads("\n".join(line for line in lines if not line.strip().startswith("//")))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(sys, "path", [*sys.path])
    found = {benchmark.name for benchmark in discovery.disc_benchmarks(str(ROOT / settings["benchmark_dir"]))}
    assert {name.split(".")[0] for name in found} == {"bench_decode", "bench_encode", "bench_generate"}
    wanted = {
        *(f"bench_decode.Decode.track_over_{rival}" for rival in ("best_torch", "dense_bf16", "read_floor")),
        *("bench_decode.Decode.track_bits", "bench_decode.Attend.time_attend", "bench_decode.Scaling.track_exponent"),
        *("bench_encode.Encode.track_over_memcpy", "bench_generate.Generate.track_tokens_per_second"),
    }
    assert wanted <= found


def test_asv_classes_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_decode, "SHAPES", {str(TINY): TINY})
    monkeypatch.setattr(bench_decode, "SUBJECTS", SUBJECTS)
    monkeypatch.setattr(bench_decode, "ROUNDS", 2)
    decode = bench_decode.Decode()
    rows = decode.setup_cache()
    for name in ("milliseconds", "over_best_torch", "over_dense_bf16", "over_dense_fp32", "over_read_floor", "bits"):
        assert getattr(decode, f"track_{name}")(rows, "kivi-2 int8", str(TINY)) > 0
    attend = bench_decode.Attend()
    attend.setup("kivi-2", str(TINY))
    monkeypatch.setattr(bench_encode, "ANCHOR", Shape(64, 64, 4, 2))
    monkeypatch.setattr(bench_encode, "ROUNDS", 2)
    encode = bench_encode.Encode()
    found = encode.setup_cache()
    for what in encode.params[0]:
        assert encode.track_over_memcpy(found, what) > 0
