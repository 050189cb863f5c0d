"""One run: the service, the reference, the load and the faults beside it, and what is left at the end."""

import asyncio
import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from common.config.serve import ServeConfig
from common.errors import BatonError
from scripts.chaos_harness.answers import Answer, smallest_margin
from scripts.chaos_harness.config import ChaosConfig
from scripts.chaos_harness.faults.base import Fault, Site
from scripts.chaos_harness.faults.network import Silence
from scripts.chaos_harness.faults.table import FAULTS
from scripts.chaos_harness.hosts import Hosts, Link
from scripts.chaos_harness.load import Load
from scripts.chaos_harness.pauses import Injected, pauses_by_kind
from scripts.chaos_harness.process_resources import num_descriptors
from scripts.chaos_harness.schedule import PlannedFault, choose_target, fault_schedule
from scripts.chaos_harness.service import GATEWAY, ChaosService, Node
from scripts.chaos_harness.verdicts import Findings, Tally, held
from scripts.chaos_harness.workload import distinct_requests, draws, margin_body

MODEL = "m"
#: A request of the reference may take longer than one under faults: all nodes compile their grammars first.
REFERENCE_TIMEOUT_S = 300.0
#: Log-probabilities that differ by less than this may change places when a batch has another shape.
TIE = 1e-4
SETTLE_S = 90.0
DISK_BYTES = 16 << 20


class NoReference(BatonError):
    """A request has no proper answer before the first fault."""


class Run:
    """One run of the harness.

    Args:
        say: called with each line of the timeline.
    """

    def __init__(self, config: ChaosConfig, folder: Path, say: Callable[[str], None]) -> None:
        self._config = config
        self._folder = folder
        self._say = say
        self._requests = distinct_requests(config.distinct, config.seed, MODEL)
        self._reference: dict[int, Answer] = {}
        self._service: ChaosService
        self._site: Site
        self._began_at = self._load_s = 0.0
        self._is_stopping = False
        self._injections: list[asyncio.Task[None]] = []
        self._injected: list[Injected] = []
        self._descriptors: dict[str, int] = {}
        self.tally = Tally(is_exact=config.dtype == "float32")

    @property
    def injected(self) -> list[str]:
        """Names of the faults that were injected, in order."""
        return [fault.name for fault in self._injected]

    async def run(self) -> Findings:
        """Run to the end; return what was found. Everything is undone and stopped when this returns or raises.

        Raises BatonError: the service does not start, or does not answer before the first fault.
        """
        with contextlib.ExitStack() as stack:
            hosts = self._hosts(stack)
            disk, disk_user = self._disk(stack)
            self._service = ChaosService(
                self._serve_config(),
                self._folder,
                hosts=hosts,
                num_gateways=self._config.gateways,
                node_flags=[f"--drain-timeout={self._config.drain_timeout:g}"],
                logs_of={disk_user: disk} if disk else {},
                on_event=self._tell,
            )
            stack.callback(self._service.kill_all)
            if disk is not None:
                self._service.nodes[disk_user].argv.append(f"--record={disk / 'recording'}")
            self._site = Site(self._config, self._service, self._requests, disk, disk_user)
            await self._service.start()
            return await self._observe()

    async def _observe(self) -> Findings:
        await self._make_reference()
        self._descriptors = self._open_descriptors()
        self._began_at = time.monotonic()
        faults = asyncio.create_task(self._inject_all())
        load = Load(self._config, self._service, self._reference, self.tally, tell=self._tell)
        try:
            await load.run(draws(self._requests, self._config.seed))
        finally:
            self._load_s = time.monotonic() - self._began_at
            self._is_stopping = True
            faults.cancel()
            ended = await asyncio.gather(faults, *self._injections, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise error
        return await self._findings()

    # ---- what the run needs ------------------------------------------------------------------------------------------

    def _serve_config(self) -> ServeConfig:
        config = self._config
        return ServeConfig(
            model=config.model,
            served_model_name=MODEL,
            prefill=config.prefill,
            decode=config.decode,
            dtype=config.dtype,
            device="cpu",
            threads=1,
            transport=config.transport,
            cluster_key="c" * 32 if config.namespaces else None,
            max_total_tokens=config.max_total_tokens,
            chunked_prefill_size=64,
            enable_priority_scheduling=True,
            default_priority_value=0,
            node_timeout=config.node_timeout,
            heartbeat_interval=0.5,
            request_timeout=config.request_timeout,
        )

    def _hosts(self, stack: contextlib.ExitStack) -> Hosts | None:
        config = self._config
        if not config.namespaces:
            return None
        names = [f"prefill-{i}" for i in range(config.prefill)]
        names += [f"decode-{i}" for i in range(config.decode)]
        link = Link(
            config.mtu,
            config.packet_loss / 100,
            config.packet_delay / 1_000,
            config.clock_step,
            is_relayed=Silence.name in config.faults,
        )
        hosts = Hosts(names, link)
        if hosts.has_relay:
            why = f"--faults {Silence.name} needs it" if link.is_relayed else "this kernel has no netem"
            self._say(f"packets go through a relay in user space, since {why}")
        stack.callback(hosts.close)
        return hosts

    def _disk(self, stack: contextlib.ExitStack) -> tuple[Path | None, str]:
        """A small disk, and the node that writes to it; None where it cannot be mounted.

        It is in no folder, so that nothing stays mounted even after a ``kill -9`` of this process: it is reached
        through a descriptor, and vanishes with that one and the files that are open on it.
        """
        place = self._folder / "small-disk"
        place.mkdir()
        try:
            mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place)]
            subprocess.run(mount, check=True, capture_output=True)
            descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, descriptor)
            subprocess.run(["umount", "-l", str(place)], check=True, capture_output=True)
        except (subprocess.CalledProcessError, FileNotFoundError):
            return None, ""
        finally:
            place.rmdir()
        disk = Path(f"/proc/{os.getpid()}/fd/{descriptor}")
        stack.callback(_save_logs, disk, self._folder)
        return disk, f"decode-{self._config.decode - 1}"

    # ---- the load ----------------------------------------------------------------------------------------------------

    async def _make_reference(self) -> None:
        """Ask every distinct request once, undisturbed, a few at a time. Raises NoReference."""
        left = iter(self._requests)
        client = self._service.clients[self._service.gateway.name]

        async def work() -> None:
            for request in left:
                answer = await client.send(request, REFERENCE_TIMEOUT_S)
                if not answer.is_complete:
                    raise NoReference(
                        f"request {request.number} ({request.kind}) has no answer without faults: status "
                        f"{answer.status} {answer.code} {answer.message}\n{self._service.log_tail()}"
                    )
                self._reference[request.number] = answer

        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(work())
        await self._leave_out_ties()
        self._say(f"reference: {len(self._reference)} distinct requests, answered without faults")

    async def _leave_out_ties(self) -> None:
        """Leave out requests with two equally likely tokens at some position, up to rounding: either is right."""
        client = self._service.clients[self._service.gateway.name]
        for request in list(self._requests):
            if not (body := margin_body(request)):
                continue
            status, answer = await client.call("POST", request.path, body, timeout_s=REFERENCE_TIMEOUT_S)
            if status == 200 and smallest_margin(answer) < TIE:
                self._say(f"left out: request {request.number} ({request.kind}), where two tokens are equally likely")
                self._requests.remove(request)
                del self._reference[request.number]
        if not self._requests:
            raise NoReference("every request is left out: raise --distinct")

    # ---- the faults --------------------------------------------------------------------------------------------------

    def _chosen(self) -> list[type[Fault]]:
        """The faults of this run; says which cannot be injected here and why."""
        chosen = []
        for name in self._config.faults or FAULTS:
            if why := FAULTS[name].why_not(self._site):
                self._say(f"skipped: {name} {why}")
            else:
                chosen.append(FAULTS[name])
        return chosen

    def _schedule(self) -> Iterator[PlannedFault]:
        config = self._config
        kinds = [fault.kind(config) for fault in self._chosen()]
        return fault_schedule(kinds, kill_every=config.kill_every, fault_every=config.fault_every, seed=config.seed)

    async def _inject_all(self) -> None:
        for planned in self._schedule():
            await asyncio.sleep(max(self._began_at + planned.at_s - time.monotonic(), 0.0))
            self._injections.append(asyncio.create_task(self._inject_when_possible(planned)))

    async def _inject_when_possible(self, planned: PlannedFault) -> None:
        """Inject a fault as soon as a node may be hit by it; never, if it takes until the next one of its sort."""
        every_s = self._config.kill_every if planned.kind.is_loss else self._config.fault_every
        gives_up_at = time.monotonic() + every_s
        while not self._is_stopping and time.monotonic() < gives_up_at:
            if (node := self._target(planned)) is not None:
                await self._inject(planned, node)
                return
            await asyncio.sleep(0.1)

    def _target(self, planned: PlannedFault) -> Node | None:
        if not planned.kind.roles:
            return self._service.gateway
        counts = {"prefill": self._config.prefill, "decode": self._config.decode}
        lone = [role for role, count in counts.items() if count == 1]
        states = self._service.states()
        if planned.kind.name == "role":  # a node that records keeps its role
            states = [state for state in states if state.name != self._site.disk_user]
        name = choose_target(planned, states, lone)
        return self._service.nodes[name] if name else None

    async def _inject(self, planned: PlannedFault, node: Node) -> None:
        """Inject one fault, and undo it when its time is over or the run ends."""
        fault = FAULTS[planned.kind.name]()
        is_of_node = bool(planned.kind.roles)
        if is_of_node:
            node.fault = fault.name
            node.may_end = node.may_end or fault.may_end
        began_at = time.monotonic()
        try:
            try:
                self._tell(await fault.inject(self._site, node))
                ends_at = began_at + planned.lasts_s
                while time.monotonic() < ends_at and not self._is_stopping:
                    await asyncio.sleep(0.05)
            finally:
                await fault.undo(self._site, node)
        except (OSError, subprocess.CalledProcessError) as error:
            self._tell(f"{fault.name} at {node.name}: {error}")  # the node has ended meanwhile
        finally:
            if is_of_node:
                node.fault = ""
                node.may_end = node.may_end and not node.is_running
            mark_s = self._marks().get(fault.name, 0.0)
            self._injected.append(Injected(fault.name, began_at, time.monotonic(), mark_s))

    def _marks(self) -> dict[str, float]:
        """Longest pause, p99, of the faults that have a mark."""
        config = self._config
        return {
            name: config.node_timeout + 3.0 if fault.is_silent else config.max_kill_pause
            for name, fault in FAULTS.items()
            if fault.is_loss or fault.is_silent
        }

    def _tell(self, text: str) -> None:
        self._say(f"{time.monotonic() - self._began_at:8.1f} s  {text}" if self._began_at else text)

    # ---- the end -----------------------------------------------------------------------------------------------------

    async def _findings(self) -> Findings:
        service = self._service
        await service.until_registered()
        pages = await self._unreleased()
        service.close_clients()
        for gateway in service.gateways:
            await service.count_recoveries(gateway)
        service.close_clients()
        await asyncio.sleep(0.5)  # until the gateway has seen the connections close
        after = self._open_descriptors()
        problems = list(self._site.problems)
        problems += [f"the log of {name} has a traceback" for name in service.tracebacks()]
        return Findings(
            pages=pages,
            failed_checks=service.failed_checks,
            crashes=service.crashes,
            left=await service.stop(),
            descriptors={name: (before, after.get(name, 0)) for name, before in self._descriptors.items()},
            problems=problems,
            pauses=pauses_by_kind(self._injected, self.tally.streams),
            marks=self._marks(),
            num_recovered=service.num_recovered,
            load_s=self._load_s,
            switches_s=self._site.switches_s,
            since_faults_s=self._site.since_faults_s,
        )

    async def _unreleased(self) -> dict[str, str]:
        """What nodes still hold after some time without requests; shorter than any lease that could hide a leak."""
        ends_at = time.monotonic() + SETTLE_S
        while True:
            rows = await self._service.rows()
            left = {row["name"]: what for row in rows if (what := held(row))}
            if not left or time.monotonic() > ends_at:
                return left
            await asyncio.sleep(0.5)

    def _open_descriptors(self) -> dict[str, int]:
        """The most that a gateway and a node have: after a change of roles, nodes have each other's."""
        found: dict[str, int] = {}
        for node in self._service.nodes.values():
            kind = "a gateway" if node.role == GATEWAY else "a node"
            found[kind] = max(found.get(kind, 0), num_descriptors(node.pid) if node.is_running else 0)
        return found


def _save_logs(disk: Path, folder: Path) -> None:
    """Copy the logs from a disk that is about to vanish."""
    for log in disk.glob("*.log"):
        with contextlib.suppress(OSError):
            shutil.copy(log, folder)
