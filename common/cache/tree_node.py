"""What the radix tree is made of: nodes, transfers that still write some of them, and what calls on the tree answer."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.cache.prefix_watch import Watchers

TOKEN_BYTES = 4

#: Tokens in packed form: int32, little endian.
TokenKey = bytes


def pack(tokens: Sequence[int] | TokenKey) -> TokenKey:
    """Token ids as bytes; what is packed already passes through. Raises ``struct.error`` for ids outside of int32."""
    if isinstance(tokens, bytes):
        return tokens
    return struct.pack(f"<{len(tokens)}i", *tokens)


class TreeNode:
    """A run of tokens and their pages. Roots have neither, no parent, and a salt.

    Attributes:
        key: packed tokens, a multiple of a page; ``pages``: where their KV lies.
        children: by the bytes of their first page.
        locks: how many locks lie on this node or below it.
        last_used: time of the last match or insert that came through here; ``num_uses``: how many did.
        created: time at which these tokens came into the tree.
        priority: the highest of the requests that inserted them.
        pending: the transfer that still writes these pages; None when they are ready.
        in_heap: whether the eviction queue has an entry for it.
        serial: order of creation, so that equal times are decided the same way in every run.
        watchers: those whose cached tokens end here, by the page that they go on with.
    """

    __slots__ = (
        "children",
        "created",
        "in_heap",
        "key",
        "last_used",
        "locks",
        "num_uses",
        "pages",
        "parent",
        "pending",
        "priority",
        "salt",
        "serial",
        "watchers",
    )

    def __init__(
        self, parent: "TreeNode | None", key: TokenKey, pages: list[int], *, serial: int = 0, salt: str = ""
    ) -> None:
        self.parent = parent
        self.key = key
        self.pages = pages
        self.salt = salt
        self.serial = serial
        self.children: dict[TokenKey, TreeNode] = {}
        self.locks = 0
        self.last_used = 0
        self.num_uses = 0
        self.created = 0
        self.priority = 0
        self.pending: Pending | None = None
        self.in_heap = False
        self.watchers: Watchers = {}

    @property
    def is_evictable_leaf(self) -> bool:
        return not self.children and not self.locks and self.pending is None and self.parent is not None

    @property
    def is_pending(self) -> bool:
        return self.pending is not None

    def path(self) -> "list[TreeNode]":
        """The nodes from below the root down to this one."""
        nodes: list[TreeNode] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass(slots=True, eq=False)
class Pending:
    """Handle of what one transfer is going to fill: ``node`` and those above it with the same handle."""

    node: TreeNode
    is_over: bool = False

    @property
    def nodes(self) -> list[TreeNode]:
        """Top to bottom; one, unless matches have cut it."""
        return [node for node in self.node.path() if node.pending is self]

    @property
    def pages(self) -> list[int]:
        return [page for node in self.nodes for page in node.pages]


@dataclass(slots=True)
class Match:
    """The longest ready prefix: its pages, its length, its deepest node (or the root, if it is empty).

    ``pending`` is the pending node that the tokens go on into, if any: all of its tokens are tokens of the caller.
    """

    pages: list[int]
    num_tokens: int
    node: TreeNode
    pending: TreeNode | None = None


@dataclass(slots=True)
class Inserted:
    """``pages[first_adopted:]`` of an insert belong to the tree now; what is before stays as it was.

    ``node`` is the deepest ready node along the tokens. If nothing was adopted, ``first_adopted`` is ``len(pages)``.
    """

    node: TreeNode
    first_adopted: int
    num_adopted: int
