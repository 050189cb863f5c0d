"""The types of the radix tree: nodes, pending transfers, watches, and the results of calls."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import overload

TOKEN_BYTES = 4

#: Tokens in packed form: uint32 in the machine's byte order.
TokenKey = bytes
#: Watches by the page that follows their cached tokens; empty bytes if less than a page follows.
Watchers = dict[bytes, "dict[PrefixWatch, None]"]


@dataclass(slots=True, frozen=True)
class PackedTokens(Sequence[int]):
    """Token ids of which only the packed form is kept. A slice is packed, too.

    For the simulator: it is no tuple, equals none, and must not be sent.
    """

    packed: TokenKey

    def __len__(self) -> int:
        return len(self.packed) // TOKEN_BYTES

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> "PackedTokens": ...
    def __getitem__(self, place: int | slice) -> "int | PackedTokens":
        if isinstance(place, int):
            return memoryview(self.packed).cast("I")[place]
        start, end, step = place.indices(len(self))
        assert step == 1, "a slice is a run of tokens"
        return PackedTokens(self.packed[start * TOKEN_BYTES : end * TOKEN_BYTES])

    def __iter__(self) -> Iterator[int]:
        return iter(memoryview(self.packed).cast("I"))

    def __add__(self, tokens: Sequence[int]) -> "PackedTokens":
        return PackedTokens(self.packed + pack(tokens))


def pack(tokens: Sequence[int] | TokenKey) -> TokenKey:
    """Pack token ids; packed tokens are returned unchanged. Raises ``OverflowError`` for ids outside uint32."""
    if isinstance(tokens, bytes):
        return tokens
    if isinstance(tokens, PackedTokens):
        return tokens.packed
    return array("I", tokens).tobytes()  # twice as fast as ``struct`` and numpy


@dataclass(slots=True, eq=False)
class TreeNode:
    """A run of tokens and the pages with their KV. A root has no tokens, no pages and no parent.

    Attributes:
        key: packed tokens, a multiple of a page.
        pages: one page for each ``page_size`` tokens.
        salt: salt of a root; empty in other nodes.
        children: child nodes, by the bytes of their first page.
        locks: number of locks on this node and below it.
        last_used: time of the last match or insert that passed through the node.
        num_uses: number of requests that have begun with the node's tokens in the cache.
        priority: highest priority of the requests that inserted the tokens or a continuation.
        pending: transfer that still writes the pages; None once they are ready.
        serial: order of creation, which decides between equal ranks in the same way in every run.
        watchers: watches whose cached tokens end at this node, by the page that follows.
    """

    parent: "TreeNode | None" = None
    key: TokenKey = b""
    pages: list[int] = field(default_factory=list)
    serial: int = 0
    salt: str = ""
    children: "dict[TokenKey, TreeNode]" = field(default_factory=dict)
    locks: int = 0
    last_used: int = 0
    num_uses: int = 0
    priority: int = 0
    pending: "Pending | None" = None
    in_heap: bool = False
    watchers: Watchers = field(default_factory=dict)

    @property
    def is_evictable_leaf(self) -> bool:
        return not self.children and not self.locks and self.pending is None and self.parent is not None

    def path(self) -> "list[TreeNode]":
        """Return the nodes from below the root to this node."""
        nodes: list[TreeNode] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass(slots=True, eq=False)
class Pending:
    """Handle of the nodes that one transfer will fill: ``node``, and nodes above it with the same handle."""

    node: TreeNode

    @property
    def nodes(self) -> list[TreeNode]:
        """The nodes from top to bottom: more than one after a match has split the first, none after the transfer."""
        return [node for node in self.node.path() if node.pending is self]

    @property
    def pages(self) -> list[int]:
        return [page for node in self.nodes for page in node.pages]


@dataclass(slots=True)
class Match:
    """Result of a match: the pages, length and deepest node of the longest ready prefix; by default, nothing matches.

    Attributes:
        node: the root if nothing matches.
        pending: pending node that continues the prefix; all its tokens match too. None if there is none.
    """

    pages: list[int] = field(default_factory=list)
    num_tokens: int = 0
    node: TreeNode = field(default_factory=TreeNode)
    pending: TreeNode | None = None


@dataclass(slots=True)
class Inserted:
    """Result of an insert: the tree has adopted ``pages[first_adopted:]``; the caller keeps the pages before.

    Attributes:
        node: deepest ready node along the tokens.
        first_adopted: ``len(pages)`` if the tree adopted none.
    """

    node: TreeNode
    first_adopted: int
    num_adopted: int


@dataclass(slots=True, eq=False)
class PrefixWatch:
    """The cached length of one waiting request.

    Attributes:
        key: packed tokens of the request that may be cached.
        num_tokens: number of them that are cached now, in whole pages.
        node: deepest node of the cached tokens: a root if nothing is cached, None if the cache is disabled.
    """

    key: TokenKey
    num_tokens: int = 0
    node: TreeNode | None = None
