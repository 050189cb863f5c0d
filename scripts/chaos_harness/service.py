"""The service under test: gateways and nodes as real processes, which are killed, stopped and started again.

The processes are those of ``serve``, with the same command lines and keys; each gateway has an address of its own. A
process that has ended is started again at its address, as a supervisor would do. A process that ends although no fault
explains it counts as a crash.
"""

import asyncio
import contextlib
import dataclasses
import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.config.serve import ServeConfig
from common.errors import BatonError
from common.system.exit_status import how_ended
from common.system.python_environ import ROOT
from scripts.chaos_harness.client import Client
from scripts.chaos_harness.hosts import Hosts
from scripts.chaos_harness.process_resources import ProcessResources
from scripts.chaos_harness.schedule import NodeState
from scripts.serving.bound_process import bound_command
from scripts.serving.cpu_affinity import Share
from scripts.serving.serve import GatewayPlace, children, free_port

POLL_S = 0.25
RESTART_S = 0.5
START_TIMEOUT_S = 180.0
STOP_S = 30.0
RELEASE_S = 10.0  # after the last process has ended
GATEWAY = "gateway"
#: Counters of the further attempts, in /metrics of a gateway.
RECOVERED = re.compile(rb"^baton_recoveries_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)

Worker = dict[str, Any]  # a row of /v1/workers


class ServiceFailed(BatonError):
    """The service did not start; the message ends with the log."""


@dataclass(slots=True)
class Node:
    """One process of the service.

    Attributes:
        port: HTTP port of a gateway.
        data_port: of a prefill node.
        fault: the fault that it is hit by now; empty without one.
        may_end: a fault explains its end, and whatever it has open then.
        is_registered: every gateway that answers has it in rotation, by its present process. Of a gateway: it serves.
        killed_at: when a fault last killed it.
        num_orders: orders to nodes that a gateway carries out now.
    """

    name: str
    argv: list[str]
    env: dict[str, str]
    log: Path
    role: str
    port: int = 0
    data_port: int = 0
    process: "subprocess.Popen[bytes] | None" = None
    fault: str = ""
    may_end: bool = False
    is_registered: bool = False
    num_starts: int = 0
    ended_at: float = 0.0
    killed_at: float = 0.0
    num_orders: int = 0
    worker: Worker = field(default_factory=dict)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def send_signal(self, number: signal.Signals) -> None:
        if self.is_running and self.process is not None:
            self.process.send_signal(number)


class ChaosService:
    """Starts and watches the processes.

    Args:
        folder: of logs and temporary files.
        hosts: the network namespaces of the nodes, by name; None to run all on this host.
        node_flags: further flags of every node.
        logs_of: folders of the logs of single processes, by name.
        on_event: called with what happens to processes, for the timeline.
    """

    def __init__(
        self,
        config: ServeConfig,
        folder: Path,
        *,
        hosts: Hosts | None = None,
        num_gateways: int = 1,
        node_flags: Sequence[str] = (),
        logs_of: dict[str, Path] | None = None,
        on_event: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.hosts = hosts
        self.folder = folder
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True)
        self._on_event = on_event
        controls = [free_port("127.0.0.1", 0, "--control-port") for _ in range(num_gateways)]
        data_ports = [free_port("127.0.0.1", 0, "--data-port") for _ in range(config.prefill)]
        places = [GatewayPlace(f"{GATEWAY}-{i}", control) for i, control in enumerate(controls)]
        self.nodes = {
            child.name: Node(
                child.name,
                [*child.argv, *self._address_flags(child.name, controls)],
                child.env | {"TMPDIR": str(self.temporary)},
                (logs_of or {}).get(child.name, folder) / f"{child.name}.log",
                child.name.split("-")[0],
            )
            for child in children(config, [Share(1)] * (config.prefill + config.decode), places)
        }
        for node in self.nodes.values():
            if hosts is not None:  # shared memory of another host is out of reach
                node.env |= {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "eth0"}
            if node.role == GATEWAY:
                node.port = free_port("127.0.0.1", 0, "--port")
                node.argv.append(f"--port={node.port}")
            else:
                node.argv += node_flags
            if node.role == "prefill":  # a fixed port, so that it comes back at the same address
                node.data_port = data_ports.pop()
                node.argv.append(f"--data-port={node.data_port}")
        self.clients = {gateway.name: Client("127.0.0.1", gateway.port) for gateway in self.gateways}
        self.crashes: list[str] = []
        self.failed_checks: dict[str, int] = {}  # by name and process
        self.num_recovered = 0  # further attempts of gateways that have ended
        self._resources: list[tuple[str, ProcessResources]] = []  # of processes that have been ended, by name
        self._keeper: asyncio.Task[None] | None = None
        self._is_stopping = False

    def _address_flags(self, name: str, controls: Sequence[int]) -> list[str]:
        """The addresses of hosts."""
        if self.hosts is None:
            return []
        bridge = self.hosts.bridge_address
        if name.startswith(GATEWAY):
            return [f"--control-host={bridge}"]
        address = self.hosts.address(name)
        flags = [f"--gateway={','.join(f'{bridge}:{port}' for port in controls)}", f"--advertise-host={address}"]
        return flags if name.startswith("prefill") else [*flags, f"--data-interface={address}"]

    # ---- processes ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start everything; return once every node is in rotation. Raises ServiceFailed."""
        for node in self.nodes.values():
            self._spawn(node)
        await self.until_registered()
        self._keeper = asyncio.create_task(self._keep())

    async def until_registered(self) -> None:
        """Return once every gateway serves, with every node in rotation. Raises ServiceFailed."""
        ends_at = time.monotonic() + START_TIMEOUT_S
        while not all(node.is_registered for node in self.nodes.values()):
            await self._look()
            dead = [node.name for node in self.nodes.values() if not node.is_running and self._keeper is None]
            if dead or time.monotonic() > ends_at:
                missing = ", ".join(node.name for node in self.nodes.values() if not node.is_registered)
                why = f"{', '.join(dead)} ended" if dead else f"not in rotation after {START_TIMEOUT_S:g} s: {missing}"
                raise ServiceFailed(f"{why}\n{self.log_tail()}")
            await asyncio.sleep(POLL_S)

    @property
    def gateways(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.role == GATEWAY]

    @property
    def workers(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.role != GATEWAY]

    @property
    def gateway(self) -> Node:
        """A gateway that serves and is hit by no fault; the first one if there is none."""
        able = [gateway for gateway in self.gateways if gateway.is_registered and not gateway.fault]
        return (able or self.gateways)[0]

    def states(self) -> list[NodeState]:
        return [
            NodeState(
                node.name, node.role, node.is_registered and node.is_running and not (node.fault or node.num_orders)
            )
            for node in self.nodes.values()
        ]

    def _spawn(self, node: Node) -> None:
        argv = node.argv if self.hosts is None or node.role == GATEWAY else self.hosts.command(node.name, *node.argv)
        node.num_starts += 1
        with contextlib.ExitStack() as stack:
            try:
                output: Any = stack.enter_context(node.log.open("ab"))
            except OSError:  # its disk is full
                output = subprocess.DEVNULL
            node.process = subprocess.Popen(
                bound_command(argv),
                env=node.env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    async def _keep(self) -> None:
        """Start processes again that have ended, and keep what the gateways say about nodes."""
        while not self._is_stopping:
            for node in self.nodes.values():
                if not node.is_running:
                    self._on_ended(node)
            await self._look()
            await asyncio.sleep(POLL_S)

    def _on_ended(self, node: Node) -> None:
        assert node.process is not None
        now = time.monotonic()
        if not node.ended_at:
            node.ended_at = now
            node.is_registered = False
            how = how_ended(node.process.returncode)
            if not node.may_end:
                self.crashes.append(f"{node.name} {how}")
                self._on_event(f"{node.name} {how}, and no fault explains it")
        elif now - node.ended_at > RESTART_S:
            node.ended_at, node.may_end = 0.0, False
            self._spawn(node)

    async def _look(self) -> None:
        found = await asyncio.gather(*map(self._listing, self.gateways))
        for gateway, listing in zip(self.gateways, found, strict=True):
            gateway.is_registered = listing.get("is_ready", False) and gateway.is_running
        tables = [{row["name"]: row for row in listing["workers"]} for listing in found if listing]
        for node in self.workers:
            rows = [table.get(node.name) for table in tables]
            node.is_registered = bool(rows) and node.is_running
            for row in rows:
                if row is None or not node.is_running or row["register"]["pid"] != node.pid:
                    node.is_registered = False
                    continue
                node.role, node.worker = row["role"], row
                counters = (row["heartbeat"] or {}).get("counters", {})
                self.failed_checks[f"{node.name} {node.pid}"] = int(counters.get("failed_checks", 0))

    async def _listing(self, gateway: Node) -> dict[str, Any]:
        """The answer of a gateway to ``/v1/workers``; empty if it does not answer."""
        status, body = await self.clients[gateway.name].call("GET", "/v1/workers", timeout_s=10.0)
        found: dict[str, Any] = json.loads(body) if status == 200 else {}
        return found

    async def rows(self) -> list[Worker]:
        """The rows of ``/v1/workers`` of all gateways."""
        found = await asyncio.gather(*map(self._listing, self.gateways))
        return [row for listing in found for row in listing.get("workers", [])]

    async def count_recoveries(self, gateway: Node) -> None:
        """Add the further attempts that a gateway has made, at its end."""
        _, metrics = await self.clients[gateway.name].call("GET", "/metrics")
        self.num_recovered += sum(int(float(number)) for number in RECOVERED.findall(metrics))

    async def order(self, path: str, body: dict[str, object]) -> tuple[int, bytes]:
        """Tell a gateway to do something with a node. No fault ends that gateway meanwhile, since the order would be
        lost with it.
        """
        gateway = self.gateway
        gateway.num_orders += 1
        try:
            return await self.clients[gateway.name].call("POST", path, json.dumps(body).encode(), timeout_s=90.0)
        finally:
            gateway.num_orders -= 1

    def remember_resources(self, node: Node) -> None:
        """Record what a process has open, before a fault ends it."""
        with contextlib.suppress(OSError):
            found = ProcessResources.of([node.pid])
            ours = (str(ROOT), str(self.folder))  # libraries; logs and recordings
            files = frozenset(path for path in found.files if not path.startswith(ours))
            self._resources.append((node.name, dataclasses.replace(found, files=files)))

    def kill(self, node: Node) -> None:
        """End a process as the kernel does, without a warning; return once it has ended."""
        self.remember_resources(node)
        node.may_end = True
        node.killed_at = time.monotonic()
        node.send_signal(signal.SIGKILL)
        if node.process is not None:
            node.process.wait()
            self._on_ended(node)

    # ---- the end -----------------------------------------------------------------------------------------------------

    async def stop(self) -> list[str]:
        """Stop every process with SIGTERM; return what is not as it should be after that."""
        self._is_stopping = True
        if self._keeper is not None:
            await self._keeper
        self.close_clients()
        running = [node for node in self.nodes.values() if node.is_running]
        for node in running:
            self.remember_resources(node)
        problems: list[str] = []
        for group in ([n for n in running if n.role != GATEWAY], [n for n in running if n.role == GATEWAY]):
            problems += await asyncio.to_thread(_terminate, group)
        ends_at = time.monotonic() + RELEASE_S
        for name, resources in self._resources:
            while (left := resources.left()) and time.monotonic() < ends_at:
                await asyncio.sleep(POLL_S)
            problems += [f"{name} left {left}"] if left else []
        if files := sorted(path.name for path in self.temporary.iterdir()):
            problems.append(f"temporary files are left: {', '.join(files[:10])}")
        return problems

    def close_clients(self) -> None:
        for client in self.clients.values():
            client.close()

    def kill_all(self) -> None:
        """End every process at once."""
        self._is_stopping = True
        if self._keeper is not None:
            self._keeper.cancel()
        for node in self.nodes.values():
            node.send_signal(signal.SIGKILL)
            if node.process is not None:
                node.process.wait()

    def log_tail(self) -> str:
        parts = []
        for node in self.nodes.values():
            with contextlib.suppress(OSError):
                lines = node.log.read_text(errors="replace").splitlines()[-15:]
                parts.append("\n".join([f"---- {node.log.name}", *lines]))
        return "\n".join(parts)

    def tracebacks(self) -> list[str]:
        """Names of processes whose logs have a traceback."""
        found = []
        for node in self.nodes.values():
            with contextlib.suppress(OSError):
                if "Traceback (most recent call last)" in node.log.read_text(errors="replace"):
                    found.append(node.name)
        return found


def _terminate(nodes: Sequence[Node]) -> list[str]:
    for node in nodes:
        node.send_signal(signal.SIGTERM)
    ends_at = time.monotonic() + STOP_S
    problems = []
    for node in nodes:
        assert node.process is not None
        try:
            status = node.process.wait(max(ends_at - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            problems.append(f"{node.name} did not stop within {STOP_S:g} s of SIGTERM")
            node.process.kill()
            node.process.wait()
            continue
        if status:
            problems.append(f"{node.name} stopped with status {status}")
    return problems
