"""CUDA kernels executed on a CPU: the C++ of ``.cu`` files, unmodified, compiled by g++ with every thread a fiber.

:class:`HostModule` has the calls of ``cupy.RawModule``; :func:`running` chooses between checked and fast execution and
the order of threads. The headers in ``device/`` are CUDA's words for g++, ``runtime/`` runs and checks the threads.
"""

from kvsketch.tests.cuda_host.memory import empty
from kvsketch.tests.cuda_host.modes import running
from kvsketch.tests.cuda_host.module import HostModule
from kvsketch.tests.cuda_host.toolchain import CompileError, CudaHostError, missing

__all__ = ["CompileError", "CudaHostError", "HostModule", "empty", "missing", "running"]
