"""Arguments of a launch against the kernel's parameters, as strictly as possible: CUDA itself checks nothing."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvsketch.tests.cuda_host.arrays import ndarray
from kvsketch.tests.cuda_host.devices import devices
from kvsketch.tests.cuda_host.memory import extent, footprint, mark_written, written_flags
from kvsketch.tests.cuda_host.toolchain import CudaHostError
from kvsketch.tests.cuda_host.traffic import Counter

#: The letter of device/launch.hpp for a NumPy dtype kind; structs for the others.
LETTERS = {"f": "f", "i": "i", "u": "u", "b": "u"}
WORDS = {"e": "float", "b": "bfloat", "f": "float", "i": "int", "u": "uint"}


class Parameter:
    """A kernel's parameter, from a description of device/launch.hpp such as ``*cf4``: pointer to const float."""

    def __init__(self, text: str) -> None:
        self.pointer = text.startswith("*")
        text = text.removeprefix("*")
        self.constant = text.startswith("c")
        text = text.removeprefix("c")
        self.letter, self.bytes = text[0], int(text[1:])

    def __str__(self) -> str:
        words = "pointer to " * self.pointer + "const " * self.constant
        if self.letter == "v":
            return f"{words}void"
        return (
            f"{words}struct of {self.bytes} bytes"
            if self.letter == "s"
            else f"{words}{WORDS[self.letter]}{8 * self.bytes}"
        )

    def takes(self, dtype: np.dtype[Any]) -> bool:
        """Whether an element of `dtype` is what the kernel reads; signed and unsigned integers are not told apart."""
        if self.letter == "v":
            return True
        if self.letter == "s":  # a vector type, such as float4, reads several elements
            return self.bytes % dtype.itemsize == 0 if self.pointer else dtype.itemsize == self.bytes
        letter = "b" if dtype.name == "bfloat16" else LETTERS.get(dtype.kind, "s")
        wanted = "f" if self.letter == "e" else self.letter
        return dtype.itemsize == self.bytes and (letter == wanted or {letter, wanted} == {"i", "u"})


class Passed:
    """An argument as the kernel takes it: a value, or an address and the array there."""

    def __init__(self, value: Any, array: np.ndarray | None = None, name: str = "", read_only: bool = True) -> None:
        self.value = value
        self.array = array
        self.name = name
        self.read_only = read_only
        # The runtime keeps their addresses for as long as it runs.
        self.flags: np.ndarray | None = None
        self.covered: np.ndarray | None = None
        self.counter: Counter | None = None

    def declare(self, runtime: Any, *, counted: bool) -> None:
        """Tell the runtime what memory this argument lets the kernel touch, and whether to count what it does."""
        if self.array is None or not self.array.size:
            return
        start, end = extent(self.array)
        self.flags, self.covered = written_flags(self.array), footprint(self.array)
        addresses = (None if of is None else of.ctypes.data for of in (self.flags, self.covered))
        runtime.cuda_host_add_argument(start, end - start, self.name.encode(), int(self.read_only), *addresses)
        if counted:
            self.counter = Counter(end - start)
            runtime.cuda_host_count_argument(*self.counter.addresses())

    def mark_written(self) -> None:
        """After an unchecked launch: what was not written before is taken to be now."""
        if self.array is not None and not self.read_only:
            mark_written(self.array)


def convert(kernel: str, parameters: Sequence[Parameter], args: Sequence[Any], *, takes_numpy: bool) -> list[Passed]:
    """`args` as the kernel takes them; CudaHostError when one is not what the kernel's parameter is."""
    if len(args) != len(parameters):
        raise CudaHostError(f"{kernel}: {len(args)} arguments for {len(parameters)} parameters")
    return [
        _convert(f"{kernel}: argument {i}", parameter, arg, takes_numpy)
        for i, (parameter, arg) in enumerate(zip(parameters, args, strict=True))
    ]


def _convert(which: str, parameter: Parameter, arg: Any, takes_numpy: bool) -> Passed:
    wanted = f", the kernel wants {parameter}"
    if isinstance(arg, ndarray):
        if arg.device_id != devices.current:
            raise CudaHostError(f"{which} lies on device {arg.device_id}, the current device is {devices.current}")
        array = arg.held
    elif isinstance(arg, np.generic) or (isinstance(arg, np.ndarray) and not arg.ndim and not parameter.pointer):
        if parameter.pointer or not parameter.takes(arg.dtype):
            raise CudaHostError(f"{which} is a scalar {arg.dtype}{wanted}")
        return Passed((ctypes.c_char * arg.dtype.itemsize).from_buffer_copy(arg.tobytes()))
    elif isinstance(arg, np.ndarray):
        if not takes_numpy:
            raise CudaHostError(f"{which} is a NumPy array, which CuPy passes by value; give an array of the device")
        array = arg
    else:
        raise CudaHostError(f"{which} is a {type(arg).__name__}; give arrays and NumPy scalars")
    described = f"{array.dtype}{list(array.shape)}"
    if not parameter.pointer or not parameter.takes(array.dtype):
        raise CudaHostError(f"{which} is an array {described}{wanted}")
    name = f"{which.rpartition(': ')[2]} ({described})"
    return Passed(ctypes.c_void_p(array.ctypes.data), array, name, parameter.constant or not array.flags.writeable)
