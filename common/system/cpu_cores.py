"""The processor cores that this process may use."""

import os
from pathlib import Path

from common.system.control_groups import control_groups


def usable_cores() -> list[tuple[int, ...]]:
    """The CPU numbers of each physical core that affinity and control group let this process use."""
    allowed = sorted(os.sched_getaffinity(0))
    cores: dict[str, list[int]] = {}
    for cpu in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.setdefault(siblings.read_text() if siblings.exists() else str(cpu), []).append(cpu)
    return [tuple(core) for core in cores.values()][: _quota()]


def _quota() -> int | None:
    """Whole CPUs that the control groups of this process grant, at least 1; None without a limit."""
    granted = [cpus for folder in control_groups("cpu") if (cpus := _granted(folder)) is not None]
    return max(1, int(min(granted))) if granted else None


def _granted(folder: Path) -> float | None:
    """CPUs that one control group grants; None without a limit."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):
        return None
