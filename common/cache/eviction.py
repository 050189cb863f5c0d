"""Which cached prefix goes first when pages are needed. Pure.

Leaves of the radix tree that nobody needs wait in a heap under the rank at which they entered. Ranks only rise, so a
leaf whose rank has risen meanwhile is put back under the new one when it comes up, and nobody looks at the whole tree.
"""

import heapq
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, Literal

from common.cache.tree_node import TreeNode

EvictionPolicy = Literal["lru", "lfu", "fifo", "priority"]

#: By ``--radix-eviction-policy``: the node with the lowest rank goes first.
RANKS: dict[str, Callable[[TreeNode], Any]] = {
    "lru": attrgetter("last_used"),
    "lfu": attrgetter("num_uses", "last_used"),
    "fifo": attrgetter("created"),
    "priority": attrgetter("priority", "last_used"),
}


class EvictionQueue:
    """Leaves that nobody needs.

    Args:
        policy: least recently used, least often used, oldest, or least urgent (and then least recently used) first.
    """

    def __init__(self, policy: EvictionPolicy = "lru") -> None:
        self._rank = RANKS[policy]
        self._heap: list[tuple[Any, int, TreeNode]] = []

    def __iter__(self) -> Iterator[TreeNode]:
        return (node for _, _, node in self._heap)

    def offer(self, node: TreeNode) -> None:
        """Take a node in, if it is a leaf that nobody needs and is not here yet."""
        if not node.in_heap and node.is_evictable_leaf:
            node.in_heap = True
            heapq.heappush(self._heap, (self._rank(node), node.serial, node))

    def pop(self) -> TreeNode | None:
        """Take out the leaf that goes first."""
        while self._heap:
            entered, _, node = heapq.heappop(self._heap)
            node.in_heap = False
            if not node.is_evictable_leaf:
                continue  # it is offered again when that changes
            if self._rank(node) == entered:
                return node
            self.offer(node)
        return None
