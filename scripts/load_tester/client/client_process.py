"""A client process: reads requests from standard input, sends them on time, writes the results to standard output.

``ClientPool`` starts it. It imports little, so that the first request goes out soon, and collects no garbage while it
runs, since a pause would look like the server's.
"""

import asyncio
import gc
import os
import resource
import signal
import sys
import time
from contextlib import suppress
from typing import Any

import uvloop

from scripts.load_tester.client.http_client import HttpClient
from scripts.load_tester.client.ipc import (
    ClientFinished,
    ClientReady,
    EndOfRequests,
    MessageReader,
    MessageWriter,
    RequestDone,
    RequestsDone,
    SendRequest,
    Setup,
    StartClock,
    Stop,
    client_decoder,
)

PROGRESS_S = 0.25
REPORT_AFTER_S = 0.25
REPORT_AFTER_BYTES = 1 << 20
REPORT_AFTER_MORE = 16  # closed loop: results beyond the number of slots, far fewer than the requests at hand
NICENESS = -10
MAX_BYTES_WAITING = 256 << 20
RESUME_S = 0.05


class ClientProcess:
    """Connects the pipes to the parent process with a ``HttpClient``."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self._client: HttpClient | None = None
        self._reader = MessageReader(client_decoder, self._on_message, self._over.set)
        self._writer = MessageWriter()
        self._began_at = self._began_cpu_s = 0.0
        self._dones: list[RequestDone] = []
        self._num_bytes = 0
        self._report_after_count = float("inf")
        self._reporting: asyncio.TimerHandle | None = None
        self._is_paused = self._is_finished = self._reports_progress = False

    async def run(self) -> None:
        await self._loop.connect_write_pipe(lambda: self._writer, os.fdopen(1, "wb"))
        await self._loop.connect_read_pipe(lambda: self._reader, os.fdopen(0, "rb"))
        await self._over.wait()

    def _on_message(self, message: Any) -> None:
        client = self._client
        if isinstance(message, Setup):
            self._client = HttpClient(message, self._on_done, self._finish)
            self._reports_progress = message.reports_progress
            if message.slots:
                self._report_after_count = message.slots + REPORT_AFTER_MORE
            self._writer.send(ClientReady())
        elif client is None:
            raise AssertionError("Setup comes first")
        elif isinstance(message, SendRequest):
            client.add(message)
            # Never pause before the start: StartClock comes through the same pipe.
            if client.bytes_waiting > MAX_BYTES_WAITING and not self._is_paused and self._began_at:
                self._is_paused = True
                self._reader.transport.pause_reading()
                self._loop.call_later(RESUME_S, self._resume)
        elif isinstance(message, EndOfRequests):
            client.end_of_requests()
        elif isinstance(message, StartClock):
            self._began_at, self._began_cpu_s = time.monotonic(), time.process_time()
            client.start(message.start_at)
            if self._reports_progress:
                self._loop.call_later(PROGRESS_S, self._report_progress)
        elif isinstance(message, Stop):
            client.stop()
            self._finish()

    def _on_done(self, done: RequestDone) -> None:
        """Collect results for a moment: a message for each would cost more than the requests themselves."""
        self._dones.append(done)
        self._num_bytes += len(done.raw)
        if self._num_bytes >= REPORT_AFTER_BYTES or len(self._dones) >= self._report_after_count:
            self._report_dones()
        elif self._reporting is None:
            self._reporting = self._loop.call_later(REPORT_AFTER_S, self._report_dones)

    def _report_dones(self) -> None:
        if self._reporting:
            self._reporting.cancel()
            self._reporting = None
        if self._dones:
            self._writer.send(RequestsDone(self._dones))
            self._dones, self._num_bytes = [], 0

    def _resume(self) -> None:
        """Read on once half of the waiting bytes have been sent; no event tells when that is."""
        if self._client and self._client.bytes_waiting < MAX_BYTES_WAITING // 2:
            self._is_paused = False
            self._reader.transport.resume_reading()
        elif not self._is_finished:
            self._loop.call_later(RESUME_S, self._resume)

    def _report_progress(self) -> None:
        if self._client and not self._is_finished:
            self._writer.send(self._client.progress())
            self._loop.call_later(PROGRESS_S, self._report_progress)

    def _finish(self) -> None:
        client = self._client
        if self._is_finished or client is None:
            return
        self._is_finished = True
        client.close()
        self._report_dones()
        cpu_s, wall_s = time.process_time() - self._began_cpu_s, time.monotonic() - self._began_at
        self._writer.send(ClientFinished(cpu_s, wall_s, list(client.lags), client.num_connections))
        self._writer.close()


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole process group; the parent decides what to do
        signal.signal(number, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with suppress(OSError):  # where allowed: a server on the same cores must not delay the clock readings
        os.nice(NICENESS)
    gc.freeze()
    gc.disable()
    uvloop.run(_run())


async def _run() -> None:
    await ClientProcess().run()


if __name__ == "__main__":
    main()
    sys.exit(0)
