"""Whether a benchmark had its cores to itself: processor time that went to processes other than it and its children."""

import os
import time
from collections.abc import Iterable
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Neighbours:
    """Looks from its making until ``cores`` is asked.

    Args:
        cpus: the CPUs that matter.
    """

    def __init__(self, cpus: Iterable[int]) -> None:
        self._names = {f"cpu{number}" for number in cpus}
        self._began_at, self._busy_s, self._own_s = time.monotonic(), self._busy(), own_s(os.getpid())

    def cores(self) -> float:
        """How many cores others kept busy on average, time stolen by a hypervisor included."""
        others_s = self._busy() - self._busy_s - (own_s(os.getpid()) - self._own_s)
        return max(0.0, others_s / max(time.monotonic() - self._began_at, 1e-9))

    def _busy(self) -> float:
        total = 0
        for line in Path("/proc/stat").read_text().splitlines():
            name, *ticks = line.split()
            if name in self._names:
                user, nice, system, _, _, irq, softirq, steal = map(int, ticks[:8])
                total += user + nice + system + irq + softirq + steal
        return total / TICKS_PER_S


def own_s(root: int) -> float:
    """Processor seconds of a process, of those that descend from it, and of their children that have ended."""
    children: dict[int, list[int]] = {}
    used: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        pid = int(path.parent.name)
        children.setdefault(int(fields[1]), []).append(pid)
        used[pid] = sum(map(int, fields[11:15]))
    total, left = 0, [root]
    while left:
        pid = left.pop()
        total += used.get(pid, 0)
        left += children.get(pid, [])
    return total / TICKS_PER_S
