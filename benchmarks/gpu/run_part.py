"""One part in this process: ``python -m benchmarks.gpu.run_part NAME FILE [--dry-run]``."""

from __future__ import annotations

import importlib
import sys
import traceback
from contextlib import nullcontext
from pathlib import Path

from benchmarks.gpu.device import opened
from benchmarks.gpu.findings import FAILED, NOT_RUN, PASSED, Findings, NotRun, said
from benchmarks.gpu.parts import PARTS


def run_part(name: str, file: Path, dry_run: bool) -> Findings:
    """Run the part called `name`; whatever it raises becomes its outcome."""
    (part,) = (part for part in PARTS if part.name == name)
    findings = Findings(file)
    findings.save()
    try:
        measure = importlib.import_module(f"benchmarks.gpu.{name}").measure
        with opened(dry_run) if dry_run or part.needs_cupy else nullcontext() as device:
            measure(findings, device)
    except NotRun as reason:
        findings.end(FAILED if findings.failures else NOT_RUN, "; ".join([*findings.failures[:3], str(reason)]))
    except Exception as error:
        traceback.print_exc()
        findings.end(FAILED, said(error))
    else:
        findings.end(FAILED if findings.failures else PASSED, "; ".join(findings.failures[:3]))
    return findings


if __name__ == "__main__":
    run_part(sys.argv[1], Path(sys.argv[2]), "--dry-run" in sys.argv[3:])
