"""Control groups that cap the processor time of single processes, by version 1 or 2 of the interface of Linux."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from common.errors import ConfigError

#: Each period, a group may use its share. With shorter periods, parts of it are lost on cores that do not need them.
PERIOD_US = 100_000
MIN_PERCENT, MAX_PERCENT = 5, 100
#: Where groups are made.
V1, V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
PREFIX = "baton-bench"
REMOVE_S = 5.0


class CpuQuota:
    """A control group whose processes together get a share of one core."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, pid: int) -> None:
        """Move a process into the group, with all its threads."""
        (self.path / "cgroup.procs").write_text(str(pid))


@contextlib.contextmanager
def cpu_quota(percent: int) -> Iterator[CpuQuota]:
    """A control group that gets ``percent`` of one core; its processes must end before the block does.

    Raises:
        ConfigError: no group can be made here.
    """
    remove_abandoned()
    group = _make(f"{PREFIX}-{os.getpid()}-{time.monotonic_ns()}", percent * PERIOD_US // 100)
    try:
        yield CpuQuota(group)
    finally:
        _remove(group)


def why_no_quota() -> str:
    """Why this machine grants no group; empty if it does."""
    try:
        with cpu_quota(MAX_PERCENT):
            return ""
    except ConfigError as error:
        return str(error)


def _make(name: str, quota_us: int) -> Path:
    files = {
        V1: {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": str(quota_us)},
        V2: {"cpu.max": f"{quota_us} {PERIOD_US}"},
    }
    problems = []
    for root, limits in files.items():
        group = root / name
        try:
            group.mkdir()
        except OSError as error:
            problems.append(f"{group}: {error.strerror}")
            continue
        missing = [file for file in ("cgroup.procs", *limits) if not (group / file).exists()]
        if missing:  # an ordinary folder, or a group without this controller
            problems.append(f"{group / missing[0]}: there is no such file")
            group.rmdir()
            continue
        try:
            for file, text in limits.items():
                (group / file).write_text(text)
        except OSError as error:
            problems.append(f"{group / file}: {error.strerror}")
            group.rmdir()
            continue
        return group
    raise ConfigError(f"no control group can cap processor time here (that takes root): {'; '.join(problems)}")


def _remove(group: Path) -> None:
    """A group can be removed a moment after its last process has ended."""
    ends_at = time.monotonic() + REMOVE_S
    while group.exists() and time.monotonic() < ends_at:
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.05)


def remove_abandoned() -> None:
    """Remove groups of benchmarks that were killed; those that still have processes stay."""
    for root in (V1, V2):
        for group in root.glob(f"{PREFIX}-*"):
            if not Path(f"/proc/{group.name.split('-')[2]}").exists():
                with contextlib.suppress(OSError):
                    group.rmdir()
