"""How many CPUs control groups grant this process."""

from pathlib import Path

import pytest

from common.system import cpu_cores


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "350000 100000"}, 3.5),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.cfs_quota_us": "50000", "cpu.cfs_period_us": "100000"}, 0.5),
        ({"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}, None),
        ({}, None),
    ],
    ids=["version 2", "version 2 without a limit", "version 1", "version 1 without a limit", "no group"],
)
def test_a_control_group_grants_cpus(tmp_path: Path, files: dict[str, str], expected: float | None) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    assert cpu_cores._granted(tmp_path) == expected


def test_the_least_of_nested_limits_counts_in_whole_cpus_but_at_least_one(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {Path("/a/b"): None, Path("/a"): 2.5, Path("/"): 8.0}
    monkeypatch.setattr(cpu_cores, "control_groups", lambda controller: iter(limits))
    monkeypatch.setattr(cpu_cores, "_granted", limits.__getitem__)
    assert cpu_cores._quota() == 2
    limits[Path("/a/b")] = 0.3
    assert cpu_cores._quota() == 1
