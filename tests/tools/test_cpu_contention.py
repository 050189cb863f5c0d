"""Processor time of other processes is separated from that of a benchmark."""

import os
import subprocess
import sys
import time

from scripts.benchmarks.harness.cpu_contention import CpuContention, cpu_time_s

BURN = "import time; ends = time.process_time() + 0.6\nwhile time.process_time() < ends: pass"


def test_cpu_time_includes_running_and_ended_children() -> None:
    before = cpu_time_s(os.getpid())
    living = subprocess.Popen([sys.executable, "-c", BURN + "\ntime.sleep(30)"])
    used, ends = 0.0, time.monotonic() + 60
    while used < 0.3 and time.monotonic() < ends:
        time.sleep(0.05)
        used = cpu_time_s(os.getpid()) - before
    living.kill()
    living.wait()
    assert used >= 0.3
    assert cpu_time_s(os.getpid()) - before >= 0.3


def test_time_of_this_process_does_not_count_as_contention() -> None:
    contention = CpuContention([])  # no CPU, so none is busy
    subprocess.run([sys.executable, "-c", BURN], check=True)
    assert contention.cores() == 0.0


def test_time_of_an_unrelated_process_counts() -> None:
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {BURN!r}])"
    contention = CpuContention(os.sched_getaffinity(0))
    subprocess.run([sys.executable, "-c", parent], check=True)  # its child outlives it and is no longer a descendant
    time.sleep(1.5)
    assert contention.cores() > 0.1


def test_a_process_whose_name_is_cut_within_a_character_counts_as_any_other() -> None:
    named = "open('/proc/self/comm', 'wb').write('программа'.encode()[:15]); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", named], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline()
        assert cpu_time_s(os.getpid()) > 0
        process.kill()
