"""The parent's side of the client processes: starts them, feeds them requests a little ahead, collects the results.

Responses stay as received until the run is over.
"""

import asyncio
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
from typing import Any

import msgspec
import numpy as np

from common.errors import BatonError
from common.system.python_environ import python_environ
from scripts.load_tester.client.ipc import (
    ClientFinished,
    ClientReady,
    EndOfRequests,
    MessageReader,
    MessageWriter,
    Progress,
    RequestDone,
    RequestsDone,
    SendRequest,
    Setup,
    StartClock,
    Stop,
    parent_decoder,
)
from scripts.load_tester.workload.planned_request import PlannedRequest

HEAD_START_S = 0.02
READY_TIMEOUT_S = 120.0
MAX_FEED_BEFORE_START_S = 0.4
MAX_BYTES_AT_ONCE = 16 << 20  # of bodies; beyond it the clock starts, and the process must read them first
LOOKAHEAD_S = 5.0
FEED_EVERY_S = 2.0  # open loop: many requests at a time, since each time wakes two processes
GRACE_S = 5.0
EXIT_TIMEOUT_S = 2.0


class ClientFailed(BatonError):
    """A client process could not be started, or ended too early."""


@dataclass
class LoadResult:
    """The requests sent and the responses received.

    Attributes:
        start_at: instant 0 of the run on the monotonic clock.
        finished: final figures of each client process.
        feed_cpu_s: CPU seconds of this process for making bodies and collecting results.
    """

    start_at: float = 0.0
    ended_at: float = 0.0
    dones: list[RequestDone] = field(default_factory=list)
    planned: list[PlannedRequest] = field(default_factory=list)
    finished: list[ClientFinished] = field(default_factory=list)
    feed_cpu_s: float = 0.0
    was_stopped: bool = False


class _ProcessHandle:
    def __init__(
        self, on_message: Callable[["_ProcessHandle", Any], None], on_end: Callable[["_ProcessHandle"], None]
    ) -> None:
        command = [sys.executable, "-m", "scripts.load_tester.client.client_process"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=python_environ(os.environ)
        )
        self.reader = MessageReader(parent_decoder, lambda message: on_message(self, message), lambda: on_end(self))
        self.writer = MessageWriter()
        self.is_ready = asyncio.Event()
        self.finished: ClientFinished | None = None
        self.progress: Progress | None = None
        self.num_open = 0  # sessions handed over that have not ended
        self.is_connected = False

    async def connect(self) -> None:
        loop = asyncio.get_running_loop()
        assert self.process.stdin and self.process.stdout
        await loop.connect_write_pipe(lambda: self.writer, self.process.stdin)
        await loop.connect_read_pipe(lambda: self.reader, self.process.stdout)
        self.is_connected = True

    async def close(self) -> None:
        """End the process: by closing its pipe, then by force."""
        if self.is_connected:
            if not self.writer.transport.is_closing():  # the process may have died
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


class ClientPool:
    """Client processes of one run.

    Args:
        content: makes the own headers, and the body, of a request.
    """

    def __init__(
        self,
        setup: Setup,
        num_clients: int,
        content: Callable[[PlannedRequest], tuple[bytes, bytes]],
        on_progress: Callable[[Sequence[Progress]], None] | None = None,
    ) -> None:
        self._setup = setup
        self._num_clients = num_clients
        self._content = content
        self._on_progress = on_progress
        self._handles: list[_ProcessHandle] = []
        self._result = LoadResult()
        self._all_ended = asyncio.Event()
        self._some_ended = asyncio.Event()
        self._failure = ""
        self._is_closing = False
        self._last_turns: set[int] = set()  # indices of requests in flight that end their session

    async def start(self) -> None:
        """Start the processes, which import while the plan is made. ``close`` ends them, after a failure too.

        Raises ClientFailed: the system cannot start that many.
        """
        await self._start(self._num_clients)

    async def grow(self, num_clients: int) -> None:
        """Start more processes, up to this number; only before ``run``, and in an open loop."""
        assert not self._setup.slots
        await self._start(num_clients - len(self._handles))

    async def _start(self, count: int) -> None:
        begin = len(self._handles)
        # The processes inherit the mask: Ctrl-C reaches the whole group, and would end them while they still import.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        try:
            for _ in range(count):
                self._handles.append(_ProcessHandle(self._on_message, self._on_end))
        except OSError as error:
            raise ClientFailed(f"a client process cannot be started: {error.strerror}; lower --clients") from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number, handle in enumerate(self._handles[begin:], begin):
            await handle.connect()
            slots = self._setup.slots // self._num_clients + (number < self._setup.slots % self._num_clients)
            reports = self._on_progress is not None
            handle.writer.send(msgspec.structs.replace(self._setup, slots=slots, reports_progress=reports))

    async def run(self, sessions: Iterable[Sequence[PlannedRequest]]) -> LoadResult:
        """Send all sessions; return when everything has ended. Raises ClientFailed: a process died."""
        cpu_s = time.process_time()
        feeding = asyncio.create_task(self._feed(iter(sessions)))
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
        result = self._result
        result.finished = [handle.finished for handle in self._handles if handle.finished]
        result.ended_at = time.monotonic()
        result.start_at = result.start_at or result.ended_at  # stopped before the clock was started
        result.feed_cpu_s = time.process_time() - cpu_s
        return result

    # ---- feeding ----------------------------------------------------------------------------------------------------

    async def _feed(self, sessions: Iterable[Sequence[PlannedRequest]]) -> None:
        """Hand sessions out to the processes; start the clock once they have enough to begin with."""
        await self._until_ready()
        began_at, has_started, num_bytes = time.monotonic(), False, 0
        for number, session in enumerate(sessions):
            handle = self._handle_for(number)
            if not has_started and self._can_start(number, session[0].at, began_at):
                has_started = await self._start_clock()
            if has_started:
                await self._until_near(session[0].at)
                await self._until_short_of_work(handle)
                await handle.writer.room()
                if self._is_over():
                    break
            handle.num_open += 1
            if self._setup.slots:
                self._last_turns.add(session[-1].index)
            for planned in session:
                self._result.planned.append(planned)
                request = self._message_for(planned)
                num_bytes += len(request.body)
                handle.writer.send(request)
                if num_bytes > MAX_BYTES_AT_ONCE:  # a long session: a process reads all of it only after the start
                    has_started = has_started or await self._start_clock()
                    await handle.writer.drain()
                    num_bytes = 0
            if number % 16 == 15:
                await asyncio.sleep(0)
        if not has_started:
            await self._start_clock()
        for handle in self._handles:
            handle.writer.send(EndOfRequests())

    async def _until_ready(self) -> None:
        for handle in self._handles:
            try:
                await asyncio.wait_for(handle.is_ready.wait(), READY_TIMEOUT_S)
            except TimeoutError:
                raise ClientFailed(f"a client process was not ready within {READY_TIMEOUT_S:g} s") from None

    def _is_over(self) -> bool:
        stop_s = self._setup.stop_after_s
        return self._result.was_stopped or (0 < stop_s < time.monotonic() - self._result.start_at)

    def _message_for(self, planned: PlannedRequest) -> SendRequest:
        headers, body = self._content(planned)
        return SendRequest(
            planned.index, planned.at, planned.session, planned.think_s, planned.turns_left, headers, body
        )

    def _can_start(self, number: int, at: float, began_at: float) -> bool:
        """Whether a few seconds of work, or as much as time allows, have been handed out."""
        if time.monotonic() - began_at > MAX_FEED_BEFORE_START_S:
            return True
        return number >= self._max_open() * len(self._handles) if self._setup.slots else at > LOOKAHEAD_S

    def _handle_for(self, number: int) -> _ProcessHandle:
        """Processes in turn; in a closed loop the least loaded one, since some responses are slow."""
        if not self._setup.slots:
            return self._handles[number % len(self._handles)]
        return min(self._handles, key=lambda handle: handle.num_open)

    def _max_open(self) -> int:
        """Sessions that each process of a closed loop has at hand."""
        return 4 * self._setup.slots // len(self._handles) + 64

    async def _until_short_of_work(self, handle: _ProcessHandle) -> None:
        """In a closed loop, wait until a process will soon have nothing to send."""
        while self._setup.slots and handle.num_open >= self._max_open() and not self._is_over():
            self._some_ended.clear()
            stop_s = self._setup.stop_after_s
            left_s = self._result.start_at + stop_s - time.monotonic() if stop_s else None
            with suppress(TimeoutError):
                await asyncio.wait_for(self._some_ended.wait(), left_s)

    async def _until_near(self, at: float) -> None:
        """In an open loop, wait until a request is due soon, so that making bodies does not take the server's cores."""
        if not self._setup.slots:
            while (wait_s := self._result.start_at + at - LOOKAHEAD_S - time.monotonic()) > 0:
                await asyncio.sleep(min(wait_s + FEED_EVERY_S, 2 * FEED_EVERY_S))
                if self._result.was_stopped:
                    return

    async def _start_clock(self) -> bool:
        for handle in self._handles:
            await handle.writer.drain()
        self._result.start_at = time.monotonic() + HEAD_START_S
        for handle in self._handles:
            handle.writer.send(StartClock(self._result.start_at))
        return True

    # ---- ending -----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """End the processes."""
        self._is_closing = True
        await asyncio.gather(*(handle.close() for handle in self._handles))

    def stop(self) -> None:
        """End the run now; what has been received is kept."""
        if self._result.was_stopped:
            return
        self._result.was_stopped = True
        self._some_ended.set()
        for handle in self._handles:
            if not handle.finished:
                handle.writer.send(Stop())
        asyncio.get_running_loop().call_later(GRACE_S, self._all_ended.set)

    def _on_message(self, handle: _ProcessHandle, message: Any) -> None:
        if isinstance(message, RequestsDone):
            self._result.dones += message.ended
            ended = self._last_turns & {done.index for done in message.ended}
            handle.num_open -= len(ended)
            self._last_turns -= ended
            self._some_ended.set()
        elif isinstance(message, Progress):
            handle.progress = message
            progress = [other.progress for other in self._handles if other.progress]
            if self._on_progress and len(progress) == len(self._handles):
                self._on_progress(progress)
        elif isinstance(message, ClientReady):
            handle.is_ready.set()
        elif isinstance(message, ClientFinished):
            handle.finished = message
            if all(other.finished for other in self._handles):
                self._all_ended.set()

    def _on_end(self, handle: _ProcessHandle) -> None:
        if handle.finished or self._is_closing:
            return
        self._failure = f"a client process ended early (status {handle.process.poll()})"
        self._all_ended.set()


def resolve_host(host: str, port: int) -> str:
    """Resolve a host once, so that no request waits for it; IPv4 first, since servers often listen on it alone.

    Raises OSError: the host has no address.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return str(found[0][4][0])


def num_clients_for(requests_per_s: float, events_per_s: float, slots: int) -> int:
    """Number of client processes for a load: one carries 8,000 events/s, 500 requests/s or 1,000 slots with ease."""
    needed = max(events_per_s / 8000, requests_per_s / 500, slots / 1000)
    return max(1, min(math.ceil(min(needed, 16)), os.cpu_count() or 1, 16))


def peak_load(plan: Sequence[PlannedRequest]) -> tuple[float, float]:
    """Requests/s and output tokens/s of an open loop, in the ten seconds with the most."""
    if not plan:
        return 0.0, 0.0
    at = np.array([planned.at for planned in plan])
    length_s = min(10.0, max(1.0, float(at[-1])))
    _, window = np.unique(at // length_s, return_inverse=True)
    tokens = np.bincount(window, weights=[planned.num_output for planned in plan])
    return float(np.bincount(window).max()) / length_s, float(tokens.max()) / length_s
