"""The engine thread hands every result over once, with one wake-up."""

import os
import select
import threading
import time
from concurrent.futures import Future

import pytest
from support.engine.asynchronous_device import AsynchronousDevice
from support.engine.synchronous_executor import SynchronousExecutor
from support.waiting import until

from common.errors import ErrorCode, RequestError
from common.node.engine_thread import CompiledGrammar, EngineThread
from common.step_plan import StepPlan, StepResult


class Engine(SynchronousExecutor):
    """An executor that takes ``seconds`` for a step, or raises; ``spent_s`` is the time that it took."""

    pool = None

    def __init__(self, seconds: float = 0.0) -> None:
        self.error: Exception | None = None
        self.seconds = seconds
        self.spent_s = 0.0
        self.grammars: dict[str, Future[None]] = {}

    def compile_grammar(self, grammar: str) -> Future[None]:
        return self.grammars.setdefault(grammar, Future())

    def drop_grammar(self, grammar: str) -> None:
        self.grammars.pop(grammar).cancel()

    def run(self, plan: StepPlan) -> StepResult:
        began = time.monotonic()
        time.sleep(self.seconds)
        self.spent_s += time.monotonic() - began
        if self.error is not None:
            raise self.error
        return StepResult(plan.step, ())


def plan(step: int) -> StepPlan:
    return StepPlan(step, (), (), ())


def taken(thread: EngineThread) -> StepResult:
    return until(thread.take)


def is_readable(thread: EngineThread) -> bool:
    return bool(select.select([thread.fileno()], [], [], 0)[0])


def test_a_result_may_be_taken_before_its_wake_up(monkeypatch: pytest.MonkeyPatch) -> None:
    write, written, may_write = os.eventfd_write, [], threading.Semaphore(0)

    def late(descriptor: int, value: int) -> None:
        assert may_write.acquire(timeout=60)
        write(descriptor, value)
        written.append(value)

    monkeypatch.setattr(os, "eventfd_write", late)
    thread = EngineThread(Engine())
    for step in range(3):
        thread.submit(plan(step))
        assert taken(thread).step == step
        assert not thread.is_busy
        may_write.release()
    until(lambda: len(written) == 3)
    assert is_readable(thread), "the late wake-up"
    assert thread.take() is None
    assert not is_readable(thread), "a wake-up for nothing must not be given again and again"
    thread.close()


def test_only_time_inside_steps_counts_as_busy() -> None:
    engine = Engine(0.05)
    thread = EngineThread(engine)
    began_at = time.monotonic()
    for step in range(2):
        thread.submit(plan(step))
        taken(thread)
        time.sleep(0.2)
    spent_s = time.monotonic() - began_at
    assert 0.1 <= engine.spent_s <= thread.steps.seconds.sum <= spent_s - 0.4
    thread.close()


def test_an_exception_of_the_executor_is_raised_by_take() -> None:
    engine = Engine()
    engine.error = ValueError("no such page")
    thread = EngineThread(engine)
    thread.submit(plan(1))
    with pytest.raises(ValueError, match="no such page"):
        taken(thread)
    thread.close()


class FailingProfiler:
    seconds_left = None

    def after_step(self) -> None:
        raise ValueError("not foreseen")


def test_an_unexpected_error_of_the_thread_is_raised_by_take_after_the_results_before_it() -> None:
    thread = EngineThread(Engine(), FailingProfiler())  # type: ignore[arg-type]
    thread.submit(plan(1))
    assert taken(thread).step == 1
    with pytest.raises(ValueError, match="not foreseen"):
        taken(thread)
    thread.close()


def test_two_steps_may_be_outstanding_and_their_results_come_in_order() -> None:
    thread = EngineThread(Engine(), max_outstanding=2)
    thread.submit(plan(1))
    assert thread.is_busy and thread.has_room
    thread.submit(plan(2))
    assert not thread.has_room
    with pytest.raises(AssertionError):
        thread.submit(plan(3))
    assert [taken(thread).step, thread.is_busy, taken(thread).step, thread.is_busy] == [1, True, 2, False]
    assert thread.begun_at is None
    thread.close()


def test_a_step_is_launched_before_the_one_before_it_has_ended() -> None:
    device = AsynchronousDevice(Engine())
    thread = EngineThread(device, max_outstanding=2)
    thread.submit(plan(1))
    thread.submit(plan(2))
    until(lambda: device.num_launched == 2)
    assert thread.take() is None
    device.let_end()
    assert taken(thread).step == 1
    assert thread.is_busy and thread.begun_at is not None, "the second step is still in the engine"
    thread.submit(plan(3))
    device.let_end(2)
    assert [taken(thread).step, taken(thread).step] == [2, 3]
    thread.close()


def test_an_error_of_an_asynchronous_step_is_raised_by_take() -> None:
    engine = Engine()
    device = AsynchronousDevice(engine)
    thread = EngineThread(device, max_outstanding=2)
    engine.error = ValueError("the device is lost")
    thread.submit(plan(1))
    thread.submit(plan(2))
    device.let_end(2)
    with pytest.raises(ValueError, match="the device is lost"):
        taken(thread)
    thread.close()


def test_grammars_are_handed_over_with_a_wake_up_unless_they_were_dropped() -> None:
    engine = Engine()
    thread = EngineThread(engine)
    for grammar in ("good", "bad", "dropped", "broken"):
        thread.compile_grammar(grammar)
    assert not is_readable(thread)
    thread.drop_grammar("dropped")
    engine.grammars["good"].set_result(None)
    engine.grammars["bad"].set_exception(RequestError(ErrorCode.INVALID_REQUEST, "not like this"))
    engine.grammars["broken"].set_exception(RuntimeError("a bug"))
    assert is_readable(thread)
    assert thread.take() is None
    assert thread.take_grammars() == [
        CompiledGrammar("good"),
        CompiledGrammar("bad", "not like this"),
        CompiledGrammar("broken", "the grammar cannot be compiled"),
    ]
    assert not is_readable(thread)
    thread.compile_grammar("good")
    assert is_readable(thread), "it is ready at once"
    assert thread.take_grammars() == [CompiledGrammar("good")]
    thread.compile_grammar("late")
    thread.close()
    engine.grammars["late"].set_result(None)  # wakes nothing


def test_a_grammar_that_is_compiled_again_is_not_taken_before_it_is_ready() -> None:
    """The executor has forgotten it after the drop."""
    engine = Engine()
    thread = EngineThread(engine)
    thread.compile_grammar("again")
    engine.grammars["again"].set_result(None)
    thread.drop_grammar("again")
    thread.compile_grammar("again")
    assert thread.take_grammars() == []
    engine.grammars["again"].set_result(None)
    assert thread.take_grammars() == [CompiledGrammar("again")]
    thread.close()


def test_an_error_from_another_thread_is_raised_by_take() -> None:
    thread = EngineThread(Engine())
    thread.fail(ValueError("a rank is lost"))
    assert is_readable(thread)
    with pytest.raises(ValueError, match="a rank is lost"):
        thread.take()
    thread.close()


def test_the_thread_is_nicer_than_the_loop_by_as_much_as_it_is_told() -> None:
    found: list[int] = []

    class Noting(Engine):
        def run(self, plan: StepPlan) -> StepResult:
            found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            return super().run(plan)

    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    for niceness in (5, 0):
        thread = EngineThread(Noting(), niceness=niceness)
        thread.submit(plan(1))
        taken(thread)
        thread.close()
    assert found == [min(before + 5, 19), before]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
