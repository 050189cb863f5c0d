"""Processes that start in milliseconds: one that has imported what they need forks them.

    nursery.py DESCRIPTOR

The interpreter, torch and NIXL take 1.4 s of CPU to start; a fork of a process that has them takes next to nothing, and
is a process of its own like any other. The nursery has one thread when it forks, and no agent, pool or socket but the
one through which it is told what to start.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, TextIO

TESTS = Path(__file__).parent
_PR_SET_PDEATHSIG = 1


class Nursery:
    """The tests' end: starts the process on first use, and ends it with all that it forked."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        environment = {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]), "OMP_NUM_THREADS": "1"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(TESTS / "nursery.py"), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **environment, "OPENBLAS_NUM_THREADS": "1"},
            )

    def start(self, *argv: str, **environment: str) -> "Child":
        """A process that runs ``transport_node`` with these arguments."""
        (their_in, our_in), (our_out, their_out) = os.pipe(), os.pipe()
        order = json.dumps({"argv": argv, "environment": environment}).encode()
        socket.send_fds(self._socket, [order], [their_in, their_out])
        os.close(their_in)
        os.close(their_out)
        return Child(self, int(self._answer()), os.fdopen(our_in, "w"), os.fdopen(our_out))

    def status(self, pid: int) -> int:
        """Exit status of one that has ended, as ``subprocess`` tells it. Once for each."""
        self._socket.send(json.dumps({"ended": pid}).encode())
        return int(self._answer())

    def _answer(self) -> bytes:
        ready, _, _ = select.select([self._socket], [], [], 60)
        answer = self._socket.recv(64) if ready else b""
        assert answer, "the nursery does not answer"
        return answer

    def close(self) -> None:
        self._socket.close()
        assert self._process.wait(20) == 0


class Child:
    """As much of ``subprocess.Popen`` as tests need."""

    def __init__(self, nursery: Nursery, pid: int, stdin: TextIO, stdout: TextIO) -> None:
        self.pid = pid
        self.stdin, self.stdout = stdin, stdout
        self.returncode: int | None = None
        self._nursery = nursery

    def send_signal(self, number: signal.Signals) -> None:
        if self.returncode is None:  # until then even a dead one keeps its number
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout_s: float = 60.0) -> int:
        if self.returncode is None:
            pidfd = os.pidfd_open(self.pid)
            try:
                ready, _, _ = select.select([pidfd], [], [], timeout_s)
            finally:
                os.close(pidfd)
            assert ready, f"process {self.pid} does not end"
            self.returncode = self._nursery.status(self.pid)
        return self.returncode


def main() -> None:
    """The nursery's own process."""
    os.environ["NIXL_LOG_LEVEL"] = "WARN"
    import transport_node

    with contextlib.suppress(ImportError):  # whoever wants it will say what is wrong with it
        import nixl  # noqa: F401
    orders = socket.socket(fileno=int(sys.argv[1]))
    while True:
        data, descriptors, _, _ = socket.recv_fds(orders, 65_536, 2)
        if not data:
            return
        order: dict[str, Any] = json.loads(data)
        if "ended" in order:
            _, status = os.waitpid(order["ended"], 0)
            orders.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        pid = os.fork()
        if not pid:
            orders.close()
            _live(transport_node, order, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        orders.send(str(pid).encode())


def _live(program: Any, order: dict[str, Any], descriptors: list[int]) -> None:
    """In the forked process: its ``main`` with its own input, output, arguments and environment, to the end."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.environ.update(order["environment"])
        sys.argv[1:] = order["argv"]
        program.main()
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
