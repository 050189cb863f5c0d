"""Control groups of benchmarks: what they grant, and that none is left."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import ConfigError
from scripts.benchmarks.services import cpu_quota as module
from scripts.benchmarks.services.cpu_quota import cpu_quota, why_no_quota


@pytest.mark.skipif(bool(why_no_quota()), reason="no control group can be made here")
def test_a_process_joins_the_group_which_is_removed_after_an_error() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    groups: list[Path] = []

    def fail_in_the_block() -> None:
        with cpu_quota(25) as quota:
            groups.append(quota.path)
            quota.add(process.pid)
            assert (quota.path / "cgroup.procs").read_text().split() == [str(process.pid)]
            process.communicate(b"\n")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_in_the_block()
    assert [group.exists() for group in groups] == [False]


def test_a_machine_without_control_groups_is_refused_by_a_sentence_that_names_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "V1", tmp_path / "one" / "cpu")
    monkeypatch.setattr(module, "V2", tmp_path / "two")
    with pytest.raises(ConfigError, match=r"no control group can cap .*one/cpu/.*No such file.*two/.*No such file"):
        cpu_quota(25).__enter__()
    assert why_no_quota()


def test_groups_of_killed_benchmarks_are_removed_and_those_of_running_ones_stay(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for pid in (ended.pid, os.getpid()):
        (tmp_path / f"{module.PREFIX}-{pid}-1").mkdir()
    monkeypatch.setattr(module, "V1", tmp_path)
    monkeypatch.setattr(module, "V2", tmp_path / "none")
    module.remove_abandoned()
    assert [path.name for path in tmp_path.iterdir()] == [f"{module.PREFIX}-{os.getpid()}-1"]
