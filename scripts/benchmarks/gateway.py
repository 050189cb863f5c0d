"""Throughput of the gateway: answers and streamed chunks per second on one core, with scripted nodes.

The gateway process is pinned to one core; its nodes (without an engine) and a minimal client share the others. Streams
run in lockstep: a node sends the next token when the client has the previous chunk, so that every chunk holds one
token. The table also shows the processor time of the gateway, including its I/O thread. If client and nodes are slower
than the gateway, the inverse of that time is the rate that the gateway could reach.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import uvloop
import zmq

from common.config.shared import SMALL_MODEL, SMALL_MODEL_NAME
from common.wire.mailbox import Mailbox
from common.wire.messages import FromGateway, Generate, Heartbeat, LayoutMessage, Register, Registered, Role, Tokens
from common.wire.process_id import new_incarnation

ROOT = Path(__file__).resolve().parents[2]
SHORTEST = ("--seconds=0.3",)
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
OnGenerate = Callable[["ScriptedNode", Generate], None]


class ScriptedNode:
    """A node without an engine; a function answers each request."""

    def __init__(self, context: zmq.Context[Any], control: str, role: Role) -> None:
        self._on_generate: OnGenerate = ignore
        self.registered = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._mailbox = Mailbox(context, new_incarnation(), FromGateway, connect=f"tcp://{control}")
        self._is_drain_due = False
        self._fd = int(self._mailbox.sockets[0].get(zmq.FD))
        self._loop.add_reader(self._fd, self._drain)
        self._mailbox.send(
            Register(
                role=role, name=role, model=SMALL_MODEL_NAME, digest="bench", weight_version="bench", vocab_size=4096,
                context_length=1 << 20, eos_token_ids=(), generation={}, layout=LayoutMessage(1, 1, 8, 16, "float32"),
                num_pages=1 << 20, max_running=4096, max_queued=4096, transports=("shm",),
                address="127.0.0.1:9", pid=0, device="none",
            )
        )  # fmt: skip
        self._beat()

    def answer_with(self, on_generate: OnGenerate) -> None:
        self._on_generate = on_generate

    def _beat(self) -> None:
        self._mailbox.send(Heartbeat(0, 0, 0, 0, 0, {}))
        self._later = self._loop.call_later(1.0, self._beat)
        self._drain_soon()

    def send(self, message: Tokens) -> None:
        self._mailbox.send(message)
        self._drain_soon()

    def _drain_soon(self) -> None:
        if not self._is_drain_due:
            self._is_drain_due = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._is_drain_due = False
        for letter in self._mailbox.receive():
            if isinstance(letter.message, Generate):
                self._on_generate(self, letter.message)
            elif isinstance(letter.message, Registered):
                self.registered.set()

    def close(self) -> None:
        self._later.cancel()
        self._loop.remove_reader(self._fd)
        self._mailbox.close()


class Connection(asyncio.Protocol):
    """One keep-alive connection; ``on_data`` receives its bytes."""

    def __init__(self, on_data: Callable[["Connection", bytes], None]) -> None:
        self.on_data = on_data
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.on_data(self, data)

    def post(self, path: str, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(data)}\r\n\r\n"
        assert self.transport is not None
        self.transport.write(head.encode() + data)


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of the table: events per second, and the gateway's processor time per event."""

    name: str
    per_second: float
    cpu_us: float

    def __str__(self) -> str:
        possible = 1e6 / self.cpu_us if self.cpu_us else 0.0
        return f"{self.name:56} {self.per_second:9,.0f} /s {self.cpu_us:8.1f} us CPU each {possible:9,.0f} /s per core"


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far, over all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


@contextlib.asynccontextmanager
async def gateway_process(model: str, *, is_pinned: bool) -> AsyncIterator[tuple[int, str, str]]:
    """Run a gateway on free ports; yields its process id, HTTP address and control address."""
    words = [sys.executable, "-m", "gateway", "--model", model, "--served-model-name", SMALL_MODEL_NAME]
    cores = sorted(os.sched_getaffinity(0))
    process = await asyncio.create_subprocess_exec(
        *words, "--port", "0", "--control-port", "0", "--max-queued-requests", "4096",
        cwd=ROOT, stderr=subprocess.PIPE,
        preexec_fn=(lambda: os.sched_setaffinity(0, cores[:1])) if is_pinned else None,
    )  # fmt: skip
    if is_pinned:
        os.sched_setaffinity(0, cores[1:])
    assert process.stderr is not None
    try:
        control = (await process.stderr.readline()).decode().split()[-1]
        url = (await process.stderr.readline()).decode().split()[-1]
        yield process.pid, url, control
    finally:
        process.send_signal(signal.SIGTERM)
        await process.wait()


class GatewayBench:
    def __init__(self, pid: int, url: str, control: str, seconds: float) -> None:
        self._pid = pid
        address = urlsplit(url)
        self._host, self._port = address.hostname or "", address.port or 0
        self._seconds = seconds
        self._context: zmq.Context[Any] = zmq.Context()
        self._nodes = [ScriptedNode(self._context, control, role) for role in ("prefill", "decode")]

    async def ready(self) -> None:
        """Wait for the nodes, and look up the tokens of 26 letters; each of them makes a chunk."""
        for node in self._nodes:
            await node.registered.wait()
        answered = asyncio.get_running_loop().create_future()
        (connection,) = await self._connect(1, lambda _, data: answered.set_result(data))
        connection.post("/tokenize", {"prompt": list("abcdefghijklmnopqrstuvwxyz"), "add_special_tokens": False})
        answer = json.loads((await answered).rpartition(b"\r\n")[2])
        self._letters = tuple(tokens[0] for tokens in answer["tokens"])
        await close_all([connection])

    def close(self) -> None:
        for node in self._nodes:
            node.close()
        self._context.destroy(linger=0)

    async def _connect(self, count: int, on_data: Callable[[Connection, bytes], None]) -> list[Connection]:
        loop = asyncio.get_running_loop()
        return [
            (await loop.create_connection(lambda: Connection(on_data), self._host, self._port))[1] for _ in range(count)
        ]

    async def _measure(self, name: str, count: Callable[[], int]) -> Figure:
        await asyncio.sleep(0.5)  # warm up
        before, cpu, started_at = count(), cpu_seconds(self._pid), time.perf_counter()
        await asyncio.sleep(self._seconds)
        number = count() - before
        cpu = cpu_seconds(self._pid) - cpu
        return Figure(name, number / (time.perf_counter() - started_at), 1e6 * cpu / max(number, 1))

    async def answers(self, num_connections: int) -> Figure:
        """Measure complete answers of one token in a closed loop."""
        num_done = 0
        body = {"prompt": "Shall I compare thee to a summer's day?", "max_tokens": 1}

        def on_data(connection: Connection, data: bytes) -> None:
            nonlocal num_done
            assert data.startswith(b"HTTP/1.1 200"), data
            num_done += 1
            connection.post("/v1/completions", body)

        self._nodes[0].answer_with(
            lambda node, generate: node.send(
                Tokens(generate.rid, generate.attempt, 0, generate.prompt[:1], finish="length")
            )
        )
        connections = await self._connect(num_connections, on_data)
        for connection in connections:
            connection.post("/v1/completions", body)
        figure = await self._measure(f"answers, {num_connections} connections", lambda: num_done)
        await close_all(connections)
        return figure

    async def chunks(self, num_streams: int, path: str, body: dict[str, Any], *, name: str = "") -> Figure:
        """Measure streamed chunks of one token each, all streams in lockstep with their node."""
        num_chunks = 0
        streams: dict[str, tuple[int, int]] = {}  # request -> attempt, index of its next token
        waiting: list[Connection] = []
        rids: dict[Connection, str] = {}
        prefill, decode = self._nodes

        def on_generate(node: ScriptedNode, generate: Generate) -> None:
            rids[waiting.pop(0)] = generate.rid
            streams[generate.rid] = (generate.attempt, 1)
            node.send(Tokens(generate.rid, generate.attempt, 0, self._letters[:1]))

        def on_data(connection: Connection, data: bytes) -> None:
            nonlocal num_chunks
            count = data.count(b"data: ")
            if not count:
                return
            num_chunks += count
            rid = rids[connection]
            attempt, index = streams[rid]
            streams[rid] = (attempt, index + 1)
            decode.send(Tokens(rid, attempt, index, (self._letters[index % 26],)))

        prefill.answer_with(on_generate)
        connections = await self._connect(num_streams, on_data)
        for connection in connections:
            waiting.append(connection)
            connection.post(path, {**body, "stream": True, "max_tokens": 1 << 19})
            while waiting:
                await asyncio.sleep(0.001)
        figure = await self._measure(f"{path} chunks, {num_streams} streams {name}".strip(), lambda: num_chunks)
        await close_all(connections)
        return figure


async def close_all(connections: list[Connection]) -> None:
    for connection in connections:
        if connection.transport is not None:
            connection.transport.close()
    await asyncio.sleep(0.3)


def ignore(node: ScriptedNode, generate: Generate) -> None:
    pass


async def measure(model: str, seconds: float, *, is_pinned: bool) -> list[Figure]:
    async with gateway_process(model, is_pinned=is_pinned) as (pid, url, control):
        bench = GatewayBench(pid, url, control, seconds)
        try:
            await bench.ready()
            return [
                await bench.answers(1),
                await bench.answers(16),
                await bench.chunks(1, "/v1/completions", {"prompt": "a"}),
                await bench.chunks(64, "/v1/completions", {"prompt": "a"}),
                await bench.chunks(64, "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
                await bench.chunks(
                    64, "/v1/completions", {"prompt": "a", "stop": ["THE END", "\n\n"]}, name="with stop strings"
                ),
            ]
        finally:
            bench.close()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each measurement (%(default)s)")
    parser.add_argument("--model", default=SMALL_MODEL, help="folder with a tokenizer and a chat template")
    parser.add_argument("--no-pin", action="store_true", help="do not pin the gateway to a core")


def run(options: argparse.Namespace) -> dict[str, float]:
    is_pinned = not options.no_pin and len(os.sched_getaffinity(0)) > 1
    figures = uvloop.run(measure(options.model, options.seconds, is_pinned=is_pinned))
    for figure in figures:
        print(figure)
    return {
        f"{figure.name}, {unit}": value
        for figure in figures
        for unit, value in (("per second", figure.per_second), ("us of CPU each", figure.cpu_us))
    }
