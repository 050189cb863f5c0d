"""``./scripts/serve`` starts a service, restarts its processes, and stops all of them."""

import asyncio
import contextlib
import json
import os
import re
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx2
import openai
import psutil
import pytest
from support.gateway.certificates import make_chain
from support.service.output import Lines
from support.service.service import WORKER

from common.config.serve import ServeConfig
from common.errors import ConfigError
from gateway.http.access.tls import make_tls_context
from gateway.siblings.connection import listen_at
from gateway.siblings.group import GatewayGroup
from scripts.serving.cpu_affinity import Share
from scripts.serving.serve import (
    _call,
    _curl_headers,
    _missing,
    _on_signals,
    bind,
    children,
    free_port,
    shares_of,
    tell_ready,
    with_key,
)
from scripts.serving.supervisor import Supervisor

ROOT = Path(__file__).resolve().parents[2]


class Service:
    """A ``serve`` process with its URL and the lines that it has printed."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.lines: list[str] = []
        self.url = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if found := re.match(r"ready (http://\S+)", line):
                self.url = found.group(1)

    def wait_until_ready(self) -> None:
        ends = time.monotonic() + 180
        while not self.url:
            assert self.process.poll() is None, "\n".join(self.lines)
            assert time.monotonic() < ends, "\n".join(self.lines)
            time.sleep(0.02)

    def nodes(self) -> dict[str, psutil.Process]:
        """The child processes: the gateway, and the nodes by their role."""
        found = {}
        for child, (_, _, module, *flags) in self.commands():
            found[flags[0] if module == WORKER else module] = child
        return found

    def commands(self) -> list[tuple[psutil.Process, list[str]]]:
        """The child processes with their command lines, without those that have just ended."""
        found = []
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # a zombie has no command line
                found.append((child, child.cmdline()))
        return found

    def complete(self, prompt: str) -> tuple[int, str]:
        """HTTP status and text of a greedy completion of 40 tokens."""
        body = {"model": "baton-small", "prompt": prompt, "temperature": 0, "max_tokens": 40}
        with closing(HTTPConnection(self.url.removeprefix("http://"), timeout=180)) as connection:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            content = json.load(answer)
        return answer.status, content["choices"][0]["text"] if answer.status == 200 else str(content)

    def stop(self, number: signal.Signals) -> None:
        """Send a signal and wait until the process has ended."""
        self.process.send_signal(number)
        self.process.wait(60)
        self._reader.join(60)


@contextmanager
def serving(*flags: str) -> Iterator[Service]:
    command = [sys.executable, "-m", "scripts.serving.serve", "--port", "0", "--max-total-tokens", "4096", *flags]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True, **output) as process:
        service = Service(process)
        try:
            yield service
        except BaseException:
            print("\n".join(service.lines))
            raise
        finally:
            if process.poll() is None:
                process.kill()


@pytest.mark.slow
def test_a_service_survives_a_killed_node_and_stops_without_leftovers_although_one_hangs():
    with serving() as service:
        service.wait_until_ready()
        nodes = service.nodes()
        assert set(nodes) == {"gateway", "prefill", "decode"}
        status, verse = service.complete("ROMEO:\n")
        assert status == 200
        assert re.search(r"[A-Za-z]{3}", verse)

        nodes["decode"].kill()
        ends = time.monotonic() + 180
        while (answer := service.complete("ROMEO:\n")) != (200, verse):
            assert answer[0] in (502, 503), answer
            assert time.monotonic() < ends, "\n".join(service.lines)
            time.sleep(0.1)
        left = service.nodes()
        assert left["prefill"] == nodes["prefill"]
        assert left["gateway"] == nodes["gateway"]

        left["prefill"].suspend()
        service.stop(signal.SIGTERM)
        assert service.process.returncode == 0
        assert not any(process.is_running() for process in left.values())
        assert not any("Traceback" in line for line in service.lines), "\n".join(service.lines)


NUM_PROMPTS, NUM_TOKENS = 12, 48
PROMPTS = [f"Speech number {number}:\n" for number in range(NUM_PROMPTS)]


def gateways(service: Service) -> list[psutil.Process]:
    return [child for child, words in service.commands() if "gateway" in words]


async def until(condition: Callable[[], object], service: Service) -> None:
    async with asyncio.timeout(180):
        while not condition():
            assert service.process.poll() is None, "\n".join(service.lines)
            await asyncio.sleep(0.05)


async def complete_for_sure(url: str, prompt: str, key: str, *, is_stream: bool) -> str:
    """The text of a greedy completion, asked for until it is whole; each client has connections of its own."""
    headers = {"Idempotency-Key": key}
    body: dict[str, Any] = {"model": "baton-small", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=180) as client:
        while True:
            try:
                if not is_stream:
                    return (await client.completions.create(**body, extra_headers=headers)).choices[0].text
                chunks = await client.completions.create(**body, extra_headers=headers, stream=True)
                return "".join([chunk.choices[0].text async for chunk in chunks])
            except (openai.APIConnectionError, httpx2.TransportError):
                await asyncio.sleep(0.05)
            except openai.InternalServerError as error:
                if error.status_code != 503:  # of a new gateway that slow nodes have not reached yet
                    raise
                await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_every_answer_of_two_gateways_is_right_although_one_is_killed_under_load() -> None:
    with serving("--workers", "2", "--dtype", "float32") as service:
        await asyncio.to_thread(service.wait_until_ready)
        first, second = gateways(service)
        (group,) = [word.partition("=")[2].split(":")[0] for word in first.cmdline() if word.startswith("--group=")]
        answers: list[str] = []

        async def ask(number: int, key: str) -> str:
            is_stream = number % 2 == 0
            answers.append(await complete_for_sure(service.url, PROMPTS[number], key, is_stream=is_stream))
            return answers[-1]

        expected = await asyncio.gather(*(ask(number, f"first-{number}") for number in range(NUM_PROMPTS)))
        answers.clear()
        numbers = [*range(NUM_PROMPTS)] * 2
        again = [asyncio.create_task(ask(number, f"second-{i}")) for i, number in enumerate(numbers)]
        await until(lambda: answers, service)
        first.kill()
        assert await asyncio.gather(*again) == expected * 2
        await until(lambda: len(gateways(service)) == 2 and not first.is_running(), service)
        async with openai.AsyncOpenAI(base_url=service.url, api_key="any") as client:
            async with asyncio.timeout(180):
                page = ""
                while not all(f'baton_requests_in_flight{{gateway="{index}"' in page for index in range(2)):
                    page = await client.get("/metrics", cast_to=str)
        assert second in gateways(service)
        children = psutil.Process(service.process.pid).children()
        await asyncio.to_thread(service.stop, signal.SIGINT)
        assert service.process.returncode == 0
        assert not any(process.is_running() for process in children)
        assert group not in Path("/proc/net/unix").read_text()
        assert not any("Traceback" in line for line in service.lines), "\n".join(service.lines)


def test_a_shared_socket_listens_on_ipv6_alone_and_is_closed_for_good() -> None:
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    with bind("::1", 0, "--port") as listener:
        address = listener.getsockname()[:2]
        socket.create_connection(address).close()
        with pytest.raises(ConfigError, match="cannot bind --host ::1 --port"):
            bind("::1", address[1], "--port")
        assert listener.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)


def test_every_gateway_inherits_the_socket_and_one_alone_changes_roles() -> None:
    config = ServeConfig(workers=3, port=8000, control_port=8001, auto_roles=True, auto_roles_per_hour=9)
    with bind("127.0.0.1", 0, "--port") as listener:
        found = children(config, [Share(1), Share(1)], listener=listener)
        assert [child.name for child in found] == ["gateway-0", "gateway-1", "gateway-2", "prefill-0", "decode-0"]
        assert [child.fds for child in found] == [(listener.fileno(),)] * 3 + [()] * 2
        groups = [word.rpartition(":")[2] for child in found for word in child.argv if word.startswith("--group=")]
        assert groups == ["0/3", "1/3", "2/3"]
        assert [f"--listen-fd={listener.fileno()}" in child.argv for child in found[:3]] == [True] * 3
        for flag in ("--auto-roles", "--auto-roles-per-hour=9"):
            assert [flag in child.argv for child in found] == [True] + [False] * 4
        assert all(word.count(",") == 2 for word in found[3].argv if word.startswith("--gateway="))


@pytest.mark.slow
def test_a_second_signal_does_not_wait_for_a_node_that_hangs():
    with serving("--drain-timeout", "600") as service:
        service.wait_until_ready()
        nodes = service.nodes()
        nodes["decode"].suspend()
        service.process.send_signal(signal.SIGINT)
        while not any("stopping" in line for line in service.lines):
            time.sleep(0.01)
        service.stop(signal.SIGINT)
        assert service.process.returncode == 130, "serve waited for the node"
        _, alive = psutil.wait_procs(nodes.values(), 60)
        assert not alive


def test_a_service_can_be_stopped_while_it_loads():
    with serving() as service:
        while not any("starting" in line for line in service.lines):
            time.sleep(0.01)
        service.stop(signal.SIGINT)
        assert service.process.returncode == 0


def test_a_missing_model_ends_the_service_with_an_error():
    with serving("--model", "/nowhere") as service:
        assert service.process.wait(60) == 2
        service._reader.join(60)
        assert service.lines == ["serve: --model /nowhere: no such folder"]


def test_a_port_in_use_is_refused_by_name():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        command = [sys.executable, "-m", "scripts.serving.serve", "--port", str(port)]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert ended.stderr.startswith(
        f"serve: cannot bind --host 127.0.0.1 --port {port}: address already in use; choose another with --port"
    )
    assert ended.stdout == ""


def test_an_address_of_another_machine_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"--host 192\.0\.2\.1 --port 0: .*; choose another with --host"):
        bind("192.0.2.1", 0, "--port")


async def test_serve_goes_on_without_its_terminal_under_nohup() -> None:
    stopping, output = asyncio.Event(), Lines()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        _on_signals(Supervisor([], output), stopping, output)
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.01)
        assert not stopping.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        await stopping.wait()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_nodes_that_have_changed_their_roles_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ServeConfig(prefill=2, decode=4)
    workers = [{"name": name, "role": "decode", "model": config.served_name} for name in ("prefill-0", "decode-0")]

    def call(config: ServeConfig, group: object, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        return 200, json.dumps({"workers": workers}).encode()

    monkeypatch.setattr("scripts.serving.serve._call", call)
    monkeypatch.setattr("scripts.serving.serve._failed_request", lambda config, group: "")
    assert _missing(config, None) == "prefill-1, decode-1, decode-2 and 1 other node"
    workers += [{**workers[0], "name": name} for name in ("prefill-1", "decode-1", "decode-2", "decode-3")]
    assert _missing(config, None) == ""


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        ([(0, 2), (1, 3)], [Share(1, (0, 2)), Share(1, (1, 3))]),
        ([(0,), (1,), (2,)], [Share(2), Share(1)]),
    ],
)
def test_nodes_are_pinned_unless_a_quota_leaves_cpus_out(cores, expected, monkeypatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr("scripts.serving.serve.usable_cores", lambda: cores)
    assert shares_of(ServeConfig(device="cpu")) == expected


def test_memory_that_is_no_share_for_each_node_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--memory-fraction 0.005 is too little for 6 nodes; give at least 0.006"):
        ServeConfig(prefill=2, decode=4, memory_fraction=0.005)
    assert ServeConfig(prefill=3, decode=6, memory_fraction=0.009)


def test_a_free_port_is_found():
    port = free_port("127.0.0.1", 0, "--port")
    assert free_port("127.0.0.1", port, "--port") == port
    assert free_port("127.0.0.1", 0, "--port") != port


def test_a_free_port_cannot_be_taken_by_an_outgoing_connection():
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if first <= 30_000:
        pytest.skip("this machine gives all high ports to outgoing connections")
    assert all(free_port("127.0.0.1", 0, "--port") < first for _ in range(20))


def test_a_port_in_use_is_no_free_port(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        monkeypatch.setattr("scripts.serving.serve._listening_ports", iter([taken]))
        assert free_port("127.0.0.1", 0, "--port") != taken


def test_every_node_gets_its_name_gateway_threads_and_memory_share(monkeypatch):
    monkeypatch.setenv("BATON_PAGE_SIZE", "99")
    monkeypatch.setenv("OMP_NUM_THREADS", "99")
    config = ServeConfig(
        prefill=1, decode=3, port=8000, control_port=8001, page_size=64, api_key="k", admin_api_key="a", insecure=True
    )
    found = children(config, [Share(2, (0, 1)), Share(1, (2,)), Share(1, (3,)), Share(1)])
    assert [child.name for child in found] == ["gateway", "prefill-0", "decode-0", "decode-1", "decode-2"]
    assert found[0].argv[1:] == ["-m", "gateway", "--insecure", "--drain-timeout=2.0"]
    assert found[1].argv[1:] == [
        *("-m", WORKER, "prefill", "--insecure", "--drain-timeout=2.0", "--threads=2", "--page-size=64"),
        *("--name=prefill-0", "--memory-fraction=0.2"),
    ]
    assert [child.cpus for child in found] == [(), (0, 1), (2,), (3,), ()]
    assert [child.env["OMP_NUM_THREADS"] for child in found] == ["1", "2", "1", "1", "1"]
    assert [child.env.get("BATON_ADMIN_API_KEY") for child in found] == ["a", None, None, None, None]
    assert all(child.env["BATON_API_KEY"] == "k" and "BATON_PAGE_SIZE" not in child.env for child in found)


@pytest.mark.parametrize(
    ("first", "expected"), [(9100, [9100, 9101, 9102]), (0, ["", "", ""]), (None, ["none", "none", "none"])]
)
def test_nodes_get_ports_for_their_metrics_one_after_the_other(first, expected):
    config = ServeConfig(prefill=1, decode=2, http_port=first)
    _, *nodes = children(config, [Share(1), Share(1), Share(1)])
    flags = [[word for word in node.argv if word.startswith("--http-port")] for node in nodes]
    assert flags == [[f"--http-port={port}"] if port != "" else [] for port in expected]


def test_every_node_records_into_its_own_file():
    found = children(ServeConfig(record="/tmp/run"), [Share(1), Share(1)])
    records = [[word for word in child.argv if word.startswith("--record")] for child in found]
    assert records == [[], ["--record=/tmp/run.prefill-0"], ["--record=/tmp/run.decode-0"]]


def test_without_prefill_nodes_the_gateway_prefills_on_decode_nodes():
    config = ServeConfig(
        prefill=0, decode=2, local_prefill="always", also_serve=("b=/x",), port=8000, control_port=8001
    )
    found = children(config, [Share(1), Share(1)])
    assert [child.name for child in found] == ["gateway", "decode-0", "decode-1"]
    assert found[0].argv[1:] == ["-m", "gateway", "--also-serve=b=/x", "--local-prefill=always", "--drain-timeout=2.0"]


def test_serve_makes_its_own_key_if_all_keys_are_hashed() -> None:
    config = with_key(ServeConfig(api_key_file="/etc/keys"))
    assert config.api_key is not None and len(config.api_key) == 64
    (gateway, *_) = children(config, [Share(1), Share(1)])
    assert gateway.env["BATON_API_KEY"] == config.api_key
    assert config.api_key not in " ".join(gateway.argv)
    assert with_key(ServeConfig(api_key_file="/etc/keys", api_key="mine")).api_key == "mine"
    assert with_key(ServeConfig()).api_key is None


def test_serve_sends_a_key_of_any_letters() -> None:
    def answer(listener: socket.socket) -> None:
        with listener.accept()[0] as connection:
            heads.append(connection.recv(65536))
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    heads: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        config = ServeConfig(port=listener.getsockname()[1], api_key="ключ")
        assert _call(config, None, "GET", "/ready") == (200, b"")
        thread.join()
    assert "Authorization: Bearer ключ".encode() in heads[0]
    assert b"Host: localhost\r\n" in heads[0], "whatever --host is, --allowed-hosts does not refuse it"


def test_serve_sends_no_key_to_another_user_at_the_address_of_a_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    group, user = GatewayGroup(secrets.token_hex(16), 0, 2), os.geteuid()
    with closing(listen_at(group.address(0))) as listener:
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        with pytest.raises(PermissionError, match="another user listens at the address of a gateway"):
            _call(ServeConfig(api_key="k"), group, "GET", "/ready")
        with listener.accept()[0] as connection:
            assert connection.recv(1) == b""


def test_serve_trusts_the_certificate_of_its_gateway_beside_that_of_any_authority(tmp_path: Path) -> None:
    def answer(listener: socket.socket) -> None:
        with contextlib.suppress(ssl.SSLError), tls.wrap_socket(listener.accept()[0], server_side=True) as connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    made = make_chain(tmp_path)
    tls = make_tls_context(str(made.cert), str(made.key))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        config = ServeConfig(port=listener.getsockname()[1], tls_cert=str(made.cert), tls_key=str(made.key))
        try:
            assert _call(config, None, "GET", "/ready") == (200, b"")
        finally:
            thread.join()


def test_the_command_shown_names_the_variable_of_the_key_only_if_it_holds_that_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BATON_API_KEY", "of-the-environment")
    assert _curl_headers(ServeConfig()) == ""
    assert "Bearer $BATON_API_KEY" in _curl_headers(ServeConfig(api_key="of-the-environment"))
    assert "Bearer KEY" in _curl_headers(ServeConfig(api_key="of-a-flag"))
    assert "Bearer KEY" in _curl_headers(with_key(ServeConfig(api_key_file="keys.toml")))


def test_serve_continues_if_stdout_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    output = Lines()
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        tell_ready("http://127.0.0.1:1", "", output)
        assert sys.stdout is None
        with contextlib.suppress(OSError):
            full.close()
    assert output.lines[0].startswith("serve: ready http://127.0.0.1:1; cannot write to standard output: No space left")
