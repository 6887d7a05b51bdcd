"""What tests of kernels ask for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvsketch.tests.cuda_host.stand_in import available, installed
from kvsketch.tests.cuda_host.toolchain import missing

#: Marks tests that execute kernels on the CPU.
needs_compiler = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture
def cupy() -> Iterator[Any]:
    """CuPy: the real one where it has a device, else the stand-in."""
    if not available() and missing() is not None:
        pytest.skip(str(missing()))
    with installed() as module:
        yield module
