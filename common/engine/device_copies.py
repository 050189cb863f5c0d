"""Work on the device for which the host does not wait: copies, and the device that kernels are launched on.

CUDA makes the host wait for copies from and to ordinary memory. Arrays therefore pass through pinned memory, which
torch keeps and uses again once the copy is over.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def current_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make a CUDA device the current one of this thread.

    Triton launches kernels there, wherever their tensors are. Every thread begins with the first GPU. Waiting there for
    an event of another GPU, or leaving a stream of another one, would take half a gigabyte of the first.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to a device; on the CPU the tensor shares its memory."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def copy_into(target: Tensor, array: NDArray[Any]) -> None:
    """Copy an array to memory that is on a device already."""
    tensor = torch.from_numpy(array)
    if target.device.type == "cuda":
        tensor = tensor.pin_memory()
    target.copy_(tensor, non_blocking=True)


class HostCopies:
    """The tensors of one step that the host will read. On the CPU they are there at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event(blocking=True) if device.type == "cuda" else None

    def add(self, tensor: Tensor) -> Tensor:
        """Begin to copy a tensor to the host; the copy that is returned must not be read before ``wait``."""
        if self._event is None:
            return tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)

    def end(self) -> None:
        """Note that everything the step does has been queued on the device."""
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))

    @property
    def is_done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Wait until the device has done the step, and its tensors are on the host."""
        if self._event is not None:
            with current_device(self._device):
                self._event.synchronize()
