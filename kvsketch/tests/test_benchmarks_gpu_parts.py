"""What the parts of ``make gpu`` find on a stand-in for a GPU, and what they make of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import kvsketch
from kvsketch.bitpack import pack_codes
from kvsketch.tests.cuda_host.fixtures import needs_compiler

ROOT = Path(kvsketch.__file__).parents[1]
if not (ROOT / "benchmarks" / "__main__.py").exists():
    pytest.skip("kvsketch is installed without its tree", allow_module_level=True)
sys.path.insert(0, str(ROOT))

from benchmarks.__main__ import app  # noqa: E402
from benchmarks.gpu import decode, graphs, launches, parity, parts, processes, sanitizer  # noqa: E402
from benchmarks.gpu.clock import HostClock  # noqa: E402
from benchmarks.gpu.device import Device, opened  # noqa: E402
from benchmarks.gpu.errors import LARGEST_ERRORS  # noqa: E402
from benchmarks.gpu.findings import NOT_RUN, PASSED, Findings, NotRun  # noqa: E402
from benchmarks.gpu.subjects import device_queries, store_on_device  # noqa: E402
from benchmarks.rows import row_of  # noqa: E402
from benchmarks.subjects import Shape, fill_cache, lengthen, make_tokens  # noqa: E402
from benchmarks.table import CONSOLE  # noqa: E402
from benchmarks.timing import Race  # noqa: E402


@pytest.fixture
def findings(tmp_path: Path) -> Findings:
    return Findings(tmp_path / "findings.json")


def row(shape: Shape, seconds: float, nbytes: int) -> Any:
    """A row of a method that needs `seconds` where a copy of 100 bytes needs 1 and flash 6."""
    race = Race({"copy": [1.0] * 4, decode.FLASH: [6.0] * 4, "kivi-2": [seconds] * 4})
    ratios = {"copy": decode.share(race, "kivi-2", nbytes, 200), "flash": race.ratio(decode.FLASH, "kivi-2")}
    extra = {"host_s": 1e-4, "compile_s": 1.0, "error": 1e-4}
    return row_of(race, "kvsketch", "kivi-2", shape, 0, nbytes=nbytes, ratios=ratios, extra=extra)


def test_targets_and_what_misses_them() -> None:
    """A share counts what is read over what a copy reads and writes; few rows and other lengths have no target."""
    met = decode.marks_of(row(Shape(32768, b=16), 2.0, 280))
    assert [(mark.measured, mark.met) for mark in met] == [(pytest.approx(0.7), True), (3.0, True)]
    missed = decode.marks_of(row(Shape(32768, b=16), 4.0, 280))
    assert [(mark.measured, mark.met) for mark in missed] == [(pytest.approx(0.35), False), (1.5, False)]
    assert len(decode.marks_of(row(Shape(32768), 1.0, 100))) == 1
    assert decode.marks_of(row(Shape(4096), 1.0, 100)) == []
    line = decode._line(row(Shape(32768, b=16), 4.0, 280), {mark.what for mark in missed})
    assert line[6:8] == ("0.35 (0.35 - 0.35)!", "1.50 (1.50 - 1.50)!")


def test_lengthened_rows_hold_their_pages_again_and_again() -> None:
    view = fill_cache("kivi-2", *make_tokens(Shape(36 + 3 * 32, 64, 4, 2))).view()
    longer = lengthen(view, 36 + 8 * 32, 3)
    assert longer.lengths.tolist() == [36 + 8 * 32] * 3
    for row_pages in longer.pages:
        np.testing.assert_array_equal(row_pages, view.pages[0][:, [0, 1, 2, 0, 1, 2, 0, 1]])
    np.testing.assert_array_equal(longer.window_k[2], view.window_k[0])


@needs_compiler
def test_an_error_in_a_result_fails_the_part(findings: Findings) -> None:
    shape = Shape(100, 64, 4, 2, 2)
    with opened(True) as device:
        subject = next(decode._subjects(findings, device, shape, ["kivi-2"]))
        assert decode._errors(findings, shape, [subject])["kivi-2"] < 1e-3
        assert findings.failures == []
        wrong = subject._replace(run=lambda: device_queries(device, shape))
        assert decode._errors(findings, shape, [wrong])["kivi-2"] > 0.1
        stored = store_on_device(device, "kivi-2", shape)
    assert "kivi-2 at n=100 d=64 heads=4/2 rows=2 is wrong" in findings.failures[0]
    # 2 pages of 32 tokens for 2 rows and heads: 2 bits a number with a scale and zero of 16 bits each for 32.
    assert stored.nbytes == 4 * (64 * 2 * 64 * 3 // 8 + 36 * 2 * 64 * 2)


class FakeStream:
    """A stream whose graph, when replayed, writes what `replay` gives into the captured result."""

    def __init__(self, out: Any, replay: Callable[[], float] | None, error: Exception | None = None) -> None:
        self.out, self.replay, self.error = out, replay, error

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def begin_capture(self) -> None:
        pass

    def end_capture(self) -> Any:
        if self.error is not None:
            raise self.error
        replay = self.replay
        return None if replay is None else SimpleNamespace(launch=lambda stream: self.out.fill(replay()))


@needs_compiler
@pytest.mark.parametrize(
    ("results", "error", "repeatable", "text"),
    [
        ([2, 2, 2], None, True, "yes"),
        ([3, 3, 3], None, True, "other results"),
        ([3, 3, 3], None, False, "yes"),
        ([2, 3, 2], None, False, "other results"),
        (None, RuntimeError("capture failed"), True, "no: RuntimeError: capture failed"),
    ],
)
def test_what_a_graph_replays_is_compared(
    monkeypatch: pytest.MonkeyPatch, results: list[float] | None, error: Exception | None, repeatable: bool, text: str
) -> None:
    with opened(True) as device:
        out = device.cupy.full(3, 2.0)
        replay = None if results is None else iter(results).__next__
        monkeypatch.setattr(device.cupy.cuda, "Stream", lambda non_blocking: FakeStream(out, replay, error))
        captured = graphs.capture(device, graphs.Call(lambda: out), repeatable=repeatable)
    assert text in captured.text
    assert (captured.replay_us is None) == (captured.text != "yes")


TESTS = """
import pytest

def test_right(): pass

def test_wrong(): assert 1 == 2, "so it is"

def test_skipped(): pytest.skip("no need")
"""


def test_counts_of_the_suite_and_of_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, findings: Findings
) -> None:
    file = tmp_path / "test_cuda_something.py"
    file.write_text(TESTS)
    monkeypatch.setattr(parity, "declared", lambda: {("bitpack.cu", "pack_codes<2>")})
    monkeypatch.setattr(parity, "_compile_alone", lambda kernels: (list(kernels), {}))
    parity.check_files(findings, Device(None, HostClock(), False), [file], 60)
    assert findings.tables["Tests on the device"].lines[0][:4] == (file.name, "1", "1", "1")
    assert "test_wrong" in findings.failures[0]
    assert "so it is" in findings.failures[0]
    assert findings.failures[1] == "1 declared kernels were not launched"
    file.write_text("import pytest\n\ndef test_skipped(): pytest.skip('no need')\n")
    findings.failures.clear()
    parity.check_files(findings, Device(None, HostClock(), False), [file], 60)
    assert "no need" in findings.failures[0]


def test_neither_planted_bugs_nor_the_harness_meet_a_device() -> None:
    names = {path.name for path in parity.chosen_files()}
    assert "test_cuda_attention.py" in names
    assert not [name for name in names if any(word in name for word in ("host", "bugs", "compiles"))]


def test_the_kernels_that_a_session_launches_are_written_down(tmp_path: Path, cupy: Any) -> None:
    before = launches.declared()
    assert before
    assert all(file.endswith(".cu") for file, _ in before)
    codes = cupy.asarray(np.arange(64, dtype=np.uint8) % 4)
    with launches.recorded() as found:
        pack_codes(codes, bits=2)
    ((kernel, count),) = found.counts.items()
    assert kernel[0] == "bitpack.cu"
    assert count == 1
    launches.write_kernels(tmp_path / "kernels.json", found)
    assert launches.read_kernels(tmp_path / "kernels.json")[0] == {kernel}


def test_what_the_sanitizer_finds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, findings: Findings) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sanitizer, "TOOLKITS", ())
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    device, right = Device(None, HostClock(), False), processes.Ended(0, "exercised without an error\n", 2.0)
    ends = {"": right, "memcheck": right, "racecheck": right}

    def run_exercise(arguments: Any, prefix: Any, seconds: float) -> processes.Ended:
        return ends[prefix[2] if prefix else "" if arguments == [sanitizer.ENGINE] else "memcheck"]

    monkeypatch.setattr(sanitizer, "run_exercise", run_exercise)
    with pytest.raises(NotRun, match="compute-sanitizer was not found"):
        sanitizer.measure(findings, device)
    program = tmp_path / sanitizer.PROGRAM
    program.touch(0o755)
    assert sanitizer.find_program() == str(program)
    sanitizer.measure(findings, device)
    assert findings.failures == []
    said = "========= Invalid __global__ read of size 4 bytes\n========= at kernel\n"
    ends["racecheck"] = processes.Ended(sanitizer.ERROR_CODE, said, 2.0)
    sanitizer.measure(findings, device)
    assert findings.failures == ["racecheck ended with exit code 86: Invalid __global__ read of size 4 bytes"]
    ends[""] = processes.Ended(1, "AssertionError: kivi-2, 3 queries\n", 2.0)
    findings.failures.clear()
    sanitizer.measure(findings, device)
    assert findings.failures == [
        "the exercise of cuda_raw itself ended with exit code 1: AssertionError: kivi-2, 3 queries",
        "racecheck ended with exit code 86: Invalid __global__ read of size 4 bytes",
    ]


def run_dry(tmp_path: Path, names: str) -> tuple[dict[str, Any], str]:
    """A dry run of some parts: the JSON file, and the Markdown file."""
    paths = [tmp_path / "gpu.json", tmp_path / "gpu.md"]
    arguments = ["gpu", "--dry-run", "--parts", names, "--json", str(paths[0]), "--markdown", str(paths[1])]
    try:
        result = CliRunner().invoke(app, arguments)
    finally:
        CONSOLE.record = False
    assert result.exit_code == 0, result.output
    return json.loads(paths[0].read_text()), paths[1].read_text()


@needs_compiler
def test_a_dry_run_of_the_cheap_parts(tmp_path: Path) -> None:
    contents, text = run_dry(tmp_path, "step,machine")
    assert contents["times"] == "dry run: times are not a GPU's"
    assert [(part["name"], part["outcome"]) for part in contents["parts"]] == [("machine", PASSED), ("step", PASSED)]
    step = contents["parts"][1]
    assert step["details"]["kivi-2, attention"]["launches"] >= 3
    assert "no: CudaHostError" in step["details"]["kivi-2, append and attend"]["text"]
    assert step["details"]["kivi-2, prepare_step and step"]["text"] == "yes"
    assert text.startswith("# kvsketch on a CUDA GPU")
    for words in ("dry run: times are not a GPU's", "stand-in, kernels on the CPU", "## Summary", "2 passed"):
        assert words in text


@pytest.mark.slow
@needs_compiler
def test_a_dry_run_of_all_parts(tmp_path: Path) -> None:
    contents, _ = run_dry(tmp_path, "all")
    outcomes = {part["name"]: part["outcome"] for part in contents["parts"]}
    assert outcomes == {part.name: NOT_RUN if part.name == "sanitizer" else PASSED for part in parts.PARTS}
    by_name = {part["name"]: part for part in contents["parts"]}
    assert "nothing found" in by_name["sanitizer"]["facts"]["cuda_raw, without it"]
    assert {row["name"] for row in by_name["decode"]["rows"]} >= {"copy", decode.FLASH, "kivi-2", "qjl-256 int8"}
    errors = {row["name"]: row["extra"]["error"] for row in by_name["decode"]["rows"] if row["kind"] == "kvsketch"}
    assert errors["kivi-2"] < 1e-3
    assert errors["qjl-256 int8"] < LARGEST_ERRORS["int8"]
    assert "6 of 6 equal" in by_name["generate"]["facts"]["greedy tokens, float32"]
