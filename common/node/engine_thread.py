"""Runs the executor in its own thread, so that messages and page writes go on while a step computes."""

import contextlib
import os
import queue
import threading
import time
from typing import Protocol

from common.node.request_stats import StepStats
from common.sampling_params import SamplingParams
from common.step_plan import StepPlan, StepResult


class Executor(Protocol):
    def prepare(self, sampling: SamplingParams) -> None: ...

    def run(self, plan: StepPlan) -> StepResult: ...


class EngineThread:
    """Runs one plan at a time. Its ``fileno`` becomes readable when the result is available.

    Attributes:
        steps: the steps so far; read by other threads.
        begun_at: instant of ``time.monotonic`` at which the step in the engine was handed over; None without one.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[StepResult | BaseException] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.is_busy = False
        self.begun_at: float | None = None
        self.steps = StepStats()
        self._thread.start()

    def fileno(self) -> int:
        return self._wake

    def prepare(self, sampling: SamplingParams) -> None:
        """Begin work that a request needs before its first step, such as compiling its grammar. Returns at once."""
        self._executor.prepare(sampling)

    def submit(self, plan: StepPlan) -> None:
        assert not self.is_busy
        self.is_busy = True
        self.begun_at = time.monotonic()
        self._plans.put(plan)

    def take(self) -> StepResult | None:
        """The result of the step, if it is finished. Raises what the executor raised."""
        # Drain first, and on every call: the result can be there a moment before the wake-up that announces it.
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        try:
            result = self._results.get_nowait()
        except queue.Empty:
            return None
        self.is_busy = False
        self.begun_at = None
        if isinstance(result, BaseException):
            raise result
        return result

    def close(self) -> None:
        """Stop after the running step, but wait for it two seconds at most; the thread ends with the process."""
        self._plans.put(None)
        self._thread.join(timeout=2.0)
        if not self._thread.is_alive():
            os.close(self._wake)

    def _run(self) -> None:
        while (plan := self._plans.get()) is not None:
            began_at = time.monotonic()
            try:
                result: StepResult | BaseException = self._executor.run(plan)
            except BaseException as error:  # raised again in the loop, which ends the process
                result = error
            self.steps.add(time.monotonic() - began_at, len(plan.rows), plan.num_tokens)
            self._results.put(result)
            os.eventfd_write(self._wake, 1)
