"""CPU time per received token: the load tester, bare Python and other load testers, on one mock server, in turn.

``bare`` is a loop of epoll and ``recv_into`` that stores each piece with its arrival time; ``uvloop`` is a protocol
that does the same. Neither schedules, parses or checks anything, so they show the floor. That floor is higher at low
rates, where a process sleeps before each token and finds cold caches. ``--aiperf`` and ``--guidellm`` also measure
those tools (aiperf 0.13, guidellm 0.8), without their start-up: the difference between a long and a short run. Install
each in its own environment: ``python -m venv V && V/bin/pip install aiperf``.
"""

import argparse
import asyncio
import gc
import json
import os
import resource
import select
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import uvloop

from common.config.shared import SMALL_MODEL
from scripts.benchmarks.cpu_contention import CpuContention
from scripts.load_tester.config import LoadtestConfig
from scripts.load_tester.run import run_load

SHORTEST = ("--events=1000", "--seconds=1", "--repeats=1")
ROOT = Path(__file__).resolve().parents[2]
HEAD_START_S = 0.2
LAST = b"0\r\n\r\n"
REVISION = "0" * 40  # of the tokenizer in the hub cache

#: (executable, server URL, requests per second, number of requests, output tokens, folder) -> command line.
Command = Callable[[str, str, float, int, int, Path], list[str]]


class Mock:
    """The mock server of the tests in a process; it writes a line per request to ``truth.jsonl`` in its folder."""

    def __init__(self, folder: Path) -> None:
        script = str(ROOT / "tests" / "support" / "mock_openai.py")
        flags = ["--ttft", "0.1", "--itl", "0.01", "--truth", str(folder / "truth.jsonl")]
        self._process = subprocess.Popen([sys.executable, script, *flags], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()


def request(tokens: int) -> bytes:
    """The bytes of a request for a completion of that many tokens."""
    body = {"model": "mock", "prompt": list(range(100, 164)), "max_tokens": tokens, "stream": True}
    data = json.dumps(body | {"stream_options": {"include_usage": True}}).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: mock\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data)


def bare(port: int, rate: float, count: int, tokens: int) -> float:
    """CPU seconds to receive ``count`` completions with constant arrivals by epoll."""
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
                raise ConnectionError("the mock server closed the connection")
            if piece.endswith(LAST):
                idle.append(connections[number])
                done += 1
    spent = time.process_time() - began
    for connection in connections.values():
        connection.close()
    poll.close()
    return spent


class _Receiver(asyncio.Protocol):
    """Stores pieces with their arrival times, and enters a queue at the end of each answer."""

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
    """CPU seconds to receive ``count`` completions with constant arrivals by an asyncio protocol."""
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


def load_tester(port: int, rate: float, count: int, tokens: int) -> dict[str, float]:
    """Milliseconds of CPU per token of each part of the load tester."""
    config = LoadtestConfig(
        url=f"http://127.0.0.1:{port}", rate=f"{rate:g}", arrival="constant", num_requests=count, input_len="64",
        output_len=str(tokens), scrape="none",
    )  # fmt: skip
    report = run_load(config)
    events = sum(len(record.stamps_s) for record in report.records)
    return {name: spent * 1e3 / events for name, spent in report.client["cpu_s"].items()}


def in_a_process(kind: str, port: int, rate: float, count: int, tokens: int) -> float:
    """Milliseconds of CPU per token in a process that does nothing else."""
    words = [sys.executable, "-m", "scripts.benchmarks.receive", kind, f"{port}:{rate}:{count}:{tokens}"]
    said = subprocess.run(words, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    return float(said) * 1e3 / (count * tokens)


def run_child(kind: str, load: str) -> None:
    port, rate, count, tokens = load.split(":")
    gc.disable()
    if kind == "bare":
        print(bare(int(port), float(rate), int(count), int(tokens)))
    else:
        print(uvloop.run(protocol(int(port), float(rate), int(count), int(tokens))))


def extra_cpu(words: Command, program: str, rate: float, tokens: int, seconds: float) -> float:
    """Milliseconds of CPU per token of another tool, beyond its start-up: the difference of a long and a short run."""
    spent: list[tuple[float, int]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        keep_tokenizer(folder)
        for share in (0.5, 3.0):
            mock = Mock(folder)
            count = max(20, round(rate * seconds * share))
            cpu_s = cpu_of(words(program, mock.url, rate, count, tokens, folder), folder)
            mock.stop()
            sent = sum(1 for _ in (folder / "truth.jsonl").open())
            spent.append((cpu_s, sent * tokens))
    (short_s, few), (long_s, many) = spent
    return (long_s - short_s) * 1e3 / (many - few)


def medians(rate: float, tokens: int, seconds: float, repeats: int) -> list[float]:
    """Medians over runs in turn: bare epoll, uvloop, the load tester, and its parts."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        mock = Mock(Path(folder))
        port = int(mock.url.rpartition(":")[2])
        load = (port, rate, max(20, round(rate * seconds)), tokens)
        for _ in range(repeats):
            floors = [in_a_process(kind, *load) for kind in ("bare", "uvloop")]
            parts = load_tester(*load)
            rows.append([*floors, sum(parts.values()), parts["clients"], parts["feed"], parts["parse"]])
        mock.stop()
    return [statistics.median(column) for column in zip(*rows, strict=True)]


# ---- other load testers ----------------------------------------------------------------------------------------------


def aiperf_words(program: str, url: str, rate: float, count: int, tokens: int, folder: Path) -> list[str]:
    """Command line of aiperf with Poisson arrivals."""
    shutil.rmtree(folder / "aiperf", ignore_errors=True)
    words = f"profile -m mock --endpoint-type completions --streaming --arrival-pattern poisson --isl 64 --osl {tokens}"
    words += f" --request-rate {rate:g} --request-count {count} --ui none --tokenizer baton/small"
    return [program, *words.split(), "--url", url, "--output-artifact-dir", str(folder / "aiperf")]


def guidellm_words(program: str, url: str, rate: float, count: int, tokens: int, folder: Path) -> list[str]:
    """Command line of guidellm with Poisson arrivals."""
    return [
        program, "run", "--disable-console",
        "--backend", f"kind=openai_http,target={url},model=mock,validate_backend=false,request_format=/v1/completions",
        "--profile", f"kind=poisson,rate={rate:g}",
        "--constraint", f"kind=max_requests,count={count}",
        "--tokenizer", f"kind=huggingface_auto,model={SMALL_MODEL}",
        "--data", f"kind=synthetic_text,prompt_tokens=64,output_tokens={tokens}",
        "--output", f"kind=json,path={folder / 'guidellm.json'}",
    ]  # fmt: skip


def cpu_of(words: list[str], folder: Path) -> float:
    """CPU seconds of a command and all of its processes.

    Raises:
        RuntimeError: the command failed; the message contains the end of its output.
    """
    environ = os.environ | {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ran = subprocess.run(words, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if ran.returncode:
        raise RuntimeError(f"{words[0]} ended with status {ran.returncode}:\n{ran.stdout[-2000:]}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def keep_tokenizer(folder: Path) -> None:
    """Put the small model's tokenizer into a hub cache, so that aiperf needs no network."""
    cache = folder / "hf" / "hub" / "models--baton--small"
    shutil.copytree(SMALL_MODEL, cache / "snapshots" / REVISION)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(REVISION)


# ---- the command -----------------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--events", default="275,1000,3300", help="token events per second of each run (%(default)s)")
    parser.add_argument("--output-len", type=int, default=32, help="tokens of a request (%(default)s)")
    parser.add_argument("--seconds", type=float, default=8.0, help="length of each run (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="runs whose median counts (%(default)s)")
    parser.add_argument("--aiperf", help="executable of aiperf, to measure it as well", metavar="FILE")
    parser.add_argument("--guidellm", help="executable of guidellm, to measure it as well", metavar="FILE")


def run(options: argparse.Namespace) -> dict[str, float]:
    tools = (("aiperf", aiperf_words, options.aiperf), ("guidellm", guidellm_words, options.guidellm))
    others = {name: (words, program) for name, words, program in tools if program}
    names = ("bare epoll", "uvloop", "ours", "receiving", "bodies", "parsing", *others)
    print(f"{'ms of CPU per token':>22}" + "".join(f"{name:>12}" for name in names) + "   others' cores")
    tokens, seconds = options.output_len, options.seconds
    figures: dict[str, float] = {}
    for events in map(float, options.events.split(",")):
        contention = CpuContention(range(os.cpu_count() or 1))
        cells = medians(events / tokens, tokens, seconds, options.repeats)
        cells += [extra_cpu(words, program, events / tokens, tokens, seconds) for words, program in others.values()]
        line = f"{events:>13,.0f} tokens/s" + "".join(f"{cell:12.4f}" for cell in cells)
        print(f"{line}{contention.cores():16.2f}", flush=True)
        figures |= {
            f"{events:g} tokens/s, {name}, ms of CPU per token": c for name, c in zip(names, cells, strict=True)
        }
    return figures


if __name__ == "__main__":
    run_child(sys.argv[1], sys.argv[2])
