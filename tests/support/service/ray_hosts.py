"""Hosts of a Ray cluster: raylets in network and process namespaces of this machine. Needs root, Ray and nsenter.

Killing a host's first process makes the kernel kill all others in its process namespace, as when a host loses power.
"""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support.service.processes import ROOT, environment, spawn

from scripts.chaos_harness.hosts import Hosts

HAS_RAY = importlib.util.find_spec("ray") is not None and shutil.which("nsenter") is not None
HAS_RAY_CLIENT = importlib.util.find_spec("grpc") is not None
START_TIMEOUT_S = 120.0
#: Ray gives a raylet 30 seconds to appear, which a busy machine may not keep; users start it again then.
MAX_STARTS = 3
#: A command of the manager waits for processes that import torch, one after the other, maybe on a busy machine.
COMMAND_TIMEOUT_S = 600.0
GCS_PORT, CLIENT_PORT = 6379, 10_001  # in the head's own network namespace
#: A program that prints the status of the cluster for each line of its input, with no rows if there is no cluster.
#: The command itself would start Ray anew each time.
STATUS_READER = """
import sys
import msgspec
from common.errors import BatonError
from scripts.cluster_manager.main import Cluster

cluster, sys.stdout = Cluster("baton", "auto"), sys.stderr
for _ in sys.stdin:
    try:
        cluster.print(msgspec.json.encode(cluster.status()).decode())
    except BatonError:
        cluster.print('{"rows": []}')
"""
#: Small raylets. A dead host is noticed within half a minute: a raylet on a busy machine may be silent for seconds.
RAY_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # also where this user has a token for other clusters
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",  # with Ray's 15, every test that runs beside these would come first
    "RAY_gcs_server_port_wait_time_s": "120",
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1500",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "5",
}


class RayHosts:
    """Starts raylets on hosts; the first host is the head.

    Args:
        variables: of the environment of every host, such as secrets.
        redis: the address of Redis, for the head's store; empty without it.
    """

    def __init__(
        self, hosts: Hosts, folder: Path, *, variables: Mapping[str, str] | None = None, redis: str = ""
    ) -> None:
        self.hosts = hosts
        self._folder = folder
        self._variables = {**environment(), **RAY_VARIABLES, **(variables or {})}
        self._redis = redis
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._readers: dict[str, subprocess.Popen[str]] = {}
        self.head = ""

    def start(
        self,
        name: str,
        *,
        cpus: int = 8,
        gpus: int = 0,
        resources: Mapping[str, float] | None = None,
        labels: str = "",
        is_head: bool = False,
        more: Sequence[str] = (),
    ) -> None:
        """Start a raylet; return once it runs. Ray believes what it is told of GPUs.

        Args:
            more: words of ``ray start`` that come last, and so take precedence.
        """
        ray = Path(sys.executable).parent / "ray"
        address = self.hosts.address(name)
        words = [
            *(str(ray), "start", "--block", f"--node-ip-address={address}", f"--num-cpus={cpus}", f"--num-gpus={gpus}"),
            *("--object-store-memory=80000000", "--memory=4000000000", "--disable-usage-stats"),
        ]
        if resources:
            words.append(f"--resources={json.dumps(resources)}")
        if labels:
            words.append(f"--labels={labels}")
        if is_head:
            self.head = name
            words += ["--head", f"--port={GCS_PORT}", "--include-dashboard=false"]
        else:
            words.append(f"--address={self.address}")
        words += more
        mine = self._folder / name
        mine.mkdir(parents=True, exist_ok=True)
        os.makedirs("/tmp/ray", exist_ok=True)
        log = self._folder / f"{name}.log"
        variables = self._variables | ({"RAY_REDIS_ADDRESS": self._redis} if is_head and self._redis else {})
        shell = f'mount --bind "{mine}" /tmp/ray && exec "$@"'
        in_namespaces = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", shell, "sh"]
        for _ in range(MAX_STARTS):
            with contextlib.suppress(FileNotFoundError):
                log.unlink()
            self._processes[name] = spawn(self.hosts.command(name, *in_namespaces, *words), log, variables)
            if self._is_started(name, log):
                return
            said = log.read_text()
            self.kill(name)
        raise AssertionError(f"Ray did not start {MAX_STARTS} times on {name}:\n{said}\n{self.logs()}")

    def _is_started(self, name: str, log: Path) -> bool:
        """Wait for a raylet; false if its processes ended or it takes too long."""
        ends = time.monotonic() + START_TIMEOUT_S
        while "Ray runtime started" not in log.read_text():
            if self._processes[name].poll() is not None or time.monotonic() > ends:
                return False
            time.sleep(0.1)
        return True

    @property
    def address(self) -> str:
        """Of the head."""
        return f"{self.hosts.address(self.head)}:{GCS_PORT}"

    @property
    def client_address(self) -> str:
        """Of the head, for hosts that are not in the cluster."""
        return f"ray://{self.hosts.address(self.head)}:{CLIENT_PORT}"

    def run(self, name: str, *words: object) -> "subprocess.CompletedProcess[str]":
        """Run a command on a host."""
        return self._run(self._enter(name, words))

    def run_beside(self, name: str, *words: object) -> "subprocess.CompletedProcess[str]":
        """Run a command on a host that is not in the Ray cluster."""
        assert name not in self._processes
        return self._run(self.hosts.command(name, *words))

    def _run(self, line: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            line, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, cwd=ROOT, env=self._variables
        )

    def begin(self, name: str, *words: object) -> "subprocess.Popen[str]":
        """Start a command on a host."""
        return subprocess.Popen(
            self._enter(name, words),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=self._variables,
        )

    def _enter(self, name: str, words: Sequence[object]) -> list[str]:
        init = self._init(name)
        return ["nsenter", "--target", str(init), "--net", "--pid", "--mount", f"--wdns={ROOT}", *map(str, words)]

    def cluster(self, name: str, *words: object) -> "subprocess.CompletedProcess[str]":
        """Run ``baton cluster`` on a host."""
        return self.run(name, sys.executable, "-m", "scripts.cli", "cluster", *words)

    def status(self, name: str) -> dict[str, Any]:
        """The status of the cluster, asked on a host."""
        if name not in self._readers or self._readers[name].poll() is not None:
            self._end_reader(name)
            self._readers[name] = subprocess.Popen(
                self._enter(name, [sys.executable, "-c", STATUS_READER]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                cwd=ROOT,
                env=self._variables,
            )
        reader = self._readers[name]
        assert reader.stdin is not None and reader.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print(file=reader.stdin, flush=True)
        return dict(json.loads(reader.stdout.readline() or '{"rows": []}'))

    def _end_reader(self, name: str) -> None:
        if reader := self._readers.pop(name, None):
            reader.communicate()

    def _init(self, name: str) -> int:
        """The first process of the host's process namespace."""
        unshare = self._processes[name].pid
        [child] = Path(f"/proc/{unshare}/task/{unshare}/children").read_text().split()[:1]
        return int(child)

    def pids(self, name: str, part: str) -> list[int]:
        """Processes of a host whose command line contains a text, in this machine's numbers."""
        found: list[int] = []
        try:
            space = os.readlink(f"/proc/{self._init(name)}/ns/pid")
        except (OSError, ValueError):  # all of them have ended, as when Ray has given up a host that was cut off
            return found
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if folder.name.isdigit() and os.readlink(folder / "ns/pid") == space:
                    if part in (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"):
                        found.append(int(folder.name))
        return found

    def kill(self, name: str) -> None:
        """End all processes of a host at once."""
        process = self._processes.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        self._end_reader(name)

    def close(self) -> None:
        for name in list(self._processes):
            self.kill(name)
        self.hosts.close()
        # /tmp/ray stays: removing it here would unmount it in the namespaces of every other test that runs now.

    def logs(self) -> str:
        """What the raylets and Baton's processes wrote, for a failed test."""
        found: list[Any] = [*self._folder.glob("*.log"), *self._folder.glob("*/session_*/logs/worker-*")]
        return "\n".join(f"== {path}\n{path.read_text(errors='replace')[-3000:]}" for path in found)
