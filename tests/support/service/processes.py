"""Starts processes that never outlive the test run, and finds the ports, sockets and files that they hold.

The kernel kills every started process when the test process ends, however it ends.
"""

import contextlib
import ctypes
import os
import random
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
PR_SET_PDEATHSIG = 1
#: Processes that run tests at the same time, at most; see ``scripts/test``.
MAX_WORKERS = 4

_libc = ctypes.CDLL(None, use_errno=True)
_given: set[int] = set()
#: Below the ports that ``serve`` draws, and below those that the kernel gives to outgoing connections.
_PORTS = range(10_000, 20_000)


def free_port() -> int:
    """Return an unused port that neither an outgoing connection nor ``serve`` takes, never the same one twice.

    Each worker of pytest-xdist draws from ports of its own, since a port is taken some time after it was drawn.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % MAX_WORKERS
    share = len(_PORTS) // MAX_WORKERS
    while True:
        port = _PORTS[worker * share] + random.SystemRandom().randrange(share)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _given:
                _given.add(port)
                return port


def environment() -> dict[str, str]:
    """Return this process's environment without ``BATON_*`` variables and with one compute thread."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    return {**environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}


def _die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def spawn(
    argv: Sequence[str], log: Path, variables: dict[str, str] | None = None, **options: Any
) -> "subprocess.Popen[bytes]":
    """Start a process that appends its output to ``log`` and never outlives this process."""
    with log.open("ab") as output:
        return subprocess.Popen(
            argv, cwd=ROOT, env=environment() | (variables or {}), stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, preexec_fn=_die_with_parent, **options,
        )  # fmt: skip


def flags(options: dict[str, Any]) -> list[str]:
    """Return ``{"page_size": 4}`` as ``--page-size=4``, and True as a flag without a value."""
    return [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in options.items()]


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descendants(pid: int) -> list[int]:
    """Return the process ids of all descendants; processes and threads that end meanwhile have none."""
    found = []
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except FileNotFoundError:
        return found
    for task in tasks:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for child in (task / "children").read_text().split():
                found += [int(child), *descendants(int(child))]
    return found
