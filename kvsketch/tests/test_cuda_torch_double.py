"""Torch on a CUDA device that is not there: as strict as torch, one memory with the stand-in for CuPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvsketch[hf]'")

from kvsketch.adapters.torch_dlpack import array_from_tensor, beside_torch, tensor_from_array  # noqa: E402
from kvsketch.tests.cuda_host import CudaHostError  # noqa: E402
from kvsketch.tests.cuda_host.devices import counts, without_waiting  # noqa: E402
from kvsketch.tests.cuda_host.fixtures import needs_harness  # noqa: E402
from kvsketch.tests.cuda_host.torch_double import STREAM, DeviceTensor, on_cuda  # noqa: E402

pytestmark = needs_harness

DTYPES = ["float32", "float16", "bfloat16", "int64", "bool"]


@pytest.fixture
def cupy() -> Iterator[Any]:
    with on_cuda(count=2) as module:
        yield module


def test_tensors_lie_on_a_device(cupy: Any) -> None:
    x = torch.arange(6, device="cuda").reshape(2, 3).float()
    assert (x.device, x.is_cpu, x.is_cuda, x.stride()) == (torch.device("cuda", 0), False, True, (3, 1))
    x[1] = torch.tensor([7.0, 8.0, 9.0], device="cuda")
    x += 1
    assert (x @ x.T)[1].cpu().tolist() == [8 + 18 + 30, 64 + 81 + 100]
    assert torch.empty(3, device="cuda:1").device.index == 1
    assert torch.zeros(3).device.type == "cpu"
    layer = torch.nn.Linear(3, 2).to("cuda")
    assert layer.weight.device.type == "cuda"
    assert layer(x).shape == (2, 2)


REFUSED: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda x, host: x + host,
    "product": lambda x, host: x @ host,
    "concatenation": lambda x, host: torch.cat([x, host]),
    "in place": lambda x, host: x.add_(host),
    "of a device to the host's": lambda x, host: host.add_(x),
    "two devices": lambda x, host: x + host.to("cuda:1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_devices_are_not_mixed(name: str, cupy: Any) -> None:
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        REFUSED[name](torch.ones(3, device="cuda"), torch.ones(3))


def test_numbers_of_a_device_are_not_read_unasked(cupy: Any) -> None:
    x = torch.ones(3, device="cuda")
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        x.numpy()
    with pytest.raises(NotImplementedError, match="changes a tensor's shape in place"):
        torch.ones(3, device="cuda").unsqueeze_(0)
    for action, waits, sends in (
        (lambda: x + 1, 0, 0),
        (lambda: x[torch.arange(2, device="cuda")], 0, 0),
        (lambda: x[torch.arange(2)], 0, 1),
        (lambda: x[x > 0], 1, 0),
        (lambda: x.cpu(), 1, 0),
        (lambda: x.sum().item(), 1, 0),
        (lambda: bool((x > 0).all()), 1, 0),
        (lambda: (x > 0).nonzero(), 1, 0),
        (lambda: torch.zeros(3).to("cuda"), 0, 1),
        (lambda: torch.zeros(3).copy_(x), 1, 0),
    ):
        counts.reset()
        action()
        assert (counts.synchronisations, counts.uploads) == (waits, sends)
        assert all("test_cuda_torch_double.py" in place for place in counts.places)
        if waits or sends:
            with without_waiting(), pytest.raises(CudaHostError, match="captured graph"):
                action()


@pytest.mark.parametrize("name", DTYPES)
def test_arrays_and_tensors_share_memory(name: str, cupy: Any) -> None:
    x = torch.arange(24, device="cuda").reshape(2, 3, 4).to(getattr(torch, name))
    with beside_torch(x):
        a = array_from_tensor("x", x[:, 1:].transpose(1, 2))
        assert type(a) is cupy.ndarray
        assert (a.dtype.name, a.shape, a.device.id) == (name, (2, 4, 2), 0)
        back = tensor_from_array(a)
        assert (back.dtype, back.device, back.stride()) == (x.dtype, x.device, (12, 1, 4))
        x[1, 2, 3] = 0
        assert float(a[1, 3, 1]) == float(back[1, 3, 1]) == 0
        a[0, 0, 0] = 1
        assert float(x[0, 1, 0]) == 1
        assert float(back[0, 0, 0]) == 1


def test_what_cupy_refuses_of_other_libraries(cupy: Any) -> None:
    with pytest.raises(TypeError, match="CPU arrays cannot be directly imported to CuPy"):
        cupy.from_dlpack(torch.zeros(3))
    x = torch.zeros(3, device="cuda")
    with beside_torch(x):
        with pytest.raises(NotImplementedError, match="CuPy has no dtype"):
            cupy.from_dlpack(x.bfloat16())
        with pytest.raises(BufferError, match="require gradient"):
            cupy.from_dlpack(torch.nn.Parameter(x))
        with pytest.raises(BufferError, match="dtype is not supported for dlpack export"):
            torch.from_dlpack(array_from_tensor("x", x.bfloat16()))
    with pytest.raises(AssertionError, match="is not torch's current one"):
        cupy.from_dlpack(x)
    with pytest.raises(RuntimeError, match="requires explicit device ID for a null pointer"):
        cupy.cuda.UnownedMemory(0, 0, None)


def test_arrays_are_made_beside_torch(cupy: Any) -> None:
    """On its stream, on its device and in its memory, also where there is nothing to hold."""
    x = torch.zeros(3, device="cuda:1")
    taken: list[int] = []

    def seen(*args: Any, **options: Any) -> Any:
        taken.append(args[0])
        return empty(*args, **options)

    empty, torch.empty = torch.empty, seen
    try:
        with beside_torch(x):
            assert cupy.cuda.get_current_stream().ptr == STREAM
            assert cupy.cuda.Device().id == 1
            a, nothing, total = cupy.zeros((2, 8), np.float32), cupy.empty((2, 0)), cupy.ones(4) + 1
    finally:
        torch.empty = empty
    assert taken == [64, 0, 32, 32]
    assert {array.device.id for array in (a, nothing, total)} == {1}
    assert a.data.ptr % 256 == 0
    assert cupy.cuda.get_current_stream().ptr == 0
    with cupy.cuda.Device(1):
        assert isinstance(tensor_from_array(a), DeviceTensor)
        del x
        assert a.get().tolist() == [[0.0] * 8] * 2
