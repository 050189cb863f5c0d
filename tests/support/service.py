"""A whole service as real processes: what the tests from the outside stand on.

The gateway is started by its command line; nodes run theirs in a fork of a process that has torch already, which saves
each two seconds of CPU, unless ``is_forked=False`` says that they are to start from nothing as a user's do.

Its processes may be started in any order, so that nodes come before the gateway, and a gateway may be replaced.
``Client.settled`` is the proof that closes most tests: after a fresh heartbeat of every node all pages are back, none
is quarantined, and no node has found its books out of balance.
"""

import atexit
import contextlib
import http.client
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
from support.fork_server import ForkedProcess, ForkServer
from support.processes import ROOT, environment, flags, free_port, spawn
from support.service_client import HEARTBEAT_S, Client

from common.node.worker_main import SHAPE_CACHE

SMALL_MODEL = ROOT / "scripts" / "models" / "small_model"
START_TIMEOUT_S = 60.0


@cache
def fork_server() -> ForkServer:
    """The one that forks all nodes; it ends with the tests."""
    started = ForkServer(SHAPE_CACHE)
    atexit.register(started.close)
    return started


class Service:
    """A gateway and nodes, each a process of its own.

    Args:
        logs: a folder of this service's own for what its processes say.
        model: folder of the checkpoint.
        prefill, decode: how many nodes of each; they are called prefill-0, decode-0 and so on.
        gateway_options, node_options: further flags; ``only`` adds some for single nodes, by name.
        variables: of the environment.
        is_forked: nodes do not have to load torch.
    """

    def __init__(
        self, logs: Path, model: Path = SMALL_MODEL, *, prefill: int = 1, decode: int = 1,
        gateway_options: dict[str, Any] | None = None, node_options: dict[str, Any] | None = None,
        only: dict[str, dict[str, Any]] | None = None, variables: dict[str, str] | None = None, is_forked: bool = True,
    ) -> None:  # fmt: skip
        logs.mkdir(parents=True, exist_ok=True)
        self.logs = logs
        self.model = model
        self.nodes = [f"prefill-{i}" for i in range(prefill)] + [f"decode-{i}" for i in range(decode)]
        self.port, self.control_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._gateway_options = {"heartbeat_interval": HEARTBEAT_S, **(gateway_options or {})}
        self._node_options = {"dtype": "float32", "threads": 1, "max_total_tokens": 8192, **(node_options or {})}
        self._only = only or {}
        self._variables = variables or {}
        self._is_forked = is_forked
        self.processes: dict[str, subprocess.Popen[bytes] | ForkedProcess] = {}
        self._num_starts = 0

    # ---- start and end ----------------------------------------------------------------------------------------

    def _words(self, name: str) -> list[str]:
        shared = {"model": self.model, "served_model_name": "m", "log_level": "info"}
        if name == "gateway":
            return flags({**shared, "port": self.port, "control_port": self.control_port, **self._gateway_options})
        options = {**shared, "gateway": f"127.0.0.1:{self.control_port}", "name": name, **self._node_options}
        return flags({**options, **self._only.get(name, {})})

    def start(self, *names: str) -> None:
        """Start processes, by default all, and wait for nothing."""
        for name in names or ("gateway", *self.nodes):
            assert name not in self.processes, f"{name} runs already"
            self._num_starts += 1
            log = self.logs / f"{self._num_starts:03d}-{name}.log"
            module = "gateway" if name == "gateway" else f"{name.split('-')[0]}_node"
            if self._is_forked and module != "gateway":
                self.processes[name] = fork_server().run(
                    module, self._words(name), log, environment() | self._variables
                )
            else:
                self.processes[name] = spawn([sys.executable, "-m", module, *self._words(name)], log, self._variables)

    def wait_until_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Until the gateway knows all nodes that should run, in their present start."""
        wanted = {process.pid for name, process in self.processes.items() if name != "gateway"}
        ends = time.monotonic() + timeout_s
        while (workers := self._workers()) is None or {worker["register"]["pid"] for worker in workers} != wanted:
            for name, process in self.processes.items():
                assert process.poll() is None, f"{name} ended with {process.returncode}\n{self.log()}"
            assert time.monotonic() < ends, f"not ready in {timeout_s:g} s\n{self.log()}"
            time.sleep(0.02)

    def _workers(self) -> list[dict[str, Any]] | None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/v1/workers")
            found: list[dict[str, Any]] = json.loads(connection.getresponse().read())["workers"]
            return found
        except OSError:
            return None
        finally:
            connection.close()

    def kill(self, *names: str) -> float:
        """SIGKILL; returns the instant, by ``time.monotonic``, when the last was gone."""
        for name in names:
            self.processes[name].kill()
        for name in names:
            self.processes.pop(name).wait(30)
        return time.monotonic()

    def stop(self, name: str, number: signal.Signals = signal.SIGTERM) -> tuple[int, float]:
        """Ask one to end; its exit status and the seconds it took."""
        began = time.monotonic()
        process = self.processes.pop(name)
        process.send_signal(number)
        return process.wait(20), time.monotonic() - began

    def pause(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End everything, and look at what was said: no process may have met an exception that it did not expect."""
        for process in self.processes.values():
            process.send_signal(signal.SIGCONT)
            process.kill()
        for process in self.processes.values():
            process.wait(30)
        self.processes.clear()
        said = self.log()
        assert "Traceback" not in said, said
        shutil.rmtree(self.logs)

    def log(self) -> str:
        """Everything that the processes have said so far."""
        parts = [f"---- {path.name}\n{path.read_text(errors='replace')}" for path in sorted(self.logs.glob("*.log"))]
        return "\n".join(parts)

    def pid(self, name: str) -> int:
        return self.processes[name].pid

    # ---- how to reach it --------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=60)
        async with aiohttp.ClientSession(self.url, connector=connector, timeout=timeout) as session:
            client = Client(self, session)
            try:
                yield client
            finally:
                await client.leave_all()


@contextlib.contextmanager
def running(logs: Path, model: Path = SMALL_MODEL, **options: Any) -> Iterator[Service]:
    """A service that is ready, and gone afterwards."""
    service = Service(logs, model, **options)
    try:
        service.start()
        service.wait_until_ready()
        yield service
    finally:
        service.close()
