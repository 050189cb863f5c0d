"""``dfs-weight``: requests that share a prefix together, those of the busiest branch of the cache first. Pure."""

from collections.abc import Sequence

from common.cache.radix_cache import TreeNode
from common.request import Request
from common.scheduling.policies.base import Policy


class _Branch:
    """A node of the radix tree below which requests wait."""

    __slots__ = ("below", "first", "own", "weight")

    def __init__(self) -> None:
        self.own: list[Request] = []
        self.below: list[_Branch] = []
        self.weight = 0
        self.first = 0  # place in the queue of the first request in the branch


class DepthFirstByWeight(Policy):
    """The weight of a node is the number of requests that wait at it and below it; the heaviest child comes first.

    A node's own requests come after those of its children: what they lack of the prefix is being computed by then.
    Equal weights go by arrival. SGLang's policy of this name.
    """

    name = "dfs-weight"

    def order(self, waiting: Sequence[Request], now: float) -> Sequence[Request]:
        root = _Branch()
        branches: dict[TreeNode, _Branch] = {}
        for position, request in enumerate(waiting):
            node = None if request.watch is None else request.watch.node
            _branch_of(node, root, branches, position).own.append(request)
        _weigh(root)
        line: list[Request] = []
        stack = [root]
        while stack:  # backwards: a node before its children, the lightest child first
            branch = stack.pop()
            line.extend(reversed(branch.own))
            branch.below.sort(key=lambda child: (child.weight, -child.first))
            stack.extend(reversed(branch.below))
        line.reverse()
        return line


def _branch_of(node: TreeNode | None, root: _Branch, branches: dict[TreeNode, _Branch], position: int) -> _Branch:
    """The branch of a node, made with all those above it that are missing. The roots of all salts are one."""
    missing: list[TreeNode] = []
    while node is not None and node.parent is not None and node not in branches:
        missing.append(node)
        node = node.parent
    branch = root if node is None or node.parent is None else branches[node]
    for node in reversed(missing):
        below = _Branch()
        below.first = position
        branch.below.append(below)
        branch = branches[node] = below
    return branch


def _weigh(root: _Branch) -> None:
    order = [root]
    for branch in order:
        order.extend(branch.below)
    for branch in reversed(order):
        branch.weight = len(branch.own) + sum(child.weight for child in branch.below)
