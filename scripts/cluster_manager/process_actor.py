"""The actor that runs one gateway or node on its host, as a child process, and watches it.

The kernel kills the child when the actor's process ends, however it ends (``scripts/serving/supervisor.py``). A child
that dies is started again with back-off, and one that no longer answers its ``/health`` is killed first. The addresses
of the gateways lie in memory, in a file without a name that the child inherits, so that nothing is left on the disk.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

import msgspec

from common.errors import BatonError
from scripts.cluster_manager.command_line import (
    Ports,
    ProcessSpec,
    argv,
    drain_timeout_s,
    environment,
    http_host,
    url,
    wanted_ports,
)
from scripts.cluster_manager.recent_lines import RecentLines
from scripts.serving.serve import free_port, pinned_context
from scripts.serving.supervisor import Child, Supervisor

MAX_LINES, MAX_LINE, TAIL_LINES = 2_000, 4_000, 15
PROBE_S, PROBE_TIMEOUT_S, UNHEALTHY_S = 1.0, 5.0, 30.0
ADVICE_S = 2.0
#: A process that dies ``MAX_DEATHS`` times without being healthy for ``STEADY_S`` in between is given up: its host may
#: be broken.
MAX_DEATHS, STEADY_S = 5, 60.0
#: Size of the file of addresses: it is written whole, by one call.
FILE_BYTES = 4_096


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a process, as its actor sees it.

    Attributes:
        is_healthy: the process answers its ``/health``.
        is_ready: a gateway has the nodes to serve a request; a node is registered with a gateway.
        has_ended: the process has stopped for good, as asked or by a failure that a restart does not mend.
        failure: why it has failed; with the end of its log.
        gateway: where nodes reach this gateway; empty for a node.
        advised: nodes of each role that a gateway advises.
    """

    is_healthy: bool
    is_ready: bool
    has_ended: bool
    address: str
    url: str
    num_restarts: int
    failure: str = ""
    gateway: str = ""
    advised: dict[str, int] = {}


class LogBuffer(RecentLines):
    """The last lines of a process and of its actor; an ``Output`` of the process's supervisor."""

    def __init__(self) -> None:
        super().__init__(MAX_LINES)

    def say(self, text: str) -> None:
        self.add(f"actor: {text}"[:MAX_LINE])

    def relay(self, name: str, line: str) -> None:
        self.add(line[:MAX_LINE])


@dataclass(slots=True)
class Deaths:
    """Counts the deaths of a process since it was last healthy for ``STEADY_S`` without a break."""

    _num_forgiven: int = 0
    _num_seen: int = 0
    _healthy_since: float | None = None

    def seen(self, num_deaths: int, *, is_healthy: bool, now: float) -> int:
        """The deaths that count, of ``num_deaths`` in all."""
        if not is_healthy or num_deaths != self._num_seen:
            self._healthy_since = None
        self._num_seen = num_deaths
        if is_healthy:
            self._healthy_since = now if self._healthy_since is None else self._healthy_since
            if now - self._healthy_since >= STEADY_S:
                self._num_forgiven = num_deaths
        return num_deaths - self._num_forgiven


class ProcessActor:
    """Runs a process from its first ``report`` until ``stop``. An actor of Ray, with one event loop.

    Args:
        spec: a ``ProcessSpec`` as JSON.
        address: of this host.
    """

    def __init__(self, spec: bytes, address: str) -> None:
        self._spec = msgspec.json.decode(spec, type=ProcessSpec)
        self._address = address
        self._log = LogBuffer()
        self._gateways: tuple[str, ...] = ()
        self._gateway_fd = os.memfd_create("baton-gateways")
        self._failure = ""
        self._is_healthy = self._is_ready = self._is_stopping = self._has_ended = False
        self._tls: ssl.SSLContext | None = None
        self._advised: dict[str, int] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._supervisor: Supervisor | None = None
        self._ports = Ports(0)
        self._api_key = secrets.token_hex(32) if self._spec.values.get("api_key_file") else ""

    # ---- called by the supervisor ------------------------------------------------------------------------------------

    async def report(self, gateways: Sequence[str]) -> bytes:
        """Take in where the gateways are, and return a ``Report`` as JSON."""
        if tuple(gateways) != self._gateways:
            self._gateways = tuple(gateways)
            text = "".join(f"{gateway}\n" for gateway in gateways).encode()[:FILE_BYTES]
            os.pwrite(self._gateway_fd, text.ljust(FILE_BYTES, b"\n"), 0)
        for task in self._tasks:
            if task.done():
                task.result()  # raises what has ended it: a bug, after which this actor is replaced
        if self._supervisor is None and not self._has_ended:
            self._start()
        is_gateway = self._spec.role == "gateway"
        child = self._supervisor.children[0] if self._supervisor else None
        return msgspec.json.encode(
            Report(
                is_healthy=self._is_healthy and not self._has_ended,
                is_ready=self._is_ready and not self._has_ended,
                has_ended=self._has_ended,
                address=self._address,
                url=url(self._spec, self._address, self._ports),
                num_restarts=child.num_deaths if child else 0,
                failure=self._failure,
                gateway=f"{self._address}:{self._ports.control}" if is_gateway and self._ports.control else "",
                advised=self._advised,
            )
        )

    async def stop(self) -> None:
        """Drain the process; ``report`` says when it has ended."""
        if self._supervisor is None:
            self._has_ended = True
        elif not self._is_stopping:
            self._is_stopping = True
            self._tasks.append(asyncio.create_task(self._stop(self._supervisor)))

    async def logs(self, since: int) -> tuple[int, list[str]]:
        """Lines of the process; see ``RecentLines.since``."""
        return self._log.since(since)

    # ---- the process -------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        spec = self._spec
        try:
            http, control = wanted_ports(spec)
            ports = [free_port(http_host(spec), http, "--port" if spec.role == "gateway" else "--http-port")]
            if spec.role == "gateway":
                ports.append(free_port(self._address, control, "--control-port"))
            self._ports = Ports(*ports)
        except BatonError as error:
            self._fail(str(error))
            return
        words = argv(spec, address=self._address, ports=self._ports, gateway_file=f"/proc/self/fd/{self._gateway_fd}")
        child = Child(spec.name, words, environment(spec, os.environ, self._api_key), fds=(self._gateway_fd,))
        self._supervisor = Supervisor([child], self._log, drain_timeout_s=drain_timeout_s(spec.values))
        self._tasks += [asyncio.create_task(self._run(self._supervisor)), asyncio.create_task(self._watch(child))]

    async def _run(self, supervisor: Supervisor) -> None:
        try:
            await supervisor.run()
        except* (BatonError, OSError) as group:
            self._fail("\n".join(map(str, group.exceptions)), with_log=True)

    async def _stop(self, supervisor: Supervisor) -> None:
        await supervisor.stop()
        self._has_ended = True

    def _fail(self, reason: str, *, with_log: bool = False) -> None:
        _, lines = self._log.since(-TAIL_LINES) if with_log else (0, [])
        self._failure = "\n".join([reason, *lines])
        self._has_ended = True

    # ---- its health --------------------------------------------------------------------------------------------------

    async def _watch(self, child: Child) -> None:
        """Ask for its health, and kill a process that was ready and answers no more: it is then started again.

        Ends when the process is asked to stop, since a gateway that drains refuses connections.
        """
        assert self._supervisor is not None
        pid, answered_at, advice_at = 0, 0.0, 0.0
        deaths = Deaths()
        while not (self._is_stopping or self._has_ended):
            await asyncio.sleep(PROBE_S)
            num_deaths = deaths.seen(child.num_deaths, is_healthy=self._is_healthy, now=time.monotonic())
            if num_deaths >= MAX_DEATHS:
                await self._supervisor.stop()
                self._fail(f"{child.name} has died {num_deaths} times in a row", with_log=True)
                return
            process = child.process
            if process is None or process.returncode is not None:
                self._is_healthy = self._is_ready = False
                continue
            if process.pid != pid:
                pid, answered_at = process.pid, 0.0
            if not answered_at:
                self._tls = None  # the process reads its certificate when it starts, and a renewed one only then
            health = await asyncio.to_thread(self._get, "/health")
            now = time.monotonic()
            self._is_healthy = health is not None
            self._is_ready &= self._is_healthy
            if health is not None:
                answered_at = now
                self._supervisor.mark_ready()
                if self._spec.role == "gateway":
                    self._is_ready = await asyncio.to_thread(self._get, "/ready") is not None
                else:
                    self._is_ready = bool(health.get("is_registered"))
            elif answered_at and now - answered_at > UNHEALTHY_S and process.returncode is None:
                self._log.say(f"no answer to /health for {UNHEALTHY_S:g} s; killing the process")
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGKILL)
            if self._spec.role == "gateway" and now - advice_at > ADVICE_S:
                advice_at = now
                self._take_advice(await asyncio.to_thread(self._get, "/v1/advice"))

    def _take_advice(self, answer: dict[str, Any] | None) -> None:
        roles = answer["models"][0]["roles"] if answer and answer.get("models") else []
        self._advised = {role["role"]: role["advised"] for role in roles}

    def _get(self, path: str) -> dict[str, Any] | None:
        """The answer of the process as JSON; None if it is not 200. Blocks."""
        base = url(self._spec, self._address, self._ports)
        key = os.environ.get("BATON_API_KEY") or os.environ.get("BATON_ADMIN_API_KEY") or self._api_key
        # urllib sends each character as one byte; the gateway reads UTF-8.
        bearer = f"Bearer {key}".encode().decode("latin-1")
        headers = {"Host": "localhost"}  # is always allowed; the option host may not be (allowed-hosts)
        if key and self._spec.role == "gateway":
            headers["Authorization"] = bearer
        request = urllib.request.Request(base + path, headers=headers)
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        try:
            if certificate := self._spec.values.get("tls_cert"):
                self._tls = self._tls or pinned_context(certificate)
                handlers.append(urllib.request.HTTPSHandler(context=self._tls))
            with urllib.request.build_opener(*handlers).open(request, timeout=PROBE_TIMEOUT_S) as answer:
                found: dict[str, Any] = msgspec.json.decode(answer.read(), type=dict)
                return found
        except (OSError, HTTPException, ValueError):  # among them: the certificate cannot be read
            return None
