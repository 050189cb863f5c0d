"""Measures the processor time that other processes took from a benchmark."""

import os
import time
from collections.abc import Iterable
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class CpuContention:
    """Processor time of other processes since construction."""

    def __init__(self, cpus: Iterable[int]) -> None:
        self._names = {f"cpu{number}" for number in cpus}
        self._began_at, self._busy_s, self._own_s = time.monotonic(), self._busy(), cpu_time_s(os.getpid())

    def cores(self) -> float:
        """Cores that other processes kept busy on average, including time stolen by the hypervisor."""
        others_s = self._busy() - self._busy_s - (cpu_time_s(os.getpid()) - self._own_s)
        return max(0.0, others_s / max(time.monotonic() - self._began_at, 1e-9))

    def _busy(self) -> float:
        total = 0
        for line in Path("/proc/stat").read_text().splitlines():
            name, *ticks = line.split()
            if name in self._names:
                user, nice, system, _, _, irq, softirq, steal = map(int, ticks[:8])
                total += user + nice + system + irq + softirq + steal
        return total / TICKS_PER_S


def cpu_time_s(root: int) -> float:
    """Processor seconds of a process and its descendants, including ended children that were waited for."""
    children: dict[int, list[int]] = {}
    used: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_bytes().rpartition(b")")[2].split()  # a name may be cut within a character
        except OSError:
            continue  # the process has just ended
        pid = int(path.parent.name)
        children.setdefault(int(fields[1]), []).append(pid)
        used[pid] = sum(map(int, fields[11:15]))
    total, left = 0, [root]
    while left:
        pid = left.pop()
        total += used.get(pid, 0)
        left += children.get(pid, [])
    return total / TICKS_PER_S


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far, over all its threads."""
    return time.clock_gettime(~pid << 3 | 2)  # its CPU clock, as clock_getcpuclockid(3) numbers it on Linux
