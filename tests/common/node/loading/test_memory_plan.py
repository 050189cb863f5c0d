"""How much memory a node may take."""

from pathlib import Path

import pytest

from common.cache.page_layout import PageLayout
from common.node.loading import memory_plan
from common.node.loading.memory_plan import Capacity, attention_bytes

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


@pytest.mark.parametrize(
    ("num_pages", "context_length", "window", "num_fitting", "num_tokens"),
    [
        *[(1000, 5000, None, 1000, 5008), (100, 5000, None, 1000, 1600), (1000, None, None, 1000, 16000)],
        *[(1000, 5000, None, 50, 800), (1000, 5000, None, -1, 0), (100, 5000, 64, 50, 5008)],
    ],
    ids=[
        *["a whole context", "a small pool", "no bound but the pool", "a pool that memory bounds", "no memory"],
        "requests longer than the pool",
    ],
)
def test_attention_copies_each_token_of_the_longest_request(
    num_pages: int, context_length: int | None, window: int | None, num_fitting: int, num_tokens: int
) -> None:
    layout = PageLayout(num_layers=28, num_kv_heads=8, head_dim=128, page_size=16, dtype="bfloat16")
    capacity = Capacity(4, num_pages, 0, None, context_length=context_length, window=window)
    free_bytes = num_fitting * 16 * (28 * 8 * (128 + 128) * 2 + 3000)  # for pages and the copies of their tokens
    assert attention_bytes(layout, capacity, copied_bytes=3000, free_bytes=free_bytes) == num_tokens * 3000
