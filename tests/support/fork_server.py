"""Processes that start in milliseconds: one that has imported what they need forks them.

    fork_server.py DESCRIPTOR

The interpreter, torch and NIXL take two seconds of CPU to start; a fork of a process that has them takes next to
nothing, and is a process of its own like any other. The fork server has one thread when it forks, and no agent, pool or
socket but the one through which it is told what to start.
"""

import contextlib
import ctypes
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

TESTS = Path(__file__).resolve().parents[1]
_PR_SET_PDEATHSIG = 1


class ForkServer:
    """The tests' end: starts the process, and ends it with all that it forked.

    Args:
        variables: of its environment, for what is read when torch is loaded.
    """

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        self._socket, theirs = socket.socketpair()
        self._lock = threading.Lock()
        environment = {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]), "OMP_NUM_THREADS": "1"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(TESTS / "support" / "fork_server.py"), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **environment, "OPENBLAS_NUM_THREADS": "1", **(variables or {})},
            )

    def start(self, *argv: str, **environment: str) -> "TransportProcess":
        """A process that runs ``transport_process`` with these arguments, and is talked with."""
        (their_in, our_in), (our_out, their_out) = os.pipe(), os.pipe()
        pid = self._ask({"argv": argv, "environment": environment}, [their_in, their_out])
        os.close(their_in)
        os.close(their_out)
        return TransportProcess(self, pid, os.fdopen(our_in, "w"), os.fdopen(our_out))

    def run(self, module: str, argv: Sequence[str], log: Path, environment: Mapping[str, str]) -> "ForkedProcess":
        """A process that does what ``python -m MODULE`` does with these arguments and this environment alone."""
        with open(os.devnull) as nothing, log.open("ab") as output:
            files = [nothing.fileno(), output.fileno(), output.fileno()]
            return ForkedProcess(
                self, self._ask({"module": module, "argv": argv, "environment": dict(environment)}, files)
            )

    def status(self, pid: int) -> int:
        """Exit status of one that has ended, as ``subprocess`` tells it. Once for each."""
        return self._ask({"ended": pid}, [])

    def _ask(self, order: dict[str, Any], descriptors: list[int]) -> int:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(order).encode()], descriptors)
            ready, _, _ = select.select([self._socket], [], [], 60)
            answer = self._socket.recv(64) if ready else b""
        assert answer, "the fork server does not answer"
        return int(answer)

    def close(self) -> None:
        self._socket.close()
        assert self._process.wait(60) == 0


class ForkedProcess:
    """As much of ``subprocess.Popen`` as tests need."""

    def __init__(self, fork_server: ForkServer, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._fork_server = fork_server

    def send_signal(self, number: signal.Signals) -> None:
        if self.returncode is None:  # until then even a dead one keeps its number
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout_s: float = 60.0) -> int:
        status = self._ended(timeout_s)
        assert status is not None, f"process {self.pid} does not end"
        return status

    def poll(self) -> int | None:
        return self._ended(0.0)

    def _ended(self, timeout_s: float) -> int | None:
        if self.returncode is None:
            pidfd = os.pidfd_open(self.pid)
            try:
                ready, _, _ = select.select([pidfd], [], [], timeout_s)
            finally:
                os.close(pidfd)
            if ready:
                self.returncode = self._fork_server.status(self.pid)
        return self.returncode


class TransportProcess(ForkedProcess):
    """One with whom tests talk."""

    def __init__(self, fork_server: ForkServer, pid: int, stdin: TextIO, stdout: TextIO) -> None:
        super().__init__(fork_server, pid)
        self.stdin, self.stdout = stdin, stdout


def main() -> None:
    """The fork server's own process."""
    os.environ["NIXL_LOG_LEVEL"] = "WARN"
    import support.transport_process as transport_process

    with contextlib.suppress(ImportError):  # whoever wants it will say what is wrong with it
        import nixl  # noqa: F401
    orders = socket.socket(fileno=int(sys.argv[1]))
    while True:
        data, descriptors, _, _ = socket.recv_fds(orders, 1 << 20, 3)
        if not data:
            return
        order: dict[str, Any] = json.loads(data)
        if "ended" in order:
            _, status = os.waitpid(order["ended"], 0)
            orders.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        if "module" in order:
            import common.engine.executor
            import common.node.worker_main  # noqa: F401
        assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack the other threads"
        pid = os.fork()
        if not pid:
            orders.close()
            if "module" in order:
                _become(order, descriptors)
            _live(transport_process, order, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        orders.send(str(pid).encode())


def _live(program: Any, order: dict[str, Any], descriptors: list[int]) -> None:
    """In the forked process: its ``main`` with its own input, output, arguments and environment, to the end."""
    status = 1
    try:
        _settle(descriptors)
        os.environ.update(order["environment"])
        sys.argv[1:] = order["argv"]
        program.main()
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        os._exit(status)


def _become(order: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """In the forked process: go on as if the interpreter had just been started with this module."""
    _settle(descriptors)
    os.chdir(TESTS.parent)
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
    sys.argv[1:] = order["argv"]
    runpy.run_module(order["module"], run_name="__main__", alter_sys=True)
    sys.exit()


def _settle(descriptors: list[int]) -> None:
    """Its own standard files, and an end with the fork server's."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)


if __name__ == "__main__":
    main()
