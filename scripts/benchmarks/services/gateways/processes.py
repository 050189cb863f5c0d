"""Processes of the gateway benchmark: each runs on one core until its block ends."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from common.errors import BatonError
from scripts.serving.bound_process import bound_command

ROOT = Path(__file__).resolve().parents[4]
START_S = 30.0
STOP_S = 10.0


class StartError(BatonError):
    """A gateway ended or timed out before it answered; the message contains its output."""


def split_cores() -> set[int]:
    """Leave the first core to the gateways and keep the others, if any, for this process; return the former."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return set(cores)
    os.sched_setaffinity(0, cores[1:])
    return {cores[0]}


@contextlib.asynccontextmanager
async def pinned_process(words: Sequence[str], cores: set[int]) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a command on these cores; its standard error can be read."""
    process = await asyncio.create_subprocess_exec(
        *bound_command(words, cpus=cores),
        cwd=ROOT,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), STOP_S)
        except TimeoutError:
            process.kill()
            await process.wait()
