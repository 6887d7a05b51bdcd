"""Which kernels a run of the tests executed and compiled, counted over all its processes."""

from __future__ import annotations

from collections.abc import Iterable

#: (name expression, mode) of launches that ended well, and (name expression, architecture) of compilations.
executed: set[tuple[str, str]] = set()
compiled: set[tuple[str, int]] = set()


def found() -> dict[str, list[list[str | int]]]:
    """What this process did, in types that may be sent to another."""
    return {"executed": [list(pair) for pair in executed], "compiled": [list(pair) for pair in compiled]}


def add(other: dict[str, list[list[str | int]]]) -> None:
    """Count what another process did."""
    executed.update((str(name), str(mode)) for name, mode in other["executed"])
    compiled.update((str(name), int(architecture)) for name, architecture in other["compiled"])


def summary() -> list[str]:
    """Lines that say how many of the declared instances of kernels were executed and compiled; none for none."""
    if not executed and not compiled:
        return []
    from kvsketch.cuda_raw.instances import INSTANCES

    names = {instance.expression for instance in INSTANCES}
    if not names & {name for name, _ in executed | compiled}:
        return []
    modes = [f"{_of(names, (n for n, m in executed if m == mode))} in {mode} mode" for mode in ("check", "fast")]
    targets = sorted({architecture for name, architecture in compiled if name in names})
    each = [f"{_of(names, (n for n, a in compiled if a == target))} for sm_{target}" for target in targets]
    return [
        f"CUDA kernels executed on the CPU, of {_of(names, names)}: {', '.join(modes)}",
        f"CUDA kernels compiled by NVRTC: {', '.join(each) or 'none'}",
    ]


def _of(declared: set[str], names: Iterable[str]) -> str:
    those = declared & {*names}
    return f"{len(those)} instances ({len({name.partition('<')[0] for name in those})} kernels)"
