"""The client processes of a run: feeding, and the end of the run."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from scripts.benchmarks.harness.mock_server import MockServer, load, mock_server
from scripts.load_tester import run
from scripts.load_tester.client import client_pool, client_process, http_client
from scripts.load_tester.client.ipc import SendRequest, Setup, StartClock
from scripts.load_tester.config import LoadtestConfig
from scripts.load_tester.workload.planned_request import PlannedRequest
from scripts.load_tester.workload.prompts import RequestBodies


def test_a_closed_loop_keeps_its_concurrency(tmp_path: Path) -> None:
    with mock_server(tmp_path, "--ttft", "0.03") as server:
        report = load(server, concurrency=4, num_requests=40, output_len="1")
    spans = [(record.released_s, record.ended_s) for record in report.records]
    most = max(sum(begin <= at < end for begin, end in spans) for at, _ in spans)
    assert most == 4
    assert report.num_requests == 40


def test_a_closed_loop_with_a_duration_begins_no_session_after_it(tmp_path: Path) -> None:
    with mock_server(tmp_path, "--ttft", "0.02") as server:
        report = load(server, concurrency=2, duration="0.6", output_len="1")
    assert 2 <= report.num_requests <= 62
    assert max(record.intended_s for record in report.records) < 0.6


def test_the_clock_starts_in_the_middle_of_a_very_long_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its process would stop reading before it learns of the start."""
    happened: list[int | str] = []
    body, go = RequestBodies.body, client_pool.ClientPool._start_clock
    monkeypatch.setattr(
        RequestBodies, "body", lambda self, planned: happened.append(planned.index) or body(self, planned)
    )
    monkeypatch.setattr(client_pool.ClientPool, "_start_clock", lambda self: happened.append("go") or go(self))
    monkeypatch.setattr(client_pool, "MAX_BYTES_AT_ONCE", 2000)
    with mock_server(tmp_path) as server:
        report = load(server, rate="50", num_requests=2, turns="12", input_len="100", output_len="1")
    assert happened.count("go") == 1 and 0 < happened.index("go") < 11
    assert [one for one in happened if one != "go"] == list(range(24))
    assert report.errors["count"] == 0
    assert [record.turn for record in sorted(report.records, key=lambda r: (r.session, r.sent_s))] == [*range(12)] * 2


async def test_a_client_process_never_pauses_reading_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pipe:
        is_reading = True

        def pause_reading(self) -> None:
            self.is_reading = False

        def write(self, data: bytes) -> None: ...

        def is_closing(self) -> bool:
            return False

    monkeypatch.setattr(client_process, "MAX_BYTES_WAITING", 10)
    process = client_process.ClientProcess()
    process._reader.transport = process._writer.transport = pipe = Pipe()  # type: ignore[assignment]
    process._on_message(Setup("127.0.0.1", 9, "", True, b"", 0, 1.0, 0.0))
    process._on_message(SendRequest(0, 900.0, -1, -1.0, 0, b"", b"x" * 11))
    assert pipe.is_reading
    process._on_message(StartClock(time.monotonic()))
    process._on_message(SendRequest(1, 900.0, -1, -1.0, 0, b"", b"x"))
    assert not pipe.is_reading
    assert process._client
    process._client.close()


async def test_no_bodies_wait_of_sessions_that_come_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a client process would never read on, and the run would never end."""
    client = http_client.HttpClient(Setup("127.0.0.1", 9, "", True, b"", 1, 60.0, 1.0), lambda done: None, lambda: None)
    monkeypatch.setattr(client, "_open_for", lambda exchange: None)
    client.start(time.monotonic())
    for session in range(2):  # the first one takes the only slot
        client.add(SendRequest(2 * session, 0.0, session, -1.0, 1, b"", b"x" * 5))
        client.add(SendRequest(2 * session + 1, 0.0, session, 0.0, 0, b"", b"x" * 7))
    assert client.bytes_waiting == 7 + 12
    client._start_at -= 2.0
    client.add(SendRequest(4, 0.0, 2, -1.0, 1, b"", b"x" * 5))
    assert client.bytes_waiting == 7
    client.add(SendRequest(5, 0.0, 2, 0.0, 0, b"", b"x" * 7))
    assert client.bytes_waiting == 7
    client.close()


def test_a_trace_gets_processes_for_its_peak_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = [
        PlannedRequest(n, at, (), tokens)
        for n, (at, tokens) in enumerate([(0, 5), (1, 5), (21, 300), (25, 100), (40, 9)])
    ]
    assert client_pool.peak_load(plan) == (0.2, 40.0)  # seconds 20 to 30 of 40
    assert client_pool.peak_load(plan[:2]) == (1.0, 5.0)  # a plan of one second
    assert [client_pool.num_clients_for(*load, 0) for load in ((1, 1), (0, 1e300))] == [1, min(16, os.cpu_count() or 1)]
    monkeypatch.setattr(run, "num_clients_for", lambda rate, events, slots: 2 if rate else 1)
    trace = tmp_path / "t.jsonl"
    trace.write_text("".join(f'{{"at": {n / 100}, "prompt": "x", "max_tokens": 2}}\n' for n in range(10)))
    with mock_server(tmp_path) as server:
        report = load(server, trace=str(trace))
    assert report.client["processes"] == 2 and report.errors["count"] == 0
    assert len(server.truth) == 10


def test_client_processes_that_do_not_start_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, started = subprocess.Popen, []

    def popen(*args: object, **options: object) -> object:
        if len(started) == 1:
            raise OSError(12, "Cannot allocate memory")
        started.append(real(*args, **options))  # type: ignore[call-overload]
        return started[-1]

    with mock_server(tmp_path) as server:
        with monkeypatch.context() as patch:
            patch.setattr(client_pool.subprocess, "Popen", popen)
            with pytest.raises(client_pool.ClientFailed, match="cannot be started: Cannot allocate memory"):
                load(server, clients=2)
        assert started[0].poll() is not None and started[0].stdin.closed
        monkeypatch.setattr(client_pool, "READY_TIMEOUT_S", 0.0)
        with pytest.raises(client_pool.ClientFailed, match="not ready within 0 s"):
            load(server)
    assert not server.truth


def test_a_client_process_that_dies_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[client_pool.ClientPool] = []
    real = client_pool.ClientPool._start_clock

    async def go(self: client_pool.ClientPool) -> bool:
        made.append(self)
        self._handles[1].process.kill()
        return await real(self)

    monkeypatch.setattr(client_pool.ClientPool, "_start_clock", go)
    with mock_server(tmp_path) as server:
        with pytest.raises(client_pool.ClientFailed, match="ended early"):
            load(server, rate="50", num_requests=200, clients=2)
    assert all(member.process.poll() is not None for member in made[0]._handles)


def test_feeding_a_closed_loop_is_bounded_by_its_slots(tmp_path: Path) -> None:
    """For an endless plan, the number of slots bounds the bodies made ahead."""
    with mock_server(tmp_path, "--ttft", "0.02") as server:
        config = LoadtestConfig(url=server.url, concurrency=2, duration="0.7", output_len="1", scrape="none")
        made: list[int] = []
        load_ = run._Run(config, None, 0)
        real = RequestBodies.body
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RequestBodies, "body", lambda self, planned: made.append(1) or real(self, planned))
            report = asyncio.run(load_.run(None))
    assert 2 <= report.num_requests <= 72
    assert len(made) <= report.num_requests + 4 * 2 + 64 + 1


def test_several_client_processes_share_one_schedule(tmp_path: Path) -> None:
    with mock_server(tmp_path) as server:
        one = load(server, rate="200", num_requests=60, output_len="2", clients=1, seed=9)
        three = load(server, rate="200", num_requests=60, output_len="2", clients=3, seed=9)
    assert three.client["processes"] == 3
    assert [round(record.intended_s, 6) for record in one.records] == [
        round(record.intended_s, 6) for record in three.records
    ]
    assert [record.prompt_digest for record in one.records] == [record.prompt_digest for record in three.records]
    bodies = sorted(str(truth["body"]) for truth in server.truth)
    assert bodies[::2] == bodies[1::2], "both runs sent the same requests"


def until_asked(server: MockServer, count: int) -> None:
    """Wait until the mock server has received this many requests."""
    deadline_at = time.monotonic() + 60
    while time.monotonic() < deadline_at:
        with urllib.request.urlopen(server.url + "/metrics") as page:
            if int(page.read().split(b"\nmock_requests_total ")[1].split()[0]) >= count:
                return
        time.sleep(0.02)
    raise AssertionError("no requests came")


@pytest.mark.parametrize(("number", "is_for_all"), [(signal.SIGINT, False), (signal.SIGTERM, True)])
def test_a_stopped_run_reports_what_there_is_and_leaves_no_process(
    tmp_path: Path, number: int, is_for_all: bool
) -> None:
    """A supervisor signals the process, a terminal its whole group."""
    with mock_server(tmp_path, "--ttft", "0.02", "--itl", "0.2") as server:
        words = ["loadtest", "--url", server.url, "--rate", "40", "--duration", "60", "--output-len", "2"]
        words += ["--json", str(tmp_path / "r.json")]
        words = [sys.executable, "-m", "scripts.cli", *words]
        with subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True) as process:
            until_asked(server, 20)
            clients = psutil.Process(process.pid).children(recursive=True)
            os.killpg(process.pid, number) if is_for_all else process.send_signal(number)
            assert process.wait(60) == 130
    report = json.loads((tmp_path / "r.json").read_text())
    assert "stopped before its end" in report["reasons"][-1]
    assert 20 <= report["num_requests"] < 2400
    assert report["num_measured"] < report["num_requests"] and report["errors"]["count"] == 0, "cut off, not failed"
    assert report["throughput"]["window_s"][1] <= report["length_s"]
    assert clients and not any(client.is_running() for client in clients)


def test_client_processes_end_with_their_parent(tmp_path: Path) -> None:
    with mock_server(tmp_path, "--ttft", "0.02") as server:
        words = ["loadtest", "--url", server.url, "--rate", "20", "--duration", "60"]
        with subprocess.Popen([sys.executable, "-m", "scripts.cli", *words], stdout=subprocess.PIPE) as process:
            until_asked(server, 2)
            clients = psutil.Process(process.pid).children(recursive=True)
            process.kill()
    _, alive = psutil.wait_procs(clients, 60)
    assert clients and not alive
