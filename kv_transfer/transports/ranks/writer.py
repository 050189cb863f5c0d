"""The prefill node's side of transfers between ranks."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from common.cache.page_layout import PageLayout
from common.wire.messages import Connect, LayoutMessage
from kv_transfer.page_mapping import rank_layout
from kv_transfer.page_slices import SlicePair
from kv_transfer.transports.base import Attached, AttachError, WriterTransport
from kv_transfer.transports.ranks.pairs import Pair, RanksEnd, pairs_of, rank_of_peer, split


@dataclass(slots=True)
class _Attachment:
    """One decode node.

    Attributes:
        how: transport and reason of each pair that is attached.
        beside: epoch under which the only pair attaches by a better transport; 0: none.
    """

    epoch: int
    pairs: list[Pair]
    how: dict[Pair, tuple[str, str]] = field(default_factory=dict)
    is_broken: bool = False
    beside: int = 0


def _mixed(attachment: _Attachment) -> str:
    """Why the transports that were found do not fit together; empty if they do.

    Some place pages in the pool and some beside it on a GPU's node, and a page cannot come in both ways.
    """
    for rank in dict.fromkeys(target for _, target in attachment.pairs):
        names = [attachment.how[pair][0] for pair in attachment.pairs if pair[1] == rank]
        if len(set(names)) > 1:
            return f"rank {rank} would get its pages by {' and '.join(dict.fromkeys(names))}: name one with --transport"
    return ""


class RanksWriter(RanksEnd[WriterTransport], WriterTransport):
    """``WriterTransport`` over those of all ranks."""

    def __init__(self, ends: Sequence[WriterTransport], layout: PageLayout) -> None:
        super().__init__(ends, layout)
        self._attachments: dict[str, _Attachment] = {}
        self._leaving: dict[str, set[Pair]] = {}  # detached peers, and the pairs that may still write
        self._tickets: dict[tuple[int, int], tuple[int, str, Pair]] = {}  # (rank, its ticket) -> ours, peer, pair
        self._over: list[int] = []
        self._num_tickets = 0

    def attach(self, peer: str, connect: Connect) -> None:
        assert peer not in self._attachments, "detach first"
        try:
            endpoints = msgspec.json.decode(connect.endpoint, type=list[str])
        except (msgspec.DecodeError, UnicodeError) as error:
            raise AttachError(f"the endpoint offered by {connect.name} cannot be understood") from error
        layout = connect.layout.layout()
        pairs = pairs_of(layout.num_kv_heads, self.num_ranks, connect.num_ranks)
        if len(endpoints) != len(pairs):
            raise AttachError(f"{connect.name} offers {len(endpoints)} endpoints, {len(pairs)} are needed")
        self._attachments[peer] = _Attachment(connect.epoch, pairs)
        for (source, target), endpoint in zip(pairs, endpoints, strict=True):
            try:
                self._ends[source].attach(rank_of_peer(peer, target), self._own(connect, endpoint))
            except AttachError:
                self.detach(peer)
                raise

    @staticmethod
    def _own(connect: Connect, endpoint: str) -> Connect:
        """The offer of one rank."""
        layout = LayoutMessage.of(rank_layout(connect.layout.layout(), connect.num_ranks))
        return msgspec.structs.replace(connect, layout=layout, endpoint=endpoint, num_ranks=1, num_peer_ranks=1)

    def returns(self) -> list[str]:
        """Only peers with a single pair; others leave their transport before they try the better one."""
        peers = []
        for end in self._ends:
            for name in end.returns():
                peer, _ = split(name)
                if peer in self._attachments and len(self._attachments[peer].pairs) == 1:
                    peers.append(peer)
                else:
                    end.attach_beside(name, None)
        return peers

    def attach_beside(self, peer: str, connect: Connect | None) -> bool:
        attachment = self._attachments[peer]
        own, endpoints = None, []
        if connect is not None:
            with contextlib.suppress(msgspec.DecodeError, UnicodeError):
                endpoints = msgspec.json.decode(connect.endpoint, type=list[str])
            own = self._own(connect, endpoints[0] if len(endpoints) == 1 else "")
        source, target = attachment.pairs[0]
        is_begun = self._ends[source].attach_beside(rank_of_peer(peer, target), own)
        if is_begun and connect is not None:
            attachment.beside = connect.epoch
        return is_begun

    def is_changing(self, peer: str) -> bool:
        pairs = self._attachments[peer].pairs if peer in self._attachments else ()
        return any(self._ends[source].is_changing(rank_of_peer(peer, target)) for source, target in pairs)

    def poll(self) -> list[Attached]:
        news = []
        for source, end in enumerate(self._ends):
            for attached in end.poll():
                peer, target = split(attached.peer)
                attachment = self._attachments.get(peer)
                if attachment is None or attachment.is_broken:
                    continue
                if attached.epoch == attachment.beside:
                    attachment.epoch, attachment.beside = attached.epoch, 0
                elif attached.epoch != attachment.epoch:
                    continue
                if attached.problem:
                    attachment.is_broken = True
                    news.append(replace(attached, peer=peer, problem=self._named(attached.problem, source, target)))
                    continue
                attachment.how[source, target] = (attached.transport or end.name, attached.why)
                if len(attachment.how) == len(attachment.pairs):
                    news.append(self._attached(peer, attachment))
        return news

    def _named(self, problem: str, source: int, target: int) -> str:
        """A problem with the ranks between which it is, where there are several."""
        return problem if self.num_ranks == 1 and not target else f"{problem} (rank {source} to rank {target})"

    @staticmethod
    def _attached(peer: str, attachment: _Attachment) -> Attached:
        found = [attachment.how[pair] for pair in attachment.pairs]
        if mixed := _mixed(attachment):
            attachment.is_broken = True
            return Attached(peer, attachment.epoch, mixed)
        transports, whys = ([*dict.fromkeys(one)] for one in zip(*found, strict=True))
        transport = transports[0] if len(transports) == 1 else "+".join(transport for transport, _ in found)
        return Attached(peer, attachment.epoch, "", transport, "; ".join(filter(None, whys)))

    def prepare(self, peer: str, pages: Sequence[int]) -> None:
        for source, target in self._attachments[peer].pairs:
            self._ends[source].prepare(rank_of_peer(peer, target), pages)

    def write(self, peer: str, pages: Sequence[tuple[int, int]], slices: SlicePair | None = None) -> int:
        pair = (0, 0) if slices is None else (slices.source.rank, slices.target.rank)
        own = None if slices is None or slices.is_whole else slices
        self._num_tickets += 1
        ticket = self._ends[pair[0]].write(rank_of_peer(peer, pair[1]), pages, own)
        self._tickets[pair[0], ticket] = (self._num_tickets, peer, pair)
        return self._num_tickets

    def checksums(self, pages: Sequence[int], slices: SlicePair | None) -> list[int]:
        return self._ends[0 if slices is None else slices.source.rank].checksums(pages, slices)

    def done(self) -> list[int]:
        over, self._over = self._over, []
        for rank, end in enumerate(self._ends):
            over += [self._tickets.pop((rank, ticket))[0] for ticket in end.done() if (rank, ticket) in self._tickets]
        return over

    def late(self) -> list[str]:
        return list(dict.fromkeys(split(name)[0] for end in self._ends for name in end.late()))

    def detach(self, peer: str) -> bool:
        attachment = self._attachments.pop(peer, None)
        pairs = {*self._leaving.pop(peer, ()), *(attachment.pairs if attachment is not None else ())}
        left = {pair for pair in pairs if not self._ends[pair[0]].detach(rank_of_peer(peer, pair[1]))}
        if left:
            self._leaving[peer] = left
        # Tickets of pairs that are detached vanish. If others of this peer do not, the caller waits for all.
        gone = {key: t for key, t in self._tickets.items() if t[1] == peer and t[2] not in left}
        for key, (ticket, _, _) in gone.items():
            del self._tickets[key]
            if left:
                self._over.append(ticket)
        return not left
