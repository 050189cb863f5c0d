"""One thousand nodes and 100,000 requests in flight: what a gateway costs, alone and beside another one.

First the router alone chooses pairs among many nodes; hashing of the prompts is printed apart. Half of every prompt is
one of 50 shared prefixes.

Then a real gateway serves nodes without engines (``gateways/many_nodes.py``), in processes of their own, over real ZMQ
with keys: they register, send heartbeats, and hold requests until these are released. The requests are HTTP streams,
each with a batch of different prompts, so that every output is routed for itself and has its own pair. Then requests
of two tokens come and go at the highest rate, over one gateway and over two with the same nodes.

The processor time of a gateway, all its threads, belongs to it alone. The rate does not: client and nodes take the
same cores. On few cores, client and nodes limit the rate of two gateways; the processor time of each gateway per
request, without its heartbeats, says what it could reach.

With ``--gateway-share``, each gateway gets a fixed share of a core, so that cores are left to client and nodes. The
measured rates of one and of two gateways can then be compared, as long as the gateways use their whole share.
"""

import argparse
import asyncio
import contextlib
import gc
import multiprocessing
import os
import random
import resource
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from urllib.parse import urlsplit

import uvloop

from common.config.shared import SMALL_MODEL, SMALL_MODEL_NAME, LocalPrefillMode, Role
from common.errors import BatonError, ConfigError
from common.system.open_files import raise_open_file_limit
from common.wire.key_folder import load_keys
from gateway.workers.routing.router import Router
from scripts.benchmarks.harness.cpu_contention import cpu_seconds
from scripts.benchmarks.harness.options import comma_separated
from scripts.benchmarks.services.cpu_quota import MAX_PERCENT, MIN_PERCENT, cpu_quota, why_no_quota
from scripts.benchmarks.services.gateways.client import Connection, http_post, is_complete
from scripts.benchmarks.services.gateways.many_nodes import Order, Report, run_nodes
from scripts.benchmarks.services.gateways.processes import pinned_process
from scripts.load_tester.reporting.formats import counted

SHORTEST = (
    "--pairing-nodes=10,100", "--choices=50", "--nodes=20", "--in-flight=200", "--batch=4", "--seconds=1.5",
    "--connections=64",
)  # fmt: skip
VOCABULARY, SHARED_PREFIXES = 4_000, 50
#: Prompt lengths for the router alone, and that of the service; processes among which its nodes are divided.
PAIRING_TOKENS, PROMPT_TOKENS, NUM_PROCESSES = (100, 8_000), 100, 2
COMPLETIONS = "/v1/completions"
MODES: dict[str, LocalPrefillMode] = {"prefill nodes": "never", "--local-prefill auto": "auto"}
#: How long the benchmark waits for each state, and how long nodes may be silent. All of them are in few processes.
WAIT_S, NODE_TIMEOUT_S = 300.0, 60.0
END_OF_STREAM = b"\r\n0\r\n\r\n"
#: How long a decode node has a request of two tokens while rates are measured.
HOLD_S = 0.1


# ---- the router alone ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BenchNode:
    """A node as the router sees it."""

    incarnation: str
    capacity_tokens: int = 1 << 22
    longest_tokens: int = 1 << 22
    most_held_tokens: int = 0
    max_running: int = 256
    revision: str = "w1"
    step_s: float = 0.01
    prompt_token_s: float = 1e-4
    send_token_s: float = 1e-6
    failed_peers: frozenset[str] = frozenset()


def pairing(num_nodes: int, num_tokens: int, mode: LocalPrefillMode, num_choices: int) -> tuple[float, float]:
    """Median microseconds of hashing a prompt, and of choosing its pair with all else that this takes.

    Three of ten nodes are prefill nodes.
    """
    num_prefill = max(num_nodes * 3 // 10, 1)
    prefills = tuple(BenchNode(f"{i:032x}") for i in range(num_prefill))
    decodes = tuple(BenchNode(f"{i:032x}") for i in range(num_prefill, num_nodes))
    router, drawn = Router(local_prefill=mode), random.Random(1)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(drawn.randrange(150_000) for _ in range(count))

    shared = [tokens(num_tokens // 2) for _ in range(SHARED_PREFIXES)]
    prompts = [drawn.choice(shared) + tokens(num_tokens - num_tokens // 2) for _ in range(num_choices)]
    hash_prompt = router.prefixes.pieces
    hashed = b""

    def known(prompt: Sequence[int], salt: str) -> bytes:
        return hashed

    hashing: list[float] = []
    choosing: list[float] = []
    open_pairs = []
    for number, prompt in enumerate(prompts):
        begun = time.perf_counter()
        hashed = hash_prompt(prompt, "")
        hashing.append(time.perf_counter() - begun)
        router.prefixes.pieces = known  # type: ignore[method-assign]
        begun = time.perf_counter()
        router.dispatch_capacity(prefills, decodes)
        pair = router.choose(prefills, decodes, prompt, num_new=100, now=number * 1e-3)
        choosing.append(time.perf_counter() - begun)
        assert pair is not None
        open_pairs.append(pair)
        if len(open_pairs) > num_nodes:
            ended = open_pairs.pop(0)
            router.prefill_done(ended)
            router.decode_done(ended)
    return statistics.median(hashing) * 1e6, statistics.median(choosing) * 1e6


def pairing_table(options: argparse.Namespace) -> dict[str, float]:
    figures: dict[str, float] = {}
    print(f"{'choosing a pair, us':36} {'prompt':>8} {'hashing':>9} {'choosing':>9}")
    gc.collect()
    gc.disable()
    for name, mode in MODES.items():
        for num_nodes in options.pairing_nodes:
            for num_tokens in PAIRING_TOKENS:
                hashing, choosing = pairing(num_nodes, num_tokens, mode, options.choices)
                row = f"{num_nodes:,} nodes, {name}"
                figures[f"{row}, {num_tokens:,} tokens, choosing us"] = choosing
                figures[f"{row}, {num_tokens:,} tokens, hashing us"] = hashing
                print(f"{row:36} {num_tokens:8,} {hashing:9.1f} {choosing:9.1f}")
    gc.enable()
    return figures


# ---- the nodes and the gateways --------------------------------------------------------------------------------------


class Nodes:
    """The processes of the nodes."""

    def __init__(self, pipes: Sequence[Pipe]) -> None:
        self._pipes = pipes

    async def order(self, order: Order) -> list[Report]:
        try:
            for pipe in self._pipes:
                pipe.send(order)
            return [await asyncio.to_thread(pipe.recv) for pipe in self._pipes]
        except (EOFError, OSError):
            raise BatonError("a process of nodes has ended; its error is above") from None

    async def until_held(self, count: int) -> None:
        """Wait until decode nodes hold ``count`` requests."""
        await _until(f"{count} requests on decode nodes", lambda all: sum(one.num_held for one in all) == count, self)

    async def until_registered(self, num_nodes: int) -> None:
        def are_registered(reports: list[Report]) -> bool:
            by_gateway = [report.num_registered for report in reports]
            return all(sum(counts) == num_nodes for counts in zip(*by_gateway, strict=True))

        await _until("registered nodes", are_registered, self)


async def _until(what: str, is_met: Callable[[list[Report]], bool], nodes: Nodes) -> None:
    ends_at = time.monotonic() + WAIT_S
    while not is_met(reports := await nodes.order(Order())):
        if time.monotonic() > ends_at:
            counts = [(sum(one.num_registered), one.num_requests, one.num_held) for one in reports]
            raise BatonError(f"no {what} within {WAIT_S:g} s; registered, requests so far and held: {counts}")
        await asyncio.sleep(0.05)


class Streams:
    """HTTP streams of one client, each with a batch of requests."""

    def __init__(self) -> None:
        self._tails: dict[Connection, bytes] = {}  # the last bytes of each stream, whose end may come in two parts
        self._num_open = 0
        self._ended = asyncio.Event()
        self.failures: list[bytes] = []

    async def open(self, port: int, body: bytes) -> None:
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: Connection(self._on_data), "127.0.0.1", port
        )
        self._tails[connection] = b""
        self._num_open += 1
        connection.send(body)

    def _on_data(self, connection: Connection, data: bytes) -> None:
        if data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200"):
            self.failures.append(data)
        data = self._tails[connection] + data
        self._tails[connection] = data[-len(END_OF_STREAM) :]
        if data.endswith(END_OF_STREAM):
            self._num_open -= 1
        if self._num_open == 0 or self.failures:
            self._ended.set()

    async def end(self) -> None:
        """Wait for the ends of all streams, and close the connections."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), WAIT_S)
        if self.failures:
            raise BatonError(f"a gateway answered {self.failures[0][:400]!r}")
        if self._num_open:
            raise BatonError(f"{self._num_open} streams have not ended within {WAIT_S:g} s")
        for connection in self._tails:
            connection.close()
        await asyncio.sleep(0.2)


@dataclass(frozen=True)
class RunningGateway:
    pid: int
    port: int
    control: str

    @property
    def rss_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * resource.getpagesize()

    async def get(self, path: str) -> tuple[float, int]:
        """Seconds until a whole answer has come, and its bytes."""
        begun = time.perf_counter()
        answer = await self.read(path)
        return time.perf_counter() - begun, len(answer)

    async def read(self, path: str) -> str:
        """A whole answer, with its head."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        data = await asyncio.wait_for(reader.read(-1), WAIT_S)
        writer.close()
        if not data.startswith(b"HTTP/1.1 200"):
            raise BatonError(f"GET {path} was answered with {data[:200]!r}")
        return data.decode()


@contextlib.asynccontextmanager
async def running_gateway(max_queued: int, share: int) -> AsyncIterator[RunningGateway]:
    """Run a gateway as a process.

    Args:
        share: percent of a core that it gets at most; 0: all that it needs.
    """
    words = [
        sys.executable, "-m", "gateway", "--model", SMALL_MODEL, "--served-model-name", SMALL_MODEL_NAME,
        "--port", "0", "--control-port", "0", "--max-queued-requests", str(max_queued), "--no-log-requests",
        "--node-timeout", str(NODE_TIMEOUT_S),
    ]  # fmt: skip
    async with contextlib.AsyncExitStack() as stack:
        quota = stack.enter_context(cpu_quota(share)) if share else None
        process = await stack.enter_async_context(pinned_process(words, _all_cores()))
        if quota is not None:
            quota.add(process.pid)
        assert process.stderr is not None
        control = (await process.stderr.readline()).decode().split()[-1]
        url = (await process.stderr.readline()).decode().split()[-1]
        draining = asyncio.create_task(process.stderr.read(-1))  # a line for each node
        try:
            yield RunningGateway(process.pid, urlsplit(url).port or 0, control)
        finally:
            draining.cancel()


def _all_cores() -> set[int]:
    return set(os.sched_getaffinity(0))


class Table:
    """Prints figures, and keeps them."""

    def __init__(self) -> None:
        self.figures: dict[str, float] = {}

    def add(self, name: str, value: float, unit: str) -> None:
        self.figures[f"{name}, {unit}"] = value
        print(f"{name:64} {value:12,.1f} {unit}", flush=True)

    def add_difference(self, name: str, value: float, unit: str) -> None:
        """Add a difference of two measurements, which may be less than their noise, as that of few requests is.

        One that is not greater than zero is printed, and is no figure.
        """
        self.add(name, value, unit)
        if value <= 0.0:
            del self.figures[f"{name}, {unit}"]


def _prompts(options: argparse.Namespace, drawn: random.Random) -> list[list[int]]:
    return [[drawn.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(options.batch)]


async def measure_held(
    gateways: Sequence[RunningGateway], nodes: Nodes, options: argparse.Namespace, table: Table, idle: float
) -> None:
    """Fill the nodes with requests, look at the gateways meanwhile, and end the requests.

    Args:
        idle: processor seconds per second without requests, which do not count.
    """
    label, drawn = _label(gateways), random.Random(2)
    num_streams = max(options.in_flight // options.batch, 1)
    count = num_streams * options.batch
    await nodes.order(Order())
    cpu_s, rss = sum(cpu_seconds(one.pid) for one in gateways), sum(one.rss_bytes for one in gateways)
    begun, streams = time.perf_counter(), Streams()
    for number in range(num_streams):
        body = {"model": SMALL_MODEL_NAME, "prompt": _prompts(options, drawn), "max_tokens": 1000, "stream": True}
        await streams.open(gateways[number % len(gateways)].port, http_post(COMPLETIONS, body))
    await nodes.until_held(count)
    table.add(f"{label}: requests in flight", count, "requests")
    elapsed_s = time.perf_counter() - begun
    table.add(f"{label}: until they are", elapsed_s, "s")
    cpu_now_s = sum(cpu_seconds(one.pid) for one in gateways) - idle * elapsed_s
    table.add_difference(
        f"{label}: CPU per request, in and sent and two tokens", (cpu_now_s - cpu_s) / count * 1e6, "us"
    )
    more = sum(one.rss_bytes for one in gateways) - rss
    table.add_difference(f"{label}: memory per request", more / count / 1e3, "kB")
    await measure_idle(gateways, options, table, "requests in flight")
    for path in ("/health", "/metrics", "/v1/workers", "/v1/workers?limit=10"):
        taken = [await gateways[0].get(path) for _ in range(3)]
        table.add(f"{label}: GET {path}", statistics.median(seconds for seconds, _ in taken) * 1e3, "ms")
        table.add(f"{label}: GET {path}, size", taken[-1][1] / 1e3, "kB")
    most = [number for report in await nodes.order(Order()) for number in report.most]
    table.add(f"{label}: most requests on a decode node, of a room of {options.room}", max(most), "requests")
    table.add(f"{label}: fewest", min(most), "requests")
    cpu_s, begun = sum(cpu_seconds(one.pid) for one in gateways), time.perf_counter()
    await nodes.order(Order(is_release=True))
    await streams.end()
    cpu_now_s = sum(cpu_seconds(one.pid) for one in gateways) - idle * (time.perf_counter() - begun)
    table.add_difference(f"{label}: CPU per request, last token and end", (cpu_now_s - cpu_s) / count * 1e6, "us")


async def measure_idle(
    gateways: Sequence[RunningGateway], options: argparse.Namespace, table: Table, when: str
) -> float:
    """What heartbeats alone cost: processor seconds per second, of all gateways together."""
    before, begun = [cpu_seconds(one.pid) for one in gateways], time.perf_counter()
    await asyncio.sleep(options.seconds)
    elapsed_s = time.perf_counter() - begun
    shares = [(cpu_seconds(one.pid) - cpu_s) / elapsed_s for one, cpu_s in zip(gateways, before, strict=True)]
    table.add(f"{_label(gateways)}: CPU of each gateway, {when}, heartbeats alone", max(shares) * 100, "% of a core")
    return sum(shares)


async def measure_rate(
    gateways: Sequence[RunningGateway], nodes: Nodes, options: argparse.Namespace, table: Table, idle: float
) -> float:
    """Requests of two tokens that come and go, from a client with a fixed number of connections; returns their rate.

    Args:
        idle: as for ``measure_held``.
    """
    label, drawn = _label(gateways), random.Random(3)
    await nodes.order(Order(hold_s=HOLD_S))
    num_answers = 0
    failures: list[bytes] = []
    requests = [
        http_post(COMPLETIONS, {"model": SMALL_MODEL_NAME, "prompt": prompt, "max_tokens": 2})
        for _ in range(50)
        for prompt in _prompts(options, drawn)
    ]

    def on_data(connection: Connection, data: bytes) -> None:
        nonlocal num_answers
        if not (data.startswith(b"HTTP/1.1 200") and is_complete(data)):
            failures.append(data)
        num_answers += 1
        connection.send(requests[num_answers % len(requests)])

    loop = asyncio.get_running_loop()
    connections = []
    for number in range(options.connections):
        port = gateways[number % len(gateways)].port
        _, connection = await loop.create_connection(lambda: Connection(on_data), "127.0.0.1", port)
        connections.append(connection)
        connection.send(requests[number % len(requests)])
    await asyncio.sleep(options.seconds / 4)
    before, cpu_s, begun = num_answers, [cpu_seconds(one.pid) for one in gateways], time.perf_counter()
    await asyncio.sleep(options.seconds)
    elapsed_s, count = time.perf_counter() - begun, max(num_answers - before, 1)
    spent = [cpu_seconds(one.pid) - was for one, was in zip(gateways, cpu_s, strict=True)]
    for connection in connections:
        connection.close()
    await asyncio.sleep(0.2)
    if failures:
        raise BatonError(f"a gateway answered {failures[0][:400]!r}")
    table.add(f"{label}: rate of requests of two tokens", count / elapsed_s, "per s")
    table.add(f"{label}: CPU of each gateway meanwhile", sum(spent) / len(spent) / elapsed_s * 100, "% of a core")
    each_s = max((sum(spent) - idle * elapsed_s) / count, 1e-9)
    table.add(f"{label}: CPU of a gateway per request", each_s * 1e6, "us")
    allowed = (len(gateways) - idle) / each_s
    table.add(f"{label}: rate for which it suffices, on a core for each gateway", allowed, "per s")
    return count / elapsed_s


def _label(gateways: Sequence[RunningGateway]) -> str:
    return "1 gateway" if len(gateways) == 1 else f"{len(gateways)} gateways"


async def measure_service(nodes: Nodes, options: argparse.Namespace, table: Table) -> None:
    async with contextlib.AsyncExitStack() as stack:
        gateways: list[RunningGateway] = []
        rates: list[float] = []
        for _ in range(2):
            gateways.append(
                await stack.enter_async_context(running_gateway(2 * options.in_flight, options.gateway_share))
            )
            before = [(cpu_seconds(one.pid), one.rss_bytes) for one in gateways]
            await nodes.order(Order(gateways=[]))
            while '"num_workers":0' not in (await gateways[0].read("/v1/workers?limit=1")):
                await asyncio.sleep(0.1)  # a node with the name of one that has just gone may be refused
            begun = time.perf_counter()
            await nodes.order(Order(gateways=[one.control for one in gateways]))
            await nodes.until_registered(options.nodes)
            if len(gateways) == 1:
                (cpu_s, rss), one = before[0], gateways[0]
                table.add(f"{options.nodes:,} nodes: until all are registered", time.perf_counter() - begun, "s")
                table.add("CPU of the gateway for it", cpu_seconds(one.pid) - cpu_s, "s")
                table.add_difference(
                    "memory of the gateway per node", (one.rss_bytes - rss) / options.nodes / 1e3, "kB"
                )
            await asyncio.sleep(2.0)  # gateways that share nodes learn their shares
            idle = await measure_idle(gateways, options, table, "no requests")
            rates.append(await measure_rate(gateways, nodes, options, table, idle))
            if not options.rates_only:
                await measure_held(gateways, nodes, options, table, idle)
    table.add("measured rate of two gateways, of that of one", rates[1] / rates[0] * 100, "%")


# ---- the benchmark ---------------------------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> dict[str, float]:
    if min(options.nodes, *options.pairing_nodes) < 2:
        raise ConfigError("--nodes and --pairing-nodes must be at least 2: a prefill and a decode node")
    num_files = raise_open_file_limit()
    table = Table()
    if not options.no_pairing:
        table.figures |= pairing_table(options)
    num_prefill = max(options.nodes * 3 // 10, 1)
    options.room = max(options.in_flight * 5 // 4 // (options.nodes - num_prefill), 1)
    keys = load_keys(None, is_insecure=False, role="node")
    fork = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for index in range(NUM_PROCESSES):
        ours, theirs = multiprocessing.Pipe()
        names: dict[Role, list[str]] = {
            "prefill": [f"prefill-{i}" for i in range(num_prefill)][index::NUM_PROCESSES],
            "decode": [f"decode-{i}" for i in range(options.nodes - num_prefill)][index::NUM_PROCESSES],
        }
        process = fork.Process(target=run_nodes, args=(theirs, names, options.room, keys))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        uvloop.run(measure_service(Nodes(pipes), options, table))
    finally:
        for pipe, process in zip(pipes, processes, strict=True):
            with contextlib.suppress(OSError):
                pipe.send(None)
            process.join(10.0)
            process.kill()
    print(f"{counted(len(_all_cores()), 'core')}, at most {num_files:,} open files in each process")
    return table.figures


def _percent(text: str) -> int:
    """The share of a core that a control group can grant here; 0: no limit."""
    if not text.isdecimal() or not (int(text) == 0 or MIN_PERCENT <= int(text) <= MAX_PERCENT):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {MIN_PERCENT} to {MAX_PERCENT}")
    if int(text) and (problem := why_no_quota()):
        raise argparse.ArgumentTypeError(problem)
    return int(text)


def add_options(parser: argparse.ArgumentParser) -> None:
    numbers = comma_separated(int)
    parser.add_argument("--pairing-nodes", type=numbers, default="10,100,1000", help="for the router (%(default)s)")
    parser.add_argument("--choices", type=int, default=1_000, help="pairs that it chooses of each kind (%(default)s)")
    parser.add_argument("--no-pairing", action="store_true", help="measure the service alone")
    parser.add_argument("--nodes", type=int, default=1_000, help="of the service (%(default)s)")
    parser.add_argument("--in-flight", type=int, default=100_000, help="requests at once (%(default)s)")
    parser.add_argument("--batch", type=int, default=20, help="prompts of one HTTP stream (%(default)s)")
    parser.add_argument("--connections", type=int, default=512, help="of the client that measures rates (%(default)s)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement (%(default)s)")
    parser.add_argument(
        "--gateway-share", type=_percent, default=0, metavar="PERCENT",
        help="of a core that each gateway gets at most; needs root and control groups (default: no limit)",
    )  # fmt: skip
    parser.add_argument("--rates-only", action="store_true", help="hold no requests, and measure rates alone")
