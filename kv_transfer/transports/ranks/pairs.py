"""The connections between the ranks of two nodes, and what both ends of them have in common."""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from common.cache.page_layout import PageLayout
from kv_transfer.page_mapping import head_parts, rank_layout
from kv_transfer.page_store import PageStore
from kv_transfer.transfer_stats import sums
from kv_transfer.transports.base import Transport

#: (rank of the prefill node, rank of the decode node)
Pair = tuple[int, int]

T = TypeVar("T", bound=Transport)


def pairs_of(num_kv_heads: int, num_sources: int, num_targets: int) -> list[Pair]:
    """The pairs of ranks that exchange pages, in the order of their endpoints in ``Connect``."""
    return [(part.source_rank, part.target_rank) for part in head_parts(num_kv_heads, num_sources, num_targets)]


def rank_of_peer(peer: str, rank: int) -> str:
    """The name of one rank of a peer."""
    return f"{peer}/{rank}"


def split(rank_name: str) -> tuple[str, int]:
    """Reverse ``rank_of_peer``."""
    peer, _, rank = rank_name.rpartition("/")
    return peer, int(rank)


class NodeStore:
    """The pools of all ranks of a node, as the state machines at rank 0 see them.

    Args:
        own: the pool of rank 0.
        layout: of whole pages.
    """

    def __init__(self, own: PageStore, layout: PageLayout) -> None:
        self.layout = layout
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


class RanksEnd(Transport, Generic[T]):
    """What the two ends have in common.

    Args:
        ends: the transport of each rank, by rank.
        layout: of whole pages.
    """

    def __init__(self, ends: Sequence[T], layout: PageLayout) -> None:
        self.name = ends[0].name
        self.num_ranks = len(ends)
        assert ends[0].store.layout == rank_layout(layout, len(ends))
        self.store: PageStore = NodeStore(ends[0].store, layout)
        self._ends = list(ends)

    @property
    def names(self) -> Sequence[str]:
        return self._ends[0].names

    def files(self) -> Sequence[int]:
        return [file for end in self._ends for file in end.files()]

    def counters(self) -> dict[str, float]:
        """The sums over all ranks."""
        return sums(*(end.counters() for end in self._ends))

    def close(self) -> None:
        for end in self._ends:
            end.close()
