"""A process that is loading can be ended."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CODE = """
import os, signal
from common.system.loading_signals import end_on_signals
signal.signal(signal.SIGINT, signal.default_int_handler)  # the shell of these tests may ignore it
if {is_first}:
    os.getpid = lambda: 1
end_on_signals()
print(callable(signal.getsignal(signal.SIGTERM)), flush=True)
os.kill(int(os.readlink("/proc/self")), signal.{name})
signal.pause()
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_signal_ends_a_process_that_is_loading_also_the_first_one_of_a_container(name: str, is_first: bool) -> None:
    code = CODE.format(is_first=is_first, name=name)
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    number = signal.Signals[name]
    # The kernel gives the first process of a container only signals for which it has handlers.
    assert (ended.returncode, ended.stdout) == ((128 + number, "True\n") if is_first else (-number, "False\n"))
    assert ended.stderr == ""
