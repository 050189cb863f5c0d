"""The nodes among which the router chooses, and what it knows of each, in arrays. Pure.

Each node has a row in the arrays. So costs of a thousand nodes are a few operations of numpy, and not a loop.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

#: Rows that the arrays have at first.
NUM_ROWS = 64

Rows = NDArray[np.intp]
#: A figure of each node, or of some of them.
Column = NDArray[np.float64]


class Candidate(Protocol):
    """A node that could take a request."""

    @property
    def incarnation(self) -> str: ...
    @property
    def capacity_tokens(self) -> int: ...
    @property
    def longest_tokens(self) -> int:
        """Prompt and output of the longest request that fits into its pool."""
        ...

    @property
    def most_held_tokens(self) -> int:
        """Tokens of its pool that one request holds at most; 0: all tokens of the request."""
        ...

    @property
    def max_running(self) -> int: ...
    @property
    def revision(self) -> str:
        """Stands for its weights; pages go only between nodes of one revision."""
        ...

    @property
    def step_s(self) -> float:
        """What a step without prompts takes there."""
        ...

    @property
    def prompt_token_s(self) -> float:
        """What a prompt token adds to a step; 0: not measured yet."""
        ...

    @property
    def send_token_s(self) -> float:
        """What sending the pages of a token takes."""
        ...

    @property
    def failed_peers(self) -> frozenset[str]:
        """Incarnations of nodes with which it gets no requests at present, since pages do not arrive."""
        ...


def can_pair(prefill: Candidate, decode: Candidate) -> bool:
    """Whether pages can go from one to the other, as far as is known."""
    return (
        prefill.revision == decode.revision
        and prefill.incarnation not in decode.failed_peers
        and decode.incarnation not in prefill.failed_peers
    )


class NodeArrays:
    """What is known of the nodes, in arrays with a row for every node.

    All have the type of costs, since numpy takes several times as long for numbers of two types. They count exactly up
    to 2 ** 53.

    Attributes:
        capacity, longest, max_running, step_s, prompt_token_s, send_token_s: as in ``Candidate``.
        most_held: tokens of a pool that one request holds at most.
        revision: hash of the revision, to the precision of a double.
        load: tokens that a node still has to compute (prefill) or holds (decode), for all gateways.
        other_load: the part of it that other gateways have sent.
        num_requests: in flight, whose last token the node makes.
        num_begun: those of them that have a token.
        local_load: prompt tokens that a decode node still has to compute.
        idle_at: when a prefill node will have computed what this gateway has sent: an estimate.
        turn: when the node was chosen last; equals take turns.
    """

    def __init__(self) -> None:
        self.capacity, self.longest, self.max_running, self.revision = _zeros(), _zeros(), _zeros(), _zeros()
        self.most_held = _zeros()
        self.step_s, self.prompt_token_s, self.send_token_s = _zeros(), _zeros(), _zeros()
        self.load, self.other_load, self.local_load = _zeros(), _zeros(), _zeros()
        self.num_requests, self.num_begun, self.turn, self.idle_at = _zeros(), _zeros(), _zeros(), _zeros()

    def grow(self) -> None:
        """Add as many empty rows as there are."""
        for name, column in vars(self).items():
            setattr(self, name, np.concatenate([column, np.zeros_like(column)]))

    def clear(self, row: int) -> None:
        for column in vars(self).values():
            column[row] = 0

    def copy(self, row: int, to: int) -> None:
        for column in vars(self).values():
            column[to] = column[row]


def _zeros() -> Column:
    return np.zeros(NUM_ROWS, np.float64)


class NodeGroup(NamedTuple):
    """The nodes that may take a request.

    Attributes:
        prefills, decodes: the nodes.
        prefill_rows, decode_rows: their rows, in the same order.
        can_pair: whether pages can go from a prefill node to a decode node, by the places of both; None if they can go
            from each to each.
        min_prefill, min_decode: tokens of the longest request that each pool can take.
        by_incarnation: all nodes.
    """

    prefills: Sequence[Candidate]
    decodes: Sequence[Candidate]
    prefill_rows: Rows
    decode_rows: Rows
    can_pair: NDArray[np.bool_] | None
    min_prefill: int
    min_decode: int
    by_incarnation: Mapping[str, Candidate]


class NodeFilter(NamedTuple):
    """Which nodes of a group may take a request.

    Attributes:
        revision: of the nodes; empty: any.
        prefers_idle: nodes without requests, if there are any.
        avoid: incarnations of nodes that may not.
        decode: incarnation of the only decode node that may, even if it is one to avoid; None: any.
    """

    revision: str = ""
    prefers_idle: bool = False
    avoid: frozenset[str] = frozenset()
    decode: str | None = None


ALL_NODES = NodeFilter()


def pairable(prefills: Sequence[Candidate], decodes: Sequence[Candidate]) -> NDArray[np.bool_] | None:
    """Which prefill nodes can pair with which decode nodes, by the places of both; None if all can."""
    revisions: dict[str, int] = {}
    of_prefills, of_decodes = (
        np.array([revisions.setdefault(node.revision, len(revisions)) for node in nodes], np.int64)
        for nodes in (prefills, decodes)
    )
    can = of_prefills[:, np.newaxis] == of_decodes
    p_places, d_places = ({node.incarnation: i for i, node in enumerate(nodes)} for nodes in (prefills, decodes))
    for i, node in enumerate(prefills):
        can[i, [d_places[peer] for peer in node.failed_peers if peer in d_places]] = False
    for i, node in enumerate(decodes):
        can[[p_places[peer] for peer in node.failed_peers if peer in p_places], i] = False
    return None if can.all() else can
