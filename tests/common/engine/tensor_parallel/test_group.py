"""The collective operations of ranks, and ranks that do not answer."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from common.engine.tensor_parallel.group import RankGroup, open_group
from common.engine.tensor_parallel.shard import Shard
from common.errors import RankLostError

CPU = torch.device("cpu")


def run_ranks(*ranks: Callable[[RankGroup], None]) -> None:
    """Run a function for each rank in its own thread, and raise what rank 0 raises."""
    store = HashStore()

    def run(rank: int) -> None:
        ranks[rank](open_group(store, Shard(rank, len(ranks)), CPU, timeout_s=60))

    others = [threading.Thread(target=run, args=(rank,)) for rank in range(1, len(ranks))]
    for thread in others:
        thread.start()
    try:
        run(0)
    finally:
        for thread in others:
            thread.join(120)
            assert not thread.is_alive()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ranks_add_up_gather_and_hear_rank_0(dtype: torch.dtype) -> None:
    found = []

    def rank(number: int) -> Callable[[RankGroup], None]:
        def run(group: RankGroup) -> None:
            total = group.all_reduce(torch.full((2, 3), 10.0**number, dtype=dtype))
            beside = group.all_gather(torch.full((2, 1), number + 0.5, dtype=dtype))
            told = group.broadcast(torch.tensor([7, number]))
            group.barrier()
            found.append((total.tolist(), beside.tolist(), told.tolist()))

        return run

    run_ranks(rank(0), rank(1), rank(2))
    assert found == [([[111.0] * 3] * 2, [[0.5, 1.5, 2.5]] * 2, [7, 0])] * 3


@pytest.mark.cuda
def test_a_group_on_cuda_works_the_same_way() -> None:
    """With one rank, since NCCL wants a device for each."""
    device = torch.device("cuda", 0)
    group = open_group(HashStore(), Shard(0, 1), device, timeout_s=60)
    assert group.all_reduce(torch.ones(3, device=device)).tolist() == [1.0] * 3
    assert group.broadcast(torch.tensor([7], device=device)).tolist() == [7]
    group.barrier()


def test_a_rank_that_does_not_come_is_lost() -> None:
    with pytest.raises(RankLostError, match="does not answer"):
        open_group(HashStore(), Shard(0, 2), CPU, timeout_s=0.2)


def test_a_rank_that_ends_is_lost() -> None:
    with pytest.raises(RankLostError, match="does not answer"):
        run_ranks(lambda group: group.barrier(), lambda group: None)
