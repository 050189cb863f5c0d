"""The commands of the pages for hosts of your own, etcd, systemd and Kubernetes are run.

Addresses, ports and folders are replaced by those of this machine. Programs that would change the machine, or that need
a cluster, have stand-ins that check what they are told: systemctl against the units, kubectl against the manifests.
"""

import contextlib
import http.client
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from support.service.etcd import IS_INSTALLED, EtcdServer
from support.service.processes import environment, free_port

ROOT = Path(__file__).resolve().parents[2]
SERVERS = ("./scripts/gateway", "./scripts/prefill", "./scripts/decode")
SMALL_NODE = " --threads 1 --max-total-tokens 4096"
START_S = 240.0


def commands_of(name: str) -> list[str]:
    """The commands after ``$`` in the console blocks of a page, in order."""
    text = (ROOT / "docs" / name).read_text()
    blocks = re.findall(r"^```console\n(.*?)^```", text, flags=re.S | re.M)
    return [line[2:] for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.startswith("$ ")]


@pytest.mark.parametrize("name", ["bare-metal.md", "kubernetes.md", "ray.md", "systemd.md"])
def test_every_page_says_how_many_what_to_watch_how_to_upgrade_and_what_to_do(name: str) -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "docs" / name).read_text(), re.M)
    for topic in ("Start|Install", "Capacity, and what to watch", "Upgrade", "What to do when"):
        assert any(re.match(topic, heading) for heading in headings), topic
    assert f"]({name})" in (ROOT / "docs" / "operations.md").read_text()


class Shell:
    """One shell that runs commands in order, as a user types them.

    Args:
        folder: of its stand-ins, which come first in its path.
        replaced: what stands for other texts in every command.
    """

    def __init__(self, folder: Path, replaced: dict[str, str]) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir()
        self._replaced = replaced
        path = f"{self.bin}{os.pathsep}{sys.prefix}/bin{os.pathsep}{os.environ['PATH']}"
        self.variables = {**environment(), "VIRTUAL_ENV": sys.prefix, "PATH": path}

    def stand_in(self, name: str, script: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def words(self, command: str) -> str:
        for text, other in self._replaced.items():
            command = command.replace(text, other)
        return command

    def run(self, command: str) -> str:
        """What a command prints. ``export`` holds for those that follow."""
        command = self.words(command)
        if command.startswith("export "):
            self.variables |= dict(word.split("=", 1) for word in shlex.split(command, comments=True)[1:])
            return ""
        found = subprocess.run(
            ["bash", "-c", command], cwd=ROOT, env=self.variables, capture_output=True, text=True, timeout=240
        )
        assert found.returncode == 0, f"{command}\n{found.stdout}{found.stderr}"
        return found.stdout

    def spawn(self, command: str, log: Path) -> "subprocess.Popen[bytes]":
        with log.open("ab") as output:
            return subprocess.Popen(
                ["bash", "-c", f"exec {self.words(command)}"],
                cwd=ROOT, env=self.variables, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip


@contextlib.contextmanager
def ending(processes: "dict[str, subprocess.Popen[bytes]]") -> Iterator[None]:
    """Stop processes at the end, and assert that they stop well."""
    try:
        yield
    finally:
        for process in processes.values():
            process.send_signal(signal.SIGINT)
        statuses = {name: process.wait(120) for name, process in processes.items()}
    assert set(statuses.values()) == {0}, statuses


def answer(port: int, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path, headers={"Authorization": "Bearer key-of-clients"})
        got = connection.getresponse()
        return got.status, got.read()
    except OSError:
        return 0, b""
    finally:
        connection.close()


def names_at(port: int) -> set[str]:
    status, body = answer(port, "/v1/workers")
    return {worker["name"] for worker in json.loads(body)["workers"]} if status == 200 else set()


def until_there(port: int, names: set[str], log: Path) -> None:
    ends = time.monotonic() + START_S
    while not names <= names_at(port):
        assert time.monotonic() < ends, log.read_text()
        time.sleep(0.1)


# ---- hosts of your own ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_commands_for_hosts_of_your_own_serve_list_and_upgrade(tmp_path: Path) -> None:
    http_port, control, listed, second, second_control = (free_port() for _ in range(5))
    replaced = {
        "10.0.0.1:8000": f"127.0.0.1:{http_port}", "10.0.0.1:8001": f"127.0.0.1:{control}",
        "10.0.0.1:8002": f"127.0.0.1:{listed}", "--data-port 8002": f"--data-port {listed}",
        "--port 8010": f"--port {second}", "--control-port 8011": f"--control-port {second_control}",
        "10.0.0.1": "127.0.0.1", "10.0.0.2": "127.0.0.2", "keys/": f"{tmp_path}/keys/",
        "keygen keys ": f"keygen {tmp_path}/keys ",
    }  # fmt: skip
    shell = Shell(tmp_path, replaced)
    shell.stand_in("sysctl", 'test -n "$*"')
    shell.stand_in("sudo", 'exec "$@"')
    log = tmp_path / "log"
    processes: dict[str, subprocess.Popen[bytes]] = {}
    expected: dict[int, set[str]] = {http_port: set(), second: set()}
    with ending(processes):
        for command in commands_of("bare-metal.md"):
            words = shlex.split(shell.words(command), comments=True)
            if words[0] not in SERVERS:
                for port, names in expected.items():
                    if names:
                        until_there(port, names, log)
                shell.run(command)
                continue
            if words[0] == "./scripts/gateway":
                flags = f" --port {http_port} --control-port {control}" if "--port" not in words else ""
            else:
                flags = SMALL_NODE
                name = words[words.index("--name") + 1]
                expected[second if "listed" in words else http_port].add(name)
            processes[command] = shell.spawn(command + flags, log)
        ends = time.monotonic() + START_S
        (drained,) = [process for command, process in processes.items() if command.endswith("--name decode-b")]
        assert drained.wait(START_S) == 0, log.read_text()
        until_there(second, {"prefill-listed"}, log)
        while names_at(http_port) != {"prefill-a", "decode-c"}:
            assert time.monotonic() < ends, log.read_text()
            time.sleep(0.1)
    assert "Traceback" not in log.read_text()


# ---- etcd -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not IS_INSTALLED, reason="needs etcd (Debian: etcd-server)")
@pytest.mark.timeout(1200)
def test_the_commands_for_etcd_start_a_gateway_that_nodes_find(tmp_path: Path) -> None:
    etcd = EtcdServer(tmp_path / "etcd")
    http_port, control = free_port(), free_port()
    replaced = {
        "http://10.0.0.5:2379": etcd.url, "10.0.0.1": "127.0.0.1", "10.0.0.2": "127.0.0.2",
        "keys/": f"{tmp_path}/keys/", "keygen keys ": f"keygen {tmp_path}/keys ",
    }  # fmt: skip
    shell = Shell(tmp_path, replaced)
    for command in commands_of("bare-metal.md"):
        if "keygen" in command or command.startswith("export "):
            shell.run(command)
    log = tmp_path / "log"
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        etcd.start()
        with ending(processes):
            for command in commands_of("discovery.md"):
                role = shlex.split(command)[0]
                assert role in SERVERS, command
                flags = f" --port {http_port} --control-port {control}" if role == "./scripts/gateway" else SMALL_NODE
                processes[command] = shell.spawn(command + flags, log)
            ends = time.monotonic() + START_S
            while answer(http_port, "/ready")[0] != 200:
                assert time.monotonic() < ends, log.read_text()
                time.sleep(0.1)
    finally:
        etcd.kill()
    assert len(processes) == 3
    assert "Traceback" not in log.read_text()


# ---- systemd --------------------------------------------------------------------------------------------------------

SYSTEMCTL = """
case "$1" in daemon-reload|list-units) exit 0;; enable|restart|start|stop) ;; *) echo "systemctl $1" >&2; exit 1;; esac
shift
for unit in "$@"; do
    case "$unit" in --now) continue;; *.*) name=$unit;; *) name=$unit.service;; esac
    test -f "$UNITS/$(echo "$name" | sed 's/@[^.]*/@/')" || { echo "no unit $unit" >&2; exit 1; }
    echo "$name" >> "$STARTED"
done
"""


def test_the_commands_for_systemd_install_what_the_units_name_and_start_units_that_exist(tmp_path: Path) -> None:
    replaced = {
        folder: f"{tmp_path}{folder}"
        for folder in ("/etc/baton", "/etc/systemd/system", "/opt/baton", "/var/lib/baton")
    }
    shell = Shell(tmp_path, replaced)
    units = tmp_path / "etc" / "systemd" / "system"
    units.mkdir(parents=True)
    shell.variables |= {"UNITS": str(units), "STARTED": str(tmp_path / "started")}
    shell.stand_in("systemctl", SYSTEMCTL)
    shell.stand_in("useradd", 'echo "$*" | grep -q -- "--system .* baton$"')
    shell.stand_in("journalctl", 'test "$*" = "--no-pager -u baton-* --since -10min"')
    shell.stand_in("curl", 'test "$*" = "-sf http://127.0.0.1:8000/ready"')
    shell.stand_in("python3", f'test "$*" = "-m venv {tmp_path}/opt/baton"')
    pip = tmp_path / "opt" / "baton" / "bin" / "pip"
    pip.parent.mkdir(parents=True)
    pip.write_text('#!/bin/sh\ntest "$*" = "install -c constraints.txt ." && test -f constraints.txt\n')
    pip.chmod(0o755)
    for command in commands_of("systemd.md"):
        shell.run(command)
    installed = {path.name for path in units.iterdir()}
    assert installed == {
        path.name for path in (ROOT / "deploy" / "systemd").glob("baton[-.]*") if path.suffix != ".toml"
    }
    named = {path for unit in units.iterdir() for path in re.findall(r"/etc/baton/[\w.]+(?=\s|$)", unit.read_text())}
    assert {"/etc/baton/baton.toml", "/etc/baton/secrets.env"} <= named
    for path in ("/etc/baton/baton.toml", "/etc/baton/secrets.env"):
        assert Path(f"{tmp_path}{path}").is_file()
    secrets = Path(f"{tmp_path}/etc/baton/secrets.env")
    assert re.fullmatch(r"BATON_API_KEY=[0-9a-f]{48}\n", secrets.read_text())
    assert secrets.stat().st_mode & 0o777 == 0o600
    assert {"baton-gateway.service", "baton-prefill@0.service", "baton-decode@0.service"} <= set(
        Path(shell.variables["STARTED"]).read_text().split()
    )


# ---- Kubernetes -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl here")
def test_the_commands_for_kubernetes_make_the_secrets_and_name_objects_that_exist(tmp_path: Path) -> None:
    shell = Shell(tmp_path, {"keys/": f"{tmp_path}/keys/", "keygen keys ": f"keygen {tmp_path}/keys "})
    kubectl = shutil.which("kubectl")
    shell.stand_in("baton", f'exec {sys.executable} -m scripts.cli "$@"')
    made: dict[str, set[str]] = {}
    objects: set[str] = set()
    for command in commands_of("kubernetes.md"):
        words = shlex.split(command, comments=True)
        if words[0] != "kubectl":
            shell.run(command)
        elif words[1] == "create":
            shell.stand_in("kubectl", f'exec {kubectl} "$@" --dry-run=client -o yaml')
            secret = yaml.safe_load(shell.run(command))
            made[secret["metadata"]["name"]] = set(secret["data"])
        elif words[1] == "apply":
            built = yaml.safe_load_all(shell.run(f"{kubectl} kustomize {words[-1]}"))
            documents = list(built)
            objects |= {f"{one['kind'].lower()}/{one['metadata']['name']}" for one in documents}
            wanted = _secret_items(documents)
            assert wanted and all(items <= made[name] for name, items in wanted.items())
        else:
            named = [word for word in words if re.match(r"(deployment|service)/", word)]
            assert named or words[1:3] == ["get", "pods"], command
            assert set(named) <= objects, command
    assert "deployment/baton-decode" in objects


def _secret_items(documents: "list[dict[str, object]]") -> dict[str, set[str]]:
    """Keys of secrets that manifests name, by the secrets' names."""
    found: dict[str, set[str]] = {}

    def look(value: object) -> None:
        if isinstance(value, list):
            for one in value:
                look(one)
        elif isinstance(value, dict):
            if isinstance(ref := value.get("secretKeyRef"), dict):
                found.setdefault(ref["name"], set()).add(ref["key"])
            if "secretName" in value:
                found.setdefault(value["secretName"], set()).update(item["key"] for item in value["items"])
            for one in value.values():
                look(one)

    look(documents)
    return found
