"""What a rank does with the messages of rank 0."""

import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.engine.batch import RowArrays
from common.engine.tensor_parallel.rank_executor import RankExecutor
from common.node.tensor_parallel import rank_main
from common.node.tensor_parallel.channel import AdapterRead, RankChannel, ReadAdapter, Step

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


def test_an_adapter_that_is_dropped_while_it_is_read_is_not_kept() -> None:
    """As when another rank cannot read it, so that rank 0 gives it up."""
    ours, theirs = map(RankChannel, socket.socketpair())
    ours.limit(LONGEST_S)
    executor = SlowReader()
    pool: Any = None

    def handle() -> None:
        with pytest.raises(EOFError):
            rank_main._handle_messages(theirs, executor, pool, None)

    thread = threading.Thread(target=handle)
    thread.start()
    ours.send(ReadAdapter(7, "digest", "folder", 8, None))
    ours.send(step_that_drops(7))
    assert executor.has_run.wait(LONGEST_S), "the step waits for the adapter"
    executor.may_read.set()
    ours.send(ReadAdapter(8, "digest", "folder", 8, None))
    answers = [ours.receive()[0] for _ in range(2)]
    ours.shut()
    thread.join(LONGEST_S)
    assert not thread.is_alive()
    ours.close()
    theirs.close()
    assert answers == [AdapterRead(7), AdapterRead(8)]
    assert [*executor._adapters] == [8]
