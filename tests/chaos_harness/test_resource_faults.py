"""Faults that take a resource from a node."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.chaos_harness.config import ChaosConfig
from scripts.chaos_harness.faults import resources
from scripts.chaos_harness.faults.base import Site
from scripts.chaos_harness.faults.resources import Memory


async def test_control_groups_that_a_killed_run_has_left_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder stands for the tree of control groups; one with a file in it for a group with a process."""
    monkeypatch.setattr(resources, "CGROUPS", ((str(tmp_path), "memory.max"),))
    for name in ("baton-chaos-1-2", "baton-chaos-1-3", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "baton-chaos-1-3" / "process").touch()
    service: Any = SimpleNamespace(remember_resources=lambda node: None)
    node: Any = SimpleNamespace(pid=7, name="decode-0")
    await Memory().inject(Site(ChaosConfig(), service, []), node)
    made = {path.name for path in tmp_path.iterdir() if (path / "cgroup.procs").exists()}
    assert {path.name for path in tmp_path.iterdir()} - made == {"baton-chaos-1-3", "other"}
    assert len(made) == 1
