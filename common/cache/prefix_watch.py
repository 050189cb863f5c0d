"""How much of each waiting request is cached, kept current by the radix cache as it grows and shrinks. Pure.

A watch stands at the deepest ready node whose path it shares wholly, filed there under the page that its tokens go on
with. So a node that comes concerns just the watches filed under its first page, and one that goes just those that stand
at it: nobody matches the whole queue anew for every step. This is the second index, beside the tree itself, that
SGLang builds anew over the waiting queue before each step.
"""

from collections.abc import Callable

from common.cache.tree_node import TOKEN_BYTES, TokenKey, TreeNode
from common.errors import invariant

#: Watches by the page that their tokens go on with; empty bytes for those that end here.
Watchers = dict[bytes, "dict[Watch, None]"]


class Watch:
    """Of one waiting request.

    Attributes:
        key: packed tokens that a cached prefix may stand for.
        num_tokens: of them, how many are cached now, in whole pages.
        node: where they end in the tree; a root if nothing is cached, None if the cache keeps nothing.
    """

    __slots__ = ("key", "node", "num_tokens")

    def __init__(self, key: TokenKey) -> None:
        self.key = key
        self.num_tokens = 0
        self.node: TreeNode | None = None


class Watching:
    """The watches of one tree.

    Args:
        page_bytes: length of a packed page.
        descend: takes a ready child, a key and the offset at which both meet; cuts the child where the key leaves it,
            and returns the part that they share.
    """

    def __init__(self, page_bytes: int, descend: Callable[[TreeNode, TokenKey, int], TreeNode]) -> None:
        self._page_bytes = page_bytes
        self._descend = descend

    def place(self, watch: Watch, node: TreeNode, offset: int) -> None:
        """Let a watch stand as deep as ready nodes reach, from ``node`` on, which covers its first ``offset`` bytes."""
        key = watch.key
        while (child := node.children.get(key[offset : offset + self._page_bytes])) and child.pending is None:
            node = self._descend(child, key, offset)
            offset += len(node.key)
        self._file(watch, node, offset // TOKEN_BYTES)

    def remove(self, watch: Watch) -> None:
        """Forget a watch."""
        node = watch.node
        assert node is not None
        page = self._next_page(watch)
        group = node.watchers[page]
        del group[watch]
        if not group:
            del node.watchers[page]
        watch.node = None

    def came(self, node: TreeNode) -> None:
        """A node became ready."""
        parent = node.parent  # which is another once a watch has cut the node
        assert parent is not None
        for watch in parent.watchers.pop(node.key[: self._page_bytes], ()):
            self.place(watch, parent, watch.num_tokens * TOKEN_BYTES)

    def gone(self, leaf: TreeNode, parent: TreeNode) -> None:
        """A leaf has left the tree, from below this parent."""
        self._retreat(leaf, parent, len(leaf.key) // TOKEN_BYTES)

    def trimmed(self, leaf: TreeNode, num_bytes: int) -> None:
        """A leaf has lost so many bytes at its end."""
        self._retreat(leaf, leaf, num_bytes // TOKEN_BYTES)

    def _retreat(self, leaf: TreeNode, node: TreeNode, num_tokens: int) -> None:
        """Those who stood at the leaf stand so much higher now, at ``node``: what they go on with is the same."""
        groups = list(leaf.watchers.values())
        leaf.watchers.clear()
        for group in groups:
            for watch in group:
                self._file(watch, node, watch.num_tokens - num_tokens)

    def _file(self, watch: Watch, node: TreeNode, num_tokens: int) -> None:
        watch.node = node
        watch.num_tokens = num_tokens
        page = self._next_page(watch)
        group = node.watchers.get(page)
        if group is None:
            node.watchers[page] = {watch: None}
        else:
            group[watch] = None

    def _next_page(self, watch: Watch) -> bytes:
        start = watch.num_tokens * TOKEN_BYTES
        page = watch.key[start : start + self._page_bytes]
        return page if len(page) == self._page_bytes else b""

    def check(self, node: TreeNode, path: TokenKey) -> None:
        """Every watch at this node, whose path has these tokens, stands where it belongs."""
        invariant(not node.watchers or node.pending is None, "a watch stands at a pending node")
        for page, group in node.watchers.items():
            invariant(group, "an empty group of watches is kept")
            child = node.children.get(page)
            invariant(child is None or child.pending is not None, "a watch stands above where it belongs")
            for watch in group:
                invariant(
                    watch.node is node and watch.num_tokens * TOKEN_BYTES == len(path), "a watch does not know where"
                )
                invariant(watch.key.startswith(path), "a watch stands below other tokens than its own")
                invariant(self._next_page(watch) == page, "a watch is filed under another page")
