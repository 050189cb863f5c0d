"""The prefix cache: a radix tree of token runs and the pages that hold their KV. Whole pages only.

A node holds a run of tokens, packed as uint32 so that runs are compared as bytes, and one page for each
``page_size`` of them. A child is found by the bytes of its first page. Each salt has its own root, which exists only
while a node or a watch is below it.

- ``match`` finds the longest cached prefix. If the tokens differ inside a node, it splits the node: the upper part is a
  new node, the lower part stays the same object, so that a lock on it still covers the whole path.
- ``lock`` protects a node and its ancestors from eviction. The locks of a node include those of its descendants, so
  that evictable pages are counted and not searched.
- ``evict`` removes unlocked leaves in the order of ``common/cache/eviction.py``. It shortens the last one, so that it
  evicts exactly as many pages as asked for.
- ``watch`` keeps the cached length of a waiting request current (``common/cache/prefix_watch.py``).
- *Pending* nodes stand for pages that a transfer still writes. ``match`` finds them, so that a second request with the
  prefix can wait; until ``make_ready`` they cannot be used, locked, evicted or extended by an insert.

Pages of ready nodes belong to ``Owner.RADIX``, pages of pending nodes to ``Owner.GRANT``. Time is a counter of calls.
A radix tree over KV pages is SGLang's idea (Zheng et al., arXiv:2312.07104).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from common.cache.eviction import EvictionPolicy, EvictionQueue
from common.cache.page_allocator import Owner, PageAllocator
from common.cache.prefix_watch import WatchIndex
from common.cache.tree_node import TOKEN_BYTES, Inserted, Match, Pending, PrefixWatch, TokenKey, TreeNode, pack
from common.errors import invariant


class RadixCache:
    """The prefix cache of one page pool.

    Args:
        is_enabled: False: inserts keep nothing and nothing matches.
    """

    def __init__(
        self, allocator: PageAllocator, page_size: int, *, is_enabled: bool = True, eviction: EvictionPolicy = "lru"
    ) -> None:
        assert page_size > 0
        self.page_size = page_size
        self.is_enabled = is_enabled
        self.num_evictable_pages = 0
        self.num_pages = 0  # in ready nodes
        self.allocator = allocator
        self._page_bytes = page_size * TOKEN_BYTES
        self._roots: dict[str, TreeNode] = {}
        self._leaves = EvictionQueue(eviction)
        self._watches = WatchIndex(self._page_bytes, self._shared_part)
        self._time = 0
        self._num_nodes = 0

    # ---- finding ----------------------------------------------------------------------------------------------------

    def match(self, tokens: Sequence[int] | TokenKey, salt: str = "", *, received_from: int | None = None) -> Match:
        """Return the longest cached prefix of ``tokens`` after which a request can go on, in whole pages.

        ``Match.pending`` is set if a longer one can be used once that node is ready. The prefix counts as
        used now, but not once more: see ``count_use``.

        Args:
            received_from: see ``WindowPages.num_usable``.
        """
        key = pack(tokens)
        found, window_pages = self.match_all(key, salt), self.allocator.window_pages
        if window_pages is None:
            return found
        pending = found.pending
        if pending is not None and not self.num_pending(key, salt, received_from=received_from):
            pending = None
        if (num_usable := window_pages.num_usable(found.pages, received_from)) < len(found.pages):
            found = self.match_all(key[: num_usable * self._page_bytes], salt)
        return replace(found, pending=pending)

    def match_all(self, tokens: Sequence[int] | TokenKey, salt: str = "") -> Match:
        """``match``, even where window pages are missing."""
        root = self._roots.get(salt)
        if root is None:
            return Match(node=TreeNode(salt=salt))
        node, offset, pending = self._walk(root, pack(tokens))
        pages: list[int] = []
        for part in node.path():
            pages += part.pages
        return Match(pages, offset // TOKEN_BYTES, node, pending)

    def num_pending(self, tokens: Sequence[int] | TokenKey, salt: str = "", *, received_from: int | None = None) -> int:
        """Return the number of pending pages of ``tokens`` that ``match`` finds once they are ready."""
        key, node, offset, num_ready = pack(tokens), self._roots.get(salt), 0, 0
        pages: list[int] = []
        while node is not None and (child := node.children.get(key[offset : offset + self._page_bytes])):
            node = self._shared_part(child, key, offset)
            offset += len(node.key)
            pages += node.pages
            num_ready += len(node.pages) if node.pending is None else 0
        window_pages = self.allocator.window_pages
        num_usable = len(pages) if window_pages is None else window_pages.num_usable(pages, received_from)
        return max(0, num_usable - num_ready)

    def has_all(self, tokens: Sequence[int] | TokenKey, salt: str = "") -> bool:
        """Return whether these whole pages of tokens are in the tree, usable or not. Changes nothing."""
        key, node, offset = pack(tokens), self._roots.get(salt), 0
        while node is not None and offset < len(key):
            child = node.children.get(key[offset : offset + self._page_bytes])
            if child is None or not key.startswith(child.key, offset):
                return child is not None and child.key.startswith(key[offset:])
            node = child
            offset += len(child.key)
        return node is not None

    @staticmethod
    def count_use(node: TreeNode) -> None:
        """Count that a request begins with the prefix that ends at ``node``. It may have been matched many times."""
        for part in node.path():
            part.num_uses += 1

    def _walk(self, root: TreeNode, key: TokenKey) -> tuple[TreeNode, int, TreeNode | None]:
        """Walk down along ``key`` and split the node in which it ends.

        Returns:
            The deepest ready node, the number of bytes matched, and the pending node that follows, if any.
        """
        self._time += 1
        node, offset = root, 0
        while child := node.children.get(key[offset : offset + self._page_bytes]):
            child = self._shared_part(child, key, offset)
            if child.pending is not None:
                return node, offset, child
            child.last_used = self._time
            node = child
            offset += len(child.key)
        return node, offset, None

    def _shared_part(self, child: TreeNode, key: TokenKey, offset: int) -> TreeNode:
        """Return the part of ``child`` that ``key`` shares from ``offset`` on; split the child if that is not all."""
        if key.startswith(child.key, offset):
            return child
        return self._split(child, self._common_pages(child.key, key, offset))

    def _common_pages(self, run: TokenKey, key: TokenKey, offset: int) -> int:
        """Return how many whole pages at the start of ``run`` equal ``key`` from ``offset`` on; fewer than all."""
        num_bytes = min(len(run), len(key) - offset)
        left = np.frombuffer(run, np.uint8, num_bytes)
        right = np.frombuffer(key, np.uint8, num_bytes, offset)
        differs = left != right
        first = int(differs.argmax())
        num_common = first if differs[first] else num_bytes
        return num_common // self._page_bytes

    def _split(self, lower: TreeNode, num_pages: int) -> TreeNode:
        """Split a node after ``num_pages`` pages. Return the upper part, a new node; ``lower`` is the lower part."""
        assert 0 < num_pages < len(lower.pages)
        parent = lower.parent
        assert parent is not None
        cut = num_pages * self._page_bytes
        upper = self._new_node(parent, lower.key[:cut], lower.pages[:num_pages])
        upper.locks = lower.locks
        upper.last_used = lower.last_used
        upper.num_uses = lower.num_uses
        upper.priority = lower.priority
        upper.pending = lower.pending
        parent.children[lower.key[: self._page_bytes]] = upper
        lower.key = lower.key[cut:]
        del lower.pages[:num_pages]
        lower.parent = upper
        upper.children[lower.key[: self._page_bytes]] = lower
        return upper

    def _new_node(self, parent: TreeNode, key: TokenKey, pages: list[int]) -> TreeNode:
        self._num_nodes += 1
        node = TreeNode(parent, key, pages, serial=self._num_nodes)
        node.last_used = self._time
        return node

    # ---- watching ---------------------------------------------------------------------------------------------------

    def watch(self, tokens: Sequence[int] | TokenKey, salt: str = "") -> PrefixWatch:
        """Return a watch whose cached length is current until ``unwatch``. Does not count as a match."""
        watch = PrefixWatch(pack(tokens))
        if self.is_enabled:
            root = self._roots.get(salt)
            if root is None:
                root = self._roots[salt] = TreeNode(salt=salt)
            self._watches.place(watch, root, 0)
        return watch

    def unwatch(self, watch: PrefixWatch) -> None:
        node = watch.node
        if node is not None:
            self._watches.remove(watch)
            self._drop_if_empty(node)

    def _drop_if_empty(self, node: TreeNode) -> None:
        """Remove a root without children and watches."""
        if node.parent is None and not node.children and not node.watchers:
            del self._roots[node.salt]

    # ---- adding -----------------------------------------------------------------------------------------------------

    def insert(
        self, tokens: Sequence[int] | TokenKey, pages: Sequence[int], salt: str = "", *, priority: int = 0
    ) -> Inserted:
        """Insert the computed KV of ``tokens``, which fill ``pages`` exactly, for a request of this priority.

        The tree adopts the pages of tokens that it lacks: they move from ``Owner.REQUEST`` to ``Owner.RADIX``. Pages of
        tokens that it has stay with the caller. The insert stops before a pending node.
        """
        key = pack(tokens)
        assert len(key) == len(pages) * self._page_bytes, "tokens must be whole pages"
        root = self._roots.get(salt) or TreeNode(salt=salt)
        if not self.is_enabled:
            return Inserted(root, len(pages), 0)
        node, offset, pending = self._walk(root, key)
        self._raise_priority(node, priority)
        first = offset // self._page_bytes
        if pending is not None or first == len(pages):
            return Inserted(node, len(pages), 0)
        adopted = list(pages[first:])
        self.allocator.move(adopted, Owner.REQUEST, Owner.RADIX)
        leaf = self._attach(node, key[offset:], adopted, priority)
        self._count_ready(leaf)
        self._watches.node_added(leaf)
        return Inserted(leaf, first, len(pages) - first)  # ``len(leaf.pages)`` may be less: a watch may have split it

    def insert_pending(
        self, tokens: Sequence[int] | TokenKey, pages: Sequence[int], salt: str = "", *, priority: int = 0
    ) -> Pending:
        """Add a pending node for the last pages of ``tokens``, which a transfer will write (``Owner.GRANT``).

        The tokens before these pages must be in the tree and ready; the tokens of these pages must not be in the tree.
        The path above is locked until ``make_ready`` or ``drop_pending``.
        """
        assert self.is_enabled, "a disabled cache has no pending nodes"
        assert pages
        key = pack(tokens)
        assert len(key) % self._page_bytes == 0
        root = self._roots.get(salt) or TreeNode(salt=salt)
        node, offset, pending = self._walk(root, key)
        assert pending is None, "part of this prefix is pending already; wait for it"
        assert len(key) - offset == len(pages) * self._page_bytes, "the prefix of the pending pages is not in the tree"
        self._raise_priority(node, priority)
        leaf = self._attach(node, key[offset:], list(pages), priority)
        leaf.pending = Pending(leaf)
        self.lock(node)
        return leaf.pending

    def make_ready(self, pending: Pending) -> TreeNode:
        """Complete a transfer: its pages move to ``Owner.RADIX``. Return the deepest node, without a lock."""
        nodes = pending.nodes
        assert nodes, "this transfer was already completed or dropped"
        self.allocator.move(list(chain.from_iterable([node.pages for node in nodes])), Owner.GRANT, Owner.RADIX)
        self._time += 1
        for node in pending.node.path():
            node.last_used = self._time
        for node in nodes:
            node.pending = None
            self._count_ready(node)
        self.unlock(nodes[0].parent)
        self._watches.node_added(nodes[0])
        return pending.node

    def drop_pending(self, pending: Pending, num_arrived: int = 0) -> list[int]:
        """Remove the nodes of a failed transfer, except for its first pages, which have arrived and become ready.

        Returns:
            The other pages in order; they stay with ``Owner.GRANT``.
        """
        nodes, pages = pending.nodes, pending.pages
        assert nodes, "this transfer was already completed or dropped"
        assert num_arrived <= len(pages)
        above, num_left = nodes[0].parent, len(pages) - num_arrived
        while num_left:
            lowest = pending.node
            if num_left < len(lowest.pages):
                self._split(lowest, len(lowest.pages) - num_left)
            num_left -= len(lowest.pages)
            assert lowest.parent is not None
            pending.node = lowest.parent
            self._detach(lowest)
        if num_arrived:
            self.make_ready(pending)
        else:
            self.unlock(above)
        return pages[num_arrived:]

    def _raise_priority(self, node: TreeNode, priority: int) -> None:
        """Raise the priority of a node and its ancestors, which are at least as urgent as their descendants."""
        above: TreeNode | None = node
        while above is not None and above.priority < priority:
            above.priority = priority
            above = above.parent

    def _attach(self, parent: TreeNode, key: TokenKey, pages: list[int], priority: int) -> TreeNode:
        node = self._new_node(parent, key, pages)
        node.priority = priority
        if parent.parent is None:
            self._roots[parent.salt] = parent
        parent.children[key[: self._page_bytes]] = node
        return node

    def _count_ready(self, node: TreeNode) -> None:
        self.num_pages += len(node.pages)
        if not node.locks:
            self.num_evictable_pages += len(node.pages)
            self._leaves.offer(node)

    # ---- locking ----------------------------------------------------------------------------------------------------

    def lock(self, node: TreeNode | None) -> None:
        """Protect a node and its ancestors from eviction; does nothing for a root or None."""
        assert node is None or node.pending is None, "a pending node cannot be used"
        while node is not None and node.parent is not None:
            if not node.locks:
                self.num_evictable_pages -= len(node.pages)
            node.locks += 1
            node = node.parent

    def unlock(self, node: TreeNode | None) -> None:
        lowest = node
        while node is not None and node.parent is not None:
            assert node.locks > 0, "a node without a lock is unlocked"
            node.locks -= 1
            if not node.locks:
                self.num_evictable_pages += len(node.pages)
            node = node.parent
        if lowest is not None:
            self._leaves.offer(lowest)

    # ---- evicting ---------------------------------------------------------------------------------------------------

    def evict(self, num_pages: int) -> int:
        """Evict up to ``num_pages`` pages and return their number. They linger while steps are in flight."""
        freed: list[int] = []
        while len(freed) < num_pages and (pages := self._take_from_leaf(num_pages - len(freed))):
            freed += pages
        self._free(freed)
        return len(freed)

    def evict_from_leaf(self, num_pages: int) -> int:
        """Evict up to ``num_pages`` pages of the leaf that comes first, and return their number."""
        pages = self._take_from_leaf(num_pages)
        self._free(pages)
        return len(pages)

    def _take_from_leaf(self, num_pages: int) -> list[int]:
        """Remove up to ``num_pages`` pages from the end of the leaf that comes first; return them."""
        leaf = self._leaves.pop()
        if leaf is None:
            return []
        if len(leaf.pages) > num_pages:
            return self._trim(leaf, num_pages)
        parent = leaf.parent
        self._detach(leaf)
        if parent is not None:
            self._leaves.offer(parent)
        return leaf.pages

    def _free(self, pages: Sequence[int]) -> None:
        self.num_pages -= len(pages)
        self.num_evictable_pages -= len(pages)
        self.allocator.free(pages, Owner.RADIX)

    def clear(self) -> int:
        """Evict every page without a lock and return their number."""
        return self.evict(self.num_evictable_pages)

    def _trim(self, leaf: TreeNode, num_pages: int) -> list[int]:
        """Remove the last pages of a leaf, and return them; the rest keeps its rank."""
        pages = leaf.pages[-num_pages:]
        del leaf.pages[-num_pages:]
        leaf.key = leaf.key[: -num_pages * self._page_bytes]
        if leaf.watchers:
            self._watches.move_up(leaf, leaf, num_pages * self._page_bytes)
        self._leaves.offer(leaf)
        return pages

    def _detach(self, node: TreeNode) -> None:
        """Remove a leaf from the tree, and its root too if nothing else is below it."""
        parent = node.parent
        assert parent is not None
        assert not node.children
        del parent.children[node.key[: self._page_bytes]]
        node.parent = None
        if node.watchers:
            self._watches.move_up(node, parent, len(node.key))
        self._drop_if_empty(parent)

    # ---- proving ----------------------------------------------------------------------------------------------------

    def nodes(self) -> Iterator[TreeNode]:
        """Yield all nodes except roots, parents before children."""
        waiting = [child for root in self._roots.values() for child in root.children.values()]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())

    def check(self) -> None:
        """Walk the tree and verify all counts and links. Raises InvariantError: something is wrong."""
        num_pages = num_evictable = num_pending = 0
        seen: set[int] = set()
        for root in self._roots.values():
            invariant(root.children or root.watchers, "an empty root is kept")
            self._watches.check(root, b"")
        for node in self.nodes():
            self._check_node(node)
            invariant(seen.isdisjoint(node.pages), "a page is in the tree twice")
            seen.update(node.pages)
            if node.pending is not None:
                num_pending += len(node.pages)
                continue
            num_pages += len(node.pages)
            num_evictable += 0 if node.locks else len(node.pages)
        invariant(num_pages == self.num_pages, f"{num_pages} pages are in the tree, not {self.num_pages}")
        invariant(
            num_evictable == self.num_evictable_pages,
            f"{num_evictable} pages are evictable, not {self.num_evictable_pages}",
        )
        invariant(num_pages == self.allocator.count(Owner.RADIX), "allocator and tree count different pages")
        invariant(num_pending <= self.allocator.count(Owner.GRANT), "a pending page is not granted")
        in_heap = list(self._leaves)
        invariant(all(node.in_heap for node in in_heap), "a node in the eviction heap is not marked")
        invariant(len(in_heap) == len({node.serial for node in in_heap}), "a node is in the eviction heap twice")

    def _check_node(self, node: TreeNode) -> None:
        parent = node.parent
        assert parent is not None
        invariant(node.pages, "a node is empty")
        invariant(len(node.key) == len(node.pages) * self._page_bytes, "a node's tokens and pages differ in length")
        invariant(parent.children.get(node.key[: self._page_bytes]) is node, "a node is stored under another key")
        invariant(node.locks >= sum(child.locks for child in node.children.values()), "a lock does not reach the root")
        invariant(not node.pending or not node.locks, "a pending node is locked")
        invariant(
            not parent.pending or parent.pending is node.pending, "a node is below a pending node of another transfer"
        )
        invariant(parent.parent is None or parent.last_used >= node.last_used, "a node was used without its parent")
        if node.watchers:
            self._watches.check(node, b"".join(part.key for part in node.path()))
        invariant(node.in_heap or not node.is_evictable_leaf, "an evictable leaf is not in the eviction heap")
        if node.pending and not parent.pending and parent.parent is not None:
            invariant(parent.locks > 0, "the prefix of a transfer is not locked")
