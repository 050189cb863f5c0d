"""Profiles of steps: bounded in steps and time, one file each, ended and written in every order of events."""

import gzip
import json
import queue
import threading
import time

import pytest
import torch
from support.engine.synchronous_executor import SynchronousExecutor
from support.thread_limit import refuse_thread

from common.errors import ConfigError
from common.node import profiler as module
from common.node.engine_thread import EngineThread
from common.node.profiler import NO_FOLDER, Profiler
from common.sampling_params import SamplingParams
from common.step_plan import StepPlan, StepResult
from common.wire.messages import ProfileAnswer, StartProfile, StopProfile


class Engine(SynchronousExecutor):
    """Multiplies two matrices in each step."""

    def prepare(self, sampling: SamplingParams) -> None:
        pass

    def run(self, plan: StepPlan) -> StepResult:
        torch.ones(8, 8) @ torch.ones(8, 8)
        return StepResult(plan.step, ())


@pytest.fixture
def profiler(tmp_path):
    return Profiler(tmp_path / "traces", "decode/../0")


@pytest.fixture
def engine(profiler):
    thread = EngineThread(Engine(), profiler)
    yield thread
    thread.close()


def ask(engine, message):
    """Return the answer to a message, however long it takes."""
    engine.profile(message, "gateway")
    return answer_of(engine)


def answer_of(engine, asker="gateway"):
    while not (answers := list(engine.take_answers())):
        time.sleep(0.001)
    ((to, answer),) = answers
    assert to == asker
    return answer


def step(engine, count=1):
    for _ in range(count):
        engine.submit(StepPlan(0, (), (), ()))
        while engine.take() is None:
            time.sleep(0.001)


def events_of(file):
    with gzip.open(file) as stream:
        return json.load(stream)["traceEvents"]


def test_a_profile_has_the_operations_of_the_steps_between_start_and_stop(engine, tmp_path):
    started = ask(engine, StartProfile(activities=("CPU",), number=4))
    assert (started.error, started.number) == ("", 4)
    step(engine, 3)
    stopped = ask(engine, StopProfile(number=5))
    assert stopped == ProfileAnswer(file=started.file, num_steps=3, number=5)
    (file,) = (tmp_path / "traces").iterdir()
    assert str(file) == stopped.file
    assert file.name.startswith("decode_.._0-2")
    names = [event.get("name") for event in events_of(file)]
    assert names.count("aten::mm") == 3


def test_a_profile_ends_after_its_steps_and_is_reported_once_at_the_stop(engine):
    file = ask(engine, StartProfile(num_steps=2)).file
    step(engine, 5)
    assert ask(engine, StopProfile()) == ProfileAnswer(file=file, num_steps=2)
    assert ask(engine, StopProfile()).error == "no profile has been started; start one first"
    assert [event.get("name") for event in events_of(file)].count("aten::mm") == 2


def test_a_profile_ends_after_its_time_although_no_step_comes(engine, monkeypatch):
    monkeypatch.setattr(module, "MAX_S", 0.05)
    file = ask(engine, StartProfile()).file
    while engine._profiler.seconds_left is not None:
        time.sleep(0.005)
    monkeypatch.setattr(module, "MAX_S", 60.0)
    assert ask(engine, StopProfile()) == ProfileAnswer(file=file, num_steps=0)
    assert isinstance(events_of(file), list)


def test_a_second_start_is_refused_and_a_later_one_has_a_file_of_its_own(engine):
    first = ask(engine, StartProfile())
    assert "stop it first" in ask(engine, StartProfile()).error
    ask(engine, StopProfile())
    second = ask(engine, StartProfile())
    assert second.error == "" and second.file != first.file
    ask(engine, StopProfile())


def test_each_of_two_gateways_gets_the_answers_to_its_own_questions(engine, monkeypatch):
    may_write = threading.Event()
    write = Profiler._write
    monkeypatch.setattr(Profiler, "_write", lambda *work: may_write.wait(60) and write(*work))
    file = ask(engine, StartProfile(number=1)).file
    engine.profile(StopProfile(number=2), "gateway")
    engine.profile(StartProfile(number=2), "another")
    assert "stop it first" in answer_of(engine, "another").error
    may_write.set()
    assert answer_of(engine) == ProfileAnswer(file=file, num_steps=0, number=2)


def test_a_profile_of_a_gpu_that_is_not_there_is_refused(engine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "there is no GPU" in ask(engine, StartProfile(activities=("GPU",))).error


def test_a_trace_that_cannot_be_written_is_an_error_and_the_next_one_works(profiler, tmp_path):
    answers: queue.SimpleQueue[ProfileAnswer] = queue.SimpleQueue()
    profiler.handle(StartProfile(), answers.put)
    assert not answers.get().error
    (tmp_path / "traces").rmdir()
    profiler.handle(StopProfile(), answers.put)
    assert "could not be written" in answers.get(timeout=60).error
    (tmp_path / "traces").mkdir()
    profiler.handle(StartProfile(), answers.put)
    profiler.handle(StopProfile(), answers.put)
    assert not answers.get().error and not answers.get(timeout=60).error


def test_a_node_without_a_folder_refuses_to_profile():
    engine = EngineThread(Engine())
    try:
        assert ask(engine, StartProfile(number=3)) == ProfileAnswer(error=NO_FOLDER, number=3)
    finally:
        engine.close()


def test_a_folder_that_cannot_be_made_is_refused_at_start(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--profile-dir"):
        Profiler(tmp_path / "file" / "traces", "decode")


def test_a_profile_for_which_there_is_no_thread_fails_and_the_steps_go_on(engine, monkeypatch):
    ask(engine, StartProfile(activities=("CPU",), number=1))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse_thread)
        assert ask(engine, StopProfile(number=2)).error == "the profiler failed: can't start new thread"
    step(engine, 2)


class Broken:
    """A profiler of torch that fails in the given method, as it does if another one is active."""

    def __init__(self, method, **options):
        self._method = method

    def __getattr__(self, name):
        def call(*args):
            if name == self._method:
                raise RuntimeError("the profiler is busy")

        return call


@pytest.mark.parametrize("method", ["start", "step"])
def test_a_profiler_that_fails_ends_its_profile_and_no_step(engine, monkeypatch, method):
    monkeypatch.setattr(torch.profiler, "profile", lambda **options: Broken(method, **options))
    started = ask(engine, StartProfile(activities=("CPU",), number=1))
    assert (started.error, started.number) == ("the profiler failed: the profiler is busy" * (method == "start"), 1)
    step(engine, 2)
    stopped = ask(engine, StopProfile(number=2))
    assert ("no profile has been started" if method == "start" else "the profiler failed") in stopped.error
    monkeypatch.undo()
    assert ask(engine, StartProfile(activities=("CPU",), number=3)).error == ""
    ask(engine, StopProfile())  # torch crashes when the interpreter ends while it records
