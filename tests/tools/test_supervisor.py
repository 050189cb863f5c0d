"""Children are kept running, and none outlives its supervisor."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import uvloop
from support.service.output import Lines

from scripts.serving import supervisor as module
from scripts.serving.supervisor import Child, ChildFailed, Supervisor

ROOT = Path(__file__).resolve().parents[2]


def child(code: str, name: str = "node", **options) -> Child:
    return Child(name, [sys.executable, "-c", code], dict(os.environ), **options)


async def until(condition, seconds: float = 60.0) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "it took too long"
        await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def _short_delays(monkeypatch):
    monkeypatch.setattr(module, "FIRST_DELAY_S", 0.01)


async def test_a_child_that_dies_is_restarted_alone():
    first, second = child("import time; time.sleep(60)"), child("import time; time.sleep(60)")
    supervisor = Supervisor([first, second], Lines())
    running = asyncio.create_task(supervisor.run())
    await until(lambda: first.process and second.process)
    killed, kept = first.process, second.process
    killed.kill()
    await until(lambda: first.process is not killed)
    assert second.process is kept
    assert kept.returncode is None
    await supervisor.stop()
    await running
    assert first.process.returncode == second.process.returncode == -signal.SIGTERM


def test_nodes_learn_of_a_stop_before_their_gateway():
    told, children = [], [child("", name) for name in ("gateway", "prefill-0", "decode-0")]
    for one in children:
        one.process = SimpleNamespace(returncode=None, send_signal=lambda number, name=one.name: told.append(name))
    Supervisor(children, Lines()).signal_all(signal.SIGTERM)
    assert told == ["decode-0", "prefill-0", "gateway"]


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_child_is_restarted_and_stopped_although_its_own_child_holds_its_output(new_loop, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "LAST_LINES_S", 0.1)
    pids = tmp_path / "pids"
    code = (
        "import subprocess, sys, time\n"
        "helper = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])\n"
        "print('said', flush=True)\n"
        f"with open({str(pids)!r}, 'a+') as file:\n"
        "    print(helper.pid, file=file, flush=True)\n"
        "    file.seek(0)\n"
        "    is_first = len(file.readlines()) == 1\n"
        "time.sleep(0 if is_first else 60)\n"
    )

    async def run() -> list[str]:
        output, helped = Lines(), child(code)
        supervisor = Supervisor([helped], output)
        supervisor.mark_ready()
        running = asyncio.create_task(supervisor.run())
        await until(lambda: helped.num_deaths == 1 and len(pids.read_text().split()) == 2)
        await supervisor.stop()
        await running
        return output.lines

    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            lines = runner.run(run())
    finally:
        for pid in pids.read_text().split():
            os.kill(int(pid), signal.SIGKILL)
    assert lines.count("node | said") == 2


async def test_a_child_that_refuses_its_configuration_ends_everything():
    supervisor = Supervisor([child("raise SystemExit(2)"), child("import time; time.sleep(60)")], Lines())
    with pytest.raises(ExceptionGroup) as failed:
        await supervisor.run()
    await supervisor.stop()
    error = failed.value.exceptions[0]
    assert isinstance(error, ChildFailed) and error.is_refusal
    assert str(error) == "node ended with status 2; see its output above"


async def test_a_child_that_keeps_dying_before_the_service_was_ready_ends_everything():
    failing = child("raise SystemExit(1)")
    with pytest.raises(ExceptionGroup) as failed:
        await Supervisor([failing], Lines()).run()
    assert failing.num_deaths == module.MAX_EARLY_DEATHS
    assert not failed.value.exceptions[0].is_refusal


async def test_once_ready_a_child_that_keeps_dying_is_always_restarted():
    failing = child("raise SystemExit(2)")
    supervisor = Supervisor([failing], Lines())
    supervisor.mark_ready()
    running = asyncio.create_task(supervisor.run())
    await until(lambda: failing.num_deaths > module.MAX_EARLY_DEATHS)
    assert not running.done()
    await supervisor.stop()
    running.cancel()


@pytest.mark.parametrize("error", [OSError("no process is left"), subprocess.SubprocessError("no core is left")])
async def test_a_child_that_cannot_be_started_is_tried_again_and_leaves_the_others_alone(monkeypatch, error):
    spawn, errors, output = module._spawn, [error] * 2, Lines()
    first, second = child("import time; time.sleep(60)", name="decode"), child("import time; time.sleep(60)")
    supervisor = Supervisor([first, second], output)
    supervisor.mark_ready()
    running = asyncio.create_task(supervisor.run())
    await until(lambda: first.process and second.process)
    killed, kept = first.process, second.process

    async def fail_at_first(one, output):
        if errors:
            raise errors.pop()
        return await spawn(one, output)

    monkeypatch.setattr(module, "_spawn", fail_at_first)
    killed.kill()
    await until(lambda: running.done() or first.process is not killed)
    assert not running.done() and second.process is kept and kept.returncode is None
    assert f"serve: decode cannot be started ({error}); starting it again in 0.02 s" in output.lines
    await supervisor.stop()
    await running


async def test_a_child_that_ignores_sigterm_is_killed(monkeypatch):
    monkeypatch.setattr(module, "STOP_S", 0.2)
    deaf = child("import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)")
    output = Lines()
    supervisor = Supervisor([deaf], output)
    running = asyncio.create_task(supervisor.run())
    await until(lambda: "node | deaf" in output.lines)
    await supervisor.stop()
    await running
    assert deaf.process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])  # the latter in actors of Ray
def test_ctrl_c_in_a_terminal_reaches_the_supervisor_alone(new_loop):
    async def check():
        waiting = child("import time; time.sleep(60)")
        supervisor = Supervisor([waiting], Lines())
        running = asyncio.create_task(supervisor.run())
        await until(lambda: waiting.process)
        assert os.getpgid(waiting.process.pid) == waiting.process.pid != os.getpgid(0)
        await supervisor.stop()
        await running

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(check())


async def test_no_python_of_the_supervisor_runs_in_a_fork_where_locks_of_its_threads_stay_taken():
    forks: list[int] = []
    os.register_at_fork(before=lambda: forks.append(1))
    with pytest.raises(ExceptionGroup):
        await Supervisor([child("raise SystemExit(2)")], Lines()).run()
    assert not forks


async def test_output_is_copied_line_by_line_after_the_name():
    output = Lines()
    printing = child("print('one'); print('two', end=''); raise SystemExit(2)", name="decode-0")
    supervisor = Supervisor([printing], output)
    with pytest.raises(ExceptionGroup):
        await supervisor.run()
    assert output.lines == ["decode-0 | one", "decode-0 | two"]


async def test_a_child_is_pinned_to_its_cpus():
    cpu = min(os.sched_getaffinity(0))
    output = Lines()
    pinned = child("import os; print(os.sched_getaffinity(0)); raise SystemExit(2)", cpus=(cpu,))
    with pytest.raises(ExceptionGroup):
        await Supervisor([pinned], output).run()
    assert output.lines == [f"node | {{{cpu}}}"]


def test_no_child_outlives_a_supervisor_that_is_killed():
    code = (
        "import asyncio, os, sys\n"
        "from scripts.serving.output import ServeOutput\n"
        "from scripts.serving.supervisor import Child, Supervisor\n"
        "sleeper = [sys.executable, '-c', 'import time; print(1, flush=True); time.sleep(60)']\n"
        "asyncio.run(Supervisor([Child('node', sleeper, dict(os.environ))], ServeOutput('console')).run())\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True) as parent:
        assert parent.stderr is not None
        assert parent.stderr.readline() == "node | 1\n"
        (sleeper,) = psutil.Process(parent.pid).children()
        parent.kill()
    sleeper.wait(60)
    assert not sleeper.is_running()
