"""A short seeded run of the whole harness, as a user starts it."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.service.processes import ROOT, descendants, environment
from support.waiting import until

from common.config.serve import ServeConfig
from scripts.chaos_harness.answers import Answer, Output
from scripts.chaos_harness.config import ChaosConfig
from scripts.chaos_harness.run import DISK_BYTES, NoReference, Run
from scripts.chaos_harness.schedule import FaultKind, PlannedFault
from scripts.chaos_harness.service import ChaosService

WORDS = [sys.executable, "-m", "scripts.cli", "chaos", "--distinct=12", "--no-check-pauses", "--no-progress"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_short_run_finds_every_invariant_kept(tmp_path: Path) -> None:
    faults = "--faults=kill,gateway-kill,pause,terminate,role,disk,vanish,hostile"
    options = ["--requests=72", "--concurrency=6", "--kill-every=2", "--fault-every=0.5", "--seed=1"]
    report = tmp_path / "report.json"
    found = subprocess.run(
        [*WORDS, *options, faults, f"--json={report}"], capture_output=True, text=True, cwd=ROOT, env=environment()
    )
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-4000:]
    shown = json.loads(report.read_text())
    assert shown["sent"] == shown["equal"] == 72
    assert sum(shown["faults"].values()) > 0
    assert shown["broken"] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*WORDS, f"--logs={tmp_path}"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment() | {"TMPDIR": str(tmp_path)},
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("reference:")
    children = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 130
    process.stdout.close()
    assert len(children) >= 7  # six processes of the service, and those in which the gateway compiles grammars
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in children))
    assert [path.name for path in tmp_path.iterdir() if not path.name.endswith(".log")] == []


async def test_a_run_that_leaves_every_request_out_is_refused(tmp_path: Path) -> None:
    tie = b'{"choices": [{"logprobs": {"top_logprobs": [{"a": -1.0, "b": -1.0}]}}]}'

    async def send(*_: object) -> Answer:
        return Answer({0: Output("a", [1], finish="length")}, is_complete=True)

    async def call(*_: object, **__: object) -> tuple[int, bytes]:
        return 200, tie

    run = Run(ChaosConfig(distinct=1), tmp_path, lambda line: None)
    client = SimpleNamespace(send=send, call=call)
    run._service = SimpleNamespace(clients={"gateway": client}, gateway=SimpleNamespace(name="gateway"))
    with pytest.raises(NoReference, match="raise --distinct"):
        await run._make_reference()


def test_the_small_disk_is_mounted_nowhere_and_its_logs_are_kept(tmp_path: Path) -> None:
    run = Run(ChaosConfig(), tmp_path, lambda line: None)
    with contextlib.ExitStack() as stack:
        disk, user = run._disk(stack)
        if disk is None:
            pytest.skip("no disk can be mounted here")
        assert str(tmp_path) not in Path("/proc/self/mounts").read_text()
        assert list(tmp_path.iterdir()) == []
        (disk / f"{user}.log").write_text("said")
        with pytest.raises(OSError, match="No space left"):
            (disk / "filler").write_bytes(bytes(DISK_BYTES))
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("decode-1.log", "said")]


async def test_an_error_of_a_fault_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has_failed = asyncio.Event()

    class WaitingLoad:
        def __init__(self, *_: object, **__: object) -> None: ...

        async def run(self, requests: object) -> None:
            await has_failed.wait()

    async def inject(planned: PlannedFault) -> None:
        has_failed.set()
        raise ZeroDivisionError

    async def prepare() -> None: ...

    run = Run(ChaosConfig(), tmp_path, lambda line: None)
    run._service = SimpleNamespace()
    fault = PlannedFault(0.0, FaultKind("kill", True, ("decode",), (0.0, 0.0)), 0.0, 0)
    monkeypatch.setattr("scripts.chaos_harness.run.Load", WaitingLoad)
    monkeypatch.setattr(run, "_make_reference", prepare)
    monkeypatch.setattr(run, "_open_descriptors", dict)
    monkeypatch.setattr(run, "_schedule", lambda: iter([fault]))
    monkeypatch.setattr(run, "_inject_when_possible", inject)
    with pytest.raises(ZeroDivisionError):
        await run._observe()


def test_a_fault_that_does_not_exist_is_refused_by_name() -> None:
    found = subprocess.run([*WORDS, "--faults=flood"], capture_output=True, text=True, cwd=ROOT, env=environment())
    assert found.returncode == 2
    assert "--faults flood is not a fault; choose from kill" in found.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_a_short_run_between_hosts_that_lose_packets_keeps_every_invariant(tmp_path: Path) -> None:
    link = ["--namespaces", "--mtu=1400", "--packet-loss=1", "--packet-delay=50", "--clock-step=200"]
    options = ["--gateways=1", "--requests=60", "--concurrency=6", "--kill-every=6", "--fault-every=4", "--seed=1"]
    report = tmp_path / "report.json"
    found = subprocess.run(
        [*WORDS, *link, *options, "--faults=kill,reset,pair-cut", f"--json={report}"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(),
    )
    if "no network namespaces here" in found.stderr:
        pytest.skip(found.stderr)
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-4000:]
    shown = json.loads(report.read_text())
    assert shown["sent"] == shown["equal"] == 60
    assert shown["output_tokens_per_s"] > 0
    assert shown["faults"]["reset"] > 0
    assert shown["broken"] == []


def test_a_model_that_is_not_there_is_refused_before_the_run() -> None:
    found = subprocess.run([*WORDS, "--model=/nowhere"], capture_output=True, text=True, cwd=ROOT, env=environment())
    assert (found.returncode, found.stderr) == (2, "chaos: --model /nowhere: no such folder\n")


def test_a_folder_for_logs_that_is_a_file_is_refused_before_the_run(tmp_path: Path) -> None:
    file = tmp_path / "logs"
    file.touch()
    found = subprocess.run([*WORDS, f"--logs={file}"], capture_output=True, text=True, cwd=ROOT, env=environment())
    assert found.returncode == 2
    assert found.stderr == f"chaos: --logs {file}: {file} is a file: name a folder\n"


async def test_the_end_of_a_run_waits_for_gateways_that_were_killed_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise SIGTERM would end one that has just begun, which looks like a crash."""
    service = ChaosService(ServeConfig(), tmp_path)
    for node in service.workers:
        node.is_registered = True
    looked: list[bool] = []

    async def look() -> None:
        looked.append(True)
        service.gateways[0].is_registered = len(looked) > 1

    monkeypatch.setattr(service, "_look", look)
    monkeypatch.setattr(service, "_keeper", object())
    await service.until_registered()
    assert len(looked) == 2
