"""How much memory a node may take."""

from pathlib import Path

import pytest

from common.node.loading import memory_plan

VERSION_2 = {"memory.max": "5000", "memory.current": "3000", "memory.stat": "inactive_file 400\nactive_file 30"}
VERSION_1 = {
    "memory.limit_in_bytes": "5000",
    "memory.usage_in_bytes": "3000",
    "memory.stat": "inactive_file 1\nactive_file 1\ntotal_inactive_file 400\ntotal_active_file 30",
}


def write(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text + "\n")
    return folder


@pytest.mark.parametrize(
    ("files", "expected"),
    [(VERSION_2, 2430), (VERSION_2 | {"memory.max": "max"}, None), (VERSION_1, 2430), ({}, None)],
    ids=["version 2", "version 2 without a limit", "version 1", "no group"],
)
def test_a_control_group_leaves_memory_that_is_free_or_caches_files(
    tmp_path: Path, files: dict[str, str], expected: int | None
) -> None:
    assert memory_plan._left_in_group(write(tmp_path / "group", files)) == expected


def test_the_least_of_nested_limits_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    unit = write(tmp_path / "slice" / "unit", VERSION_2)
    folders = [unit, write(unit.parent, VERSION_2 | {"memory.max": "4000"}), tmp_path]
    monkeypatch.setattr(memory_plan, "control_groups", lambda controller: iter(folders))
    assert memory_plan.free_bytes("cpu") == 1430
