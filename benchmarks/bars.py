"""What figures are held to, and the verdict on each: met, missed or not measured, never taken for granted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.names import DYNAMIC_CACHE, QUANTO, READ, absent_key
from benchmarks.rows import Row
from benchmarks.subjects import ANCHOR, DATA

#: A plain read that gains less from a second thread leaves no room to show a gain.
READ_GAIN = 1.6
#: Tokens of the long and the short context of the model.
LONG, SHORT = 8000, 512


class Measured(NamedTuple):
    """A figure, and why it is not to be trusted if it is not."""

    value: float
    contended: str = ""


class NotMeasured(Exception):
    """Why there is no figure."""


@dataclass(frozen=True)
class Results:
    """Documents of the commands, by command."""

    documents: dict[str, dict[str, Any]]

    def document(self, command: str) -> dict[str, Any]:
        """The document of a command."""
        if command not in self.documents:
            raise NotMeasured(f"no result of `{command}`")
        return self.documents[command]

    def rows(self, command: str, name: str, **wanted: Any) -> list[Row]:
        """The rows of that name whose shape and threads are as wanted; at least one."""
        found = []
        for entry in self.document(command)["rows"]:
            row = Row.from_json(entry)
            numbers = row.shape._asdict() | {"threads": row.threads}
            if row.name == name and all(numbers[key] == value for key, value in wanted.items()):
                found.append(row)
        if not found:
            where = " ".join(f"{key}={value}" for key, value in wanted.items())
            raise self._lack(command, name, wanted, f"`{command}` has no row {name!r} at {where}")
        return found

    def ratio(self, command: str, name: str, ratio: str, **wanted: Any) -> Measured:
        """The median of one of a row's ratios."""
        for row in self.rows(command, name, **wanted):
            if ratio in row.ratios:
                return Measured(row.ratios[ratio].median, row.contended)
        raise self._lack(command, ratio, wanted, f"{name!r} was not compared with {ratio!r}")

    def _lack(self, command: str, name: str, wanted: dict[str, Any], reason: str) -> NotMeasured:
        """Why there is no figure: the reason that the command noted, or else the one given."""
        noted = self.document(command).get("absent", {})
        return NotMeasured(noted.get(absent_key(name, wanted.get("n", 0)), reason))


@dataclass(frozen=True)
class Bar:
    """A figure and the least or most that it may be; without a limit it is only shown."""

    what: str
    measure: Callable[[Results], Measured]
    least: float | None = None
    most: float | None = None


class Verdict(NamedTuple):
    """A bar's line: what, measured, bar, and ``met``, ``MISSED``, ``shown`` or ``not measured`` with the reason."""

    what: str
    measured: str
    bar: str
    outcome: str
    reason: str = ""


def judge(bar: Bar, results: Results) -> Verdict:
    """The verdict on one bar."""
    limit = f">= {bar.least:g}" if bar.least is not None else f"<= {bar.most:g}" if bar.most is not None else "none"
    try:
        measured = bar.measure(results)
    except NotMeasured as error:
        return Verdict(bar.what, "", limit, "not measured", str(error))
    missed = (bar.least is not None and not measured.value >= bar.least) or (
        bar.most is not None and not measured.value <= bar.most
    )
    outcome = "MISSED" if missed else "shown" if bar.least is None and bar.most is None else "met"
    reason = f"CONTENDED: {measured.contended}" if measured.contended else ""
    return Verdict(bar.what, f"{measured.value:.3g}", limit, outcome, reason)


#: Least ratios to torch's fastest and to the dense bf16 kernel, by tier and subject; None: no bar.
DECODE_BARS: dict[str, dict[str, tuple[float | None, float | None]]] = {
    "avx512-vnni": {"kivi-2": (4.5, 1.6), "kivi-4": (4.0, 1.5), "kivi-2 int8": (6.0, 2.4), "qjl-256": (5.0, 2.0)},
    "avx2": {"kivi-2": (2.5, 1.1), "kivi-4": (2.3, 1.1), "kivi-2 int8": (None, 1.8)},
    # Within three times the dense kernel's time.
    "generic": {"kivi-2": (None, 1 / 3), "kivi-4": (None, 1 / 3), "qjl-256": (None, 1 / 3)},
}
ENCODE_BARS = {
    **dict.fromkeys(("keys, 2 bits", "keys, 4 bits"), 0.5),
    **dict.fromkeys(("values, 2 bits", "values, 4 bits"), 0.4),
    "keys, Hadamard sketch m=256": 0.15,
}


def all_bars(tier: str) -> list[Bar]:
    """The bars for a machine of a tier, in the order shown."""
    return [*_decode_bars(tier), *_error_bars(), *_encode_bars(), *_thread_bars(), *_start_bars(), *_model_bars()]


def _decode_bars(tier: str) -> Iterator[Bar]:
    at = ANCHOR._asdict() | {"threads": 1}
    for name, limits in DECODE_BARS[tier].items():
        for ratio, least in zip(("best torch", "dense bf16"), limits, strict=True):
            yield Bar(
                f"decode, {name}: times faster than {ratio}",
                lambda results, name=name, ratio=ratio: results.ratio("decode", name, ratio, **at),  # type: ignore[misc]
                least=least,
            )


def _error_bars() -> Iterator[Bar]:
    for kind in DATA:
        for coefficients, most in (("int16", 1e-4), ("int8", None)):

            def worst(results: Results, kind: str = kind, int8: bool = coefficients == "int8") -> Measured:
                errors = [
                    entry["error"]
                    for entry in results.document("decode").get("errors", [])
                    if entry["data"] == kind and entry["name"].endswith(" int8") == int8
                ]
                if not errors:
                    raise NotMeasured("`decode` has no such error")
                return Measured(max(errors))

            yield Bar(f"decode, {coefficients}: largest relative L2 error, {kind}", worst, most=most)


def _encode_bars() -> Iterator[Bar]:
    at = ANCHOR._asdict() | {"threads": 1}
    for name, least in ENCODE_BARS.items():
        yield Bar(
            f"encode, {name}: speed relative to memcpy",
            lambda results, name=name: results.ratio("encode", name, "memcpy", **at),  # type: ignore[misc]
            least=least,
        )


def _thread_bars() -> Iterator[Bar]:
    for name in ("kivi-2", "kivi-4", "qjl-256"):

        def gain(results: Results, name: str = name) -> Measured:
            read = results.ratio("threads", READ.format(dtype="bf16"), "one thread", threads=2)
            if read.value < READ_GAIN:
                raise NotMeasured(f"a plain read gains {read.value:.2f} times, less than {READ_GAIN}")
            return results.ratio("threads", name, "one thread", threads=2)

        yield Bar(f"two threads, {name}: times faster than one", gain, least=1.7)


def _start_bars() -> Iterator[Bar]:
    def second(results: Results) -> Measured:
        starts = [s for s in results.document("start")["starts"] if s["process"] > 1]
        return Measured(max(s["total"] for s in starts))

    def compiling(results: Results) -> Measured:
        return Measured(results.document("start")["starts"][0]["first_use"])

    yield Bar("start: seconds of a process that finds its kernels on disk", second, most=2.0)
    yield Bar("start: seconds of compiling, in the first process", compiling)


def _model_bars() -> Iterator[Bar]:
    def mean_against_quanto(results: Results) -> Measured:
        rival = results.rows("generate", QUANTO, n=LONG)[0]
        steady, mean = results.ratio("generate", "kivi-2", QUANTO, n=LONG), rival.extra.get("mean_ms")
        if mean is None:
            raise NotMeasured("no step that quantizes anew was measured")
        return Measured(steady.value * mean / rival.time.median, steady.contended)

    def reserved(results: Results) -> Measured:
        return Measured(results.document("generate")["reserved_share"])

    def at(name: str, n: int) -> Callable[[Results], Measured]:
        return lambda results: results.ratio("generate", "kivi-2", name, n=n)

    model = f"SmolLM2, kivi-2 at {LONG} tokens"
    yield Bar(f"{model}: times less attention than {DYNAMIC_CACHE}", at("dense attention", LONG), least=6)
    yield Bar(f"{model}: share of the speed at an empty context", at("floor", LONG), least=0.85)
    yield Bar(f"{model}: times faster than {DYNAMIC_CACHE}", at("dense", LONG))
    yield Bar(f"{model}: times faster than {QUANTO}, steady steps", at(QUANTO, LONG), least=2)
    yield Bar(f"{model}: times faster than {QUANTO}, mean step", mean_against_quanto, least=2)
    yield Bar(f"SmolLM2, kivi-2 at {SHORT} tokens: times faster than {DYNAMIC_CACHE}", at("dense", SHORT), least=0.93)
    yield Bar("8 rows of 8192 tokens, kivi-2: buffers relative to dense 16-bit ones", reserved, most=0.25)
