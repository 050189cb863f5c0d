"""Tracks how many tokens of each waiting request are cached, without matching the whole queue before each step. Pure.

A watch is stored at the deepest ready node whose whole path matches its tokens, under the page that follows. A new node
therefore affects only the watches stored under its first page, and a removed node only the watches stored at it.
SGLang matches all waiting requests again before each step.
"""

from collections.abc import Callable

from common.cache.tree_node import TOKEN_BYTES, PrefixWatch, TokenKey, TreeNode
from common.errors import invariant


class WatchIndex:
    """The watches of one tree.

    ``descend`` takes a ready child, a key and an offset in the key, splits the child where the key differs, and returns
    the shared part.
    """

    def __init__(self, page_bytes: int, descend: Callable[[TreeNode, TokenKey, int], TreeNode]) -> None:
        self._page_bytes = page_bytes
        self._descend = descend

    def place(self, watch: PrefixWatch, node: TreeNode, offset: int) -> None:
        """Store a watch at the deepest matching ready node; ``node`` matches its first ``offset`` bytes."""
        key = watch.key
        while (child := node.children.get(key[offset : offset + self._page_bytes])) and child.pending is None:
            node = self._descend(child, key, offset)
            offset += len(node.key)
        self._store(watch, node, offset // TOKEN_BYTES)

    def remove(self, watch: PrefixWatch) -> None:
        node = watch.node
        assert node is not None
        page = self._next_page(watch)
        del node.watchers[page][watch]
        if not node.watchers[page]:
            del node.watchers[page]
        watch.node = None

    def node_added(self, node: TreeNode) -> None:
        """Move watches down to a node that became ready."""
        parent = node.parent  # placing a watch may split the node, which then gets another parent
        assert parent is not None
        for watch in parent.watchers.pop(node.key[: self._page_bytes], ()):
            self.place(watch, parent, watch.num_tokens * TOKEN_BYTES)

    def move_up(self, leaf: TreeNode, node: TreeNode, num_bytes: int) -> None:
        """Move the watches of a leaf to ``node``; the last ``num_bytes`` of their keys are not cached any more."""
        groups = list(leaf.watchers.values())
        leaf.watchers.clear()
        for group in groups:
            for watch in group:
                self._store(watch, node, watch.num_tokens - num_bytes // TOKEN_BYTES)

    def _store(self, watch: PrefixWatch, node: TreeNode, num_tokens: int) -> None:
        watch.node = node
        watch.num_tokens = num_tokens
        page = self._next_page(watch)
        node.watchers.setdefault(page, {})[watch] = None

    def _next_page(self, watch: PrefixWatch) -> bytes:
        start = watch.num_tokens * TOKEN_BYTES
        page = watch.key[start : start + self._page_bytes]
        return page if len(page) == self._page_bytes else b""

    def check(self, node: TreeNode, path: TokenKey) -> None:
        """Verify every watch at this node; ``path`` holds the tokens from the root to it."""
        invariant(not node.watchers or node.pending is None, "a watch is stored at a pending node")
        for page, group in node.watchers.items():
            invariant(group, "an empty group of watches is kept")
            child = node.children.get(page)
            invariant(child is None or child.pending is not None, "a watch is stored above its deepest node")
            for watch in group:
                invariant(
                    watch.node is node and watch.num_tokens * TOKEN_BYTES == len(path),
                    "a watch has another node or length",
                )
                invariant(watch.key.startswith(path), "a watch is stored below other tokens")
                invariant(self._next_page(watch) == page, "a watch is stored under another page")
