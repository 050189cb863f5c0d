"""Runs the executor in its own thread, so that messages and page writes go on while a step computes.

With overlap scheduling two steps may be in the engine: the second one starts as soon as the first ends, while the loop
takes in the first and plans a third. An executor on a GPU only queues a step on the device. A second thread waits for
the results then, so that the first thread is free to launch the next step.

Grammars are compiled beside it, on threads of the executor, and reported like the results of steps.
"""

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from common.errors import RequestError
from common.node.gateways.gateway_link import GatewayLink
from common.node.monitoring.request_stats import StepStats
from common.node.profiler import NO_FOLDER, Profiler
from common.step_plan import StepPlan, StepResult
from common.wire.messages import ProfileAnswer, StartProfile, StopProfile

log = logging.getLogger(__name__)


class CompiledGrammar(NamedTuple):
    """A grammar that is ready, or with ``error`` why it cannot be followed."""

    grammar: str
    error: str = ""


class PendingStep(Protocol):
    """A step that was launched."""

    def result(self) -> StepResult:
        """Wait until the step has ended. Raises what went wrong in it."""
        ...


class Executor(Protocol):
    @property
    def is_asynchronous(self) -> bool:
        """Whether ``launch`` returns before the step has ended."""
        ...

    def compile_grammar(self, grammar: str) -> Future[Any]: ...

    def drop_grammar(self, grammar: str) -> None: ...

    def launch(self, plan: StepPlan) -> PendingStep:
        """Begin a step, after the steps that were launched before."""
        ...


class ProfileOrder(NamedTuple):
    """What the profiler is to do, and what takes its answer."""

    message: StartProfile | StopProfile
    answer: Callable[[ProfileAnswer], None]


class LaunchedStep(NamedTuple):
    """A step without a result yet, and the instant of ``time.monotonic`` before its launch."""

    plan: StepPlan
    launched_at: float
    pending: PendingStep


class EngineThread:
    """Runs plans in order. Its ``fileno`` becomes readable when a result, a grammar or an answer is there.

    Args:
        profiler: records steps at request; without one, such requests are answered with an error.
        max_outstanding: steps that may be in the engine; 2 with overlap scheduling.
        niceness: how much nicer than the loop the thread is, and the threads that it starts.

    Attributes:
        steps: the steps so far; read by other threads.
        num_outstanding: steps that were submitted and whose results were not taken.
        begun_at: instant of ``time.monotonic`` at which the engine began the oldest of them; None without one.
    """

    def __init__(
        self, executor: Executor, profiler: Profiler | None = None, *, max_outstanding: int = 1, niceness: int = 0
    ) -> None:
        self._executor = executor
        self._niceness = niceness
        self._profiler = profiler
        self._max_outstanding = max_outstanding
        # Not a SimpleQueue: before Python 3.13, its ``get`` may block for good if its timeout has passed too early.
        self._plans: queue.Queue[StepPlan | ProfileOrder | None] = queue.Queue()
        self._answers: queue.SimpleQueue[tuple[GatewayLink, ProfileAnswer]] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[StepResult | BaseException] = queue.SimpleQueue()
        self._compiling: dict[str, Future[Any]] = {}  # grammars in use that were not taken yet
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_lock = threading.Lock()  # a grammar may be compiled after the end
        self._is_closed = False
        self._launched: queue.SimpleQueue[LaunchedStep | None] = queue.SimpleQueue()
        self._ended_at = 0.0  # of the last step
        self.num_outstanding = 0
        self.begun_at: float | None = None
        self.steps = StepStats()
        self._threads = [threading.Thread(target=self._run, name="engine", daemon=True)]
        if executor.is_asynchronous:
            self._threads.append(threading.Thread(target=self._await_results, name="step-results", daemon=True))
        for thread in self._threads:
            thread.start()

    @property
    def is_busy(self) -> bool:
        return self.num_outstanding > 0

    @property
    def has_room(self) -> bool:
        """Whether one more step may be submitted."""
        return self.num_outstanding < self._max_outstanding

    def fileno(self) -> int:
        return self._wake

    def compile_grammar(self, grammar: str) -> None:
        """Begin to compile a grammar; ``take_grammars`` returns it when it is ready or has failed."""

        def note(work: Future[Any]) -> None:
            if not work.cancelled():
                self.notify()

        self._compiling[grammar] = self._executor.compile_grammar(grammar)
        self._compiling[grammar].add_done_callback(note)

    def drop_grammar(self, grammar: str) -> None:
        """Note that no request has this grammar any more."""
        self._compiling.pop(grammar, None)
        self._executor.drop_grammar(grammar)

    def take_grammars(self) -> list[CompiledGrammar]:
        """The grammars that are ready, or have failed, since the last call. Call ``take`` first."""
        done = [grammar for grammar, work in self._compiling.items() if work.done()]
        return [CompiledGrammar(grammar, _reason(self._compiling.pop(grammar).exception())) for grammar in done]

    def submit(self, plan: StepPlan) -> None:
        assert self.has_room
        if not self.is_busy:
            self.begun_at = time.monotonic()
        self.num_outstanding += 1
        self._plans.put(plan)

    def profile(self, message: StartProfile | StopProfile, asker: GatewayLink) -> None:
        """Start or stop a profile between two steps; ``take_answers`` has the answer later."""

        def answer(said: ProfileAnswer) -> None:
            self._answers.put((asker, said))
            self.notify()

        if self._profiler is None:
            answer(ProfileAnswer(error=NO_FOLDER, number=message.number))
        else:
            self._plans.put(ProfileOrder(message, answer))

    def take_answers(self) -> Iterator[tuple[GatewayLink, ProfileAnswer]]:
        """The answers of the profiler since the last call, each with its asker."""
        while not self._answers.empty():
            yield self._answers.get()

    def take(self) -> StepResult | None:
        """The result of the oldest step, if it is finished. Raises what the executor raised."""
        # Drain first, and on every call: the result can be there a moment before the wake-up that announces it.
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        try:
            result = self._results.get_nowait()
        except queue.Empty:
            return None
        self.num_outstanding -= 1
        self.begun_at = time.monotonic() if self.is_busy else None
        if isinstance(result, BaseException):
            raise result
        return result

    def fail(self, error: Exception) -> None:
        """Have ``take`` raise this error, which ends the node; safe on any thread."""
        self._results.put(error)
        self.notify()

    def close(self) -> None:
        """Stop after the submitted steps, but wait for each thread two seconds at most; it ends with the process."""
        self._plans.put(None)
        for thread in self._threads:
            thread.join(timeout=2.0)
        with self._wake_lock:
            self._is_closed = not any(thread.is_alive() for thread in self._threads)
            if self._is_closed:
                os.close(self._wake)

    def _run(self) -> None:
        os.nice(self._niceness)  # on Linux, of this thread alone
        try:
            self._run_plans()
        except Exception as error:  # an unexpected one: no further step would run, and every request would wait
            self.fail(error)
        self._launched.put(None)

    def _run_plans(self) -> None:
        while (plan := self._next()) is not None:
            if isinstance(plan, ProfileOrder):
                assert self._profiler is not None
                self._profiler.handle(plan.message, plan.answer)
                continue
            launched_at = time.monotonic()
            step = LaunchedStep(plan, launched_at, self._launch(plan))
            if self._executor.is_asynchronous:
                self._launched.put(step)
            else:
                self._finish(step)
            if self._profiler is not None:
                self._profiler.after_step()

    def _launch(self, plan: StepPlan) -> PendingStep:
        try:
            return self._executor.launch(plan)
        except BaseException as error:  # raised again in the loop, which ends the process
            failed: Future[StepResult] = Future()
            failed.set_exception(error)
            return failed

    def _await_results(self) -> None:
        while (step := self._launched.get()) is not None:
            self._finish(step)

    def _finish(self, step: LaunchedStep) -> None:
        """Hand over the result of a step. Its time counts from the end of the step before it."""
        try:
            result: StepResult | BaseException = step.pending.result()
        except BaseException as error:  # raised again in the loop, too
            result = error
        began_at, self._ended_at = max(step.launched_at, self._ended_at), time.monotonic()
        plan, seconds = step.plan, self._ended_at - began_at
        self.steps.add(seconds, len(plan.rows), plan.num_tokens, num_prompt_tokens=plan.num_prompt_tokens)
        self._results.put(result)
        self.notify()

    def _next(self) -> StepPlan | ProfileOrder | None:
        """Wait for work, and end a profile whose time is over."""
        while True:
            try:
                return self._plans.get(timeout=None if self._profiler is None else self._profiler.seconds_left)
            except queue.Empty:
                assert self._profiler is not None
                self._profiler.end()

    def notify(self) -> None:
        """Make ``fileno`` readable; safe on any thread."""
        with self._wake_lock:
            if not self._is_closed:
                os.eventfd_write(self._wake, 1)


def _reason(error: BaseException | None) -> str:
    """Why a grammar has failed, for its requests; empty without an error."""
    if error is None or isinstance(error, RequestError):
        return "" if error is None else error.message
    log.error("a grammar could not be compiled", exc_info=error)
    return "the grammar cannot be compiled"
