"""The other ranks of a node as processes, which rank 0 starts, watches and ends."""

import contextlib
import functools
import logging
import os
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from common.errors import ConfigError, RankLostError
from common.node.tensor_parallel.channel import (
    AdapterRead,
    Join,
    LoadModel,
    Prepared,
    RankChannel,
    ReadAdapter,
    Step,
    Transfer,
    path_of,
)
from common.system.python_environ import python_environ

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from common.engine.batch import RowArrays
    from common.engine.kv_pool import KVPool
    from common.engine.tensor_parallel.group import RankGroup

log = logging.getLogger(__name__)

#: The longest time that a rank waits for the others within a step. Ranks do equal work, so that they wait much shorter;
#: a rank that has died is noticed at once.
TIMEOUT_S = 60.0
#: The longest time that a rank may take to end by itself before it is killed.
END_S = 5.0


class _RankProcess:
    """One other rank."""

    def __init__(self, load: LoadModel, module: str) -> None:
        self.rank = load.rank
        ours, theirs = socket.socketpair()
        self.channel = RankChannel(ours)
        with theirs:
            # A new interpreter: a fork would inherit the threads of OpenMP in no usable state. Its own process group:
            # Ctrl-C ends rank 0, which ends the others when its requests are over.
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=python_environ(os.environ),
                process_group=0,
            )
        with contextlib.suppress(ConnectionError):  # it has ended already, as ``wait_for`` will notice
            self.channel.send(load)

    def wait_for(self, task: str) -> None:
        """Raises ConfigError: it cannot do what it was told, such as "load the model"."""
        try:
            answer, _ = self.channel.receive()
        except (EOFError, ConnectionError) as error:
            raise ConfigError(f"--tp: rank {self.rank} of this node ended when it was to {task}") from error
        assert isinstance(answer, Prepared)
        if answer.problem:
            raise ConfigError(f"--tp: rank {self.rank} of this node cannot {task}: {answer.problem}")

    def wait_for_adapter(self, number: int) -> None:
        """Raises ConfigError: it cannot read the adapter of this number."""
        answer = None
        while not isinstance(answer, AdapterRead) or answer.number != number:  # one that came too late before
            answer, _ = self.channel.receive()
        if answer.problem:
            raise ConfigError(f"--tp: rank {self.rank} of this node: {answer.problem}")


def _connect(other: _RankProcess) -> socket.socket:
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            other.channel.send(Transfer(), [theirs.fileno()])
        except OSError as error:
            ours.close()
            raise RankLostError(f"tensor-parallel rank {other.rank} of this node does not answer: {error}") from error
    return ours


class RankProcesses:
    """``OtherRanks`` in processes of their own. A context: at its end, all of them have ended.

    Args:
        num_ranks: including rank 0, which is this process; 1: there are no others.
        module: the main module of the others, such as ``scripts.serving.rank``.
    """

    def __init__(self, num_ranks: int, module: str) -> None:
        self.num_ranks = num_ranks
        self._module = module
        self._others: list[_RankProcess] = []
        self._watchers: list[threading.Thread] = []
        self._is_closing = False
        self._reading = threading.Lock()
        self._dropped: deque[int] = deque()  # numbers of adapters

    def __enter__(self) -> "RankProcesses":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        return [other.process.pid for other in self._others]

    def start(self, load: LoadModel) -> None:
        """Start the processes, which begin to load their parts; ``load`` is that of rank 0."""
        from common.engine.tensor_parallel.shard import Shard

        for rank in range(1, self.num_ranks):
            device = Shard(rank, self.num_ranks).device(load.device)
            own = msgspec.structs.replace(load, rank=rank, name=f"{load.name}/rank-{rank}", device=device)
            self._others.append(_RankProcess(own, self._module))

    def wait_until_loaded(self) -> None:
        """Raises ConfigError: one of them cannot load its part of the model."""
        for other in self._others:
            other.wait_for("load the model")

    def join(self, pool: "KVPool") -> "RankGroup":
        """As ``OtherRanks.join``. Call ``wait_until_loaded`` first.

        Raises:
            ConfigError: a rank cannot make its pool, or the group cannot be formed.
        """
        from torch.distributed import FileStore  # type: ignore[attr-defined]

        from common.engine.tensor_parallel.group import open_group
        from common.engine.tensor_parallel.shard import Shard

        # A file that cannot be left behind. It stays open with the process: the group opens it again, by the number of
        # the descriptor, when it ends, and with NCCL at its first operation.
        store = os.memfd_create("baton-ranks", os.MFD_CLOEXEC)
        try:
            for other in self._others:
                other.channel.limit(TIMEOUT_S)
                sizes = (pool.num_full_pages, TIMEOUT_S, pool.groups, pool.num_window_pages)
                other.channel.send(Join(pool.model_layout, *sizes), [store])
            for other in self._others:
                other.wait_for("make its pool")
            shard, meeting = Shard(0, self.num_ranks), FileStore(path_of(store), self.num_ranks)
            return open_group(meeting, shard, pool.device, timeout_s=TIMEOUT_S)
        except (OSError, RankLostError) as error:
            raise ConfigError(
                f"--tp {self.num_ranks}: the ranks of this node do not find each other: {error}"
            ) from error

    def transfer_ends(self) -> "list[Callable[[], socket.socket]]":
        """What makes a connection to the transfer endpoint of each other rank. Call ``join`` first."""
        return [functools.partial(_connect, other) for other in self._others]

    def read_adapter(self, number: int, digest: str, folder: Path, *, max_rank: int, root: Path | None) -> None:
        """As ``OtherRanks.read_adapter``."""
        order = ReadAdapter(number, digest, str(folder), max_rank, None if root is None else str(root))
        with self._reading:
            try:
                for other in self._others:
                    other.channel.send(order)
                for other in self._others:
                    other.wait_for_adapter(number)
            except (OSError, EOFError) as error:
                raise RankLostError(f"a tensor-parallel rank of this node reads no adapter: {error}") from error

    def drop_adapter(self, number: int) -> None:
        """As ``OtherRanks.drop_adapter``."""
        self._dropped.append(number)

    def begin(self, rows: "RowArrays", kept: "NDArray[np.int64]", adapters: Sequence[int]) -> None:
        """As ``OtherRanks.begin``."""
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        step = Step.of(rows, kept, adapters, dropped)
        for other in self._others:
            try:
                other.channel.send(step)
            except OSError as error:
                raise RankLostError(
                    f"tensor-parallel rank {other.rank} of this node takes no steps: {error}"
                ) from error

    def watch(self, on_lost: Callable[[Exception], None]) -> None:
        """Report a rank that ends before ``close``; ``on_lost`` is called in another thread."""
        for other in self._others:
            thread = threading.Thread(target=self._watch, args=(other, on_lost), name="rank-watcher", daemon=True)
            self._watchers.append(thread)
            thread.start()

    def _watch(self, other: _RankProcess, on_lost: Callable[[Exception], None]) -> None:
        status = other.process.wait()
        if not self._is_closing:
            on_lost(RankLostError(f"tensor-parallel rank {other.rank} of this node has ended with status {status}"))

    def close(self) -> None:
        """End the other ranks, and wait for that. Idempotent."""
        self._is_closing = True
        for other in self._others:
            other.channel.shut()
        for other in self._others:
            try:
                other.process.wait(END_S)
            except subprocess.TimeoutExpired:
                log.warning("rank %d does not end and is killed", other.rank)
                other.process.kill()
                other.process.wait()
            other.channel.close()
        for thread in self._watchers:
            thread.join()
        self._others, self._watchers = [], []
