"""Torch tensors on a CUDA device that is not there: each holds a tensor of the host, which every operation runs on.

Inside :func:`on_cuda` torch behaves as a build for CUDA does, in what the library and transformers ask of it:
``model.to("cuda")``, factories with ``device="cuda"``, errors where host and device are mixed, DLPack. With the
stand-in for CuPy both libraries see the same memory, and `devices.counts` counts what torch waits for and sends, too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from kvsketch.tests.cuda_host.arrays import DLPACK_VERSION, ndarray
from kvsketch.tests.cuda_host.devices import counts, devices
from kvsketch.tests.cuda_host.memory import aligned_bytes
from kvsketch.tests.cuda_host.stand_in import installed
from kvsketch.tests.cuda_host.toolchain import built, compiler, run

#: The address of torch's current stream.
STREAM = 0x5EA
#: A guard that does nothing. A build for CPUs has none for CUDA, and cannot index a tensor of a device without.
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl { C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>) }
"""
aten = torch.ops.aten
#: What the host waits for: a value, a shape that depends on values.
WAITING = {
    *(aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default, aten.nonzero.default),
    *(aten.masked_select.default, aten._unique2.default, aten.repeat_interleave.Tensor, aten.bincount.default),
}
COPIES = {aten._to_copy.default, aten.copy_.default}
#: Where torch sends indices of the host by itself.
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
EMPTY = {aten.empty.memory_format}
#: Which kernel of torch attends: the one that is made of other operations.
MATH = 0


class DeviceTensor(torch.Tensor):
    """A tensor of a device; `held` has its numbers."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor, index: int) -> DeviceTensor:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return]
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=torch.device("cuda", index),
        )

    def __init__(self, held: torch.Tensor, index: int) -> None:
        self.held = held

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _operate(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:
        return f"DeviceTensor({self.held}, device={str(self.device)!r})"

    def data_ptr(self) -> int:
        """The address of the first number."""
        return self.held.data_ptr()

    def numpy(self, *, force: bool = False) -> Any:
        """Refused, as by torch."""
        if not force:
            raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first.")
        return self.cpu().numpy()

    def __dlpack__(
        self, *, stream: int | None = -1, max_version: Any = None, dl_device: Any = None, copy: Any = None
    ) -> Any:
        if self.requires_grad:
            raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
        if self.device.index != devices.current:
            raise BufferError(f"Can't export tensors on a different CUDA device index. Expected: {self.device.index}.")
        if stream not in (-1, STREAM):
            raise AssertionError(f"stream {stream} is not torch's current one {STREAM}: an event would order the two")
        return self.held.__dlpack__(max_version=max_version, copy=copy)


class _Device(TorchDispatchMode):
    """Where tensors of a device can be made."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _operate(func, args, kwargs or {})


def _operate(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation on what its tensors hold; errors where they do not lie together."""
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    indices = {x.device.index for x in given if isinstance(x, DeviceTensor)}
    on_host = any(not isinstance(x, DeviceTensor) and x.ndim for x in given)
    _check_together(func, indices, on_host)
    asked = kwargs.get("device")
    target = None if asked is None else torch.device(asked)
    if target is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
        index = None if target.type == "cpu" else devices.current if target.index is None else target.index
    else:
        index = next((x.device.index if isinstance(x, DeviceTensor) else None for x in given), None)
        index = index if func in COPIES or not indices else next(iter(indices))
    _count(func, args, indices, target, on_host)
    if func is aten._fused_sdp_choice.default and indices:
        return MATH
    if func in EMPTY and index is not None:
        return DeviceTensor(_empty(*args, **kwargs), index)
    result = func(*tree_map(_held, args), **tree_map(_held, kwargs))
    for argument, x in zip(func._schema.arguments, args, strict=False):
        if argument.is_write:
            _check_shape(func, x)
            return x
    if index is None:
        return result
    return tree_map(lambda x: DeviceTensor(x, index) if isinstance(x, torch.Tensor) else x, result)


def _held(x: Any) -> Any:
    return x.held if isinstance(x, DeviceTensor) else x


def _empty(size: Any, dtype: Any = None, **_: Any) -> torch.Tensor:
    dtype = torch.get_default_dtype() if dtype is None else dtype
    count = torch.Size(size).numel()
    return torch.from_numpy(aligned_bytes(count * dtype.itemsize)).view(dtype).reshape(size)


def _check_together(func: Any, indices: set[int], on_host: bool) -> None:
    mixed = len(indices) > 1 or (indices and on_host and func not in INDEXING)
    if mixed and func not in COPIES:
        where = sorted(f"cuda:{i}" for i in indices) + ["cpu"] * on_host
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {where} for {func}")


def _check_shape(func: Any, x: Any) -> None:
    if isinstance(x, DeviceTensor) and (x.shape != x.held.shape or x.stride() != x.held.stride()):
        raise NotImplementedError(f"{func} changes a tensor's shape in place, which the double does not follow")


def _count(func: Any, args: tuple[Any, ...], indices: set[int], target: torch.device | None, on_host: bool) -> None:
    """Count what waits for a device and what is sent to one."""
    if func in COPIES:
        to_device = args[0].device.type == "cuda" if target is None else target.type == "cuda"
        from_device = isinstance(args[1] if func is aten.copy_.default else args[0], DeviceTensor)
        if from_device and not to_device:
            counts.synchronise("a copy to the host")
        elif to_device and not from_device:
            counts.upload("a copy of the host")
    elif indices and (func in WAITING or (func in INDEXING and _has_mask(args[1]))):
        counts.synchronise(str(func))
    elif indices and on_host:
        counts.upload("an index of the host")


def _has_mask(indices: Any) -> bool:
    return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in indices)


def _from_dlpack(array: Any) -> torch.Tensor:
    """What ``torch.from_dlpack`` gives for an array of the stand-in."""
    if not isinstance(array, ndarray):
        return _torch_from_dlpack(array)
    _, index = array.__dlpack_device__()
    capsule = array.__dlpack__(stream=STREAM, max_version=DLPACK_VERSION)
    return DeviceTensor(_torch_from_dlpack(capsule), index)


_torch_from_dlpack = torch.from_dlpack


@cache
def _register_guard() -> None:
    folder = Path(torch.__file__).parent

    def build(_: Path, target: Path) -> None:
        source = target.with_suffix(".cpp")
        source.write_text(GUARD, encoding="utf-8")
        libraries = f"-L{folder}/lib", "-lc10", f"-Wl,-rpath,{folder}/lib"
        run([compiler(), "-std=c++20", "-shared", "-fPIC", f"-I{folder}/include", source, "-o", target, *libraries])

    ctypes.CDLL(str(built("torch-guard", [GUARD, torch.__version__, str(folder)], build)))


def _current_stream(device: Any = None) -> SimpleNamespace:
    index = devices.current if device is None else torch.device(device).index
    return SimpleNamespace(cuda_stream=STREAM, device_index=index)


@contextmanager
def on_cuda(**pretended: Any) -> Iterator[Any]:
    """Inside, torch has CUDA devices, and ``import cupy`` gives arrays in their memory; `pretended` as of `installed`.

    Where there is a real CuPy, torch is left as it is.
    """
    with installed(**pretended) as module:
        if module.ndarray is not ndarray:
            yield module
            return
        _register_guard()
        lifts, swaps = torch._C._only_lift_cpu_tensors(), torch.__future__.get_swap_module_params_on_conversion()
        torch._C._set_only_lift_cpu_tensors(True)
        torch.__future__.set_swap_module_params_on_conversion(True)
        cuda: dict[str, Any] = {
            "_lazy_init": lambda: None,
            "current_device": lambda: devices.current,
            "current_stream": _current_stream,
        }
        try:
            with (
                mock.patch.multiple(torch.cuda, **cuda),
                mock.patch.object(torch, "from_dlpack", _from_dlpack),
                _Device(),
            ):
                yield module
        finally:
            torch._C._set_only_lift_cpu_tensors(lifts)
            torch.__future__.set_swap_module_params_on_conversion(swaps)
