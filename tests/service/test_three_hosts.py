"""Three hosts in network namespaces, with keys of ``baton keygen``, and a stranger.

host-a 10.213.N.1 (gateway)   host-b 10.213.N.2 (prefill)   host-c 10.213.N.3 (decode)   host-x 10.213.N.4 (stranger)
"""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.service.hosts import make_hosts
from support.service.processes import ROOT, environment, spawn
from support.service.service import SMALL_MODEL, WORKER

from scripts.chaos_harness.hosts import Hosts

HOSTS = ("host-a", "host-b", "host-c", "host-x")
STRANGER = """
import socket, sys, time, zmq
from common.wire.curve import draw_keys
from common.wire.mailbox import Mailbox
from common.wire.messages import FromGateway, FromPrefill, Heartbeat
from common.wire.process_id import new_incarnation
context = zmq.Context()
_, drawn = draw_keys()
targets = sys.argv[1:3]
boxes = []
for address in targets:
    for curve in (None, drawn.client(drawn.gateway), drawn.client(bytes.fromhex(sys.argv[3]))):
        boxes.append(Mailbox(context, new_incarnation(), FromGateway, connect=f"tcp://{address}", curve=curve))
failures, heard, num_floods = set(), 0, 0
began = time.monotonic()
while time.monotonic() < began + 4 or (len(failures) < 3 or num_floods < 400) and time.monotonic() < began + 180:
    for box in boxes:
        box.send(Heartbeat(0, 0, 0, 0, 0, {}))
        events = box.connection_events()
        assert not events.connected, "a stranger is connected"
        if events.failure:
            failures.add(str(events.failure))
        heard += len(box.receive())
    for address in targets:
        with socket.create_connection(address.split(":"), timeout=60) as flood:
            flood.sendall(b"\\xff" * 200)
        num_floods += 1
    time.sleep(0.01)
print(sorted(failures), heard)
"""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made = make_hosts(HOSTS)
    yield made
    made.close()


def run_on(hosts: Hosts, host: str, *words: object) -> str:
    """What a command prints on a host."""
    found = subprocess.run(
        hosts.command(host, *words), capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment()
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


def num_refused(metrics: str) -> float:
    """Control connections that the gateway has refused."""
    found = re.findall(r"^baton_control_connections_refused_total\{.*\} (\S+)$", metrics, re.M)
    return sum(map(float, found))


@pytest.mark.slow
def test_three_hosts_serve_with_keys_and_a_stranger_gets_nothing(hosts: Hosts, tmp_path: Path) -> None:
    keygen = [sys.executable, "-m", "scripts.cli", "keygen", str(tmp_path / "keys"), "host-a", "host-b", "host-c"]
    subprocess.run(keygen, check=True, cwd=ROOT, env=environment())
    gateway, prefill, decode = (hosts.address(host) for host in ("host-a", "host-b", "host-c"))
    secrets = {"BATON_API_KEY": "k", "BATON_CLUSTER_KEY": "c" * 32}
    small = [
        "--dtype=float32",
        "--threads=1",
        "--max-total-tokens=2048",
        f"--gateway={gateway}:8001",
        "--transport=tcp",
    ]
    shared = [f"--model={SMALL_MODEL}", "--served-model-name=m", "--node-timeout=60"]
    options = {
        "host-a": ("gateway", [f"--host={gateway}", f"--control-host={gateway}"]),
        "host-b": (WORKER, ["prefill", *small, f"--advertise-host={prefill}", "--data-port=8002"]),
        "host-c": (WORKER, ["decode", *small, f"--data-interface={decode}"]),
    }
    running = {
        host: spawn(
            hosts.command(host, sys.executable, "-m", module, *words, f"--keys={tmp_path}/keys/{host}", *shared),
            tmp_path / f"{host}.log",
            secrets,
        )
        for host, (module, words) in options.items()
    }

    def logs() -> str:
        return "\n".join((tmp_path / f"{host}.log").read_text() for host in running)

    def ask(path: str, *words: str) -> str:
        url = f"http://{gateway}:8000{path}"
        return run_on(hosts, "host-c", "curl", "-sS", "--max-time", "60", "-H", "Authorization: Bearer k", *words, url)

    try:
        ends = time.monotonic() + 180
        while subprocess.run(
            hosts.command("host-c", "curl", "-sf", f"http://{gateway}:8000/ready"), capture_output=True
        ).returncode:
            assert all(process.poll() is None for process in running.values()), logs()
            assert time.monotonic() < ends, logs()
            time.sleep(0.1)
        [key] = [
            worker["register"]["public_key"]
            for worker in json.loads(ask("/v1/workers"))["workers"]
            if worker["role"] == "prefill"
        ]
        body = {"model": "m", "prompt": "To be", "max_tokens": 12, "ignore_eos": True, "temperature": 0, "stream": True}

        def completion() -> str:
            words = ("-N", "-H", "Content-Type: application/json", "-d", json.dumps(body))
            return "".join(
                json.loads(line[6:])["choices"][0]["text"]
                for line in ask("/v1/completions", *words).splitlines()
                if line.startswith("data: {")
            )

        before = completion()
        stranger = [sys.executable, "-c", STRANGER, f"{gateway}:8001", f"{prefill}:8002", key]
        assert run_on(hosts, "host-x", *stranger) == "['closed', 'key', 'protocol'] 0\n", logs()
        assert before and completion() == before
        ends = time.monotonic() + 60
        while num_refused(ask("/metrics")) <= 100:
            assert time.monotonic() < ends, logs()
            time.sleep(0.1)
        workers = json.loads(ask("/v1/workers"))["workers"]
        assert {(worker["role"], worker["starts"]) for worker in workers} == {("prefill", 1), ("decode", 1)}
    finally:
        for process in running.values():
            process.terminate()
        statuses = [process.wait(60) for process in running.values()]
    assert statuses == [0, 0, 0], logs()
    assert "Traceback" not in logs()
