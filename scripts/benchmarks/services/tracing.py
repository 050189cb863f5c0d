"""What tracing costs the gateway: processor time of an answer and of a streamed chunk, without it and with it.

Gateways that differ in one option each are pinned to one core and measured in turns, as in ``bench gateway``. Each
answers the same number of requests; the processor time of all its threads counts, until the last span is exported.
Without spans, the nodes report no stages at all, which real nodes cannot be told. ``otlp`` exports every request to a
collector that only reads.
"""

import argparse
import asyncio
import contextlib
import importlib.util
import statistics
from collections.abc import AsyncIterator, Mapping, Sequence

import uvloop
from aiohttp import web

from common.config.shared import SMALL_MODEL_NAME
from scripts.benchmarks.harness.cpu_contention import cpu_seconds
from scripts.benchmarks.services.gateways.baton import baton
from scripts.benchmarks.services.gateways.client import (
    Connection,
    Gateway,
    Load,
    close_all,
    connect,
    http_post,
    is_complete,
    measure,
)
from scripts.benchmarks.services.gateways.processes import split_cores

SHORTEST = ("--answers=50", "--seconds=0.3", "--rounds=1")
BODY = {"model": SMALL_MODEL_NAME, "prompt": "Shall I compare thee to a summer's day?", "max_tokens": 1}
CHUNKS = Load("chunks", "/v1/completions", {"model": SMALL_MODEL_NAME, "prompt": "a"}, 64, is_streaming=True)
NUM_CONNECTIONS = 8
#: The exporter waits for a second after the end of a request, and looks once a second.
EXPORT_S = 2.5
WITHOUT_SPANS, OFF, TIMELINES, OTLP = "without spans", "timelines off", "timelines", "otlp, all requests"


class Collector:
    """Takes spans and counts the bytes."""

    def __init__(self) -> None:
        self.num_bytes = 0

    async def on_post(self, request: web.Request) -> web.Response:
        self.num_bytes += len(await request.read())
        return web.Response()


@contextlib.asynccontextmanager
async def running_collector() -> AsyncIterator[tuple[Collector, str]]:
    """A collector and its URL."""
    collector = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", collector.on_post)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield collector, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def cpu_of_answers(gateway: Gateway, num_answers: int) -> float:
    """Microseconds of processor time for each of ``num_answers`` answers, their export included."""
    gateway.upstream.stream(False)
    request, num_sent, num_answered = http_post("/v1/completions", BODY), 0, 0
    is_over = asyncio.Event()
    parts: dict[Connection, bytes] = {}

    def send(connection: Connection) -> None:
        nonlocal num_sent
        if num_sent < num_answers:
            num_sent += 1
            connection.send(request)

    def on_data(connection: Connection, data: bytes) -> None:
        nonlocal num_answered
        answer = parts.pop(connection, b"") + data
        assert answer.startswith(b"HTTP/1.1 200"), f"{gateway.name} answered {answer!r}"
        if not is_complete(answer):
            parts[connection] = answer
            return
        num_answered += 1
        send(connection)
        if num_answered == num_answers:
            is_over.set()

    connections = await connect(gateway, NUM_CONNECTIONS, on_data)
    cpu_s = cpu_seconds(gateway.pid)
    for connection in connections:
        send(connection)
    await is_over.wait()
    await asyncio.sleep(EXPORT_S)
    cpu_us = 1e6 * (cpu_seconds(gateway.pid) - cpu_s) / num_answers
    await close_all(connections)
    return cpu_us


async def measure_all(gateways: Sequence[Gateway], options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Microseconds of processor time by kind of event and gateway."""
    found: dict[str, dict[str, list[float]]] = {"answers": {}, "chunks": {}}
    for gateway in gateways:
        await cpu_of_answers(gateway, min(options.answers, 100))  # warms up
    for _ in range(options.rounds):
        for gateway in gateways:
            found["answers"].setdefault(gateway.name, []).append(await cpu_of_answers(gateway, options.answers))
            measured = await measure(gateway, CHUNKS, options.seconds)
            found["chunks"].setdefault(gateway.name, []).append(measured.cpu_us)
    return found


async def run_all(options: argparse.Namespace) -> dict[str, float]:
    cores = split_cores()
    async with contextlib.AsyncExitStack() as stack:
        collector, url = await stack.enter_async_context(running_collector())
        flags: dict[str, list[str]] = {
            WITHOUT_SPANS: ["--timeline-requests=0"],
            OFF: ["--timeline-requests=0"],
            TIMELINES: [],
        }
        if importlib.util.find_spec("opentelemetry.exporter") is None:
            print(f"{OTLP} is left out: the extra otlp is not installed")
        else:
            flags[OTLP] = [f"--otlp-endpoint={url}"]
        gateways = [
            await stack.enter_async_context(baton(cores, name=name, options=words, has_spans=name != WITHOUT_SPANS))
            for name, words in flags.items()
        ]
        found = await measure_all(gateways, options)
    medians = {
        kind: {name: statistics.median(values) for name, values in by_name.items()} for kind, by_name in found.items()
    }
    print_table(medians)
    figures = {f"{kind}, {name}, us of CPU each": us for kind, each in medians.items() for name, us in each.items()}
    if OTLP in flags:
        figures["bytes of spans sent"] = float(collector.num_bytes)
    return figures


def print_table(medians: Mapping[str, Mapping[str, float]]) -> None:
    print(f"{'CPU of the gateway':24}{'an answer':>12}{'more':>10}{'a chunk':>12}{'more':>10}")
    base = {kind: each[WITHOUT_SPANS] for kind, each in medians.items()}
    for name, answer_us in medians["answers"].items():
        chunk_us = medians["chunks"][name]
        more = (answer_us - base["answers"], chunk_us - base["chunks"])
        print(f"{name:24}{answer_us:9.1f} us{more[0]:+7.1f} us{chunk_us:9.1f} us{more[1]:+7.1f} us")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--answers", type=int, default=1_500, help="answers of each measurement (%(default)s)")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of each measurement of chunks (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each kind (%(default)s)")


def run(options: argparse.Namespace) -> dict[str, float]:
    figures: dict[str, float] = uvloop.run(run_all(options))
    return figures
