"""Processor time of other processes is separated from that of a benchmark."""

import os
import subprocess
import sys

import pytest
from support.waiting import until

from scripts.benchmarks.harness.cpu_contention import CpuContention, cpu_time_s

BURN = "import time; ends = time.process_time() + 0.4\nwhile time.process_time() < ends: pass"


def test_cpu_time_includes_running_and_ended_children() -> None:
    before = cpu_time_s(os.getpid())
    living = subprocess.Popen([sys.executable, "-c", BURN + "\ntime.sleep(30)"])
    until(lambda: cpu_time_s(os.getpid()) - before >= 0.3)
    living.kill()
    living.wait()
    assert cpu_time_s(os.getpid()) - before >= 0.3


def test_time_of_this_process_does_not_count_as_contention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuContention, "_busy", lambda self: cpu_time_s(os.getpid()))  # as if no other process ran
    contention = CpuContention([])
    subprocess.run([sys.executable, "-c", BURN], check=True)
    assert contention.cores() == pytest.approx(0.0, abs=0.3)


def test_time_of_an_unrelated_process_counts() -> None:
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {BURN!r}])"
    contention = CpuContention(os.sched_getaffinity(0))
    subprocess.run([sys.executable, "-c", parent], check=True)  # its child outlives it and is no longer a descendant
    until(lambda: contention.cores() > 0.0)


def test_a_process_whose_name_is_cut_within_a_character_counts_as_any_other() -> None:
    named = "open('/proc/self/comm', 'wb').write('программа'.encode()[:15]); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", named], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline()
        assert cpu_time_s(os.getpid()) > 0
        process.kill()
