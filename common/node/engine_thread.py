"""Runs the executor in its own thread, so that messages and page writes go on while a step computes."""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Iterator
from typing import Protocol

from common.node.profiler import NO_FOLDER, Profiler
from common.sampling_params import SamplingParams
from common.step_plan import StepPlan, StepResult
from common.wire.messages import ProfileAnswer, StartProfile, StopProfile


class Executor(Protocol):
    def prepare(self, sampling: SamplingParams) -> None: ...

    def run(self, plan: StepPlan) -> StepResult: ...


class EngineThread:
    """Runs one plan at a time. Its ``fileno`` becomes readable when the result, or an answer of the profiler, is there.

    Args:
        profiler: records steps at request; without one, such requests are answered with an error.

    Attributes:
        busy_s: seconds spent in steps so far.
    """

    def __init__(self, executor: Executor, profiler: Profiler | None = None) -> None:
        self._executor = executor
        self._profiler = profiler
        self._plans: queue.SimpleQueue[StepPlan | StartProfile | StopProfile | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[ProfileAnswer] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[StepResult | BaseException] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.is_busy = False
        self.busy_s = 0.0
        self._thread.start()

    def fileno(self) -> int:
        return self._wake

    def prepare(self, sampling: SamplingParams) -> None:
        """Begin work that a request needs before its first step, such as compiling its grammar. Returns at once."""
        self._executor.prepare(sampling)

    def submit(self, plan: StepPlan) -> None:
        assert not self.is_busy
        self.is_busy = True
        self._plans.put(plan)

    def profile(self, message: StartProfile | StopProfile) -> None:
        """Start or stop a profile between two steps; ``take_answers`` has the answer later."""
        if self._profiler is None:
            self._answer(ProfileAnswer(error=NO_FOLDER, number=message.number))
        else:
            self._plans.put(message)

    def take_answers(self) -> Iterator[ProfileAnswer]:
        """The answers of the profiler since the last call."""
        while not self._answers.empty():
            yield self._answers.get()

    def _answer(self, answer: ProfileAnswer) -> None:
        self._answers.put(answer)
        os.eventfd_write(self._wake, 1)

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
        while (plan := self._next()) is not None:
            if not isinstance(plan, StepPlan):
                assert self._profiler is not None
                self._profiler.handle(plan, self._answer)
                continue
            began_at = time.monotonic()
            try:
                result: StepResult | BaseException = self._executor.run(plan)
            except BaseException as error:  # raised again in the loop, which ends the process
                result = error
            self.busy_s += time.monotonic() - began_at
            self._results.put(result)
            os.eventfd_write(self._wake, 1)
            if self._profiler is not None:
                self._profiler.after_step()

    def _next(self) -> StepPlan | StartProfile | StopProfile | None:
        """Wait for work, and end a profile whose time is over."""
        while True:
            try:
                return self._plans.get(timeout=None if self._profiler is None else self._profiler.seconds_left)
            except queue.Empty:
                assert self._profiler is not None
                self._profiler.end()
