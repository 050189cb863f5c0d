"""Runs ``serve``, or another server, for the length of a ``with`` block, and loads it. For benchmarks."""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from common.errors import BatonError
from common.system.python_environ import python_environ
from scripts.benchmarks.harness.cpu_contention import CpuContention
from scripts.load_tester.config import LoadtestConfig
from scripts.load_tester.reporting.report import Report
from scripts.load_tester.run import run_load
from scripts.serving.bound_process import bound_command

STOP_S = 20.0
MAX_OTHERS = 0.15  # cores used by other processes above which figures are invalid


class ServiceStartError(BatonError):
    """``serve`` ended or timed out before it was ready; the message contains its output."""


@contextlib.contextmanager
def running_service(flags: Sequence[str], *, timeout_s: float = 300.0) -> Iterator[str]:
    """Run ``serve`` on a free port with these flags; yields its URL once a request has succeeded.

    The service inherits the CPU affinity of this process, and ends with the block or with this process.

    Raises ServiceStartError: the service did not become ready.
    """
    command = [sys.executable, "-m", "scripts.cli", "serve", "--port=0", "--log-level=warning", *flags]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    with tempfile.TemporaryFile("w+") as log:
        with running_process(command, python_environ(environ), output=subprocess.PIPE, log=log) as process:
            yield _ready(process, log, timeout_s)


@contextlib.contextmanager
def running_process(
    command: Sequence[str | Path], environ: Mapping[str, str], *, output: int | IO[str], log: IO[str]
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a server, which writes errors to ``log``; it ends with the block or with this process."""
    bound = bound_command(map(str, command))
    process = subprocess.Popen(bound, stdout=output, stderr=log, stdin=subprocess.DEVNULL, env=environ, process_group=0)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # children of other engines may outlive it
        if process.stdout:
            process.stdout.close()


def measured_load(config: LoadtestConfig, *, salt: int = 0) -> tuple[Report, float]:
    """Run the load tester; return its report and the cores that other processes used meanwhile.

    Raises KeyboardInterrupt: the run was stopped.
    """
    contention = CpuContention(os.sched_getaffinity(0))
    report = run_load(config, salt=salt)
    if report.was_stopped:
        raise KeyboardInterrupt  # the load tester has handled the signal
    return report, contention.cores()


def _ready(process: "subprocess.Popen[bytes]", log: IO[str], timeout_s: float) -> str:
    assert process.stdout
    ends_at = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while (left_s := ends_at - time.monotonic()) > 0:
            if not selector.select(left_s):
                break
            line = process.stdout.readline()
            if line.startswith(b"ready "):
                return line.split()[1].decode()
            if not line:
                break
    log.seek(0)
    raise ServiceStartError(f"the service was not ready after {timeout_s:g} s or ended:\n{log.read()[-3000:]}")
