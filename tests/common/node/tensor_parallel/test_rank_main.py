"""What a rank does with the messages of rank 0."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.thread_limit import refuse_thread

from common.engine.batch import RowArrays
from common.engine.tensor_parallel.rank_executor import RankExecutor
from common.node.tensor_parallel import rank_main
from common.node.tensor_parallel.channel import AdapterRead, RankChannel, ReadAdapter, Step, Transfer

LONGEST_S = 60.0


class SlowReader(RankExecutor):
    """Reads adapters, which are empty here, only when the test lets it; computes nothing."""

    def __init__(self) -> None:
        self._adapters = {}
        self.may_read = threading.Event()
        self.has_run = threading.Event()

    def read_adapter(self, number: int, digest: str, folder: Path, *, max_rank: int, root: Path | None) -> None:
        assert self.may_read.wait(LONGEST_S)
        adapter: Any = object()
        self._adapters[number] = adapter

    def run(self, *_: Any) -> None:
        self.has_run.set()


def step_that_drops(*numbers: int) -> Step:
    one = np.ones(1, np.int64)
    return Step.of(RowArrays(one, one, np.zeros((1, 1), np.int32), 16), one, dropped=numbers)


@contextlib.contextmanager
def rank_of(executor: SlowReader) -> Iterator[RankChannel]:
    """A rank on a thread of its own; gives the end of rank 0."""
    ours, theirs = map(RankChannel, socket.socketpair())
    ours.limit(LONGEST_S)
    pool: Any = SimpleNamespace(device=torch.device("cpu"))

    def handle() -> None:
        with pytest.raises(EOFError):
            rank_main._handle_messages(theirs, executor, pool, lambda *_: None)

    thread = threading.Thread(target=handle)
    thread.start()
    try:
        yield ours
    finally:
        ours.shut()
        thread.join(LONGEST_S)
        ours.close()
        theirs.close()
    assert not thread.is_alive()


def test_an_adapter_that_is_dropped_while_it_is_read_is_not_kept() -> None:
    """As when another rank cannot read it, so that rank 0 gives it up."""
    executor = SlowReader()
    with rank_of(executor) as rank0:
        rank0.send(ReadAdapter(7, "digest", "folder", 8, None))
        rank0.send(step_that_drops(7))
        assert executor.has_run.wait(LONGEST_S), "the step waits for the adapter"
        executor.may_read.set()
        rank0.send(ReadAdapter(8, "digest", "folder", 8, None))
        answers = [rank0.receive()[0] for _ in range(2)]
    assert answers == [AdapterRead(7), AdapterRead(8)]
    assert [*executor._adapters] == [8]


@pytest.mark.parametrize("what", ["descriptor", "thread"])
def test_a_rank_that_can_serve_no_transfers_closes_their_connection_and_computes(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = SlowReader()
    executor.may_read.set()
    with rank_of(executor) as rank0:
        rank0.send(ReadAdapter(6, "digest", "folder", 8, None))
        assert rank0.receive()[0] == AdapterRead(6)
        monkeypatch.setattr(threading.Thread, "start", refuse_thread)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.settimeout(LONGEST_S)
            rank0.send(Transfer(), [theirs.fileno()] if what == "thread" else [])
            theirs.close()
            assert ours.recv(1) == b""
        rank0.send(ReadAdapter(7, "digest", "folder", 8, None))
        assert rank0.receive()[0] == AdapterRead(7)
        rank0.send(step_that_drops())
        assert executor.has_run.wait(LONGEST_S)
