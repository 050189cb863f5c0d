"""Priorities that decode nodes lend to requests of which this prefill node has not heard yet. Pure.

A decode node may have a request, and somebody who waits for it, before the gateway's message reaches the prefill node.
What it lends is kept under a lease, as early grants are; each node has room of its own, so that one that is confused
pushes out nothing but what it lent itself.
"""

from common.request import LOWEST_PRIORITY

Key = tuple[str, int]

LEASE_S = 30.0
#: Of one decode node. Its loans are to transfers that it has granted pages for, or will as soon as it is connected.
MAX_OF_PEER = 1_024


class EarlyLoans:
    """By decode node (incarnation) and key, with the end of the lease; the oldest first."""

    def __init__(self) -> None:
        self._loans: dict[str, dict[Key, tuple[int, float]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._loans.values()))

    def keep(self, peer: str, key: Key, priority: int, now: float) -> None:
        """So urgent is who waits for this request, if it comes; LOWEST_PRIORITY: nobody does any more.

        Args:
            peer: a decode node that has offered its pool: ``lost`` will be called when it goes.
        """
        loans = self._loans.setdefault(peer, {})
        loans.pop(key, None)
        if priority > LOWEST_PRIORITY:
            loans[key] = (priority, now + LEASE_S)
        while loans and (len(loans) > MAX_OF_PEER or next(iter(loans.values()))[1] <= now):
            del loans[next(iter(loans))]
        if not loans:
            del self._loans[peer]

    def take(self, peer: str, key: Key, now: float) -> int | None:
        """What this decode node has lent to a request that has just come; None if nothing, or too long ago."""
        loans = self._loans.get(peer, {})
        priority, until = loans.pop(key, (None, now))
        if peer in self._loans and not loans:
            del self._loans[peer]
        return priority if until > now else None

    def lost(self, peer: str) -> None:
        """The decode node is gone."""
        self._loans.pop(peer, None)
