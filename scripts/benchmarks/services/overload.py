"""Goodput under overload: at one and three times the capacity, and after all clients leave and come back at once.

``serve`` runs on this machine with a prefill node and a decode node of the small model; its engines take most of the
time. The capacity is what a closed loop of clients gets, a few more than run at once. Then requests come at one and
three times that rate, each with a deadline, and refused ones are lost. In the storm all clients leave at once, come
back at once, and heed Retry-After. An answer counts towards the goodput if it is whole and within its deadline.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Coroutine
from typing import Any
from urllib.parse import urlsplit

from common.errors import ConfigError
from scripts.benchmarks.harness.service_fixture import running_service
from scripts.load_tester.reporting.formats import counted

SHORTEST = ("--seconds=2", "--window=1", "--clients=20")
#: On a busy machine every answer may be late; then the answers are counted nevertheless.
MAY_BE_ZERO = ("goodput at 1x", "goodput at 3x", "goodput before the storm", "goodput after the storm")
#: Deadline of a request, as a multiple of the latency of an answer at the capacity.
DEADLINE_FACTOR = 4.0
#: Arrivals per request that can be served.
OVERLOAD = 3.0
#: Requests that run at once, those that wait at most, and tokens of each answer.
NUM_RUNNING, NUM_QUEUED, NUM_TOKENS = 8, 64, 16


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=30.0, help="of each load (default: 30)")
    parser.add_argument("--window", type=float, default=5.0, help="seconds between two figures (default: 5)")
    parser.add_argument("--clients", type=int, default=200, help="that leave and come back (default: 200)")


def run(options: argparse.Namespace) -> dict[str, float]:
    if 2 * options.window > options.seconds:
        raise ConfigError("--seconds must be at least twice --window: the first window after the storm does not count")
    flags = [
        "--dtype=float32",
        "--threads=1",
        "--max-total-tokens=8192",
        f"--max-running-requests={NUM_RUNNING}",
        f"--max-queued-requests={NUM_QUEUED}",
        "--max-dispatch-ahead=4",
        "--no-log-requests",
    ]
    with running_service(flags) as url:
        return asyncio.run(Overload(url, options).run())


class Overload:
    """The loads, one after another, and the instants at which answers were whole and in time."""

    def __init__(self, url: str, options: argparse.Namespace) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname, parts.port
        self._options = options
        self._drawn = random.Random(1)
        self._deadline_s = 60.0
        self.ended_at: list[float] = []
        self.latencies: list[float] = []
        self.statuses: Counter[int] = Counter()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []  # open connections

    async def run(self) -> dict[str, float]:
        options = self._options
        await self._closed_loop(2.0)  # warm
        capacity = await self._closed_loop(options.seconds)
        self._deadline_s = DEADLINE_FACTOR * statistics.median(self.latencies)
        print(f"capacity {capacity:.1f} answers/s; deadline {self._deadline_s:.2f} s")
        figures = {"capacity": capacity}
        for factor in (1.0, OVERLOAD):
            figures[f"goodput at {factor:g}x"] = goodput = await self._open_loop(factor * capacity)
            figures[f"answers at {factor:g}x"] = self.statuses[200]
            print(
                f"goodput at {factor:g}x: {goodput:.1f}/s, {goodput / capacity:.2f} of the capacity; {self._counted()}"
            )
        figures |= await self._storm(capacity)
        for task in list(self._tasks):
            task.cancel()
        for _, writer in self._idle:
            writer.close()
        return figures

    async def _closed_loop(self, seconds: float) -> float:
        """Answers per second of some more clients than run at once."""
        self._begin()
        begun_at = time.monotonic()
        until = begun_at + seconds

        async def client() -> None:
            while time.monotonic() < until:
                await self._ask()

        async with asyncio.TaskGroup() as clients:
            for _ in range(NUM_RUNNING + 4):
                clients.create_task(client())
        return len(self.ended_at) / (time.monotonic() - begun_at)  # the last answers come after the end

    async def _open_loop(self, rate: float) -> float:
        """Answers per second, of requests that come at this rate, once the queue has had a deadline's time to fill."""
        self._begin()
        begun_at = next_at = time.monotonic()
        counted_at = begun_at + self._deadline_s
        until = begun_at + max(self._options.seconds, 2 * self._deadline_s)  # a slow machine has late deadlines
        while next_at < until:
            await asyncio.sleep(max(next_at - time.monotonic(), 0.0))
            self._start(self._ask())
            next_at += self._drawn.expovariate(rate)
        ends_at = time.monotonic()
        while self._tasks:
            await asyncio.wait(self._tasks)
        return sum(counted_at <= at < ends_at for at in self.ended_at) / (ends_at - counted_at)

    async def _storm(self, capacity: float) -> dict[str, float]:
        """Goodput in the windows after all clients have left and come back at once."""
        self._begin()
        seconds = max(self._options.seconds, 2 * self._deadline_s)  # a slow machine has late answers

        async def client() -> None:
            while True:
                retry_after_s = await self._ask()
                await asyncio.sleep(retry_after_s)

        first = [self._start(client()) for _ in range(self._options.clients)]
        await asyncio.sleep(seconds)
        before = len(self.ended_at) / seconds
        for task in first:
            task.cancel()
        await asyncio.wait(first)
        self._begin()
        storm_at = time.monotonic()
        again = [self._start(client()) for _ in range(self._options.clients)]
        await asyncio.sleep(seconds)
        for task in again:
            task.cancel()
        await asyncio.wait(again)
        window_s = self._options.window
        windows = [
            sum(start <= at - storm_at < start + window_s for at in self.ended_at) / window_s
            for start in (i * window_s for i in range(int(seconds / window_s)))
        ]
        print(f"{counted(self._options.clients, 'client')}: {before:.1f}/s, {before / capacity:.2f} of the capacity")
        shown = ", ".join(f"{goodput:.1f}" for goodput in windows)
        print(f"after all left and came back: {shown}/s in windows of {window_s:g} s; {self._counted()}")
        after = statistics.mean(windows[1:])
        print(f"from {window_s:g} s after the storm on: {after:.1f}/s, {after / capacity:.2f} of the capacity")
        return {"goodput before the storm": before, "goodput after the storm": after}

    # ---- clients ----------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self.ended_at.clear()
        self.latencies.clear()
        self.statuses.clear()

    def _counted(self) -> str:
        return ", ".join(f"{count} x {status}" for status, count in sorted(self.statuses.items()))

    def _start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _ask(self) -> float:
        """Send one request and read its answer; return its Retry-After, or 0."""
        begun_at = time.monotonic()
        body = json.dumps(
            {
                "input_ids": [self._drawn.randrange(10, 200) for _ in range(32)],
                "sampling_params": {"max_new_tokens": NUM_TOKENS, "ignore_eos": True},
                "deadline_ms": round(1000 * self._deadline_s),
            }
        ).encode()
        status, headers = await self._exchange(body)
        self.statuses[status] += 1
        now = time.monotonic()
        if status == 200 and now - begun_at <= self._deadline_s:
            self.ended_at.append(now)
            self.latencies.append(now - begun_at)
        return float(headers.get(b"retry-after", 0))

    async def _exchange(self, body: bytes) -> tuple[int, dict[bytes, bytes]]:
        """Send a request over a connection that is open already, if there is one, and read the whole answer.

        Return its status and its headers; 0 and none if the service closed the connection.
        """
        reader, writer = self._idle.pop() if self._idle else await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            first, *lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
            headers = dict(line.split(b": ", 1) for line in lines if line)
            await reader.readexactly(int(headers[b"content-length"]))
        except (OSError, asyncio.IncompleteReadError):
            writer.close()
            return 0, {}
        except BaseException:  # the client leaves
            writer.close()
            raise
        self._idle.append((reader, writer))
        return int(first.split()[1]), headers
