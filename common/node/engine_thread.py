"""Runs the executor in its own thread, so that messages and page writes go on while a step computes.

Grammars are compiled beside it, on threads of the executor, and reported like the results of steps.
"""

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from common.errors import RequestError
from common.node.monitoring.request_stats import StepStats
from common.node.profiler import NO_FOLDER, Profiler
from common.step_plan import StepPlan, StepResult
from common.wire.messages import ProfileAnswer, StartProfile, StopProfile

log = logging.getLogger(__name__)


class CompiledGrammar(NamedTuple):
    """A grammar that is ready, or with ``error`` why it cannot be followed."""

    grammar: str
    error: str = ""


class Executor(Protocol):
    def compile_grammar(self, grammar: str) -> Future[Any]: ...

    def drop_grammar(self, grammar: str) -> None: ...

    def run(self, plan: StepPlan) -> StepResult: ...


class EngineThread:
    """Runs one plan at a time. Its ``fileno`` becomes readable when a result, a grammar or an answer is there.

    Args:
        profiler: records steps at request; without one, such requests are answered with an error.

    Attributes:
        steps: the steps so far; read by other threads.
        begun_at: instant of ``time.monotonic`` at which the step in the engine was handed over; None without one.
    """

    def __init__(self, executor: Executor, profiler: Profiler | None = None) -> None:
        self._executor = executor
        self._profiler = profiler
        # Not a SimpleQueue: before Python 3.13, its ``get`` may block for good if its timeout has passed too early.
        self._plans: queue.Queue[StepPlan | StartProfile | StopProfile | None] = queue.Queue()
        self._answers: queue.SimpleQueue[ProfileAnswer] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[StepResult | BaseException] = queue.SimpleQueue()
        self._grammars: queue.SimpleQueue[CompiledGrammar] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_lock = threading.Lock()  # a grammar may be compiled after the end
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.is_busy = False
        self.begun_at: float | None = None
        self.steps = StepStats()
        self._thread.start()

    def fileno(self) -> int:
        return self._wake

    def compile_grammar(self, grammar: str) -> None:
        """Begin to compile a grammar; ``take_grammars`` returns it when it is ready or has failed."""

        def note(work: Future[Any]) -> None:
            if not work.cancelled():
                self._grammars.put(CompiledGrammar(grammar, _reason(work.exception())))
                self._notify()

        self._executor.compile_grammar(grammar).add_done_callback(note)

    def drop_grammar(self, grammar: str) -> None:
        """Note that no request has this grammar any more."""
        self._executor.drop_grammar(grammar)

    def take_grammars(self) -> list[CompiledGrammar]:
        """The grammars that are ready, or have failed, since the last call. Call ``take`` first."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._grammars.get_nowait())
        return found

    def submit(self, plan: StepPlan) -> None:
        assert not self.is_busy
        self.is_busy = True
        self.begun_at = time.monotonic()
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
        self._notify()

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

    def fail(self, error: Exception) -> None:
        """Have ``take`` raise this error, which ends the node; safe on any thread."""
        self._results.put(error)
        self._notify()

    def close(self) -> None:
        """Stop after the running step, but wait for it two seconds at most; the thread ends with the process."""
        self._plans.put(None)
        self._thread.join(timeout=2.0)
        with self._wake_lock:
            self._is_closed = not self._thread.is_alive()
            if self._is_closed:
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
            self.steps.add(time.monotonic() - began_at, len(plan.rows), plan.num_tokens)
            self._results.put(result)
            self._notify()
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

    def _notify(self) -> None:
        with self._wake_lock:
            if not self._is_closed:
                os.eventfd_write(self._wake, 1)


def _reason(error: BaseException | None) -> str:
    """Why a grammar has failed, for its requests; empty without an error."""
    if error is None or isinstance(error, RequestError):
        return "" if error is None else error.message
    log.error("a grammar could not be compiled", exc_info=error)
    return "the grammar cannot be compiled"
