"""The processor cores that this process may use."""

import os
from pathlib import Path


def usable_cores() -> list[tuple[int, ...]]:
    """The CPU numbers of each physical core that affinity and control group let this process use."""
    allowed = sorted(os.sched_getaffinity(0))
    cores: dict[str, list[int]] = {}
    for cpu in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.setdefault(siblings.read_text() if siblings.exists() else str(cpu), []).append(cpu)
    return [tuple(core) for core in cores.values()][: _quota()]


def _quota() -> int | None:
    """Whole CPUs that the control group grants, at least 1; None without a limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return None
