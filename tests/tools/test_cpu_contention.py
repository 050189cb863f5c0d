"""Processor time of others is told from one's own."""

import os
import subprocess
import sys
import time

from scripts.benchmarks.cpu_contention import Neighbours, own_s

BURN = "import time; ends = time.process_time() + 0.6\nwhile time.process_time() < ends: pass"


def test_own_time_is_that_of_children_too_whether_they_live_or_have_ended() -> None:
    before = own_s(os.getpid())
    living = subprocess.Popen([sys.executable, "-c", BURN + "\ntime.sleep(30)"])
    used, ends = 0.0, time.monotonic() + 20
    while used < 0.3 and time.monotonic() < ends:
        time.sleep(0.05)
        used = own_s(os.getpid()) - before
    living.kill()
    living.wait()
    assert used >= 0.3
    assert own_s(os.getpid()) - before >= 0.3


def test_what_we_do_ourselves_is_not_counted_as_others() -> None:
    neighbours = Neighbours([])  # no CPU, so nobody is busy
    subprocess.run([sys.executable, "-c", BURN], check=True)
    assert neighbours.cores() == 0.0


def test_a_process_that_is_not_ours_counts() -> None:
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {BURN!r}])"
    neighbours = Neighbours(os.sched_getaffinity(0))
    subprocess.run([sys.executable, "-c", parent], check=True)  # its child outlives it, and is ours no more
    time.sleep(1.5)
    assert neighbours.cores() > 0.1
