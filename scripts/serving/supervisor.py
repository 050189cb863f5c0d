"""Starts child processes, restarts those that die, and stops them all.

The kernel sends each child SIGKILL when this process dies, so nothing outlives a ``kill -9``. Output of a child is
copied line by line, with its name in front. A child that ends with status 2 refuses its configuration. A restart would
not help, so this ends everything unless the service has been ready before.
"""

import asyncio
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field

from common.errors import BatonError
from common.system.exit_status import how_ended
from scripts.serving.bound_process import bound_command
from scripts.serving.output import Output

REFUSED = 2  # exit status of a process that refuses its configuration
MAX_EARLY_DEATHS = 3
FIRST_DELAY_S, LAST_DELAY_S, STEADY_S = 0.2, 30.0, 60.0
STOP_S = 3.5
LAST_LINES_S = 1.0


class ChildFailed(BatonError):
    """A child keeps dying or refuses its configuration before the service has been ready.

    Attributes:
        is_refusal: it refuses its configuration.
    """

    def __init__(self, message: str, *, is_refusal: bool) -> None:
        super().__init__(message)
        self.is_refusal = is_refusal


@dataclass(slots=True)
class Child:
    """One process to keep running.

    Attributes:
        name: shown in front of its log lines.
        cpus: the CPUs that it is pinned to; empty for any.
        fds: descriptors that it inherits under their numbers.
    """

    name: str
    argv: list[str]
    env: dict[str, str]
    cpus: tuple[int, ...] = ()
    fds: tuple[int, ...] = ()
    process: asyncio.subprocess.Process | None = field(default=None, init=False)
    num_deaths: int = field(default=0, init=False)


class Supervisor:
    """Keeps children running until ``stop``.

    Args:
        drain_timeout_s: how long children go on serving after SIGTERM; they have ``STOP_S`` more to end.
    """

    def __init__(self, children: list[Child], output: Output, *, drain_timeout_s: float = 0.0) -> None:
        self.children = children
        self._stop_s = drain_timeout_s + STOP_S
        self._output = output
        self._has_been_ready = False
        self._is_stopping = False

    async def run(self) -> None:
        """Start all children and keep them running until cancelled.

        Raises ChildFailed: a child cannot be kept running and the service has never been ready.
        """
        async with asyncio.TaskGroup() as group:
            for child in self.children:
                group.create_task(self._keep(child))

    def mark_ready(self) -> None:
        """From now on, restart every child that dies."""
        self._has_been_ready = True

    async def _keep(self, child: Child) -> None:
        delay = FIRST_DELAY_S
        while not self._is_stopping:
            began = time.monotonic()
            try:
                status = await self._run_once(child)
                ended = how_ended(status)
            except (OSError, subprocess.SubprocessError) as error:  # no process, descriptor or memory is left, perhaps
                status, ended = 1, f"cannot be started ({error})"
            if self._is_stopping:
                return
            child.num_deaths += 1
            if not self._has_been_ready and (status == REFUSED or child.num_deaths >= MAX_EARLY_DEATHS):
                raise ChildFailed(f"{child.name} {ended}; see its output above", is_refusal=status == REFUSED)
            if time.monotonic() - began > STEADY_S:
                delay = FIRST_DELAY_S
            self._output.say(f"{child.name} {ended}; starting it again in {delay:g} s")
            await asyncio.sleep(delay)
            delay = min(2 * delay, LAST_DELAY_S)

    async def _run_once(self, child: Child) -> int:
        """Start a child, copy its output, and return its exit status once it has ended.

        What it has started itself may outlive it and hold its output open. Only what comes soon is waited for then.
        """
        read, write = os.pipe()
        stream = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(read, "rb", 0)
        )
        try:
            try:
                child.process = await _spawn(child, write)
            finally:
                os.close(write)
            relay = asyncio.create_task(self._relay(child.name, stream))
            try:
                status = await child.process.wait()
                await asyncio.wait({relay}, timeout=LAST_LINES_S)
            finally:
                relay.cancel()
            return status
        finally:
            transport.close()

    async def _relay(self, name: str, stream: asyncio.StreamReader) -> None:
        """Copy a child's output, whole lines at a time, until it closes."""
        rest = b""
        while chunk := await stream.read(65536):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._output.relay(name, line.decode(errors="replace"))
        if rest:
            self._output.relay(name, rest.decode(errors="replace"))

    async def stop(self) -> None:
        """Stop all children with SIGTERM, and at last with SIGKILL; return when all have ended."""
        self._is_stopping = True
        self.signal_all(signal.SIGTERM)
        running = [child.process.wait() for child in self.children if child.process is not None]
        if not running:
            return
        try:
            await asyncio.wait_for(asyncio.gather(*running), self._stop_s)
        except TimeoutError:
            late = [child.name for child in self.children if child.process and child.process.returncode is None]
            self._output.say(f"{', '.join(late)} did not stop in {self._stop_s:g} s; killing")
            self.signal_all(signal.SIGKILL)
            await asyncio.gather(*(child.process.wait() for child in self.children if child.process))

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to every child, to nodes before gateways: a node that is stopping expects its gateway to go."""
        for child in reversed(self.children):
            if child.process is not None and child.process.returncode is None:
                child.process.send_signal(number)


async def _spawn(child: Child, output: int) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *bound_command(child.argv, cpus=child.cpus),
        env=child.env,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,  # not a pipe of asyncio, which would count the process as running until all ends are closed
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C in a terminal reaches the supervisor alone, which drains children by SIGTERM
        pass_fds=child.fds,
    )
