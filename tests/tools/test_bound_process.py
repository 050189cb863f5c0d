"""A bound process ends with its parent, and is otherwise what its command makes it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from scripts.serving import bound_process
from scripts.serving.bound_process import bound_command


def run(command: list[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_bound_process_is_the_command_itself_with_its_output_and_exit_status():
    with subprocess.Popen(bound_command(["bash", "-c", "echo $$; exit 7"]), stdout=subprocess.PIPE, text=True) as bound:
        said, _ = bound.communicate(timeout=60)
    assert (said, bound.returncode) == (f"{bound.pid}\n", 7)


def test_a_bound_process_ignores_ctrl_c_alone_until_it_has_a_handler():
    lines = run(bound_command(["cat", "/proc/self/status"])).stdout.splitlines()
    (ignored,) = (int(line.split()[1], 16) for line in lines if line.startswith("SigIgn"))
    assert ignored & 1 << signal.SIGINT - 1
    assert not ignored & (1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1)


def test_a_bound_process_whose_parent_has_gone_does_not_run_its_command():
    other = str(os.getpid() + 1)
    ran = run([sys.executable, "-I", "-S", bound_process.__file__, other, "9", "", "echo", "here"])
    assert (ran.returncode, ran.stdout) == (1, "")


def test_a_command_that_cannot_run_is_named(tmp_path: Path):
    ran = run(bound_command([str(tmp_path)]))
    assert (ran.returncode, ran.stderr) == (127, f"cannot run {tmp_path}: Permission denied\n")
