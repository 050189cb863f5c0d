"""A ``LocalCluster`` whose nodes have two steps in their engine threads, as with overlap scheduling."""

import select
from collections.abc import Sequence
from typing import Any

from support.cluster.local_cluster import LocalCluster, Member
from support.engine.asynchronous_device import LONGEST_S, AsynchronousDevice

from common.node.engine_thread import EngineThread
from common.step_plan import StepPlan, StepResult


class ClusterOfExecutors(LocalCluster):
    """A cluster with executors that outlive it.

    Args:
        executors: one for each node, prefill nodes first; their pools have at least as many pages as the nodes.
    """

    def __init__(self, executors: Sequence[Any], **others: Any) -> None:
        self._executors = iter(executors)
        super().__init__(**others)

    def _load(self, role: str, num_pages: int) -> tuple[Any, tuple[int, ...]]:
        executor = next(self._executors)
        assert executor.pool.num_pages >= num_pages
        assert executor.pool.layout.page_size == self._page_sizes[role]
        return executor, ()


class OverlappedCluster(ClusterOfExecutors):
    """A cluster that hands a plan to the engine as soon as it is made, and takes results as late as possible.

    ``stop`` it, even after a failure: it ends the threads.
    """

    def __init__(self, executors: Sequence[Any], **others: Any) -> None:
        super().__init__(executors, num_outstanding=2, **others)
        self._engines = {m.name: EngineThread(m.executor, max_outstanding=2) for m in self.members}

    def plan(self, member: Member) -> None:
        num_before = len(member.plans)
        super().plan(member)
        for plan in member.plans[num_before:]:
            self._engines[member.name].submit(plan)

    def _result(self, member: Member, plan: StepPlan) -> StepResult:
        engine = self._engines[member.name]
        if isinstance(member.executor, AsynchronousDevice):
            member.executor.let_end()
        while (result := engine.take()) is None:
            assert select.select([engine], [], [], LONGEST_S)[0], "the step does not end"
        assert result.step == plan.step
        return result

    def stop(self) -> None:
        for member in self.members:
            if isinstance(member.executor, AsynchronousDevice):
                member.executor.let_end(len(member.plans))
        for engine in self._engines.values():
            engine.close()
