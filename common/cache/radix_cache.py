"""The prefix cache: a tree of token runs and the pages that hold their KV. Whole pages only.

A node carries a run of tokens (packed as little-endian int32, so that runs are compared as bytes and never token by
token) and one page for each ``page_size`` of them; a child is found by the bytes of its first page. Requests with
different salts live under different roots, which exist only while something is below them.

- ``match`` finds the longest cached prefix, cutting a node in two where the tokens leave it in the middle. The cut-off
  upper part is a new node; the lower part stays the object it was, so whoever has it locked still holds the whole path.
- ``lock`` keeps a node and everything above it from eviction. A node nobody has locked has nothing locked below it, so
  what can be evicted is counted, not searched.
- ``evict`` takes leaves that nobody needs, as ``common/cache/eviction.py`` orders them, cutting the last one so that
  no more goes than was asked for.
- ``watch`` tells how much of a waiting request is cached, for as long as it waits (``common/cache/prefix_watch.py``).
- *Pending* nodes stand for pages that a transfer is still writing: they are found by ``match`` (so that a second
  request can wait for them) but never used, locked, evicted or built upon until ``make_ready``.

Pages in ready nodes belong to ``Owner.RADIX``, those in pending nodes to ``Owner.GRANT``. Time is a counter of calls.
The idea of a radix tree over KV is from SGLang (Zheng et al., arXiv:2312.07104).
"""

from collections.abc import Iterator, Sequence

import numpy as np

from common.cache.eviction import EvictionPolicy, EvictionQueue
from common.cache.page_allocator import Owner, PageAllocator
from common.cache.prefix_watch import Watch, Watching
from common.cache.tree_node import TOKEN_BYTES, Inserted, Match, Pending, TokenKey, TreeNode, pack
from common.errors import invariant

__all__ = ["TOKEN_BYTES", "Inserted", "Match", "Pending", "RadixCache", "TokenKey", "TreeNode", "pack"]


class RadixCache:
    """The tree over one page pool.

    Args:
        books: who owns the pages.
        page_size: tokens per page.
        is_enabled: if not, nothing is ever kept and nothing matches.
        eviction: what goes first when pages are needed.
    """

    def __init__(
        self, books: PageAllocator, page_size: int, *, is_enabled: bool = True, eviction: EvictionPolicy = "lru"
    ) -> None:
        assert page_size > 0
        self.page_size = page_size
        self.is_enabled = is_enabled
        self.num_evictable_pages = 0
        self.num_pages = 0  # in ready nodes
        self._books = books
        self._page_bytes = page_size * TOKEN_BYTES
        self._roots: dict[str, TreeNode] = {}
        self._leaves = EvictionQueue(eviction)
        self._watching = Watching(self._page_bytes, self._part_shared)
        self._time = 0
        self._num_nodes = 0

    # ---- finding ----------------------------------------------------------------------------------------------------

    def match(self, tokens: Sequence[int] | TokenKey, salt: str = "") -> Match:
        """The longest cached prefix of ``tokens``, in whole pages. Counts as a use of it."""
        root = self._roots.get(salt)
        if root is None:
            return Match([], 0, TreeNode(None, b"", [], salt=salt))
        node, offset, pending = self._walk(root, pack(tokens))
        pages: list[int] = []
        for part in node.path():
            pages += part.pages
        return Match(pages, offset // TOKEN_BYTES, node, pending)

    def num_pending(self, tokens: Sequence[int] | TokenKey, salt: str = "") -> int:
        """Whole pages of ``tokens`` that are on their way."""
        key, node, offset, num_pending = pack(tokens), self._roots.get(salt), 0, 0
        while node is not None and (child := node.children.get(key[offset : offset + self._page_bytes])):
            node = self._part_shared(child, key, offset)
            offset += len(node.key)
            num_pending += len(node.pages) if node.is_pending else 0
        return num_pending

    def _walk(self, root: TreeNode, key: TokenKey) -> tuple[TreeNode, int, TreeNode | None]:
        """Down along ``key``, cutting the node in which it ends: deepest ready node, bytes matched, pending next."""
        self._time += 1
        node, offset = root, 0
        while child := node.children.get(key[offset : offset + self._page_bytes]):
            child = self._part_shared(child, key, offset)
            if child.pending is not None:
                return node, offset, child
            child.last_used = self._time
            child.num_uses += 1
            node = child
            offset += len(child.key)
        return node, offset, None

    def _part_shared(self, child: TreeNode, key: TokenKey, offset: int) -> TreeNode:
        """The part of a child whose tokens ``key`` has from ``offset`` on, cut off if it is not all."""
        if key.startswith(child.key, offset):
            return child
        return self._split(child, self._common_pages(child.key, key, offset))

    def _common_pages(self, run: TokenKey, key: TokenKey, offset: int) -> int:
        """Whole pages at the start of ``run`` that ``key`` repeats from ``offset`` on; fewer than all of them."""
        num_bytes = min(len(run), len(key) - offset)
        left = np.frombuffer(run, np.uint8, num_bytes)
        right = np.frombuffer(key, np.uint8, num_bytes, offset)
        differs = left != right
        first = int(differs.argmax())
        num_common = first if differs[first] else num_bytes
        return num_common // self._page_bytes

    def _split(self, lower: TreeNode, num_pages: int) -> TreeNode:
        """Cut a node after so many pages. Returns the upper part, a new node; ``lower`` stays who it was."""
        assert 0 < num_pages < len(lower.pages)
        parent = lower.parent
        assert parent is not None
        cut = num_pages * self._page_bytes
        upper = self._new_node(parent, lower.key[:cut], lower.pages[:num_pages])
        upper.locks = lower.locks
        upper.last_used = lower.last_used
        upper.num_uses = lower.num_uses
        upper.created = lower.created
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
        node.last_used = node.created = self._time
        return node

    # ---- watching ---------------------------------------------------------------------------------------------------

    def watch(self, tokens: Sequence[int] | TokenKey, salt: str = "") -> Watch:
        """How many of these tokens are cached, kept current until ``unwatch``. No use of them."""
        watch = Watch(pack(tokens))
        if self.is_enabled:
            root = self._roots.get(salt)
            if root is None:
                root = self._roots[salt] = TreeNode(None, b"", [], salt=salt)
            self._watching.place(watch, root, 0)
        return watch

    def unwatch(self, watch: Watch) -> None:
        """Its request waits no longer."""
        node = watch.node
        if node is not None:
            self._watching.remove(watch)
            self._drop_if_empty(node)

    def _drop_if_empty(self, node: TreeNode) -> None:
        """A root is there as long as something is below it or watched from it."""
        if node.parent is None and not node.children and not node.watchers:
            del self._roots[node.salt]

    # ---- adding -----------------------------------------------------------------------------------------------------

    def insert(
        self, tokens: Sequence[int] | TokenKey, pages: Sequence[int], salt: str = "", *, priority: int = 0
    ) -> Inserted:
        """Keep the KV of ``tokens`` (``len(pages)`` whole pages of them, each computed) for a request of this priority.

        Pages for the part that the tree lacks pass from ``Owner.REQUEST`` to ``Owner.RADIX``. For the part that it has,
        the caller's pages, if they are others, stay the caller's. Before a pending node the insert stops.
        """
        key = self._whole(tokens, pages)
        root = self._roots.get(salt) or TreeNode(None, b"", [], salt=salt)
        if not self.is_enabled:
            return Inserted(root, len(pages), 0)
        node, offset, pending = self._walk(root, key)
        self._raise_priority(node, priority)
        first = offset // self._page_bytes
        if pending is not None or first == len(pages):
            return Inserted(node, len(pages), 0)
        adopted = [*pages[first:]] if first else list(pages)
        self._books.move(adopted, Owner.REQUEST, Owner.RADIX)
        leaf = self._attach(node, key[offset:], adopted, priority)
        self._count_ready(leaf)
        self._watching.came(leaf)
        return Inserted(leaf, first, len(pages) - first)  # a watch may have cut the leaf meanwhile

    def insert_pending(
        self, tokens: Sequence[int] | TokenKey, pages: Sequence[int], salt: str = "", *, priority: int = 0
    ) -> Pending:
        """Announce pages (``Owner.GRANT``) that a transfer will fill: those of the last whole pages of ``tokens``.

        The tokens before them must be in the tree and ready, the ones for them must not be. The path above is locked
        until ``make_ready`` or ``drop_pending``.
        """
        assert self.is_enabled, "with the cache off there is nothing to wait for"
        assert pages
        key = pack(tokens)
        assert len(key) % self._page_bytes == 0
        root = self._roots.get(salt) or TreeNode(None, b"", [], salt=salt)
        node, offset, pending = self._walk(root, key)
        assert pending is None, "part of this prefix is pending already; wait for it"
        assert len(key) - offset == len(pages) * self._page_bytes, "what is before the pending pages is not in the tree"
        self._raise_priority(node, priority)
        leaf = self._attach(node, key[offset:], list(pages), priority)
        leaf.pending = Pending(leaf)
        self.lock(node)
        return leaf.pending

    def extend_pending(self, pending: Pending, tokens: Sequence[int] | TokenKey, pages: Sequence[int]) -> None:
        """Announce more pages (``Owner.GRANT``) of the same transfer: ``tokens`` are those pending, the whole prefix
        before them included, and behind them those of the new pages."""
        assert not pending.is_over, "this transfer was made ready or dropped before"
        node, key = pending.node, pack(tokens)
        num_before = sum(len(part.key) for part in node.path())
        assert not node.children and len(key) - num_before == len(pages) * self._page_bytes, "other tokens than pages"
        node.key += key[num_before:]
        node.pages += pages

    def make_ready(self, pending: Pending) -> TreeNode:
        """The transfer is complete: its pages pass to the tree, just used. Returns the deepest node, not locked."""
        nodes = self._end(pending)
        self._books.move(pending.pages, Owner.GRANT, Owner.RADIX)
        self._time += 1
        for node in pending.node.path():
            node.last_used = self._time
        for node in nodes:
            node.pending = None
            self._count_ready(node)
        self.unlock(nodes[0].parent)
        self._watching.came(nodes[0])
        return pending.node

    def drop_pending(self, pending: Pending) -> list[int]:
        """The transfer came to nothing: its nodes go. Returns its pages, in order, still ``Owner.GRANT``."""
        nodes = self._end(pending)
        pages = pending.pages
        above = nodes[0].parent
        for node in reversed(nodes):
            self._detach(node)
        self.unlock(above)
        return pages

    def _end(self, pending: Pending) -> list[TreeNode]:
        assert not pending.is_over, "this transfer was made ready or dropped before"
        pending.is_over = True
        return pending.nodes

    def _whole(self, tokens: Sequence[int] | TokenKey, pages: Sequence[int]) -> TokenKey:
        key = pack(tokens)
        assert len(key) == len(pages) * self._page_bytes, "tokens must be whole pages"
        return key

    def _raise_priority(self, node: TreeNode, priority: int) -> None:
        """What is above a prefix matters as much as the prefix itself."""
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
        """Keep this node and everything above it. A root, or None, holds nothing."""
        assert node is None or not node.is_pending, "a pending node cannot be used"
        while node is not None and node.parent is not None:
            if not node.locks:
                self.num_evictable_pages -= len(node.pages)
            node.locks += 1
            node = node.parent

    def unlock(self, node: TreeNode | None) -> None:
        """Take one lock back; what nobody holds any more may be evicted."""
        lowest = node
        while node is not None and node.parent is not None:
            assert node.locks > 0, "a node is unlocked that is not locked"
            node.locks -= 1
            if not node.locks:
                self.num_evictable_pages += len(node.pages)
            node = node.parent
        if lowest is not None:
            self._leaves.offer(lowest)

    # ---- evicting ---------------------------------------------------------------------------------------------------

    def evict(self, num_pages: int) -> int:
        """Free ``num_pages`` pages that nobody needs, or as many as there are. Returns how many.

        With a step in flight they linger in the books for a while.
        """
        freed: list[int] = []
        missing = num_pages
        while missing > 0 and (leaf := self._leaves.pop()) is not None:
            if len(leaf.pages) > missing:
                self._trim(leaf, missing, freed)
                break
            missing -= len(leaf.pages)
            freed += leaf.pages
            self._drop(leaf)
        self.num_pages -= len(freed)
        self.num_evictable_pages -= len(freed)
        self._books.free(freed, Owner.RADIX)
        return len(freed)

    def clear(self) -> int:
        """Evict everything that can be. Returns how many pages."""
        return self.evict(self.num_evictable_pages)

    def _trim(self, leaf: TreeNode, num_pages: int, freed: list[int]) -> None:
        """Give up the last pages of a leaf; the rest is a shorter prefix, and as old as before."""
        freed += leaf.pages[-num_pages:]
        del leaf.pages[-num_pages:]
        leaf.key = leaf.key[: -num_pages * self._page_bytes]
        self._watching.trimmed(leaf, num_pages * self._page_bytes)
        self._leaves.offer(leaf)

    def _drop(self, leaf: TreeNode) -> None:
        parent = leaf.parent
        self._detach(leaf)
        if parent is not None:
            self._leaves.offer(parent)

    def _detach(self, node: TreeNode) -> None:
        """Take a leaf out of the tree, and its root with it if nothing else is below."""
        parent = node.parent
        assert parent is not None
        assert not node.children
        del parent.children[node.key[: self._page_bytes]]
        node.parent = None
        if node.watchers:
            self._watching.gone(node, parent)
        self._drop_if_empty(parent)

    # ---- proving ----------------------------------------------------------------------------------------------------

    def nodes(self) -> Iterator[TreeNode]:
        """Every node but the roots, parents before children."""
        waiting = [child for root in self._roots.values() for child in root.children.values()]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())

    def check(self) -> None:
        """Recompute everything by walking the tree; raises InvariantError with a sentence."""
        num_pages = num_evictable = num_pending = 0
        seen: set[int] = set()
        for root in self._roots.values():
            invariant(root.children or root.watchers, "a root with nothing below it is kept")
            self._watching.check(root, b"")
        for node in self.nodes():
            self._check_node(node)
            invariant(seen.isdisjoint(node.pages), "a page is in the tree twice")
            seen.update(node.pages)
            if node.is_pending:
                num_pending += len(node.pages)
                continue
            num_pages += len(node.pages)
            num_evictable += 0 if node.locks else len(node.pages)
        invariant(num_pages == self.num_pages, f"{num_pages} pages are in the tree, not {self.num_pages}")
        invariant(num_evictable == self.num_evictable_pages, f"{num_evictable} can go, not {self.num_evictable_pages}")
        invariant(num_pages == self._books.count(Owner.RADIX), "the books and the tree differ about the tree's pages")
        invariant(num_pending <= self._books.count(Owner.GRANT), "a pending page is not granted")
        in_heap = list(self._leaves)
        invariant(all(node.in_heap for node in in_heap), "a node in the eviction heap does not know it")
        invariant(len(in_heap) == len({node.serial for node in in_heap}), "a node is in the eviction heap twice")

    def _check_node(self, node: TreeNode) -> None:
        parent = node.parent
        assert parent is not None
        invariant(node.pages, "a node is empty")
        invariant(len(node.key) == len(node.pages) * self._page_bytes, "a node's tokens and pages differ in length")
        invariant(parent.children.get(node.key[: self._page_bytes]) is node, "a node is filed under another key")
        invariant(node.locks >= sum(child.locks for child in node.children.values()), "a lock does not reach the root")
        invariant(not node.pending or not node.locks, "a pending node is locked")
        invariant(not parent.pending or parent.pending is node.pending, "something is built on a pending node")
        invariant(parent.parent is None or parent.last_used >= node.last_used, "a node was used without its parent")
        invariant(node.pending is None or not node.pending.is_over, "a finished transfer left a pending node")
        if node.watchers:
            self._watching.check(node, b"".join(part.key for part in node.path()))
        invariant(node.in_heap or not node.is_evictable_leaf, "a leaf that can go is not offered to eviction")
        if node.pending and not parent.pending and parent.parent is not None:
            invariant(parent.locks > 0, "what a transfer builds on is not locked")
