"""The baseline of ``bench transfer`` for the transport ``gloo``: one send of all bytes, straight into the other pool.

A group of two processes meets over a store on loopback. There are no headers, permissions or copies; the receiver
answers with one byte when all bytes are there.
"""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from common.engine.kv_pool import KVPool

_PATIENCE = timedelta(seconds=60)


def host() -> Any:
    """A store on a free port (``.port``) of loopback, where the two processes meet."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_PATIENCE)


def _join(store: Any, rank: int) -> Any:
    options = torch.distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout, options._threads = _PATIENCE, 1
    options._devices = [torch.distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False)]
    return torch.distributed.ProcessGroupGloo(store, rank, 2, options)


def _bytes_of(pool: KVPool) -> torch.Tensor:
    return torch.frombuffer(pool.memory, dtype=torch.uint8)


def receive(pool: KVPool, port: int) -> None:
    """Start a thread that receives until the other end closes."""
    threading.Thread(target=_receive, args=(pool, port), daemon=True).start()


def _receive(pool: KVPool, port: int) -> None:
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=_PATIENCE)
    group, memory, count = _join(store, 1), _bytes_of(pool), torch.zeros(1, dtype=torch.int64)
    try:
        while True:
            group.recv([count], 0, 0).wait()
            group.recv([memory[: int(count) * pool.layout.page_bytes]], 0, 0).wait()
            group.send([memory[:1]], 0, 0).wait()
    except RuntimeError:  # the other end has closed
        return


def sender(pool: KVPool, store: Any) -> Callable[[int], float]:
    """Return a function that sends that many pages and returns the seconds until they have arrived."""
    group, memory, answer = _join(store, 0), _bytes_of(pool), torch.zeros(1, dtype=torch.uint8)

    def run(count: int) -> float:
        begun_at = time.perf_counter()
        head = group.send([torch.tensor([count])], 1, 0)
        body = group.send([memory[: count * pool.layout.page_bytes]], 1, 0)
        head.wait(), body.wait(), group.recv([answer], 1, 0).wait()
        return time.perf_counter() - begun_at

    return run
