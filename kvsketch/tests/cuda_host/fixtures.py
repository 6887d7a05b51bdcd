"""What tests of kernels ask for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvsketch.tests.cuda_host.stand_in import available, installed
from kvsketch.tests.cuda_host.toolchain import missing

#: Marks tests that execute kernels, on the CPU where there is no GPU.
needs_compiler = pytest.mark.skipif(not available() and missing() is not None, reason=str(missing()))
#: Marks tests of what the harness alone sees: counts of waits, planted bugs.
needs_harness = pytest.mark.skipif(
    available() or missing() is not None, reason=str(missing() or "kernels run on a real device here")
)


@pytest.fixture
def cupy() -> Iterator[Any]:
    """CuPy: the real one where it has a device, else the stand-in."""
    if not available() and missing() is not None:
        pytest.skip(str(missing()))
    with installed() as module:
        yield module
