"""HTTP, control connections and page transfers over IPv6 between real processes."""

import http.client
import json
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.service.fork_server import ForkedProcess, shared_fork_server
from support.service.processes import ROOT, environment, flags, spawn
from support.service.service import SMALL_MODEL, WORKER

from common.config.gateway import GatewayConfig
from common.config.node import NodeConfig
from common.errors import ConfigError
from common.wire.address import host_and_port

PROMPT = list(range(100, 164))
READY_TIMEOUT_S = 180.0


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1")


class Processes:
    """Running processes with one log each; ``close`` ends them and asserts that no log contains a traceback."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes] | ForkedProcess] = {}

    def start(self, name: str, argv: list[str], /, **options: Any) -> None:
        self._running[name] = spawn([*argv, *flags(options)], self._folder / f"{name}.log")

    def fork(self, name: str, module: str, /, *argv: str, **options: Any) -> None:
        log = self._folder / f"{name}.log"
        self._running[name] = shared_fork_server().run(module, [*argv, *flags(options)], log, environment())

    def node(self, role: str, **options: Any) -> None:
        shared = {"model": SMALL_MODEL, "dtype": "float32", "threads": 1, "max_total_tokens": 2048, "name": role}
        self.fork(role, WORKER, role, **shared, **options)

    def read_log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()

    def wait_for_line(self, name: str, pattern: str) -> str:
        """Wait until the log matches ``pattern`` and return its first group."""
        ends = time.monotonic() + READY_TIMEOUT_S
        while not (found := re.search(pattern, self.read_log(name), re.MULTILINE)):
            assert self._running[name].poll() is None, self.read_log(name)
            assert time.monotonic() < ends, self.read_log(name)
            time.sleep(0.02)
        return found.group(1)

    def close(self) -> None:
        for process in self._running.values():
            process.send_signal(signal.SIGTERM)
        for name, process in self._running.items():
            assert process.wait(60) == 0, self.read_log(name)
            assert "Traceback" not in self.read_log(name), self.read_log(name)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path)
    yield made
    made.close()


def ask(url: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    host, port = host_and_port(url.removeprefix("http://"), "url")
    connection = http.client.HTTPConnection(host, port, timeout=60)
    try:
        if body is None:
            connection.request("GET", path)
        else:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read() or "null")
    finally:
        connection.close()


def workers_of(url: str, count: int) -> list[dict[str, Any]]:
    """Wait until ``count`` nodes have registered and return their registrations."""
    ends = time.monotonic() + READY_TIMEOUT_S
    while True:
        workers = ask(url, "/v1/workers")[1]["workers"]
        if len(workers) == count:
            return [worker["register"] for worker in workers]
        assert time.monotonic() < ends, workers
        time.sleep(0.05)


@needs_ipv6
@pytest.mark.parametrize("transport", [pytest.param("shm", marks=pytest.mark.slow), "tcp"])
def test_a_request_goes_from_prefill_to_decode_over_ipv6_alone(processes: Processes, transport: str) -> None:
    addresses = {"host": "::1", "port": 0, "control_host": "::1", "control_port": 0}
    processes.fork("gateway", "gateway", model=SMALL_MODEL, log_level="info", **addresses)
    control = processes.wait_for_line("gateway", r"(\[::1\]:\d+)$")
    url = processes.wait_for_line("gateway", r"(http://\[::1\]:\d+)")
    for role in ("prefill", "decode"):
        processes.node(role, gateway=control, advertise_host="::1", transport=transport)
    registered = {node["role"]: node for node in workers_of(url, 2)}
    assert re.fullmatch(r"\[::1\]:\d+", registered["prefill"]["address"])
    body = {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
    status, answer = ask(url, "/v1/completions", body)
    assert status == 200, answer
    assert len(answer["choices"][0]["token_ids"]) == 8


@pytest.mark.slow
@needs_ipv6
def test_serve_works_over_ipv6(processes: Processes) -> None:
    processes.start(
        "serve", [str(ROOT / "scripts" / "serve")], host="::1", port=0, control_host="::1", max_total_tokens=2048
    )
    url = processes.wait_for_line("serve", r"^ready (http://\[::1\]:\d+)$")
    status, answer = ask(url, "/v1/completions", {"prompt": PROMPT, "max_tokens": 4, "temperature": 0})
    assert status == 200, answer
    assert ask(url, "/ready")[0] == 200


@pytest.mark.parametrize("name", ["host", "control_host"])
def test_brackets_are_accepted_only_in_addresses_with_a_port(name: str) -> None:
    with pytest.raises(ConfigError, match=r"write it without brackets: ::1$"):
        GatewayConfig(**{name: "[::1]"})
    with pytest.raises(ConfigError, match="--advertise-host"):
        NodeConfig(advertise_host="[::1]")
    assert NodeConfig(gateway="[::1]:80").gateway == "[::1]:80"
