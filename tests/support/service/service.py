"""A gateway and nodes as real processes, for tests over HTTP.

A gateway or node is forked from a process that has already imported its modules, which saves one or two seconds of CPU.

Processes may be started in any order, and each may be killed and replaced. Most tests end with ``Client.settled``:
after a new heartbeat of every node, all pages are free or cached, none is quarantined, and no check has failed.
"""

import contextlib
import http.client
import json
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
from support.service.client import HEARTBEAT_S, Client
from support.service.fork_server import ForkedProcess, shared_fork_server
from support.service.processes import environment, flags, free_port

from common.config import shared

SMALL_MODEL = Path(shared.SMALL_MODEL)
START_TIMEOUT_S = 180.0
GPU_START_TIMEOUT_S = 240.0  # kernels may have to be compiled, and graphs are captured
#: On a machine that runs other tests a process may have no core for seconds. What ends is noticed at once all the same.
NODE_TIMEOUT_S = 30.0
#: Lines of each log that a failed test shows.
NUM_LAST_LINES = 100
WORKER = "scripts.serving.worker"


class Service:
    """A gateway and nodes, each in its own process.

    Args:
        logs: folder for the logs of this service's processes; ``close`` deletes it.
        model: folder of the checkpoint.
        gateways: their names are gateway, gateway-1 and so on; ``port`` and ``url`` are those of the first.
        prefill, decode: numbers of nodes; their names are prefill-0, decode-0 and so on.
        gateway_options, node_options: further flags; ``only`` adds flags for single nodes, by name.
        variables: environment variables for every process.
        modules: the process from which gateway and nodes are forked imports them first.
    """

    def __init__(
        self, logs: Path, model: Path = SMALL_MODEL, *, gateways: int = 1, prefill: int = 1, decode: int = 1,
        gateway_options: dict[str, Any] | None = None, node_options: dict[str, Any] | None = None,
        only: dict[str, dict[str, Any]] | None = None, variables: dict[str, str] | None = None,
        modules: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        logs.mkdir(parents=True, exist_ok=True)
        self.logs = logs
        self.model = model
        self.nodes = [f"prefill-{i}" for i in range(prefill)] + [f"decode-{i}" for i in range(decode)]
        self.gateways = ["gateway", *(f"gateway-{i}" for i in range(1, gateways))]
        self._ports = {name: (free_port(), free_port()) for name in self.gateways}
        self.port, self.control_port = self._ports["gateway"]
        self.url = self.url_of("gateway")
        shared = {"node_timeout": NODE_TIMEOUT_S}
        small = {"dtype": "float32", "threads": 1, "max_total_tokens": 8192}
        self._gateway_options = {**shared, "heartbeat_interval": HEARTBEAT_S, **(gateway_options or {})}
        self._node_options = {**shared, **small, **(node_options or {})}
        self._only = only or {}
        self._variables = variables or {}
        self._modules = modules
        self.processes: dict[str, ForkedProcess] = {}
        self._num_starts = 0
        OPEN.append(self)

    def url_of(self, gateway: str) -> str:
        return f"http://127.0.0.1:{self._ports[gateway][0]}"

    @property
    def running_nodes(self) -> list[str]:
        return [name for name in self.processes if name not in self.gateways]

    # ---- start and stop ----------------------------------------------------------------------------------------

    def _argv(self, name: str) -> list[str]:
        shared = {"model": self.model, "served_model_name": "m", "log_level": "info"}
        if name in self.gateways:
            port, control_port = self._ports[name]
            return flags({**shared, "port": port, "control_port": control_port, **self._gateway_options})
        gateways = ",".join(f"127.0.0.1:{port}" for _, port in self._ports.values())
        options = {**shared, "gateway": gateways, "name": name, **self._node_options}
        if "etcd" in options:
            del options["gateway"]
        return flags({**options, **self._only.get(name, {})})

    def start(self, *names: str) -> None:
        """Start the named processes, by default all, without waiting until they are ready."""
        for name in names or (*self.gateways, *self.nodes):
            assert name not in self.processes, f"{name} is already running"
            self._num_starts += 1
            log = self.logs / f"{self._num_starts:03d}-{name}.log"
            module, argv = WORKER, [name.split("-")[0], *self._argv(name)]
            if name in self.gateways:
                module, argv = "gateway", argv[1:]
            variables = environment() | self._variables
            self.processes[name] = shared_fork_server().run(module, argv, log, variables, imports=self._modules)

    def wait_until_ready(self, timeout_s: float | None = None) -> None:
        """Wait until every running node has registered at every running gateway, by its current process id."""
        wanted = {self.processes[name].pid for name in self.running_nodes}
        if timeout_s is None:
            timeout_s = GPU_START_TIMEOUT_S if self._node_options.get("device") == "cuda" else START_TIMEOUT_S
        ends = time.monotonic() + timeout_s
        for gateway in self.processes.keys() & self._ports.keys():
            while self._pids(gateway) != wanted:
                for name, process in self.processes.items():
                    assert process.poll() is None, f"{name} ended with {process.returncode}\n{self.log()}"
                assert time.monotonic() < ends, f"not ready in {timeout_s:g} s\n{self.log()}"
                time.sleep(0.02)

    def _pids(self, gateway: str) -> set[int] | None:
        """Process ids of the nodes that are registered at a gateway; None while it does not answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self._ports[gateway][0], timeout=60)
        try:
            connection.request("GET", "/v1/workers")
            return {worker["register"]["pid"] for worker in json.loads(connection.getresponse().read())["workers"]}
        except OSError:
            return None
        finally:
            connection.close()

    def kill(self, *names: str) -> float:
        """Send SIGKILL; return the instant, by ``time.monotonic``, at which the last process had ended."""
        for name in names:
            self.processes[name].kill()
        for name in names:
            self.processes.pop(name).wait(60)
        return time.monotonic()

    def stop(self, name: str, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal to a process and return its exit status."""
        process = self.processes.pop(name)
        process.send_signal(number)
        return process.wait(60)

    def pause(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill all processes, and assert that no log contains a traceback.

        After a failure, print the ends of the logs before they are deleted.
        """
        OPEN.remove(self)
        if sys.exc_info()[0] is not None:
            print(self.log(NUM_LAST_LINES))
        for process in self.processes.values():
            process.send_signal(signal.SIGCONT)
            process.kill()
        for process in self.processes.values():
            process.wait(60)
        self.processes.clear()
        log = self.log()
        assert "Traceback" not in log, log
        shutil.rmtree(self.logs)

    def log(self, num_lines: int = 0) -> str:
        """Return the logs of all processes so far, or the last lines of each."""
        parts = []
        for path in sorted(self.logs.glob("*.log")):
            lines = path.read_text(errors="replace").splitlines(keepends=True)
            parts.append(f"---- {path.name}\n{''.join(lines[-num_lines:])}")
        return "\n".join(parts)

    def pid(self, name: str) -> int:
        return self.processes[name].pid

    # ---- clients --------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def client(self, gateway: str = "gateway") -> AsyncIterator[Client]:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=300)
        async with aiohttp.ClientSession(self.url_of(gateway), connector=connector, timeout=timeout) as session:
            client = Client(self, session)
            try:
                yield client
            finally:
                await client.leave_all()


#: Services that are not closed yet, for the report of a test that fails.
OPEN: list[Service] = []


@contextlib.contextmanager
def running(logs: Path, model: Path = SMALL_MODEL, **options: Any) -> Iterator[Service]:
    """Start a service, wait until it is ready, and stop it at the end."""
    service = Service(logs, model, **options)
    try:
        service.start()
        service.wait_until_ready()
        yield service
    finally:
        service.close()
