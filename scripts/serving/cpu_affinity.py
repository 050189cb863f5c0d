"""Assigns cores to nodes, so that no two nodes compute on the same core.

Two OpenMP teams on one core are more than ten times slower than one, because each spins at its barriers while the other
holds the core. So nodes are pinned to disjoint sets of cores. Hardware threads of one core stay together, and a node
computes with one thread per core.
"""

from dataclasses import dataclass

from common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Share:
    """One node's part of the machine: its compute threads, and the CPUs that it is pinned to (empty: not pinned)."""

    num_threads: int
    cpus: tuple[int, ...] = ()


def divide(cores: list[tuple[int, ...]], num_nodes: int, num_threads: int | None = None) -> list[Share]:
    """Divide cores among nodes; the first nodes get the remainder.

    Nodes are pinned only if there are enough cores for each.

    Args:
        cores: the CPU numbers of each physical core.
        num_threads: compute threads of each node; one per core of its share by default.

    Raises:
        ConfigError: a node would have more threads than cores.
    """
    each, more = divmod(len(cores), num_nodes)
    if num_threads is not None and num_threads > max(1, each):
        raise ConfigError(
            f"--threads {num_threads}: the share of each of {num_nodes} nodes is {each} of {len(cores)} cores, and "
            f"threads that share a core are many times slower; give at most {max(1, each)}, or start fewer nodes"
        )
    if each == 0:
        return [Share(1)] * num_nodes
    shares, start = [], 0
    for node in range(num_nodes):
        mine = cores[start : start + each + (node < more)]
        start += len(mine)
        shares.append(Share(num_threads or len(mine), tuple(cpu for core in mine for cpu in core)))
    return shares
