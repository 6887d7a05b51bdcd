"""Attention's kernels on tensor cores compiled for real architectures."""

from __future__ import annotations

import pytest

from kvsketch.cuda_raw import _compile
from kvsketch.cuda_raw.attention_mma import FILE, key_codec, most_warps, value_codec
from kvsketch.cuda_raw.attention_mma_instances import MMA
from kvsketch.tests.cuda_host.nvrtc import compile_for, missing

#: Of a multiprocessor.
REGISTERS = 65536


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize("architecture", [80, 120])
def test_no_kernel_spills(architecture: int) -> None:
    """Registers leave room for the threads that a block may have, and spilling is not needed for that."""
    kernels = {instance: instance.kernel(architecture) for instance in MMA}
    found = compile_for(
        _compile.source(FILE),
        [kernel.expression for kernel in kernels.values()],
        [architecture],
        _compile.options,
    )
    for instance, kernel in kernels.items():
        compiled = found[architecture, kernel.expression]
        assert compiled.spill_bytes == compiled.stack_bytes == 0
        keys, values = key_codec(instance.layout.keys.spec), value_codec(instance.layout.values.spec)
        assert not isinstance(keys, str)
        assert not isinstance(values, str)
        assert compiled.registers * 32 * most_warps(keys, values) <= REGISTERS
