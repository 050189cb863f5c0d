"""What receiving costs: the load-test harness beside the least that Python can do, on one mock server, in turn.

``bare`` is a loop of epoll and ``recv_into`` that keeps each piece with its instant; ``uvloop`` is a protocol that does
the same. Neither schedules, parses or checks anything. Where tokens are far apart a process sleeps before each of them
and finds the processor's caches cold, so a token costs more; that floor is what this shows. ``--aiperf`` and
``--guidellm`` set those tools beside it, without their start-up: what a long run costs more than a short one.
"""

import asyncio
import gc
import json
import os
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

from scripts.benchmarks.competitors import Command, aiperf_words, cpu_of, guidellm_words, keep_tokenizer
from scripts.benchmarks.cpu_contention import Neighbours
from scripts.benchmarks.loadtest import ROOT, Mock
from scripts.load_tester.config import LoadtestConfig
from scripts.load_tester.run import run_load

HEAD_START_S = 0.2
LAST = b"0\r\n\r\n"


def request(tokens: int) -> bytes:
    """A completion of so many tokens, as the harness asks for it."""
    body = {"model": "mock", "prompt": list(range(100, 164)), "max_tokens": tokens, "stream": True}
    data = json.dumps(body | {"stream_options": {"include_usage": True}}).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: mock\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data)


def bare(port: int, rate: float, count: int, tokens: int) -> float:
    """CPU seconds of constant arrivals, received by epoll."""
    data, view = request(tokens), memoryview(bytearray(65536))
    poll = select.epoll()
    connections: dict[int, socket.socket] = {}
    kept: dict[int, list[tuple[float, bytes]]] = {}
    idle: list[socket.socket] = []
    sent = done = 0
    start, began = time.monotonic() + HEAD_START_S, time.process_time()
    while done < count:
        while sent < count and start + sent / rate <= time.monotonic():
            connection = idle.pop() if idle else socket.create_connection(("127.0.0.1", port))
            number = connection.fileno()
            if number not in connections:
                connection.setblocking(False)
                poll.register(number, select.EPOLLIN)
            connections[number], kept[number] = connection, []
            connection.send(data)
            sent += 1
        for number, _ in poll.poll(max(0.0, start + sent / rate - time.monotonic()) if sent < count else 5.0):
            size = connections[number].recv_into(view)
            piece = bytes(view[:size])
            kept[number].append((time.monotonic(), piece))
            if not piece:
                raise ConnectionError("the mock is gone")
            if piece.endswith(LAST):
                idle.append(connections[number])
                done += 1
    spent = time.process_time() - began
    for connection in connections.values():
        connection.close()
    poll.close()
    return spent


class _Receiver(asyncio.Protocol):
    """Keeps pieces with their instants, and hands itself over at the end of each answer."""

    def __init__(self, ended: "asyncio.Queue[_Receiver]") -> None:
        self._ended = ended
        self.kept: list[tuple[float, bytes]] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.kept.append((time.monotonic(), data))
        if data.endswith(LAST):
            self._ended.put_nowait(self)


async def protocol(port: int, rate: float, count: int, tokens: int) -> float:
    """CPU seconds of constant arrivals, received by a protocol of the running loop."""
    loop, data = asyncio.get_running_loop(), request(tokens)
    ended: asyncio.Queue[_Receiver] = asyncio.Queue()
    receivers: list[_Receiver] = []
    done = 0
    start, began = time.monotonic() + HEAD_START_S, time.process_time()
    for number in range(count):
        await asyncio.sleep(max(0.0, start + number / rate - time.monotonic()))
        if ended.empty():
            _, receiver = await loop.create_connection(lambda: _Receiver(ended), "127.0.0.1", port)
            receivers.append(receiver)
        else:
            receiver, done = ended.get_nowait(), done + 1
        receiver.transport.write(data)  # type: ignore[attr-defined]
    while done < count:
        await ended.get()
        done += 1
    spent = time.process_time() - began
    for receiver in receivers:
        receiver.transport.close()
    return spent


def harness(port: int, rate: float, count: int, tokens: int) -> dict[str, float]:
    """Milliseconds of CPU per event of a whole run: all, and of each part."""
    config = LoadtestConfig(
        url=f"http://127.0.0.1:{port}", rate=f"{rate:g}", arrival="constant", num_requests=count, input_len="64",
        output_len=str(tokens), scrape="none",
    )  # fmt: skip
    report = run_load(config)
    events = sum(len(record.stamps_s) for record in report.records)
    return {name: spent * 1e3 / events for name, spent in report.client["cpu_s"].items()}


def in_a_process(kind: str, port: int, rate: float, count: int, tokens: int) -> float:
    """Milliseconds of CPU per token, of a process that does nothing else."""
    words = [sys.executable, "-m", "scripts.benchmarks.receive", "--child", kind, f"{port}:{rate}:{count}:{tokens}"]
    said = subprocess.run(words, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    return float(said) * 1e3 / (count * tokens)


def run_child(kind: str, load: str) -> None:
    port, rate, count, tokens = load.split(":")
    gc.disable()
    if kind == "bare":
        print(bare(int(port), float(rate), int(count), int(tokens)))
    else:
        import uvloop

        print(uvloop.run(protocol(int(port), float(rate), int(count), int(tokens))))


def beside(words: Command, program: str, rate: float, tokens: int, seconds: float) -> float:
    """Milliseconds of CPU per token that another tool spends beyond its start-up; of one long and one short run."""
    spent: list[tuple[float, int]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        keep_tokenizer(folder)
        for share in (0.5, 3.0):
            mock = Mock(folder)
            count = max(20, round(rate * seconds * share))
            cpu_s = cpu_of(words(program, mock.url, rate, count, tokens, folder, "completions"), folder)
            mock.stop()
            sent = sum(1 for _ in (folder / "truth.jsonl").open())
            spent.append((cpu_s, sent * tokens))
    (short_s, few), (long_s, many) = spent
    return (long_s - short_s) * 1e3 / (many - few)


def medians(rate: float, tokens: int, seconds: float, repeats: int) -> list[float]:
    """Of runs in turn: bare epoll, uvloop, the harness, and its parts."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        mock = Mock(Path(folder))
        port = int(mock.url.rpartition(":")[2])
        load = (port, rate, max(20, round(rate * seconds)), tokens)
        for _ in range(repeats):
            floors = [in_a_process(kind, *load) for kind in ("bare", "uvloop")]
            parts = harness(*load)
            rows.append([*floors, sum(parts.values()), parts["clients"], parts["feed"], parts["parse"]])
        mock.stop()
    return [statistics.median(column) for column in zip(*rows, strict=True)]


@click.command()
@click.option("--events", "rates", default="275,1000,3300", show_default=True, help="Token events per second, each.")
@click.option("--output-len", "tokens", default=32, show_default=True)
@click.option("--seconds", default=8.0, show_default=True, help="Of each run.")
@click.option("--repeats", default=3, show_default=True)
@click.option("--aiperf", help="Path of aiperf's executable, to set it beside.", metavar="FILE")
@click.option("--guidellm", help="Path of guidellm's.", metavar="FILE")
@click.option("--child", nargs=2, hidden=True)
def main(
    rates: str,
    tokens: int,
    seconds: float,
    repeats: int,
    aiperf: str | None,
    guidellm: str | None,
    child: tuple[str, str] | None,
) -> None:
    """Client CPU per token received: bare epoll, uvloop, the harness, other tools."""
    if child:
        run_child(*child)
        return
    others = {name: (words, program) for name, words, program in (
        ("aiperf", aiperf_words, aiperf), ("guidellm", guidellm_words, guidellm),
    ) if program}  # fmt: skip
    names = ("bare epoll", "uvloop", "harness", "receiving", "bodies", "parsing", *others)
    print(f"{'ms of CPU per token':>22}" + "".join(f"{name:>12}" for name in names) + "   others' cores")
    for events in map(float, rates.split(",")):
        neighbours = Neighbours(range(os.cpu_count() or 1))
        cells = medians(events / tokens, tokens, seconds, repeats)
        cells += [beside(words, program, events / tokens, tokens, seconds) for words, program in others.values()]
        line = f"{events:>13,.0f} tokens/s" + "".join(f"{cell:12.4f}" for cell in cells)
        print(f"{line}{neighbours.cores():16.2f}", flush=True)


if __name__ == "__main__":
    main()
