"""The actor that runs a process, without Ray: a real gateway, which is killed, refused and stopped."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from support.gateway.certificates import make_certificate
from support.service.processes import descendants
from support.service.service import SMALL_MODEL

from gateway.http.access.tls import make_tls_context
from scripts.cluster_manager import process_actor
from scripts.cluster_manager.command_line import Ports, ProcessSpec
from scripts.cluster_manager.process_actor import MAX_LINES, Deaths, LogBuffer, ProcessActor, Report
from scripts.serving.supervisor import Child, Supervisor


def gateway(**values: Any) -> ProcessActor:
    spec = ProcessSpec(name="gateway-0", role="gateway", values={"model": str(SMALL_MODEL), "port": 0, **values})
    return ProcessActor(msgspec.json.encode(spec), "127.0.0.1")


async def report(actor: ProcessActor) -> Report:
    return msgspec.json.decode(await actor.report([]), type=Report)


async def until(actor: ProcessActor, condition: Callable[[Report], object]) -> Report:
    for _ in range(1_200):
        if condition(found := await report(actor)):
            return found
        await asyncio.sleep(0.1)
    raise AssertionError(f"{found}\n{await actor.logs(0)}")


async def until_listening(actor: ProcessActor, num_times: int) -> None:
    """Wait until the log has the line of each start; a killed process writes no line that it still has."""
    for _ in range(1_200):
        _, lines = await actor.logs(0)
        if sum("listening http://127.0.0.1" in line for line in lines) == num_times:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(lines)


def of_actor(actor: ProcessActor, pids: list[int]) -> list[int]:
    flag, found = f"--control-port={actor._ports.control}", []
    for pid in pids:
        with contextlib.suppress(OSError):  # it has just ended
            if flag in Path(f"/proc/{pid}/cmdline").read_text():
                found.append(pid)
    return found


async def test_a_process_that_is_killed_comes_back_at_its_address_and_ends_when_it_is_stopped() -> None:
    actor = gateway(drain_timeout=0)
    first = await until(actor, lambda found: found.is_healthy)
    assert first.num_restarts == 0 and not first.is_ready, "it has no nodes"
    assert first.gateway and first.url.startswith("http://127.0.0.1:")
    await until_listening(actor, 1)
    [pid] = of_actor(actor, descendants(os.getpid()))
    os.kill(pid, signal.SIGKILL)
    await until_listening(actor, 2)
    again = await until(actor, lambda found: found.is_healthy)
    assert (again.url, again.gateway, again.num_restarts) == (first.url, first.gateway, 1)
    await actor.stop()
    await actor.stop()
    last = await until(actor, lambda found: found.has_ended)
    assert (last.failure, last.is_healthy) == ("", False)
    assert of_actor(actor, descendants(os.getpid())) == []


async def test_a_gateway_whose_key_has_letters_beyond_ascii_becomes_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_API_KEY", "ключ")
    actor = gateway()
    await until(actor, lambda found: found.is_healthy)
    await actor.stop()
    await until(actor, lambda found: found.has_ended)


async def test_a_gateway_is_asked_under_a_name_that_it_always_serves() -> None:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()

    heads: list[bytes] = []
    actor = gateway(allowed_hosts=("llm.example.com",))
    async with await asyncio.start_server(reply, "127.0.0.1", 0) as server:
        actor._ports = Ports(server.sockets[0].getsockname()[1])
        assert await asyncio.to_thread(actor._get, "/health") == {}
    assert b"Host: localhost\r\n" in heads[0]


@pytest.mark.slow
async def test_a_process_that_answers_no_more_is_killed_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = gateway(drain_timeout=0)
    await until(actor, lambda found: found.is_healthy)
    monkeypatch.setattr(process_actor, "UNHEALTHY_S", 0.5)
    monkeypatch.setattr(process_actor, "PROBE_TIMEOUT_S", 0.5)
    [pid] = of_actor(actor, descendants(os.getpid()))
    os.kill(pid, signal.SIGSTOP)
    await until(actor, lambda found: found.num_restarts >= 1)
    monkeypatch.setattr(process_actor, "UNHEALTHY_S", 60.0)
    monkeypatch.setattr(process_actor, "PROBE_TIMEOUT_S", 5.0)
    await until(actor, lambda found: found.is_healthy)
    await actor.stop()
    await until(actor, lambda found: found.has_ended)


async def test_a_process_that_answers_no_more_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(path: str) -> dict[str, Any] | None:
        was_ready.append(actor._is_ready)
        actor._has_ended = len(was_ready) == 3
        return {"is_registered": True} if len(was_ready) == 1 else None

    was_ready: list[bool] = []
    child = Child("decode-0", [], {})
    child.process = SimpleNamespace(pid=1, returncode=None)  # type: ignore[assignment]
    actor = ProcessActor(msgspec.json.encode(ProcessSpec(name="decode-0", role="decode", values={})), "127.0.0.1")
    actor._supervisor = Supervisor([child], LogBuffer())
    monkeypatch.setattr(process_actor, "PROBE_S", 0.0)
    monkeypatch.setattr(actor, "_get", answer)
    await actor._watch(child)
    assert was_ready == [False, True, False]


async def test_a_process_that_is_stopping_is_not_killed_although_it_answers_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A gateway that drains refuses connections, for as long as its drain-timeout."""

    def answer(path: str) -> dict[str, Any] | None:
        asked.append(path)
        if len(asked) == 1:
            asyncio.run_coroutine_threadsafe(actor.stop(), loop).result()
            return {"is_registered": True}
        actor._has_ended = len(asked) == 3
        return None

    asked: list[str] = []
    signals: list[int] = []
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    child = Child("decode-0", [], {})
    process = SimpleNamespace(pid=1, returncode=None, send_signal=signals.append, wait=ended.wait)
    child.process = process  # type: ignore[assignment]
    actor = ProcessActor(msgspec.json.encode(ProcessSpec(name="decode-0", role="decode", values={})), "127.0.0.1")
    actor._supervisor = Supervisor([child], LogBuffer())
    monkeypatch.setattr(process_actor, "PROBE_S", 0.0)
    monkeypatch.setattr(process_actor, "UNHEALTHY_S", 0.0)
    monkeypatch.setattr(actor, "_get", answer)
    watch = asyncio.create_task(actor._watch(child))
    actor._tasks = [watch, watch]
    await watch
    ended.set()
    await actor._tasks[-1]
    assert signals == [signal.SIGTERM]


async def test_a_gateway_is_asked_with_the_certificate_that_it_has_read_although_another_is_there_now(
    tmp_path: Path,
) -> None:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()

    made = make_certificate(tmp_path)
    actor = gateway(**made.options)
    context = make_tls_context(str(made.cert), str(made.key))
    async with await asyncio.start_server(reply, "127.0.0.1", 0, ssl=context) as server:
        actor._ports = Ports(server.sockets[0].getsockname()[1])
        assert await asyncio.to_thread(actor._get, "/health") == {}
        make_certificate(tmp_path)
        assert await asyncio.to_thread(actor._get, "/health") == {}


@pytest.mark.slow
async def test_a_process_that_dies_again_and_again_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_actor, "MAX_DEATHS", 2)
    actor = gateway(drain_timeout=0)
    await until(actor, lambda found: found.is_healthy)
    await until_listening(actor, 1)
    for _ in range(2):
        await until(actor, lambda _: of_actor(actor, descendants(os.getpid())))
        [pid] = of_actor(actor, descendants(os.getpid()))
        os.kill(pid, signal.SIGKILL)
        await until(actor, lambda found, pid=pid: pid not in descendants(os.getpid()))
    found = await until(actor, lambda found: found.has_ended)
    assert "gateway-0 has died 2 times in a row" in found.failure
    assert "listening http://127.0.0.1" in found.failure, "the end of its log"
    assert of_actor(actor, descendants(os.getpid())) == []


def test_deaths_are_forgiven_once_a_process_has_been_healthy_for_a_minute() -> None:
    deaths = Deaths()
    assert deaths.seen(0, is_healthy=True, now=0.0) == 0
    assert deaths.seen(3, is_healthy=False, now=10.0) == 3
    assert deaths.seen(3, is_healthy=True, now=20.0) == 3
    assert deaths.seen(4, is_healthy=True, now=79.0) == 4, "it has died and come back between two questions"
    assert deaths.seen(4, is_healthy=True, now=138.0) == 4
    assert deaths.seen(4, is_healthy=True, now=139.0) == 0
    assert deaths.seen(5, is_healthy=False, now=140.0) == 1


@pytest.mark.slow(sample=0.5)
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"chat_template": "/nowhere.jinja"}, "/nowhere.jinja"),
        ({"tls_cert": "/nowhere.pem", "tls_key": "/nowhere.key"}, "--tls-cert /nowhere.pem cannot be read"),
    ],
)
async def test_a_process_that_refuses_its_options_has_failed_with_its_reason(
    options: dict[str, str], reason: str
) -> None:
    actor = gateway(**options)
    found = await until(actor, lambda found: found.has_ended)
    assert "gateway-0 ended with status 2" in found.failure
    assert reason in found.failure


@pytest.mark.parametrize("answer", [b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", b"HTTP/1.1 2"])
async def test_a_process_that_dies_within_an_answer_has_not_answered(answer: bytes) -> None:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    actor = gateway()
    async with await asyncio.start_server(reply, "127.0.0.1", 0) as server:
        actor._ports = Ports(server.sockets[0].getsockname()[1])
        assert await asyncio.to_thread(actor._get, "/health") is None


@pytest.mark.parametrize(
    ("role", "option", "flag"), [("gateway", "port", "--port"), ("decode", "http_port", "--http-port")]
)
async def test_a_port_in_use_is_a_failure_with_its_flag(role: Any, option: str, flag: str) -> None:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    spec = ProcessSpec(name=f"{role}-0", role=role, values={"model": str(SMALL_MODEL), option: port})
    found = await report(ProcessActor(msgspec.json.encode(spec), "127.0.0.1"))
    server.close()
    assert found.has_ended and f"{flag} {port}: address already in use" in found.failure


async def test_nodes_read_the_gateways_whole_from_the_file_that_they_inherit() -> None:
    actor = gateway()
    actor._has_ended = True  # nothing is started
    path = Path(f"/proc/self/fd/{actor._gateway_fd}")
    await actor.report(["10.0.0.1:8001", "10.0.0.2:8001"])
    assert path.read_text().split() == ["10.0.0.1:8001", "10.0.0.2:8001"]
    await actor.report(["10.0.0.9:1"])
    assert path.read_text().split() == ["10.0.0.9:1"]


def test_the_log_keeps_the_last_lines_and_numbers_them_all() -> None:
    log = LogBuffer()
    for number in range(MAX_LINES + 10):
        log.relay("gateway-0", f"line {number}")
    assert log.since(-2) == (MAX_LINES + 10, [f"line {MAX_LINES + 8}", f"line {MAX_LINES + 9}"])
    assert log.since(MAX_LINES + 9) == (MAX_LINES + 10, [f"line {MAX_LINES + 9}"])
    assert log.since(MAX_LINES + 10) == (MAX_LINES + 10, [])
    assert len(log.since(0)[1]) == MAX_LINES


@pytest.mark.parametrize("since", [0, -5])
def test_an_empty_log_has_no_lines(since: int) -> None:
    assert LogBuffer().since(since) == (0, [])
