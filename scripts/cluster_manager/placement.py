"""Decides on which hosts Ray may place an instance: sets of hosts, the best first. Pure.

Ray knows what is free and places within a set; when nothing is free there, the next set is tried.
"""

from collections import Counter
from collections.abc import Collection, Sequence

from scripts.cluster_manager.config import Placement


def choices(
    placement: Placement,
    used: Sequence[str],
    hosts: Collection[str],
    *,
    near: Collection[str] | None = None,
    taken: Collection[str] = (),
) -> list[tuple[str, ...]]:
    """Sets of hosts to try in turn; none if no host may be used.

    Args:
        used: the host of each instance of the group.
        hosts: all that live.
        near: hosts that are preferred to all others.
        taken: hosts where another process listens on a port of this one.
    """
    allowed = set(hosts) - set(taken)
    if placement == "strict-spread":
        allowed -= set(used)
    if placement == "strict-pack" and used:
        allowed &= {used[0]}
    preferred = allowed & _preferred(placement, used, allowed)
    near = allowed if near is None else allowed & set(near)
    ranked = [preferred & near, near, preferred, allowed]
    return list(dict.fromkeys(tuple(sorted(found)) for found in ranked if found))


def _preferred(placement: Placement, used: Sequence[str], allowed: Collection[str]) -> set[str]:
    if not used:
        return set(allowed)
    if placement == "pack":
        return set(used)
    num_instances = Counter(used)
    fewest = min((num_instances[host] for host in allowed), default=0)
    return {host for host in allowed if num_instances[host] == fewest}
