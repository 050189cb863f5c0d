"""The parent of the client processes: starts them, makes bodies a little ahead of time, and collects what comes back.

What comes back is kept as received, and read when the run is over.
"""

import asyncio
import fcntl
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from common.errors import BatonError
from scripts.load_tester.client.courier import find_library
from scripts.load_tester.client.ipc import (
    Ask,
    Done,
    Dones,
    EndOfAsks,
    Finished,
    FrameReader,
    FrameWriter,
    Go,
    Halt,
    Ready,
    Setup,
    Tick,
    to_parent,
)
from scripts.load_tester.workload.plan import Planned

ROOT = Path(__file__).resolve().parents[3]
HEAD_START_S = 0.02
READY_TIMEOUT_S = 30.0
MAX_FEED_BEFORE_START_S = 0.4
PIPE_BYTES = 1 << 20  # as many as a process lets pile up before it sends them
MAX_BYTES_AT_ONCE = 16 << 20  # bodies; after so many the clock starts, and the process must have read them
LOOKAHEAD_S = 5.0
FEED_EVERY_S = 2.0  # of an open loop: a batch of requests at a time, since each time wakes two processes up
GRACE_S = 5.0
EXIT_TIMEOUT_S = 2.0


class ClientFailed(BatonError):
    """A client process ended before its work did."""


@dataclass
class Outcome:
    """What a crew brings home.

    Attributes:
        start_at: instant 0 on the monotonic clock.
        dones: one for each request sent, in the order in which they ended.
        planned: every request handed out, in order.
        finished: one for each client process.
        feed_cpu_s: CPU seconds that making bodies and collecting answers took here.
        receives_in: what client processes received with: C or Python.
    """

    start_at: float = 0.0
    ended_at: float = 0.0
    dones: list[Done] = field(default_factory=list)
    planned: list[Planned] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    feed_cpu_s: float = 0.0
    was_halted: bool = False
    receives_in: str = ""


class _Member:
    """One client process and the pipes to it."""

    def __init__(
        self, library: str, on_frame: Callable[["_Member", Any], None], on_end: Callable[["_Member"], None]
    ) -> None:
        environ = dict(os.environ)
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environ.get("PYTHONPATH", "")]))
        environ["PYTHONSAFEPATH"] = "1"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "scripts.load_tester.client.client_process", *filter(None, [library])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ,
        )
        assert self.process.stdout
        _widen(self.process.stdout)
        self.reader = FrameReader(to_parent, lambda frame: on_frame(self, frame), lambda: on_end(self))
        self.writer = FrameWriter()
        self.is_ready = asyncio.Event()
        self.finished: Finished | None = None
        self.tick: Tick | None = None
        self.num_open = 0  # chains handed over that have not ended
        self.is_connected = False

    async def connect(self) -> None:
        loop = asyncio.get_running_loop()
        assert self.process.stdin and self.process.stdout
        await loop.connect_write_pipe(lambda: self.writer, self.process.stdin)
        await loop.connect_read_pipe(lambda: self.reader, self.process.stdout)
        self.is_connected = True

    async def close(self) -> None:
        """End the process, gently if it listens."""
        if self.is_connected:
            if not self.writer.transport.is_closing():  # it may have died
                self.writer.transport.abort()
            deadline_at = time.monotonic() + EXIT_TIMEOUT_S
            while self.process.poll() is None and time.monotonic() < deadline_at:
                await asyncio.sleep(0.005)
            self.reader.transport.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                pipe.close()


class Crew:
    """Client processes for one run.

    Args:
        setup: sent to each, with its part of the slots.
        num_clients: how many.
        content: makes the headers of its own, and the body, of a request.
        on_tick: called with the sum of all processes' states, for a live view.
    """

    def __init__(
        self,
        setup: Setup,
        num_clients: int,
        content: Callable[[Planned], tuple[bytes, bytes]],
        on_tick: Callable[[Sequence[Tick]], None] | None = None,
    ) -> None:
        self._setup = setup
        self._num_clients = num_clients
        self._content = content
        self._on_tick = on_tick
        self._members: list[_Member] = []
        self._outcome = Outcome()
        self._all_ended = asyncio.Event()
        self._some_ended = asyncio.Event()
        self._failure = ""
        self._is_stopping = False
        self._last_turns: set[int] = set()  # numbers of requests under way that end their chain

    async def start(self) -> None:
        """Start the processes; they import while the plan is being made. After a failure, too, ``close`` ends them.

        Raises:
            ClientFailed: the system has no room for them.
        """
        await self._start(self._num_clients)

    async def grow(self, num_clients: int) -> None:
        """Before ``run``, and in an open loop: as many processes as that, if there are fewer."""
        assert not self._setup.slots
        await self._start(num_clients - len(self._members))

    async def _start(self, count: int) -> None:
        begin = len(self._members)
        library = "" if self._setup.server_name else find_library()  # TLS is not for C to read
        self._outcome.receives_in = "C" if library else "Python"
        # They inherit this: Ctrl-C comes to the whole group, and they would die of it until they have imported.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        try:
            for _ in range(count):
                self._members.append(_Member(library, self._on_frame, self._on_end))
        except OSError as error:
            raise ClientFailed(f"a client process cannot be started: {error.strerror}") from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number, member in enumerate(self._members[begin:], begin):
            await member.connect()
            slots = self._setup.slots // self._num_clients + (number < self._setup.slots % self._num_clients)
            values = {name: getattr(self._setup, name) for name in Setup.__struct_fields__}
            member.writer.send(Setup(**values | {"slots": slots, "has_ticks": self._on_tick is not None}))

    async def run(self, chains: Iterable[Sequence[Planned]]) -> Outcome:
        """Send all of it; return when everything has ended.

        Raises:
            ClientFailed: a process died.
        """
        cpu_s = time.process_time()
        feeding = asyncio.create_task(self._feed(iter(chains)))
        ending = asyncio.create_task(self._all_ended.wait())
        try:
            await asyncio.wait({feeding, ending}, return_when=asyncio.FIRST_COMPLETED)
            if feeding.done():
                feeding.result()
            await ending
        finally:
            for pending in (feeding, ending):
                pending.cancel()
            await asyncio.gather(feeding, ending, return_exceptions=True)
            await self.close()
        if self._failure:
            raise ClientFailed(self._failure)
        outcome = self._outcome
        outcome.finished = [member.finished for member in self._members if member.finished]
        outcome.ended_at = time.monotonic()
        outcome.start_at = outcome.start_at or outcome.ended_at  # stopped before the clock was started
        outcome.feed_cpu_s = time.process_time() - cpu_s
        return outcome

    async def _feed(self, chains: Iterable[Sequence[Planned]]) -> None:
        """Hand requests out, chains in turn to each process; the clock starts when there is enough of a start."""
        await self._until_ready()
        began_at, has_started, num_bytes = time.monotonic(), False, 0
        for number, chain in enumerate(chains):
            member = self._member_for(number)
            if not has_started and self._is_a_start(number, chain[0].at, began_at):
                has_started = await self._go()
            if has_started:
                await self._until_near(chain[0].at)
                await self._until_short_of_work(member)
                await member.writer.room()
                if self._is_over():
                    break
            member.num_open += 1
            if self._setup.slots:
                self._last_turns.add(chain[-1].index)
            for planned in chain:
                self._outcome.planned.append(planned)
                ask = self._ask(planned)
                num_bytes += len(ask.body)
                member.writer.send(ask)
                if num_bytes > MAX_BYTES_AT_ONCE:  # a long session alone: nobody could read all of it before the start
                    has_started = has_started or await self._go()
                    await member.writer.drain()
                    num_bytes = 0
            if number % 16 == 15:
                await asyncio.sleep(0)
        if not has_started:
            await self._go()
        for member in self._members:
            member.writer.send(EndOfAsks())

    async def _until_ready(self) -> None:
        for member in self._members:
            try:
                await asyncio.wait_for(member.is_ready.wait(), READY_TIMEOUT_S)
            except TimeoutError:
                raise ClientFailed(f"a client process was not ready within {READY_TIMEOUT_S:g} s") from None

    def _is_over(self) -> bool:
        stop_s = self._setup.stop_after_s
        return self._outcome.was_halted or (0 < stop_s < time.monotonic() - self._outcome.start_at)

    def _ask(self, planned: Planned) -> Ask:
        content = self._content(planned)
        return Ask(planned.index, planned.at, planned.session, planned.think_s, planned.turns_left, *content)

    def _is_a_start(self, number: int, at: float, began_at: float) -> bool:
        """Whether enough has been handed out for the clock to start: a few seconds' worth, or all that time allows."""
        if time.monotonic() - began_at > MAX_FEED_BEFORE_START_S:
            return True
        return number >= self._lead() * len(self._members) if self._setup.slots else at > LOOKAHEAD_S

    def _member_for(self, number: int) -> _Member:
        """In turn; in a closed loop the one with the least to do, since some answers are slow."""
        if not self._setup.slots:
            return self._members[number % len(self._members)]
        return min(self._members, key=lambda member: member.num_open)

    def _lead(self) -> int:
        """Chains that each process of a closed loop has at hand."""
        return 4 * self._setup.slots // len(self._members) + 64

    async def _until_short_of_work(self, member: _Member) -> None:
        """In a closed loop, wait until a process will soon have nothing to send."""
        while self._setup.slots and member.num_open >= self._lead() and not self._is_over():
            self._some_ended.clear()
            stop_s = self._setup.stop_after_s
            left_s = self._outcome.start_at + stop_s - time.monotonic() if stop_s else None
            with suppress(TimeoutError):
                await asyncio.wait_for(self._some_ended.wait(), left_s)

    async def _until_near(self, at: float) -> None:
        """Wait until a request is due in a few seconds: making all bodies at once would take the server's cores."""
        if not self._setup.slots:
            while (wait_s := self._outcome.start_at + at - LOOKAHEAD_S - time.monotonic()) > 0:
                await asyncio.sleep(min(wait_s + FEED_EVERY_S, 2 * FEED_EVERY_S))
                if self._outcome.was_halted:
                    return

    async def _go(self) -> bool:
        for member in self._members:
            await member.writer.drain()
        self._outcome.start_at = time.monotonic() + HEAD_START_S
        for member in self._members:
            member.writer.send(Go(self._outcome.start_at))
        return True

    async def close(self) -> None:
        """End the processes."""
        self._is_stopping = True
        await asyncio.gather(*(member.close() for member in self._members))

    def halt(self) -> None:
        """End the run now, with what there is."""
        if self._outcome.was_halted:
            return
        self._outcome.was_halted = True
        self._some_ended.set()
        for member in self._members:
            if not member.finished:
                member.writer.send(Halt())
        asyncio.get_running_loop().call_later(GRACE_S, self._all_ended.set)

    def _on_frame(self, member: _Member, frame: Any) -> None:
        if isinstance(frame, Dones):
            self._outcome.dones += frame.ended
            ended = self._last_turns & {done.index for done in frame.ended}
            member.num_open -= len(ended)
            self._last_turns -= ended
            self._some_ended.set()
        elif isinstance(frame, Tick):
            member.tick = frame
            ticks = [other.tick for other in self._members if other.tick]
            if self._on_tick and len(ticks) == len(self._members):
                self._on_tick(ticks)
        elif isinstance(frame, Ready):
            member.is_ready.set()
        elif isinstance(frame, Finished):
            member.finished = frame
            if all(other.finished for other in self._members):
                self._all_ended.set()

    def _on_end(self, member: _Member) -> None:
        if member.finished or self._is_stopping:
            return
        self._failure = f"a client process ended early (status {member.process.poll()})"
        self._all_ended.set()


def _widen(pipe: IO[bytes]) -> None:
    """Room for a whole frame of answers, where the system gives it: of each part of one, both ends wake up."""
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        with suppress(OSError):
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)


def resolve_host(host: str, port: int) -> str:
    """An address of the host, looked up once so that no request pays for it.

    Raises:
        OSError: there is none.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    # Servers listen on IPv4 more often than on both.
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return str(found[0][4][0])


def num_clients_for(requests_per_s: float, events_per_s: float, slots: int) -> int:
    """Processes for a load: one carries 8,000 events per second, or 1,000 requests under way, with room to spare."""
    needed = max(events_per_s / 8000, requests_per_s / 500, slots / 1000)
    return max(1, min(math.ceil(min(needed, 16)), os.cpu_count() or 1, 16))


def busiest(plan: Sequence[Planned]) -> tuple[float, float]:
    """Requests and output tokens per second of an open loop, in the ten seconds in which most tokens are asked for."""
    if not plan:
        return 0.0, 0.0
    at = np.array([planned.at for planned in plan])
    length_s = min(10.0, max(1.0, float(at[-1])))
    _, window = np.unique(at // length_s, return_inverse=True)
    tokens = np.bincount(window, weights=[planned.num_output for planned in plan])
    return float(np.bincount(window).max()) / length_s, float(tokens.max()) / length_s
