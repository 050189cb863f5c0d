"""The collective operations of the ranks of one node, over Gloo on CPUs and NCCL on CUDA devices.

The group is built directly from the backend's class, so that nothing global of ``torch.distributed`` is touched, and
several groups can live in one process. Gloo listens on loopback alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from common.engine.tensor_parallel.shard import Shard
from common.errors import RankLostError


class RankGroup:
    """All ranks of a node. Every rank calls the same methods in the same order.

    Args:
        group: a process group of ``torch.distributed``.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group = group
        self._nothing = torch.zeros(1, device=device)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Replace ``x`` by its sum over all ranks, and return it."""
        with _named_errors():
            self._group.allreduce([x]).wait()
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """Replace ``x`` by that of rank 0, and return it."""
        with _named_errors():
            self._group.broadcast(x, 0).wait()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the ``x`` of all ranks beside each other: ``[..., width]`` becomes ``[..., ranks * width]``."""
        parts = [torch.empty_like(x) for _ in range(self._group.size())]
        with _named_errors():
            self._group.allgather([parts], [x]).wait()
        return torch.cat(parts, dim=-1)

    def barrier(self) -> None:
        """Wait until all ranks have come here; on CUDA the stream waits, and not the caller."""
        self.all_reduce(self._nothing)


@contextmanager
def _named_errors() -> Iterator[None]:
    """Turn the errors of torch's backends into a ``RankLostError``."""
    try:
        yield
    except RuntimeError as error:
        line = str(error).split("\n")[0].split(". ")[0]
        raise RankLostError(f"a tensor-parallel rank does not answer any more: {line}") from error


def open_group(store: Store, shard: Shard, device: torch.device, *, timeout_s: float) -> RankGroup:
    """Form the group; blocks until all ranks have called this.

    Args:
        store: shared by the ranks.
        timeout_s: for the group to form, and for each of its operations.

    Raises:
        RankLostError: it does not form within ``timeout_s``.
    """
    distributed: Any = torch.distributed
    with _named_errors():
        if device.type == "cuda":
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=timeout_s)
            return RankGroup(distributed.ProcessGroupNCCL(store, shard.rank, shard.size, options), device)
        options = distributed.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False)]
        return RankGroup(distributed.ProcessGroupGloo(store, shard.rank, shard.size, options), device)
