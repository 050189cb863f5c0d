"""The decode node's side of transfers between ranks."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.cache.page_layout import PageLayout
from kv_transfer.page_slices import PageSlice
from kv_transfer.transports.base import Fenced, ReaderTransport
from kv_transfer.transports.ranks.pairs import Pair, RanksEnd, pairs_of, rank_of_peer, split


@dataclass(slots=True)
class _Writer:
    """One prefill node.

    Attributes:
        pairs: of its ranks with ours.
        epoch: of the newest offer to it; 0: none holds.
        chosen: the last epoch under which it has reported its transports.
        fenced: the last epoch under which each pair cannot write any more.
        reported: the last epoch of which that was reported.
        is_dead: a process of the prefill node has died.
    """

    pairs: list[Pair]
    epoch: int = 0
    chosen: int = 0
    fenced: dict[Pair, int] = field(default_factory=dict)
    reported: int = 0
    is_dead: bool = False


class RanksReader(RanksEnd[ReaderTransport], ReaderTransport):
    """``ReaderTransport`` over those of all ranks."""

    def __init__(self, ends: Sequence[ReaderTransport], layout: PageLayout) -> None:
        super().__init__(ends, layout)
        self._writers: dict[str, _Writer] = {}

    def expect(self, peer: str, num_ranks: int) -> None:
        if peer not in self._writers:  # a process cannot change its number of ranks, even if it says that it has others
            pairs = pairs_of(self.store.layout.num_kv_heads, num_ranks, self.num_ranks)
            self._writers[peer] = _Writer(pairs, fenced=dict.fromkeys(pairs, 0))

    def offer(self, peer: str, epoch: int) -> str:
        self._writers[peer].epoch = epoch
        return json.dumps([end.offer(rank, epoch) for end, rank in self._pairs(peer)])

    def offer_beside(self, peer: str, epoch: int) -> str:
        """Only to a peer with a single pair, since several would have to change their transport at one moment."""
        pairs = self._pairs(peer)
        endpoints = [end.offer_beside(rank, epoch) for end, rank in pairs] if len(pairs) == 1 else [""]
        if not all(endpoints):
            return ""
        self._writers[peer].epoch = epoch
        return json.dumps(endpoints)

    def _pairs(self, peer: str) -> list[tuple[ReaderTransport, str]]:
        """The transport of ours, and the peer's rank under its name there, of each pair."""
        writer = self._writers.get(peer)
        pairs = [] if writer is None else writer.pairs
        return [(self._ends[target], rank_of_peer(peer, source)) for source, target in pairs]

    def withdraw(self, peer: str) -> None:
        for end, rank in self._pairs(peer):
            end.withdraw(rank)
        if peer in self._writers:
            self._writers[peer].epoch = 0
            self._forget_if_over(peer)

    def _forget_if_over(self, peer: str) -> None:
        writer = self._writers[peer]
        if not writer.epoch and writer.chosen <= writer.reported:
            for end, rank in self._pairs(peer):
                end.forget(rank)
            del self._writers[peer]

    def chosen(self, peer: str, epoch: int, transport: str) -> bool:
        pairs, names = self._pairs(peer), transport.split("+")
        if len(names) == 1:
            names *= len(pairs)
        if not pairs or len(names) != len(pairs):
            return False
        is_offered = [end.chosen(rank, epoch, name) for (end, rank), name in zip(pairs, names, strict=True)]
        self._writers[peer].chosen = epoch
        return all(is_offered)

    def allow(self, peer: str, epoch: int, pages: Sequence[int], again: PageSlice | None = None) -> None:
        own = None if again is None else again._replace(rank=0)
        for end, rank in self._pairs(peer):
            if again is None or end is self._ends[again.rank]:
                end.allow(rank, epoch, pages, own)

    def forbid(self, pages: Sequence[int]) -> None:
        for end in self._ends:
            end.forbid(pages)

    def reclaim(self, peer: str, epoch: int) -> None:
        for end, rank in self._pairs(peer):
            end.reclaim(rank, epoch)

    def landed(self, peer: str, pages: Sequence[int]) -> None:
        for rank, end in enumerate(self._ends):
            end.landed(self._source_of(peer, rank), pages)

    def checksums(self, peer: str, pages: Sequence[int], page_slice: PageSlice) -> list[int]:
        return self._ends[page_slice.rank].checksums(self._source_of(peer, page_slice.rank), pages, page_slice)

    def _source_of(self, peer: str, target: int) -> str:
        """One of the peer's ranks that write to this rank of ours; they all have the same transport."""
        return rank_of_peer(peer, next(pair[0] for pair in self._writers[peer].pairs if pair[1] == target))

    def poll(self, now: float) -> list[Fenced]:
        news = []
        for target, end in enumerate(self._ends):
            for fenced in end.poll(now):
                peer, source = split(fenced.peer)
                news += self._on_fenced(peer, (source, target), fenced)
        return news

    def _on_fenced(self, peer: str, pair: Pair, fenced: Fenced) -> list[Fenced]:
        """One pair cannot write any more: end the others, and report the peer once that holds for all."""
        writer = self._writers.get(peer)
        if writer is None:
            return []  # nothing of what it was offered came into use
        writer.fenced[pair] = max(writer.fenced[pair], fenced.epoch)
        writer.is_dead |= fenced.is_dead
        epoch = min(writer.fenced.values())
        if epoch > writer.reported:
            writer.reported = epoch
            self._forget_if_over(peer)
            return [Fenced(peer, epoch, fenced.reason, writer.is_dead)]
        if fenced.epoch == writer.epoch:
            self.withdraw(peer)
        return []
