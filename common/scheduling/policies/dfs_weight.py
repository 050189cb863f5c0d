"""``dfs-weight``: groups requests by shared prefix and serves the busiest branch of the radix tree first. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from common.cache.tree_node import TreeNode
from common.request import Request
from common.scheduling.policies.base import Policy


@dataclass(slots=True)
class _Branch:
    """A node of the radix tree with waiting requests at it or below it."""

    first: int  # position in the queue of the branch's first request
    own: list[Request] = field(default_factory=list)
    below: "list[_Branch]" = field(default_factory=list)
    weight: int = 0


class DepthFirstByWeight(Policy):
    """SGLang's policy of this name.

    The weight of a node is the number of requests that wait at it and below it. The heaviest child comes first, equal
    ones by arrival. A node's own requests come after those of its children.
    """

    name = "dfs-weight"

    def order(self, waiting: Sequence[Request], now: float) -> Sequence[Request]:
        root = _Branch(0)
        branches: dict[TreeNode, _Branch] = {}
        for position, request in enumerate(waiting):
            node = None if request.watch is None else request.watch.node
            _branch_of(node, root, branches, position).own.append(request)
        _weigh(root)
        ordered: list[Request] = []
        stack = [root]
        while stack:  # in reverse: a node before its children, the lightest child first
            branch = stack.pop()
            ordered.extend(reversed(branch.own))
            branch.below.sort(key=lambda child: (child.weight, -child.first))
            stack.extend(reversed(branch.below))
        ordered.reverse()
        return ordered


def _branch_of(node: TreeNode | None, root: _Branch, branches: dict[TreeNode, _Branch], position: int) -> _Branch:
    """The branch of a node, created with all missing branches above it. The roots of all salts share one branch."""
    missing: list[TreeNode] = []
    while node is not None and node.parent is not None and node not in branches:
        missing.append(node)
        node = node.parent
    branch = root if node is None or node.parent is None else branches[node]
    for node in reversed(missing):
        below = _Branch(position)
        branch.below.append(below)
        branch = branches[node] = below
    return branch


def _weigh(root: _Branch) -> None:
    order = [root]
    for branch in order:
        order.extend(branch.below)
    for branch in reversed(order):
        branch.weight = len(branch.own) + sum(child.weight for child in branch.below)
