"""Chooses the cached prefix to evict. Pure.

Evictable leaves of the radix tree are in a heap, each with the rank it had when it entered. Ranks only rise, so a leaf
whose rank has risen since goes back into the heap when it is popped, and no operation walks the whole tree.
"""

import heapq
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, Literal

from common.cache.tree_node import TreeNode

EvictionPolicy = Literal["lru", "lfu", "priority"]

#: Rank of a node by ``--radix-eviction-policy``. The leaf with the lowest rank is evicted first.
RANKS: dict[str, Callable[[TreeNode], Any]] = {
    "lru": attrgetter("last_used"),
    "lfu": attrgetter("num_uses", "last_used"),
    "priority": attrgetter("priority", "last_used"),
}


class EvictionQueue:
    """Evictable leaves, in the order of an eviction policy."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._rank = RANKS[policy]
        self._heap: list[tuple[Any, int, TreeNode]] = []

    def __iter__(self) -> Iterator[TreeNode]:
        return (node for _, _, node in self._heap)

    def offer(self, node: TreeNode) -> None:
        """Add a node if it is an evictable leaf and not in the queue yet."""
        if not node.in_heap and node.is_evictable_leaf:
            node.in_heap = True
            heapq.heappush(self._heap, (self._rank(node), node.serial, node))

    def pop(self) -> TreeNode | None:
        """Remove and return the leaf to evict first; None if there is none."""
        while self._heap:
            entered, _, node = heapq.heappop(self._heap)
            node.in_heap = False
            if not node.is_evictable_leaf:
                continue  # the cache offers it again once it is evictable
            if self._rank(node) == entered:
                return node
            self.offer(node)
        return None
