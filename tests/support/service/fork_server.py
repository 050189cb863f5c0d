"""Starts processes in milliseconds by forking a process that has already imported torch and NIXL.

    fork_server.py DESCRIPTOR

The interpreter, torch and NIXL take two seconds of CPU to start; a fork takes next to nothing. The fork server has one
thread when it forks, and no agent, pool or socket except the one over which it receives commands.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
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
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TextIO

from common.node.loading.model_loading import SHAPE_CACHE

TESTS = Path(__file__).resolve().parents[2]
#: The first reply comes once torch and the modules are imported.
REPLY_TIMEOUT_S = 180.0
#: What gateways and nodes import.
MODULES = (
    "common.engine.factory",
    "common.node.worker_main",
    "decode_node.factory",
    "gateway.server",
    "gateway.workers.served_models",
    "prefill_node.factory",
)
_PR_SET_PDEATHSIG = 1


class ForkServer:
    """Starts the fork server, and ends it with all processes that it forked."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._lock = threading.Lock()
        environment = {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]), "OMP_NUM_THREADS": "1"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(TESTS / "support" / "service" / "fork_server.py"), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **environment, "OPENBLAS_NUM_THREADS": "1", **SHAPE_CACHE},
            )

    def start(self, *argv: str, **environment: str) -> "TransportProcess":
        """Fork a process that runs ``transport_process`` and return it with pipes for its commands and replies."""
        (their_in, our_in), (our_out, their_out) = os.pipe(), os.pipe()
        pid = self._request({"argv": argv, "environment": environment}, [their_in, their_out])
        os.close(their_in)
        os.close(their_out)
        return TransportProcess(self, pid, os.fdopen(our_in, "w"), os.fdopen(our_out))

    def run(
        self,
        module: str,
        argv: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        *,
        imports: Sequence[str] = (),
    ) -> "ForkedProcess":
        """Fork a process that does the same as ``python -m MODULE`` with these arguments and this environment.

        Args:
            imports: modules that the fork server imports first.
        """
        with open(os.devnull) as nothing, log.open("ab") as output:
            files = [nothing.fileno(), output.fileno(), output.fileno()]
            order = {"module": module, "argv": argv, "environment": dict(environment), "imports": imports}
            return ForkedProcess(self, self._request(order, files))

    def status(self, pid: int) -> int:
        """Return the exit status of an ended process, as ``subprocess`` does; only once for each process."""
        return self._request({"ended": pid}, [])

    def _request(self, order: dict[str, Any], descriptors: list[int]) -> int:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(order).encode()], descriptors)
            ready, _, _ = select.select([self._socket], [], [], REPLY_TIMEOUT_S)
            answer = self._socket.recv(64) if ready else b""
        assert answer, f"the fork server did not reply in {REPLY_TIMEOUT_S:g} s"
        return int(answer)

    def close(self) -> None:
        self._socket.close()
        assert self._process.wait(60) == 0


@cache
def shared_fork_server() -> ForkServer:
    """The fork server of all tests of this process; it ends with the test run."""
    started = ForkServer()
    atexit.register(started.close)
    return started


class ForkedProcess:
    """The part of ``subprocess.Popen`` that tests need."""

    def __init__(self, fork_server: ForkServer, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._fork_server = fork_server

    def send_signal(self, number: signal.Signals) -> None:
        if self.returncode is None:  # until it is reaped, its pid is not reused
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout_s: float = 60.0) -> int:
        status = self._ended(timeout_s)
        assert status is not None, f"process {self.pid} did not end in {timeout_s:g} s"
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
    """A forked process with pipes to its standard input and output."""

    def __init__(self, fork_server: ForkServer, pid: int, stdin: TextIO, stdout: TextIO) -> None:
        super().__init__(fork_server, pid)
        self.stdin, self.stdout = stdin, stdout


def main() -> None:
    """Run the fork server."""
    os.environ["NIXL_LOG_LEVEL"] = "WARN"
    import support.kv.transport_process as transport_process

    with contextlib.suppress(Exception):  # a test that needs it reports the error
        _load_nixl()
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
            for name in (*MODULES, *order["imports"]):
                importlib.import_module(name)
        assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose the other threads"
        gc.freeze()  # a process that collects its garbage when it is ready need not visit, and copy, what is shared
        pid = os.fork()
        if not pid:
            orders.close()
            if "module" in order:
                _run_module(order, descriptors)
            _run_main(transport_process, order, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        orders.send(str(pid).encode())


def _load_nixl() -> None:
    """Load NIXL and UCX, which takes half a second, and make no thread, context or descriptor of theirs."""
    import nixl

    agent = nixl.nixl_agent("fork server", nixl.nixl_agent_config(enable_prog_thread=False, backends=[]))
    agent.get_plugin_params("UCX")


def _run_main(program: Any, order: dict[str, Any], descriptors: list[int]) -> None:
    """In the forked process: runs ``main`` with its own standard files, arguments and environment, then exits."""
    status = 1
    try:
        _adopt_descriptors(descriptors)
        os.environ.update(order["environment"])
        sys.argv[1:] = order["argv"]
        program.main()
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        os._exit(status)


def _run_module(order: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """In the forked process: continues as if the interpreter had just been started with this module."""
    _adopt_descriptors(descriptors)
    os.chdir(TESTS.parent)
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
    sys.argv[1:] = order["argv"]
    runpy.run_module(order["module"], run_name="__main__", alter_sys=True)
    sys.exit()


def _adopt_descriptors(descriptors: list[int]) -> None:
    """Install the standard files; the kernel kills the process when the fork server ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)


if __name__ == "__main__":
    main()
