"""Arguments of a launch against the kernel's parameters, as strictly as possible: CUDA itself checks nothing."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvsketch.tests.cuda_host.memory import extent, footprint, mark_written, written_flags
from kvsketch.tests.cuda_host.toolchain import CudaHostError

#: What letter of device/launch.hpp a NumPy dtype kind goes to.
LETTERS = {"f": "f", "i": "i", "u": "u", "b": "u"}
WORDS = {"e": "float", "b": "bfloat", "f": "float", "i": "int", "u": "uint", "s": "struct of bytes ", "v": "void "}


class Parameter:
    """A kernel's parameter, from a description such as ``*cf4``: pointer to const float."""

    def __init__(self, text: str) -> None:
        self.pointer = text.startswith("*")
        text = text.removeprefix("*")
        self.constant = text.startswith("c")
        text = text.removeprefix("c")
        self.letter, self.bytes = text[0], int(text[1:])

    def __str__(self) -> str:
        size = self.bytes if self.letter in "sv" else 8 * self.bytes
        return f"{'pointer to ' if self.pointer else ''}{'const ' if self.constant else ''}{WORDS[self.letter]}{size}"

    def takes(self, dtype: np.dtype[Any]) -> bool:
        """Whether an element of `dtype` is what the kernel reads; signed and unsigned integers are not told apart."""
        if self.letter == "v":
            return True
        if self.letter == "s":
            return dtype.itemsize == self.bytes if not self.pointer else self.bytes % dtype.itemsize == 0
        letter = "b" if dtype.name == "bfloat16" else LETTERS.get(dtype.kind, "s")
        wanted = "f" if self.letter == "e" else self.letter
        return dtype.itemsize == self.bytes and (letter == wanted or {letter, wanted} == {"i", "u"})


class Passed:
    """A value to pass, and the array that it points to where it is a pointer."""

    def __init__(self, value: Any, array: np.ndarray | None, name: str, read_only: bool) -> None:
        self.value = value
        self.array = array
        self.name = name
        self.read_only = read_only

    def declare(self, runtime: Any) -> None:
        """Tell the runtime what memory this argument lets the kernel touch."""
        if self.array is None or not self.array.size:
            return
        start, end = extent(self.array)
        # Kept here until the launch is over.
        self.flags, self.footprint = written_flags(self.array), footprint(self.array)
        flags, covered = (None if of is None else of.ctypes.data for of in (self.flags, self.footprint))
        runtime.cuda_host_add_argument(start, end - start, self.name.encode(), int(self.read_only), flags, covered)

    def mark_written(self) -> None:
        """After an unchecked launch: what was not initialised is taken to be now."""
        if self.array is not None and not self.read_only:
            mark_written(self.array)


def convert(kernel: str, parameters: Sequence[Parameter], args: Sequence[Any]) -> list[Passed]:
    """`args` as the kernel takes them; CudaHostError when one is not what the kernel's parameter is."""
    if len(args) != len(parameters):
        raise CudaHostError(f"{kernel}: {len(args)} arguments for {len(parameters)} parameters")
    return [
        _convert(kernel, i, parameter, arg) for i, (parameter, arg) in enumerate(zip(parameters, args, strict=True))
    ]


def _convert(kernel: str, number: int, parameter: Parameter, arg: Any) -> Passed:
    wrong = f"{kernel}: argument {number} is %s, the kernel wants {parameter}"
    # An array of the stand-in for CuPy holds a NumPy array.
    array = getattr(arg, "_held", arg if isinstance(arg, np.ndarray) else None)
    by_value = isinstance(arg, np.generic) or (isinstance(arg, np.ndarray) and not parameter.pointer and arg.ndim == 0)
    if by_value:
        if parameter.pointer or not parameter.takes(arg.dtype):
            raise CudaHostError(wrong % f"a scalar {arg.dtype}")
        return Passed((ctypes.c_char * arg.dtype.itemsize).from_buffer_copy(arg.tobytes()), None, "", True)
    if array is None:
        raise CudaHostError(wrong % f"a {type(arg).__name__}; pass arrays and NumPy scalars")
    described = f"{array.dtype}{list(array.shape)}"
    if not parameter.pointer or not parameter.takes(array.dtype):
        raise CudaHostError(wrong % f"an array {described}")
    name = f"argument {number} ({described})"
    return Passed(ctypes.c_void_p(array.ctypes.data), array, name, parameter.constant or not array.flags.writeable)
