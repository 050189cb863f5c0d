"""A whole service as real processes, and a client for it: what the tests from the outside stand on.

Every process is started by its own command line, in any order, on ports chosen beforehand, so that nodes may come
before the gateway and a gateway may be replaced. The kernel kills them with the test run, whatever becomes of that.
``settled`` is the proof that closes most tests: after a fresh heartbeat of every node all pages are back, none is
quarantined, and no node has found its books out of balance.
"""

import asyncio
import contextlib
import ctypes
import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).resolve().parents[1]
SMALL_MODEL = ROOT / "scripts" / "small_model"
HEARTBEAT_S = 0.1
START_TIMEOUT_S = 60.0
PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


# ---- processes ------------------------------------------------------------------------------------------------------


def free_port() -> int:
    """A port on which nobody listens, and that the kernel gives to no outgoing connection meanwhile."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def environment() -> dict[str, str]:
    """This process's, without a developer's own options and with one compute thread."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    return {**environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}


def _die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def spawn(
    argv: Sequence[str], log: Path, variables: dict[str, str] | None = None, **options: Any
) -> "subprocess.Popen[bytes]":
    """A process that writes what it says into ``log`` and never outlives this one."""
    with log.open("ab") as output:
        return subprocess.Popen(
            argv, cwd=ROOT, env=environment() | (variables or {}), stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, preexec_fn=_die_with_parent, **options,
        )  # fmt: skip


def flags(options: dict[str, Any]) -> list[str]:
    """``{"page_size": 4}`` as ``--page-size=4``, and what is True as a flag alone."""
    return [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in options.items()]


class Service:
    """A gateway and nodes, each a process of its own.

    Args:
        logs: a folder of this service's own for what its processes say.
        model: folder of the checkpoint.
        prefill, decode: how many nodes of each; they are called prefill-0, decode-0 and so on.
        gateway_options, node_options: further flags; ``only`` adds some for single nodes, by name.
        variables: of the environment.
    """

    def __init__(
        self, logs: Path, model: Path = SMALL_MODEL, *, prefill: int = 1, decode: int = 1,
        gateway_options: dict[str, Any] | None = None, node_options: dict[str, Any] | None = None,
        only: dict[str, dict[str, Any]] | None = None, variables: dict[str, str] | None = None,
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
        self._variables = variables
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._num_starts = 0

    # ---- start and end ----------------------------------------------------------------------------------------

    def _argv(self, name: str) -> list[str]:
        shared = {"model": self.model, "served_model_name": "m", "log_level": "info"}
        if name == "gateway":
            options = {**shared, "port": self.port, "control_port": self.control_port, **self._gateway_options}
            return [sys.executable, "-m", "gateway", *flags(options)]
        options = {**shared, "gateway": f"127.0.0.1:{self.control_port}", "name": name, **self._node_options}
        return [sys.executable, "-m", f"{name.split('-')[0]}_node", *flags({**options, **self._only.get(name, {})})]

    def start(self, *names: str) -> None:
        """Start processes, by default all, and wait for nothing."""
        for name in names or ("gateway", *self.nodes):
            assert name not in self.processes, f"{name} runs already"
            self._num_starts += 1
            log = self.logs / f"{self._num_starts:03d}-{name}.log"
            self.processes[name] = spawn(self._argv(name), log, self._variables)

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
            self.processes.pop(name).wait(10)
        return time.monotonic()

    def stop(self, name: str, number: signal.Signals = signal.SIGTERM) -> tuple[int, float]:
        """Ask one to end; its exit status and the seconds it took."""
        began = time.monotonic()
        process = self.processes.pop(name)
        process.send_signal(number)
        return process.wait(10), time.monotonic() - began

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
            process.wait(10)
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
    async def client(self) -> AsyncIterator["Client"]:
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


# ---- what a client sees ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Exchange:
    """One streamed ``/generate`` under way, or over.

    Attributes:
        began_at, first_at, ended_at: instants by ``time.monotonic``; 0 as long as they have not come.
        status: of HTTP; 0 before it is there, and for good if the connection broke first.
        reads: instants at which bytes arrived.
        arrivals: instant of each output token.
        body: the last event, or the whole answer if it was an error.
        is_broken: the connection ended before the answer did.
    """

    began_at: float
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    reads: list[float] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    body: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    is_broken: bool = False
    ended_at: float = 0.0
    work: "asyncio.Task[None] | None" = None

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(self.body.get("output_ids", ()))

    @property
    def code(self) -> str:
        """Of the error; empty without one."""
        return "" if self.error is None else str(self.error["code"])

    async def has(self, num_tokens: int, timeout_s: float = 20.0) -> None:
        """Waits for so many tokens."""
        await until(lambda: len(self.arrivals) >= num_tokens or bool(self.ended_at), timeout_s, "no tokens")
        assert len(self.arrivals) >= num_tokens, f"ended with {self.status} {self.error}"

    async def end(self, timeout_s: float = 30.0) -> "Exchange":
        """Waits for its end."""
        assert self.work is not None
        await asyncio.wait_for(self.work, timeout_s)
        return self

    async def leave(self) -> None:
        """Go away, as a client whose user has closed the window."""
        assert self.work is not None
        self.work.cancel()
        await asyncio.gather(self.work, return_exceptions=True)


class Client:
    """One user of a service; ``session`` is aiohttp's, for everything that has no method here."""

    def __init__(self, service: Service, session: aiohttp.ClientSession) -> None:
        self.service = service
        self.session = session
        self._exchanges: list[Exchange] = []

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and decoded answer."""
        async with self.session.post(path, json=body) as answer:
            return answer.status, await answer.json()

    async def generate(self, prompt: Sequence[int] | str, max_new: int = 8, **options: Any) -> dict[str, Any]:
        """The answer of ``/generate``, greedy and of full length unless ``options`` say otherwise."""
        status, answer = await self.post("/generate", body_of(prompt, max_new, **options))
        assert status == 200, answer
        assert isinstance(answer, dict)
        return answer

    def begin(self, prompt: Sequence[int] | str, max_new: int = 8, **options: Any) -> Exchange:
        """Starts a streamed ``/generate``."""
        exchange = Exchange(time.monotonic())
        body = {**body_of(prompt, max_new, **options), "stream": True}
        exchange.work = asyncio.create_task(self._follow(exchange, body))
        self._exchanges.append(exchange)
        return exchange

    def forget(self, exchange: Exchange) -> None:
        """It is over, and of no more interest."""
        self._exchanges.remove(exchange)

    async def leave_all(self) -> None:
        """Go away from whatever is still under way."""
        await asyncio.gather(*(exchange.leave() for exchange in self._exchanges))

    async def _follow(self, exchange: Exchange, body: dict[str, Any]) -> None:
        try:
            async with self.session.post("/generate", json=body) as answer:
                exchange.status, exchange.headers = answer.status, dict(answer.headers)
                if answer.status != 200:
                    exchange.error = (await answer.json())["error"]
                    return
                rest = b""
                is_done = False
                while data := await answer.content.readany():
                    exchange.reads.append(time.monotonic())
                    *events, rest = (rest + data).split(b"\n\n")
                    for event in events:
                        is_done |= _take(exchange, event)
                exchange.is_broken = not is_done and exchange.error is None
        except (aiohttp.ClientError, ConnectionError):
            exchange.is_broken = True
        finally:
            exchange.ended_at = time.monotonic()

    async def workers(self) -> dict[str, dict[str, Any]]:
        """Rows of ``/v1/workers`` by name."""
        async with self.session.get("/v1/workers") as answer:
            return {worker["name"]: worker for worker in (await answer.json())["workers"]}

    async def fresh(self, timeout_s: float = 10.0) -> dict[str, dict[str, Any]]:
        """Rows of which each tells of a moment after this call: of all nodes that should run and are not paused."""
        began = time.monotonic()
        rows: dict[str, dict[str, Any]] = {}
        while True:
            asked = time.monotonic()
            for name, row in (await self.workers()).items():
                if row["heartbeat"] is not None and asked - row["seen_s_ago"] > began:
                    rows[name] = row
            if rows.keys() >= self.service.processes.keys() - {"gateway"}:
                return rows
            assert time.monotonic() - began < timeout_s, f"no heartbeats; only {sorted(rows)}\n{self.service.log()}"
            await asyncio.sleep(HEARTBEAT_S / 2)

    async def heartbeats(self) -> dict[str, dict[str, Any]]:
        return {name: row["heartbeat"] for name, row in (await self.fresh()).items()}

    async def counters(self) -> dict[str, dict[str, float]]:
        """Totals of every node since its start."""
        return {name: heartbeat["counters"] for name, heartbeat in (await self.heartbeats()).items()}

    async def settled(self, timeout_s: float = 5.0) -> dict[str, dict[str, float]]:
        """Waits until all is released and proves that it is; returns the nodes' totals."""
        ends = time.monotonic() + timeout_s
        while True:
            rows = await self.fresh()
            left = {name: what for name, row in rows.items() if (what := _held(row))}
            if not left:
                break
            assert time.monotonic() < ends, f"not released: {left}\n{self.service.log()}"
            await asyncio.sleep(HEARTBEAT_S / 2)
        totals = {name: row["heartbeat"]["counters"] for name, row in rows.items()}
        for name, counters in totals.items():
            assert counters["failed_checks"] == 0, f"{name}\n{self.service.log()}"
        return totals


def body_of(prompt: Sequence[int] | str, max_new: int, **options: Any) -> dict[str, Any]:
    """A body for ``/generate``; ``options`` of the request itself are told from those of sampling by name."""
    outer = {"rid", "return_logprob", "top_logprobs_num", "deadline_ms", "cache_salt", "priority"}
    sampling = {"temperature": 0, "max_new_tokens": max_new, "ignore_eos": True}
    sampling |= {name: value for name, value in options.items() if name not in outer}
    field_name = "text" if isinstance(prompt, str) else "input_ids"
    given = prompt if isinstance(prompt, str) else list(prompt)
    body = {field_name: given, "sampling_params": sampling}
    return body | {name: value for name, value in options.items() if name in outer}


def _take(exchange: Exchange, event: bytes) -> bool:
    """One server-sent event; True if it was the last."""
    assert event.startswith(b"data: "), event
    if event == b"data: [DONE]":
        return True
    body = json.loads(event[6:])
    if "error" in body:
        exchange.error = body["error"]
        return False
    num_new = len(body["output_ids"]) - len(exchange.arrivals)
    exchange.arrivals += [exchange.reads[-1]] * num_new
    exchange.texts.append(body["text"])
    exchange.body = body
    return False


def _held(row: dict[str, Any]) -> str:
    """What a node has not given back, in words; empty if nothing."""
    heartbeat = row["heartbeat"]
    missing = row["register"]["num_pages"] - heartbeat["num_free_pages"] - heartbeat["num_cached_pages"]
    found = {
        "waiting": heartbeat["num_waiting"],
        "running": heartbeat["num_running"],
        "quarantined pages": heartbeat["num_quarantined_pages"],
        "missing pages": missing,
        "load at the gateway": row["load_tokens"],
    }
    return ", ".join(f"{count} {what}" for what, count in found.items() if count)


async def until(is_so: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Waits for a condition, looking every few milliseconds."""
    ends = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < ends, what
        await asyncio.sleep(0.002)


def prompt_of(length: int, seed: int) -> list[int]:
    """Token ids that share no prefix with those of another seed."""
    drawn = random.Random(seed)
    return [drawn.randrange(4, 1000) for _ in range(length)]


# ---- residue --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Traces:
    """What processes hold that others could see: found while they run, and searched for when they are gone.

    Attributes:
        tcp: ports on which they listen.
        unix: names of their Unix sockets, abstract ones with ``@``.
        files: paths of shared memory and locks that have a name.
    """

    pids: frozenset[int]
    tcp: frozenset[int]
    unix: frozenset[str]
    files: frozenset[str]

    @classmethod
    def of(cls, pids: Sequence[int]) -> "Traces":
        inodes: set[str] = set()
        files: set[str] = set()
        for pid in pids:
            targets = [_readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
            targets += re.findall(r" (/\S+)$", Path(f"/proc/{pid}/maps").read_text(), re.MULTILINE)
            for target in targets:
                if found := re.fullmatch(r"socket:\[(\d+)\]", target):
                    inodes.add(found[1])
                elif target.startswith(sys.prefix):
                    pass  # libraries, wherever the environment lies
                elif target.startswith(("/dev/shm/", "/tmp/", "/run/")) and not target.endswith(".log"):
                    files.add(target)
        return cls(frozenset(pids), frozenset(_tcp(inodes)), frozenset(_unix(inodes)), frozenset(files))

    def left(self) -> str:
        """What is still there of it, in words; empty if nothing."""
        alive = [pid for pid in self.pids if _is_alive(pid)]
        tcp = sorted(self.tcp & _tcp(None))
        unix = sorted(self.unix & _unix(None))
        files = [path for path in sorted(self.files) if os.path.exists(path)]
        found = {"processes": alive, "ports": tcp, "sockets": unix, "files": files}
        return ", ".join(f"{what} {values}" for what, values in found.items() if values)


def _readlink(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _tcp(inodes: set[str] | None) -> set[int]:
    """Ports listened on, through these sockets or by anybody."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {
        int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and (inodes is None or row[9] in inodes)
    }


def _unix(inodes: set[str] | None) -> set[str]:
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {row[7] for row in rows if len(row) > 7 and (inodes is None or row[6] in inodes)}


def cpu_seconds(pid: int) -> float:
    """Processor time that a process and its threads have used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def descendants(pid: int) -> list[int]:
    """Children and theirs."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *descendants(int(child))]
    return found
