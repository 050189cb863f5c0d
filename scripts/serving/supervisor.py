"""Child processes: started, watched, started again when they die, and all gone at the end.

Each child gets SIGKILL from the kernel when this process dies, however it dies, so nothing outlives a ``kill -9``.
Output of a child appears here line by line behind its name. A child that ends with status 2 refuses its configuration:
starting it again would not help, so before the service has once been ready that ends everything.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import time
from dataclasses import dataclass, field

from common.errors import BatonError

PR_SET_PDEATHSIG = 1
REFUSED = 2  # exit status of a process whose configuration cannot be
MAX_EARLY_DEATHS = 3
FIRST_DELAY_S, LAST_DELAY_S, STEADY_S = 0.2, 30.0, 60.0
STOP_S = 3.5

_libc = ctypes.CDLL(None, use_errno=True)


class ChildFailed(BatonError):
    """A child keeps dying, or refuses its configuration, before the service was ready."""


@dataclass(slots=True)
class Child:
    """One process to keep alive.

    Attributes:
        name: shown in front of its log lines.
        argv, env: of the process.
        cpus: it is pinned to these; empty for none in particular.
    """

    name: str
    argv: list[str]
    env: dict[str, str]
    cpus: tuple[int, ...] = ()
    process: asyncio.subprocess.Process | None = field(default=None, init=False)
    num_deaths: int = field(default=0, init=False)


def say(line: str) -> None:
    """One line on standard error; lost if nobody reads that any more."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


class Supervisor:
    """Keeps children alive until told to stop."""

    def __init__(self, children: list[Child]) -> None:
        self.children = children
        self.has_been_ready = False
        self._is_stopping = False

    async def run(self) -> None:
        """Start all children and keep them running; returns only by cancellation.

        Raises:
            ChildFailed: one of them cannot be kept running, and the service was never ready.
        """
        async with asyncio.TaskGroup() as group:
            for child in self.children:
                group.create_task(self._keep(child))

    async def _keep(self, child: Child) -> None:
        delay = FIRST_DELAY_S
        while not self._is_stopping:
            began = time.monotonic()
            child.process = await _spawn(child)
            assert child.process.stdout is not None
            await _relay(child.name, child.process.stdout)
            status = await child.process.wait()
            if self._is_stopping:
                return
            child.num_deaths += 1
            ended = f"killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
            if not self.has_been_ready and (status == REFUSED or child.num_deaths >= MAX_EARLY_DEATHS):
                raise ChildFailed(f"{child.name} {ended}; what it says is above")
            if time.monotonic() - began > STEADY_S:
                delay = FIRST_DELAY_S
            say(f"serve: {child.name} {ended}; starting it again in {delay:g} s")
            await asyncio.sleep(delay)
            delay = min(2 * delay, LAST_DELAY_S)

    async def stop(self) -> None:
        """SIGTERM to all, SIGKILL to those that do not heed it in time; returns when all are gone."""
        self._is_stopping = True
        self.signal_all(signal.SIGTERM)
        running = [child.process.wait() for child in self.children if child.process is not None]
        if not running:
            return
        try:
            await asyncio.wait_for(asyncio.gather(*running), STOP_S)
        except TimeoutError:
            late = [child.name for child in self.children if child.process and child.process.returncode is None]
            say(f"serve: {', '.join(late)} did not stop in {STOP_S:g} s and will be killed")
            self.signal_all(signal.SIGKILL)
            await asyncio.gather(*(child.process.wait() for child in self.children if child.process))

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to every child that still runs."""
        for child in self.children:
            if child.process is not None and child.process.returncode is None:
                child.process.send_signal(number)


def bind_to(parent: int, number: signal.Signals) -> None:
    """In a new child, before it becomes another program: it gets this signal when ``parent`` dies.

    Ctrl-C in a terminal reaches all of its processes. A child leaves it to its parent until it has a handler of its
    own, since one that still imports would end with a traceback.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _libc.prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


async def _spawn(child: Child) -> asyncio.subprocess.Process:
    parent = os.getpid()

    def in_child() -> None:
        bind_to(parent, signal.SIGKILL)
        if child.cpus:
            os.sched_setaffinity(0, child.cpus)

    return await asyncio.create_subprocess_exec(
        *child.argv,
        env=child.env,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        preexec_fn=in_child,
    )


async def _relay(name: str, stream: asyncio.StreamReader) -> None:
    """Copy a child's output, whole lines at a time, until it closes."""
    rest = b""
    while chunk := await stream.read(65536):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            say(f"{name} | {line.decode(errors='replace')}")
    if rest:
        say(f"{name} | {rest.decode(errors='replace')}")
