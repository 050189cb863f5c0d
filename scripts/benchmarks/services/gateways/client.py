"""The client of the gateway benchmark, the same for every gateway: complete answers in a closed loop, and streams."""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

from scripts.benchmarks.harness.cpu_contention import cpu_seconds

WARM_UP_S = 0.3
BEGIN_S = 60.0  # within which a stream has begun

#: Makes a stream send its next chunk, given the client's connection.
Advance = Callable[["Connection"], None]


class Upstream(Protocol):
    """What stands behind a gateway and answers for a model."""

    def stream(self, is_streaming: bool) -> None:
        """Answer requests with streams from now on, or else whole."""
        ...

    async def begun(self) -> Advance:
        """Wait for the stream that the latest request begins; it sends nothing by itself."""
        ...


@dataclass(frozen=True, slots=True)
class Gateway:
    """A running gateway; ``pid`` is the process whose processor time counts."""

    name: str
    pid: int
    port: int
    upstream: Upstream


@dataclass(frozen=True, slots=True)
class Load:
    """One row of the table for each gateway.

    Attributes:
        count: connections, each of which carries one request or stream at a time.
        with_peers: other gateways get it too.
    """

    name: str
    path: str
    body: dict[str, Any]
    count: int
    is_streaming: bool = False
    with_peers: bool = False


@dataclass(frozen=True, slots=True)
class Measurement:
    """Events (answers or chunks) per second, and the gateway's processor time for each."""

    per_second: float
    cpu_us: float


class Connection(asyncio.Protocol):
    """One keep-alive connection; ``on_data`` receives its bytes."""

    def __init__(self, on_data: Callable[["Connection", bytes], None]) -> None:
        self._on_data = on_data
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._on_data(self, data)

    def send(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    def close(self) -> None:
        assert self._transport is not None
        self._transport.close()


def http_post(path: str, body: dict[str, Any]) -> bytes:
    """The bytes of one request."""
    data = json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + data


def is_complete(answer: bytes) -> bool:
    """Whether an HTTP answer has a whole body."""
    head, separator, body = answer.partition(b"\r\n\r\n")
    _, name, rest = head.lower().partition(b"\r\ncontent-length:")
    if not name:
        return bool(separator) and body.endswith(b"0\r\n\r\n")
    return bool(separator) and len(body) >= int(rest.partition(b"\r\n")[0])


async def measure(gateway: Gateway, load: Load, seconds: float) -> Measurement:
    """Measure one kind of load on one gateway."""
    gateway.upstream.stream(load.is_streaming)
    run = _streams if load.is_streaming else _answers
    return await run(gateway, load, seconds)


async def is_answering(gateway: Gateway, load: Load) -> bool:
    """Whether a gateway answers such a request, whole and with 200."""
    gateway.upstream.stream(False)
    answers: asyncio.Queue[bytes] = asyncio.Queue()
    try:
        (connection,) = await connect(gateway, 1, lambda _, data: answers.put_nowait(data))
        connection.send(http_post(load.path, load.body))
        return (await asyncio.wait_for(answers.get(), 1.0)).startswith(b"HTTP/1.1 200")
    except (OSError, TimeoutError):
        return False


async def connect(gateway: Gateway, count: int, on_data: Callable[[Connection, bytes], None]) -> list[Connection]:
    loop = asyncio.get_running_loop()
    made = [await loop.create_connection(lambda: Connection(on_data), "127.0.0.1", gateway.port) for _ in range(count)]
    return [connection for _, connection in made]


async def close_all(connections: list[Connection]) -> None:
    for connection in connections:
        connection.close()
    await asyncio.sleep(0.1)


async def _answers(gateway: Gateway, load: Load, seconds: float) -> Measurement:
    """Complete answers; each connection sends its next request when it has the answer."""
    num_answers = 0
    request = http_post(load.path, load.body)
    parts: dict[Connection, bytes] = {}

    def on_data(connection: Connection, data: bytes) -> None:
        nonlocal num_answers
        answer = parts.pop(connection, b"") + data
        assert answer.startswith(b"HTTP/1.1 200"), f"{gateway.name} answered {answer!r}"
        if is_complete(answer):
            num_answers += 1
            connection.send(request)
        else:
            parts[connection] = answer

    connections = await connect(gateway, load.count, on_data)
    for connection in connections:
        connection.send(request)
    measurement = await _rate(gateway.pid, lambda: num_answers, seconds)
    await close_all(connections)
    return measurement


async def _streams(gateway: Gateway, load: Load, seconds: float) -> Measurement:
    """Chunks, in steps as a decode node makes them: once half of the streams have their chunk, they get the next."""
    num_chunks = 0
    advances: dict[Connection, Advance] = {}
    waiting: list[Connection] = []

    def on_data(connection: Connection, data: bytes) -> None:
        nonlocal num_chunks
        count = data.count(b"data: ")
        if count:
            num_chunks += count
            waiting.append(connection)
            if 2 * len(waiting) >= len(advances):
                for ready in waiting:
                    advances[ready](ready)
                waiting.clear()

    connections = await connect(gateway, load.count, on_data)
    for connection in connections:
        connection.send(http_post(load.path, {**load.body, "stream": True, "max_tokens": 1 << 19}))
        advances[connection] = await asyncio.wait_for(gateway.upstream.begun(), BEGIN_S)
    for connection, advance in advances.items():
        advance(connection)
    measurement = await _rate(gateway.pid, lambda: num_chunks, seconds)
    await close_all(connections)
    return measurement


async def _rate(pid: int, count: Callable[[], int], seconds: float) -> Measurement:
    await asyncio.sleep(WARM_UP_S)
    before, cpu_s, started_at = count(), cpu_seconds(pid), time.perf_counter()
    await asyncio.sleep(seconds)
    num_events, elapsed_s = count() - before, time.perf_counter() - started_at
    return Measurement(num_events / elapsed_s, 1e6 * (cpu_seconds(pid) - cpu_s) / max(num_events, 1))
