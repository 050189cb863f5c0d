"""Which cores each node gets, so that no two of them compute on the same one.

Two OpenMP teams on one core are ten times slower than one and more: each spins at its barriers while it waits for the
other's turn. So nodes get disjoint sets of cores and are pinned to them. Hardware threads of one core stay together,
and a node computes with one thread per core.
"""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Share:
    """One node's part of the machine: so many compute threads, on these CPUs (empty: wherever there is room)."""

    num_threads: int
    cpus: tuple[int, ...] = ()


def divide(cores: list[tuple[int, ...]], num_nodes: int, num_threads: int | None = None) -> list[Share]:
    """Shares of ``num_nodes`` nodes; the first ones get what does not divide evenly.

    Args:
        cores: the CPU numbers of each physical core.
        num_threads: of each node, if that is given; otherwise one for each core of its share.

    Nodes are pinned only where each has cores enough of its own; with too few, they run unpinned.
    """
    each, more = divmod(len(cores), num_nodes)
    if each < (num_threads or 1):
        return [Share(num_threads or 1)] * num_nodes
    shares, start = [], 0
    for node in range(num_nodes):
        mine = cores[start : start + each + (node < more)]
        start += len(mine)
        shares.append(Share(num_threads or len(mine), tuple(cpu for core in mine for cpu in core)))
    return shares


def usable_cores() -> list[tuple[int, ...]]:
    """The physical cores that this process may use, each as its CPU numbers; fewer if a container's quota says so."""
    allowed = sorted(os.sched_getaffinity(0))
    cores: dict[str, list[int]] = {}
    for cpu in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.setdefault(siblings.read_text() if siblings.exists() else str(cpu), []).append(cpu)
    return [tuple(core) for core in cores.values()][: _quota()]


def _quota() -> int | None:
    """Whole CPUs that the control group grants, at least 1; None without a bound."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return None
