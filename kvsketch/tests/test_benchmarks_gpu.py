"""``make gpu``: what it says where there is no GPU, how it times one, and what becomes of a part that fails."""

from __future__ import annotations

import contextlib
import ctypes
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from typer.testing import CliRunner

import kvsketch

ROOT = Path(kvsketch.__file__).parents[1]
if not (ROOT / "benchmarks" / "__main__.py").exists():
    pytest.skip("kvsketch is installed without its tree", allow_module_level=True)
sys.path.insert(0, str(ROOT))

from benchmarks.__main__ import app  # noqa: E402
from benchmarks.gpu import card, clock, command, parts, processes  # noqa: E402
from benchmarks.gpu.clock import EventClock, run_gpu_race  # noqa: E402
from benchmarks.gpu.device import Device  # noqa: E402
from benchmarks.gpu.findings import FAILED, NOT_RUN, PASSED, Findings, NotRun  # noqa: E402
from benchmarks.gpu.run_part import run_part  # noqa: E402
from benchmarks.timing import Entrant  # noqa: E402


@pytest.fixture
def no_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without a GPU, whatever this one has."""
    monkeypatch.setattr(card, "LIBRARY", "libkvsketch-no-such-library.so")
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.fixture
def findings(tmp_path: Path) -> Findings:
    return Findings(tmp_path / "findings.json")


# -- the card ---------------------------------------------------------------------------------------------------------


def put_program(folder: Path, name: str, text: str) -> None:
    """A shell script that is found first."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


class FakeDriver:
    """The driver's library."""

    def __init__(self, version: int, count: int = 1, status: int = 0) -> None:
        self.version, self.count, self.status = version, count, status

    def cuInit(self, flags: int) -> int:
        return self.status

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = self.version
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self.count
        return 0

    def cuDeviceGetName(self, name: Any, size: int, device: int) -> int:
        name.value = b"NVIDIA H200"
        return 0


@pytest.mark.usefixtures("no_card")
@pytest.mark.parametrize(("version", "extra"), [(13000, "cuda13"), (14020, "cuda13"), (12080, "cuda12")])
def test_the_driver_tells_which_extra_fits(monkeypatch: pytest.MonkeyPatch, version: int, extra: str) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeDriver(version, 2))
    found = card.find_card()
    assert found == ("NVIDIA H200", 2, (version // 1000, version % 1000 // 10), card.LIBRARY)
    assert found.extra == extra


@pytest.mark.usefixtures("no_card")
@pytest.mark.parametrize(
    ("driver", "says"),
    [
        (FakeDriver(11040), "needs 12"),
        (FakeDriver(13000, count=0), "no device"),
        (FakeDriver(13000, status=100), "100"),
    ],
)
def test_a_driver_that_is_of_no_use(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], driver: FakeDriver, says: str
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    assert card.main() == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert says in captured.err
    assert "Nothing was installed" in captured.err


@pytest.mark.usefixtures("no_card")
@pytest.mark.parametrize("words", ["CUDA Version: 13.0", "CUDA UMD Version : 12.9"])
def test_nvidia_smi_is_asked_where_the_library_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    put_program(tmp_path, "nvidia-smi", f'if [ $# = 0 ]; then echo "| {words} |"; else echo NVIDIA L4; fi')
    assert card.main() == 0
    captured = capsys.readouterr()
    assert captured.out == f"cuda{words.split()[-1][:2]}\n"
    assert "NVIDIA L4" in captured.err
    put_program(tmp_path, "nvidia-smi", "echo no devices were found; exit 6")
    with pytest.raises(card.NoCard, match=r"libkvsketch.*no devices were found"):
        card.find_card()


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_gpu_installs_nothing_where_there_is_no_gpu(tmp_path: Path) -> None:
    with contextlib.suppress(card.NoCard):
        pytest.skip(f"there is a GPU: {card.find_card().name}")
    folder = tmp_path / "environment"
    ended = subprocess.run(
        ["make", "gpu", f"PYTHON={sys.executable}", f"VENV={folder}"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert ended.returncode != 0
    assert "make gpu needs a machine with a CUDA GPU, and there is none here" in ended.stderr
    assert "Installing" not in ended.stdout
    assert not folder.exists()


@pytest.mark.usefixtures("no_card")
def test_the_command_says_so_too() -> None:
    result = CliRunner().invoke(app, ["gpu"])
    assert result.exit_code == 2
    assert "no CUDA GPU" in result.output
    result = CliRunner().invoke(app, ["gpu", "--parts", "machine,sizes"])
    assert result.exit_code == 2
    assert "'sizes'" in result.output


# -- time -------------------------------------------------------------------------------------------------------------


class FakeEvents:
    """``cupy`` with events: a call takes the device 0.25 ms, and the host as many cycles as `host_cycles` says."""

    def __init__(self, host_cycles: int) -> None:
        self.waits: list[int] = []
        self.fills = 0
        self.uint8, self.int64 = np.uint8, np.int64
        waits = self.waits

        class Event:
            """An event that is reached, by the time the host has asked for a call, unless the device waited longer."""

            done = property(lambda _: waits[-1] < host_cycles)

            def record(self) -> None:
                pass

            def synchronize(self) -> None:
                pass

        self.cuda = SimpleNamespace(
            Event=Event,
            get_elapsed_time=lambda start, end: 0.25,
            Device=lambda: SimpleNamespace(attributes={"L2CacheSize": 1 << 20}),
        )
        self.RawKernel = lambda source, name: lambda grid, block, args: waits.append(int(args[0]))

    def empty(self, size: int, dtype: Any) -> Any:
        assert size == 2 << 20

        def fill(value: int) -> None:
            self.fills += 1

        return SimpleNamespace(fill=fill)


def nothing() -> None:
    """A call that takes no time."""


def test_the_device_never_waits_for_the_host_while_it_is_timed() -> None:
    cupy = FakeEvents(host_cycles=5 * clock.FIRST_CYCLES)
    timer = EventClock(cupy)
    assert timer.seconds(nothing) == pytest.approx(0.25e-3)
    assert cupy.waits == [clock.FIRST_CYCLES * factor for factor in (1, 2, 4, 8)]
    assert cupy.fills == 4
    assert timer.seconds(nothing) == pytest.approx(0.25e-3)
    assert cupy.waits[4:] == [8 * clock.FIRST_CYCLES]
    timer.seconds(lambda: None)
    assert cupy.waits[5] == clock.FIRST_CYCLES
    assert timer.gaps == 0


def test_a_host_that_is_always_too_slow_is_told_of() -> None:
    cupy = FakeEvents(host_cycles=2 * clock.MOST_CYCLES)
    race = run_gpu_race(
        EventClock(cupy), [Entrant("a", nothing), Entrant("b", nothing, rounds=1)], rounds=3, steady="a"
    )
    assert race.seconds == {"a": [0.25e-3] * 3, "b": [0.25e-3]}
    assert max(cupy.waits) == clock.MOST_CYCLES
    assert "waited for the host in 6 calls" in race.contended


def test_a_copy_that_varies_makes_a_race_contended() -> None:
    class Clock:
        gaps = 0
        times = iter([1.0, 1.0, 1.5, 1.0, 2.0, 1.0])

        def seconds(self, run: Callable[[], object]) -> float:
            return next(self.times)

    race = run_gpu_race(Clock(), [Entrant("copy", nothing)], rounds=5, steady="copy")
    assert "varied by" in race.contended


# -- processes and parts ----------------------------------------------------------------------------------------------


def test_what_takes_too_long_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys, time; "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True); "
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid)); print('begun', flush=True); time.sleep(60)"
    )
    ended = processes.run_for([sys.executable, "-c", program], 3, tmp_path / "output")
    assert ended.code is None
    assert "time limit" in ended.reason
    assert ended.output == "begun\n"
    pid, deadline = int((tmp_path / "pid").read_text()), time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("program", "reason"),
    [("pass", ""), ("raise SystemExit(3)", "exit code 3"), ("import os; os.kill(os.getpid(), 9)", "SIGKILL")],
)
def test_how_a_process_ended(tmp_path: Path, program: str, reason: str) -> None:
    ended = processes.run_for([sys.executable, "-c", program], 60, tmp_path / "output", {"KVSKETCH_X": "1"})
    assert reason in ended.reason
    assert bool(ended.reason) == bool(reason)


def test_a_part_that_is_ended_leaves_what_it_had(findings: Findings) -> None:
    findings.table("Half", ("a",), [("1",)])
    contents = command.contents_of(parts.PARTS[3], findings.file, processes.Ended(None, "", 110.0))
    assert contents["outcome"] == FAILED
    assert contents["reason"] == "ended after 110 s, its time limit"
    assert contents["tables"]["Half"]["lines"] == [["1"]]
    contents = command.contents_of(parts.PARTS[3], findings.file.with_name("none.json"), processes.Ended(-11, "", 1.0))
    assert (contents["outcome"], contents["reason"]) == (FAILED, "ended by signal SIGSEGV")
    assert command.run_part(parts.PARTS[3], 0.5, False)["outcome"] == NOT_RUN


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (NotRun("no room"), NOT_RUN, "no room"),
        (RuntimeError("first\nsecond"), FAILED, "RuntimeError: first"),
        (None, PASSED, ""),
    ],
)
@pytest.mark.parametrize("failures", [[], ["wrong"]])
def test_whatever_a_part_raises_is_its_outcome(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    error: Exception | None,
    outcome: str,
    reason: str,
    failures: list[str],
) -> None:
    def measure(findings: Findings, device: Device | None) -> None:
        findings.failures += failures
        if error is not None:
            raise error

    monkeypatch.setattr("benchmarks.gpu.machine.measure", measure)
    run_part("machine", tmp_path / "found.json", False)
    found = json.loads((tmp_path / "found.json").read_text())
    if failures:
        assert found["outcome"] == FAILED
        assert found["failures"] == failures
    else:
        assert (found["outcome"], found["reason"]) == (outcome, reason)


def test_the_parts_fit_in_the_time_for_all() -> None:
    assert sum(part.seconds for part in parts.PARTS) <= parts.ALL_SECONDS
