"""``cluster`` on a real Ray cluster: a raylet in each of several network namespaces, real nodes, real load.

The hosts are host-a (the head, which runs none of Baton's processes), host-b, host-c, host-d and host-e.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.service.hosts import make_hosts
from support.service.processes import ROOT, environment, free_port, spawn
from support.service.ray_hosts import HAS_RAY, HAS_RAY_CLIENT, RayHosts
from support.service.steady_load import Load, until

from scripts.chaos_harness.hosts import Hosts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(not HAS_RAY, reason="needs the extra ray, and nsenter"),
]

HOSTS = ("host-a", "host-b", "host-c", "host-d", "host-e")
PORT = 8000
SECRETS = {"BATON_API_KEY": "k", "BATON_CLUSTER_KEY": "c" * 32}
CLUSTER = """
lost-after-s = 20
surge-wait-s = 5

[options]
keys = "{keys}"
served-model-name = "m"

[gateway]
count = {gateways}
options = {{ host = "0.0.0.0", port = 8000, drain-timeout = 60, advice-window = 5, advice-hold = 5 }}

[prefill]
count = 1
options = {{ dtype = "float32", max-total-tokens = 2048, transport = "tcp", node-timeout = 10, drain-timeout = 60 }}

[decode]
count = {decode}
autoscale = {{ min = 1, max = 2 }}

[decode.options]
dtype = "float32"
max-running-requests = 8
max-total-tokens = 2048
transport = "tcp"
node-timeout = 10
drain-timeout = 60

[autoscale]
up-after-s = 3
down-after-s = 3
"""
PLACED = """
surge-wait-s = 5

[options]
keys = "{keys}"
served-model-name = "m"

[gateway]
count = 1
labels = {{ tier = "front" }}
resources = {{ uplink = 1 }}
options = {{ host = "0.0.0.0" }}

[prefill]
count = 2
labels = {{ tier = "!front" }}
near = "decode"
placement = "strict-spread"
options = {{ dtype = "float32", max-total-tokens = 2048 }}

[decode]
count = 2
gpus = 1
memory-gb = 1.5
labels = {{ tier = "in(fast,faster)" }}
placement = "pack"
options = {{ dtype = "float32", max-total-tokens = 2048, device = "cpu", threads = 1 }}
"""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made = make_hosts(HOSTS)
    yield made
    made.close()


@pytest.fixture
def ray_hosts(hosts: Hosts, tmp_path: Path) -> Iterator[RayHosts]:
    made = RayHosts(hosts, tmp_path / "hosts", variables=SECRETS)
    yield made
    made.close()


def write_config(folder: Path, content: str = CLUSTER, *, gateways: int = 1, decode: int = 1) -> Path:
    keys = folder / "keys"
    if not keys.exists():
        keygen = [sys.executable, "-m", "scripts.cli", "keygen", str(keys), "all"]
        subprocess.run(keygen, check=True, cwd=ROOT, env=environment())
    path = folder / "cluster.toml"
    path.write_text(content.format(keys=keys / "all", gateways=gateways, decode=decode))
    return path


def is_running(pid: int) -> bool:
    """A process that has ended may stay as a zombie: the first process of these hosts does not wait for orphans."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Watched:
    """The cluster as ``cluster status`` shows it, asked on one host."""

    def __init__(self, ray: RayHosts, asked_on: str) -> None:
        self.ray = ray
        self.asked_on = asked_on

    def run(self, *words: object) -> str:
        found = self.ray.cluster(self.asked_on, *words)
        assert found.returncode == 0, f"{found.stdout}{found.stderr}\n{self.ray.logs()}"
        return found.stdout + found.stderr

    def status(self) -> dict[str, Any]:
        return self.ray.status(self.asked_on)

    def rows(self, role: str = "") -> list[dict[str, Any]]:
        rows = self.status()["rows"]
        return [row for row in rows if role in ("", row["role"]) and row["state"] == "ready"]

    def until_ready(self, count: int, role: str, *, without: str = "") -> None:
        """Return once the group has exactly so many instances, all ready, and a certain one is not among them."""

        def is_so() -> bool:
            rows = [row for row in self.status()["rows"] if row["role"] == role]
            ready = [row for row in rows if row["state"] == "ready" and row["name"] != without]
            return len(ready) == count == len(rows)

        until(is_so, f"{count} {role}", self.explain)

    def settled(self, role: str = "") -> list[dict[str, Any]]:
        """Return the instances, once all are ready: a late answer on a busy machine makes one "starting" again."""
        found: list[dict[str, Any]] = []

        def is_so() -> bool:
            found[:] = self.status()["rows"]
            return bool(found) and all(row["state"] == "ready" for row in found)

        until(is_so, "all to be ready", self.explain)
        return [row for row in found if role in ("", row["role"])]

    def explain(self) -> str:
        return self.ray.cluster(self.asked_on, "logs", "supervisor").stdout + self.ray.logs()

    def host_of(self, address: str) -> str:
        return next(name for name in HOSTS if self.ray.hosts.address(name) == address)

    def hosts_of(self, role: str) -> list[str]:
        """The host of each instance that has one, in the order of their starts."""
        return [self.host_of(row["host"]) for row in self.status()["rows"] if row["role"] == role and row["host"]]


def test_every_command_of_the_page_succeeds_with_a_token(hosts: Hosts, tmp_path: Path) -> None:
    page = (ROOT / "docs/ray.md").read_text()
    lines = [shlex.split(line) for line in re.findall(r"^\$ ./scripts/cluster (.*)$", page, re.M)]
    assert {words[0] for words in lines} == {"up", "status", "logs", "scale", "upgrade", "down"}
    starts = re.findall(r"^\$ (?:RAY_REDIS_ADDRESS=\S+ )?ray start (.*)$", page, re.M)
    for address, name in (("10.0.0.1", "host-a"), ("10.0.0.2", "host-b")):
        starts = [line.replace(address, hosts.address(name)) for line in starts]
    variables = SECRETS | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "t" * 32}
    config = write_config(tmp_path)
    made = RayHosts(hosts, tmp_path / "hosts", variables=variables)
    try:
        head, other, with_redis = (shlex.split(line, comments=True) for line in starts)
        made.start("host-a", is_head=True, more=head)
        made.start("host-b", more=other)
        assert with_redis == head[: len(with_redis)]
        for words in lines:
            words = [str(config) if word == "docs/examples/cluster.toml" else word for word in words]
            found = made.run("host-a", ROOT / "scripts/cluster", *words)
            assert found.returncode == 0, f"{words}\n{found.stdout}{found.stderr}\n{made.logs()}"
        without_token = ["-u", "RAY_AUTH_MODE", "-u", "RAY_AUTH_TOKEN", "RAY_gcs_server_port_wait_time_s=5"]
        stranger = made.run("host-a", "env", *without_token, sys.executable, "-m", "scripts.cli", "cluster", "status")
        assert stranger.returncode == 2 and "no Ray cluster answers" in stranger.stderr, stranger.stderr
        assert "InvalidAuthToken" in stranger.stderr
    finally:
        made.close()


def test_scaling_and_upgrades_under_load_lose_no_request(ray_hosts: RayHosts, tmp_path: Path) -> None:
    ray_hosts.start("host-a", cpus=0, is_head=True)
    for name in ("host-b", "host-c"):
        ray_hosts.start(name, cpus=5)
    config = write_config(tmp_path, gateways=2)
    cluster = Watched(ray_hosts, "host-a")
    said = cluster.run("up", "--config", config)
    addresses = [ray_hosts.hosts.address(name) for name in ("host-b", "host-c")]
    assert [line for line in said.splitlines() if line.startswith("ready")] == [
        f"ready http://{row['host']}:{PORT}" for row in cluster.settled("gateway")
    ]
    assert sorted(row["host"] for row in cluster.settled("gateway")) == addresses
    assert "is up already" in ray_hosts.cluster("host-a", "up", "--config", config).stderr
    with Load(addresses, PORT) as load:
        cluster.run("scale", "--decode", "3")
        cluster.until_ready(3, "decode")
        load.until_more()
        cluster.run("scale", "--decode", "1")
        cluster.until_ready(1, "decode")
        load.until_more()
        before = {row["name"] for row in cluster.settled()}
        assert "upgraded" in cluster.run("upgrade")
        after = cluster.settled()
        assert not before & {row["name"] for row in after}, "a process was not replaced"
        assert {row["revision"] for row in after} == {2}
        load.until_more()
        cluster.run("scale", "--autoscale")
        with Load(addresses[::-1], PORT, num_clients=12) as more:
            more.pause_s = 0.0
            until(lambda: len(cluster.rows("decode")) == 2, "one more node by advice", cluster.explain)
            more.until_more(30)
        assert not more.failures
        load.pause_s = 5.0  # where other programs take the processors, three clients with short pauses need two nodes
        cluster.until_ready(1, "decode")
        load.until_more()
        cluster.run("scale", "--decode", "1", "--no-autoscale")
        cluster.until_ready(1, "decode")
    assert not load.failures
    shown = ray_hosts.cluster("host-c", "status", "--address", ray_hosts.address).stdout
    assert "revision 2: 2 gateway, 1 prefill, 1 decode desired" in shown
    name = cluster.settled("decode")[0]["name"]
    assert "registered" in cluster.run("logs", name)
    assert f"{name} is ready" in cluster.run("logs", "supervisor", "--lines", "1000")
    cluster.run("down")
    assert "there is no cluster 'baton'" in ray_hosts.cluster("host-a", "status").stderr
    for host in ("host-b", "host-c"):
        assert not ray_hosts.pids(host, "serving.worker") + ray_hosts.pids(host, "-m gateway")


def test_processes_are_placed_by_labels_amounts_and_nearness(ray_hosts: RayHosts, tmp_path: Path) -> None:
    ray_hosts.start("host-a", cpus=0, is_head=True)
    ray_hosts.start("host-b", cpus=4, gpus=2, labels="tier=fast")
    ray_hosts.start("host-c", cpus=4, gpus=2, labels="tier=faster")
    ray_hosts.start("host-d", cpus=4, gpus=2, labels="tier=front", resources={"uplink": 1})
    cluster = Watched(ray_hosts, "host-a")
    cluster.run("up", "--config", write_config(tmp_path, PLACED))
    cluster.settled()
    assert cluster.hosts_of("gateway") == ["host-d"]
    packed, again = cluster.hosts_of("decode")
    assert packed == again and packed in ("host-b", "host-c")
    [other] = {"host-b", "host-c"} - {packed}
    assert cluster.hosts_of("prefill") == [packed, other], "near the decode nodes, and then on the host that is left"
    devices = []
    for row in cluster.settled("decode"):
        [pid] = ray_hosts.pids(packed, f"--name={row['name']}")
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        devices += [value for value in variables if value.startswith(b"CUDA_VISIBLE_DEVICES=")]
    assert sorted(devices) == [b"CUDA_VISIBLE_DEVICES=0", b"CUDA_VISIBLE_DEVICES=1"]

    cluster.run("scale", "--decode", "3", "--gateway", "2")
    cluster.until_ready(3, "decode")
    assert cluster.hosts_of("decode") == [packed, packed, other], "a full host is left for the next one"

    waiting = re.compile(r"gateway-1 +- +placing .* no host has room for 1 CPU, 1 uplink, tier=front$", re.M)
    until(lambda: waiting.search(cluster.run("status")), "the gateway to wait for room", cluster.explain)
    ray_hosts.start("host-e", cpus=1, labels="tier=front", resources={"uplink": 1})
    cluster.until_ready(2, "gateway")
    assert cluster.hosts_of("gateway") == ["host-d", "host-e"]
    with Load([ray_hosts.hosts.address("host-e")], PORT) as load:
        load.until_more()
    assert not load.failures


@pytest.mark.skipif(not HAS_RAY_CLIENT, reason="needs grpcio")
def test_a_host_outside_of_the_ray_cluster_runs_the_commands(hosts: Hosts, tmp_path: Path) -> None:
    ray_hosts = RayHosts(
        hosts, tmp_path / "hosts", variables=SECRETS | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "t" * 32}
    )
    config = write_config(tmp_path)

    def run(*words: object) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "scripts.cli", "cluster", *words, "--address", ray_hosts.client_address]
        return ray_hosts.run_beside("host-d", *command)

    def outside(*words: object) -> str:
        found = run(*words)
        assert found.returncode == 0, f"{words}\n{found.stdout}{found.stderr}\n{ray_hosts.logs()}"
        return found.stdout

    def num_ready(role: str) -> int:
        rows = json.loads(outside("status", "--json"))["rows"]
        return sum((row["role"], row["state"]) == (role, "ready") for row in rows)

    try:
        ray_hosts.start("host-a", cpus=0, is_head=True)
        ray_hosts.start("host-b", cpus=5)
        assert f"ready http://{hosts.address('host-b')}:{PORT}" in outside("up", "--config", config)
        again = run("up", "--config", config)
        assert again.returncode == 2 and "is up already" in again.stderr, again.stderr
        with Load([hosts.address("host-b")], PORT) as load:
            outside("scale", "--decode", "2")
            until(lambda: num_ready("decode") == 2, "2 decode nodes", ray_hosts.logs)
            load.until_more()
        assert not load.failures
        assert "upgraded" in outside("upgrade")
        assert "upgrading to revision 2" in outside("logs", "supervisor", "--lines", "1000")
        assert "registered" in outside("logs", "prefill-1")
        outside("down")
        ended = run("status")
        assert ended.returncode == 1 and "there is no cluster 'baton'" in ended.stderr, ended.stderr
        assert not ray_hosts.pids("host-b", "serving.worker") + ray_hosts.pids("host-b", "-m gateway")
    finally:
        ray_hosts.close()


def test_lost_processes_actors_and_hosts_are_replaced_and_requests_go_on(ray_hosts: RayHosts, tmp_path: Path) -> None:
    ray_hosts.start("host-a", cpus=0, is_head=True)
    for name in ("host-b", "host-c", "host-d"):
        ray_hosts.start(name, cpus=6)
    config = write_config(tmp_path, decode=2)
    cluster = Watched(ray_hosts, "host-a")
    cluster.run("up", "--config", config)
    addresses = [ray_hosts.hosts.address(name) for name in ("host-b", "host-c", "host-d")]
    with Load(addresses, PORT, may_lose_gateways=True) as load:
        first = cluster.settled("decode")[0]
        for pid in ray_hosts.pids(cluster.host_of(first["host"]), f"--name={first['name']}"):
            os.kill(pid, signal.SIGKILL)
        until(lambda: cluster.settled("decode")[0]["restarts"] == 1, "a restart in its place", cluster.explain)
        cluster.until_ready(2, "decode")
        load.until_more()

        before = sorted((row["name"], row["restarts"]) for row in cluster.settled())
        [pid] = ray_hosts.pids(cluster.host_of(cluster.status()["host"]), "ray::ClusterSupervisor")
        os.kill(pid, signal.SIGKILL)
        until(lambda: "has started again" in cluster.explain(), "the supervisor to start again", cluster.explain)
        until(lambda: len(cluster.rows()) == 4, "all to be found again", cluster.explain)
        assert sorted((row["name"], row["restarts"]) for row in cluster.settled()) == before
        load.until_more()

        first = cluster.settled("prefill")[0]
        [child] = ray_hosts.pids(cluster.host_of(first["host"]), f"--name={first['name']}")
        actor = int(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(actor, signal.SIGKILL)
        cluster.until_ready(1, "prefill", without=first["name"])
        assert not is_running(child), "the process outlived its actor"
        load.until_more()

        first = cluster.settled("decode")[-1]
        cut = cluster.host_of(first["host"])
        names = [row["name"] for row in cluster.settled() if row["host"] == first["host"]]
        ray_hosts.hosts.cut(cut)
        until(lambda: not {row["name"] for row in cluster.rows()} & set(names), "the loss to be seen", cluster.explain)
        cluster.until_ready(2, "decode", without=first["name"])
        cluster.until_ready(1, "gateway")
        load.until_more()
        ray_hosts.hosts.heal(cut)
        until(lambda: not ray_hosts.pids(cut, "serving.worker"), "the host's old nodes to end", cluster.explain)

        gateway = cluster.settled("gateway")[0]
        ray_hosts.kill(cluster.host_of(gateway["host"]))
        cluster.until_ready(1, "gateway", without=gateway["name"])
        cluster.until_ready(2, "decode")
        assert cluster.settled("gateway")[0]["host"] != gateway["host"]
        load.until_more()
    assert not load.failures


def test_with_redis_the_loss_of_the_head_stops_nothing_and_it_comes_back(hosts: Hosts, tmp_path: Path) -> None:
    if shutil.which("redis-server") is None:
        pytest.skip("needs redis-server")
    port = free_port()
    redis_words = ["redis-server", "--port", str(port), "--bind", hosts.bridge_address, "--protected-mode", "no"]
    redis = spawn([*redis_words, "--save", "", "--dir", str(tmp_path)], tmp_path / "redis.log")
    said = tmp_path / "redis.log"
    until(lambda: "Ready to accept connections" in said.read_text(), "Redis", said.read_text)
    variables = SECRETS | {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"}
    made = RayHosts(hosts, tmp_path / "hosts", variables=variables, redis=f"{hosts.bridge_address}:{port}")
    try:
        made.start("host-a", cpus=0, is_head=True)
        for name in ("host-b", "host-c"):
            made.start(name, cpus=5)
        cluster = Watched(made, "host-b")
        cluster.run("up", "--config", write_config(tmp_path))
        before = {row["name"]: row["restarts"] for row in cluster.settled()}
        with Load([row["host"] for row in cluster.settled("gateway")], PORT) as load:
            made.kill("host-a")
            load.until_more(20)
            made.start("host-a", cpus=0, is_head=True)
            load.until_more()
            assert {row["name"]: row["restarts"] for row in cluster.settled()} == before
            cluster.run("scale", "--decode", "2")
            cluster.until_ready(2, "decode")
            load.until_more()
        assert not load.failures
        cluster.run("down")
    finally:
        made.close()
        redis.terminate()
        redis.wait(60)


def test_without_redis_nodes_stop_when_the_head_is_lost(ray_hosts: RayHosts, tmp_path: Path) -> None:
    ray_hosts._variables["RAY_gcs_rpc_server_reconnect_timeout_s"] = "5"
    ray_hosts.start("host-a", cpus=0, is_head=True)
    ray_hosts.start("host-b", cpus=5)
    Watched(ray_hosts, "host-b").run("up", "--config", write_config(tmp_path))
    assert ray_hosts.pids("host-b", "serving.worker")
    nodes = ray_hosts.pids("host-b", "serving.worker") + ray_hosts.pids("host-b", "-m gateway")
    ray_hosts.kill("host-a")
    until(lambda: not any(map(is_running, nodes)), "the nodes to stop", ray_hosts.logs)
