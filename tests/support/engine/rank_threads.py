"""The other ranks of a tensor-parallel executor, as threads of the test's process."""

import queue
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import HashStore  # type: ignore[attr-defined]

from common.config.shared import WeightDtype
from common.engine.attention import resolve_attention
from common.engine.batch import RowArrays
from common.engine.kv_pool import KVPool
from common.engine.models.base_config import BaseModelConfig
from common.engine.models.implementation import load_model
from common.engine.tensor_parallel.group import RankGroup, open_group
from common.engine.tensor_parallel.rank_executor import RankExecutor
from common.engine.tensor_parallel.shard import Shard

CPU = torch.device("cpu")


class RankThreads:
    """``OtherRanks`` in this process. ``close`` ends the threads, and raises what one of them raised."""

    def __init__(
        self, config: BaseModelConfig, num_ranks: int, attention: str = "auto", weight_dtype: WeightDtype = "auto"
    ) -> None:
        self.num_ranks = num_ranks
        self._config = config
        self._weight_dtype: WeightDtype = weight_dtype
        self._attention = resolve_attention(attention, CPU, config.layout(1, "float32"))
        self._store = HashStore()
        self._steps: list[queue.Queue[Any]] = [queue.Queue() for _ in range(1, num_ranks)]
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []
        self._are_ready = threading.Barrier(num_ranks)
        self.executors: list[RankExecutor] = []
        self._loading = threading.Lock()  # dividing a library's model hooks every module of the process

    def join(self, pool: KVPool) -> RankGroup:
        for rank, steps in enumerate(self._steps, start=1):
            self._threads.append(threading.Thread(target=self._run, args=(Shard(rank, self.num_ranks), pool, steps)))
            self._threads[-1].start()
        group = open_group(self._store, Shard(0, self.num_ranks), CPU, timeout_s=60)
        self._are_ready.wait(60)
        return group

    def begin(self, rows: RowArrays, kept: NDArray[np.int64], adapters: Sequence[int]) -> None:
        for steps in self._steps:
            steps.put((rows, kept, adapters))

    def read_adapter(self, number: int, digest: str, folder: Path, *, max_rank: int, root: Path | None) -> None:
        for executor in self.executors:
            executor.read_adapter(number, digest, folder, max_rank=max_rank, root=root)

    def drop_adapter(self, number: int) -> None:
        for executor in self.executors:
            executor.drop_adapters([number])

    def _run(self, shard: Shard, pool: KVPool, steps: "queue.Queue[Any]") -> None:
        try:
            with self._loading:
                make_model = load_model(self._config, "float32", CPU, weight_dtype=self._weight_dtype, shard=shard)
            group = open_group(self._store, shard, CPU, timeout_s=60)
            own = KVPool(pool.layout, pool.num_pages)
            executor = RankExecutor(make_model(group), own, self._attention)
            self.executors.append(executor)
            self._are_ready.wait(60)
            while (step := steps.get()) is not None:
                executor.run(*step)
            own.close()
        except BaseException as error:
            self._errors.append(error)
            self._are_ready.abort()

    def close(self) -> None:
        for steps in self._steps:
            steps.put(None)
        for thread in self._threads:
            thread.join(120)  # longer than the group may take to form
            assert not thread.is_alive()
        for error in self._errors:
            raise error
