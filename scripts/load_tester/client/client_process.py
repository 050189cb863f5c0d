"""A client process: reads asks from standard input, sends them in time, writes what came back to standard output.

``python -m scripts.load_tester.client.client_process [LIBRARY]`` is started by
``scripts/load_tester/client/client_pool.py``; with the library of ``courier.c``, it
sends and receives in C. It imports next to nothing, so that the first request goes out soon, and collects no garbage
while it runs, since a pause would look like the server's.
"""

import asyncio
import gc
import os
import resource
import signal
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from scripts.load_tester.client.http_client import Client
from scripts.load_tester.client.ipc import (
    Ask,
    Done,
    Dones,
    EndOfAsks,
    Finished,
    Frame,
    FrameReader,
    FrameWriter,
    Go,
    Halt,
    Ready,
    Setup,
    to_client,
)

if TYPE_CHECKING:
    from scripts.load_tester.client.courier import Courier

TICK_S = 0.25
SEND_AFTER_S = 0.25
SEND_AFTER_UNWATCHED_S, SEND_AFTER_SLOTS_S, SEND_AFTER_MORE = 4.0, 1.0, 16
SEND_AFTER_BYTES = 1 << 20
NICENESS = -10
MAX_BYTES_WAITING = 256 << 20
RESUME_S = 0.05


class Shard:
    """Glue between the pipes and the client.

    Args:
        courier: see ``Client``.
    """

    def __init__(self, courier: "Courier | None") -> None:
        self._courier = courier
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self._client: Client | None = None
        self._reader = FrameReader(to_client, self._on_frame, self._on_end)
        self._writer = FrameWriter()
        self._began_at = self._began_cpu_s = 0.0
        self._dones: list[Done] = []
        self._num_bytes = 0
        self._send_after_s = SEND_AFTER_S
        self._send_after_count = float("inf")
        self._sending: asyncio.TimerHandle | None = None
        self._is_paused = self._is_finished = self._has_ticks = False

    async def run(self) -> None:
        await self._loop.connect_write_pipe(lambda: self._writer, os.fdopen(1, "wb"))
        await self._loop.connect_read_pipe(lambda: self._reader, os.fdopen(0, "rb"))
        await self._over.wait()

    def _on_frame(self, frame: Any) -> None:
        client = self._client
        if isinstance(frame, Setup):
            self._client = Client(frame, self._on_done, self._finish, self._courier)
            self._has_ticks = frame.has_ticks
            if not frame.has_ticks:  # nobody waits for what has ended but for who hands out more
                self._send_after_s = SEND_AFTER_SLOTS_S if frame.slots else SEND_AFTER_UNWATCHED_S
            if frame.slots:  # of several times as many that are at hand
                self._send_after_count = frame.slots + SEND_AFTER_MORE
            self._send(Ready())
        elif client is None:
            raise AssertionError("Setup comes first")
        elif isinstance(frame, Ask):
            client.add(frame)
            # Not before the start: then nothing would ever be sent, since that comes by the same pipe.
            if client.bytes_waiting > MAX_BYTES_WAITING and not self._is_paused and self._began_at:
                self._is_paused = True
                self._reader.transport.pause_reading()
                self._loop.call_later(RESUME_S, self._resume)
        elif isinstance(frame, EndOfAsks):
            client.end_of_asks()
        elif isinstance(frame, Go):
            self._began_at, self._began_cpu_s = time.monotonic(), time.process_time()
            client.go(frame.start_at)
            if self._has_ticks:
                self._loop.call_later(TICK_S, self._tick)
        elif isinstance(frame, Halt):
            client.halt()
            self._finish()

    def _on_done(self, done: Done) -> None:
        """Keep it a moment: a frame for each would cost more than the requests themselves."""
        self._dones.append(done)
        self._num_bytes += len(done.raw)
        if self._num_bytes >= SEND_AFTER_BYTES or len(self._dones) >= self._send_after_count:
            self._send_dones()
        elif self._sending is None:
            self._sending = self._loop.call_later(self._send_after_s, self._send_dones)

    def _send_dones(self) -> None:
        if self._sending:
            self._sending.cancel()
            self._sending = None
        if self._dones:
            self._send(Dones(self._dones))
            self._dones, self._num_bytes = [], 0

    def _resume(self) -> None:
        """Read on once half of what waited has been sent; nothing else would say when that is."""
        if self._client and self._client.bytes_waiting < MAX_BYTES_WAITING // 2:
            self._is_paused = False
            self._reader.transport.resume_reading()
        elif not self._is_finished:
            self._loop.call_later(RESUME_S, self._resume)

    def _tick(self) -> None:
        if self._client and not self._is_finished:
            self._send(self._client.tick())
            self._loop.call_later(TICK_S, self._tick)

    def _finish(self) -> None:
        client = self._client
        if self._is_finished or client is None:
            return
        self._is_finished = True
        client.close()
        self._send_dones()
        cpu_s, wall_s = time.process_time() - self._began_cpu_s, time.monotonic() - self._began_at
        self._send(Finished(cpu_s, wall_s, list(client.lags), client.num_connections, client.num_unsent))
        self._writer.close()

    def _send(self, frame: Frame) -> None:
        self._writer.send(frame)

    def _on_end(self) -> None:
        self._over.set()


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # which come to the whole group: the parent says what to do then
        signal.signal(number, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with suppress(OSError):  # where it may: a server on the same cores must not make the clock read late
        os.nice(NICENESS)
    gc.freeze()
    gc.disable()
    if len(sys.argv) > 1:
        from scripts.load_tester.client.courier import Courier, CourierSelector

        courier = Courier(sys.argv[1])
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(CourierSelector(courier))) as runner:
            runner.run(_run(courier))
        return
    try:
        import uvloop

        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    except ImportError:
        runner = asyncio.Runner()
    with runner:
        runner.run(_run(None))


async def _run(courier: "Courier | None") -> None:
    await Shard(courier).run()


if __name__ == "__main__":
    main()
    sys.exit(0)
