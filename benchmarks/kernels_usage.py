"""What the declared kernels use on each architecture, compiled by NVRTC, which needs no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import groupby
from typing import Any, NamedTuple

from benchmarks.kernels_occupancy import Occupancy, occupancy
from kvsketch.cuda_raw import _compile
from kvsketch.cuda_raw.instances import Instance
from kvsketch.tests.cuda_host.nvrtc import Compiled, compile_for
from kvsketch.tests.cuda_host.toolchain import CompileError


class Usage(NamedTuple):
    """An instance on an architecture, and what it uses there, unless it does not compile: what the compiler said."""

    instance: Instance
    architecture: int
    compiled: Compiled | None
    error: str = ""

    @property
    def occupancy(self) -> Occupancy:
        """Of its own blocks."""
        assert self.compiled is not None
        block = self.instance.blocks[self.architecture]
        return occupancy(
            self.architecture, registers=self.compiled.registers, shared=self.shared, threads=block.threads
        )

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block: its own arrays, and what it is launched with."""
        assert self.compiled is not None
        return self.compiled.static_shared_bytes + self.instance.blocks[self.architecture].shared

    @property
    def failure(self) -> str | None:
        """What is wrong with it, or None."""
        if self.compiled is None:
            return f"does not compile: {self.error}"
        if self.compiled.spill_bytes:
            return f"spills {self.compiled.spill_bytes} bytes"
        if not self.occupancy.blocks:
            return f"does not fit a multiprocessor: {self.occupancy.limit}"
        return None

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        entry: dict[str, Any] = {"file": self.instance.file, "kernel": self.instance.expression}
        entry |= {"architecture": self.architecture, "failure": self.failure}
        if self.compiled is None:
            return entry
        block, held = self.instance.blocks[self.architecture], self.occupancy
        return entry | {
            "registers": self.compiled.registers,
            "spill_bytes": self.compiled.spill_bytes,
            "stack_bytes": self.compiled.stack_bytes,
            "static_shared_bytes": self.compiled.static_shared_bytes,
            "dynamic_shared_bytes": block.shared,
            "threads": block.threads,
            "blocks_a_multiprocessor": held.blocks,
            "warps_a_multiprocessor": held.warps,
            "occupancy": round(held.share, 4),
            "limit": held.limit,
        }


def compile_all(
    instances: Iterable[Instance],
    architectures: Sequence[int],
    *,
    workers: int,
    progress: Callable[[str, int, int | None], None],
) -> list[Usage]:
    """Compile all instances for those of `architectures` that they are for, a file and an architecture at a time.

    In the order of `instances`, then of `architectures`.
    """
    order = list(instances)
    jobs = [
        (file, architecture, chosen)
        for file, of in groupby(sorted(order, key=lambda instance: instance.file), key=lambda instance: instance.file)
        for group in [list(of)]
        for architecture in architectures
        if (chosen := [instance for instance in group if architecture in instance.blocks])
    ]
    found: dict[tuple[str, str, int], Usage] = {}
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(_compile_group, *job) for job in sorted(jobs, key=lambda job: -len(job[2]))]
        for done, future in enumerate(as_completed(futures)):
            for usage in future.result():
                found[usage.instance.file, usage.instance.expression, usage.architecture] = usage
            progress("Compiling", done + 1, len(jobs))
    return [
        found[instance.file, instance.expression, architecture]
        for instance in order
        for architecture in architectures
        if architecture in instance.blocks
    ]


def _compile_group(file: str, architecture: int, instances: Sequence[Instance]) -> list[Usage]:
    """Instances of one file; when they do not compile together, each on its own, to tell which."""
    names = [instance.expression for instance in instances]
    try:
        found = compile_for(_compile.source(file), names, (architecture,), _compile.options)
    except CompileError as error:
        if len(instances) > 1:
            return [usage for instance in instances for usage in _compile_group(file, architecture, (instance,))]
        return [Usage(instances[0], architecture, None, str(error))]
    return [Usage(instance, architecture, found[architecture, instance.expression]) for instance in instances]
