"""A fake asynchronous device: ``launch`` only queues a step, which runs when the test lets it end.

A step therefore reads and writes its pages as late as the stream of a GPU could: anything that overwrites them before
changes the output.
"""

import threading
from concurrent.futures import Future
from typing import Any

from common.step_plan import StepPlan, StepResult

#: The longest time for which a step waits for the test.
LONGEST_S = 120.0


class AsynchronousDevice:
    """An executor that runs its steps by another, synchronous one."""

    is_asynchronous = True

    def __init__(self, executor: Any) -> None:
        self.pool = executor.pool
        self.num_launched = 0
        self._executor = executor
        self._may_end = threading.Semaphore(0)

    def launch(self, plan: StepPlan) -> "QueuedStep":
        self.num_launched += 1
        return QueuedStep(self, plan)

    def compile_grammar(self, grammar: str) -> "Future[Any]":
        raise NotImplementedError

    def drop_grammar(self, grammar: str) -> None:
        raise NotImplementedError

    def let_end(self, num_steps: int = 1) -> None:
        """Run so many steps, oldest first, on the thread that waits for their results."""
        for _ in range(num_steps):
            self._may_end.release()

    def run(self, plan: StepPlan) -> StepResult:
        assert self._may_end.acquire(timeout=LONGEST_S), "the test has not let the step end"
        result: StepResult = self._executor.run(plan)
        return result

    def close(self) -> None:
        self._executor.close()


class QueuedStep:
    def __init__(self, device: AsynchronousDevice, plan: StepPlan) -> None:
        self._device = device
        self._plan = plan

    def result(self) -> StepResult:
        return self._device.run(self._plan)
