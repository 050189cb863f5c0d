"""What faults of processes find wrong."""

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.chaos_harness.config import ChaosConfig
from scripts.chaos_harness.faults.base import Site
from scripts.chaos_harness.faults.processes import Terminate
from scripts.chaos_harness.service import Node

CRASH = ["terminate: decode-0 was killed by SIGSEGV in place of ending by itself"]


@pytest.mark.parametrize(("end", "problems"), [("exit 0", []), ("kill -SEGV $$", CRASH)])
async def test_a_node_that_crashes_while_it_drains_is_seen(end: str, problems: list[str]) -> None:
    service: Any = SimpleNamespace(remember_resources=lambda node: None)
    site = Site(ChaosConfig(), service, [])
    script = f"trap '{end}' TERM; echo; while :; do read line; done"
    with subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        node, fault = Node("decode-0", [], {}, Path(), "decode", process=process), Terminate()
        await fault.inject(site, node)
        await fault.undo(site, node)
    assert site.problems == problems
