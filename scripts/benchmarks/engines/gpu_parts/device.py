"""The device of a benchmark: its measured limits, and the time that work takes on it."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from common.engine.kv_pool import TORCH_DTYPES
from scripts.load_tester.reporting.formats import counted


@dataclass(frozen=True)
class Limits:
    """What the device does at best, as measured in this run."""

    bytes_per_s: float
    flops_per_s: float

    def seconds(self, *, num_bytes: float = 0.0, flops: float = 0.0) -> float:
        """The least seconds for moving ``num_bytes`` and computing ``flops`` at the same time."""
        return max(num_bytes / self.bytes_per_s, flops / self.flops_per_s)


class Device:
    """Times work on one device.

    Args:
        rounds: number of times that each measurement is made; the fastest counts.
    """

    def __init__(self, name: str, dtype: str, *, rounds: int) -> None:
        self.device = torch.device(name)
        self.dtype_name, self.dtype = dtype, TORCH_DTYPES[dtype]
        self._rounds = rounds

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def title(self) -> str:
        cpu = f"CPU, {counted(torch.get_num_threads(), 'thread')}"
        name = torch.cuda.get_device_name(self.device) if self.is_cuda else cpu
        return f"{name}, {self.dtype_name}, torch {torch.__version__}"

    def free_bytes(self) -> int:
        """Memory that can be allocated; a small figure on the CPU, where it is never short."""
        if not self.is_cuda:
            return 1 << 28
        gc.collect()
        torch.cuda.empty_cache()  # of engines that were measured before
        return torch.cuda.mem_get_info(self.device)[0]

    def wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def kernel_s(self, work: Callable[[], object]) -> float:
        """Seconds on the device alone: on CUDA the work is repeated in a graph, so that its launches do not count."""
        work()
        once = self._once(work, 1)
        count = max(1, min(200, int(0.02 / max(once, 1e-6))))
        if not self.is_cuda:
            return min(self._once(work, count) for _ in range(self._rounds))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(count):
                work()
        graph.replay()
        return min(self._once(graph.replay, 1) for _ in range(self._rounds)) / count

    def _once(self, work: Callable[[], object], count: int) -> float:
        self.wait()
        if not self.is_cuda:
            began_at = time.perf_counter()
            for _ in range(count):
                work()
            return (time.perf_counter() - began_at) / count
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(count):
            work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / count


def measure_limits(device: Device, *, num_bytes: int, matrix_size: int) -> Limits:
    """Read and write a large tensor, and multiply two matrices."""
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device.device)
    target = torch.empty_like(source)
    read_s = device.kernel_s(source.sum)
    copy_s = device.kernel_s(lambda: target.copy_(source))
    memory = max(source.nbytes / read_s, 2 * source.nbytes / copy_s)
    a = torch.randn(matrix_size, matrix_size, device=device.device).to(device.dtype)
    b = torch.randn(matrix_size, matrix_size, device=device.device).to(device.dtype)
    return Limits(memory, 2 * matrix_size**3 / device.kernel_s(lambda: a @ b))
