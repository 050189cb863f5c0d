"""The decode node's connections to prefill nodes: what was agreed with each, and when to offer the pool again. Pure.

A data connection may break while the control connection holds, and attaching may fail for a cause that passes. As soon
as it is proven that nothing can be written any more under the old epoch, the pool is offered again under a new one: at
once, and then each time after a longer pause. Transfers wait for the first ``MAX_TRIES`` offers; a page that arrives
starts the count again.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from common.wire.messages import MAX_SENTENCE, Connect, Coverage, LayoutMessage, PairState
from kv_transfer.page_slices import PageSlice
from kv_transfer.transports.base import ReaderTransport

#: Offers without a page in between for which transfers wait.
MAX_TRIES = 4
#: Pause before the second of them, which doubles with each up to the limit.
BACKOFF_S = 0.2
MAX_BACKOFF_S = 10.0
#: How long an answer may take. The first takes longer, since several transports may be tried, and since attaching may
#: wait for what is left of an earlier connection.
ANSWER_S = 10.0
FIRST_ANSWER_S = 30.0


@dataclass(slots=True)
class PrefillConnection:
    """The connection to one prefill node.

    Attributes:
        epoch: of the last offer to it.
        name: of the prefill node, for people.
        num_ranks: of the prefill node.
        is_attached: it has attached under ``epoch``.
        num_token_ranges: token ranges in which each of our pages comes.
        units: of each of our pages, by their number in messages.
        transport, why: the transport that carries pages, and why that one.
        refusal: why transfers do not wait for this connection; empty: they do.
        problem: why no page can come now; empty: pages can, or that is not known yet.
        was_attached: it has attached at least once.
        num_tries: offers since the last page came.
        retry_at: when to offer the pool again.
        answer_by: when the answer to an offer, or the proof that nothing is written any more, must be here.
        beside: epoch of an offer of better transports, while pages come by another; 0: there is none.
        drop_reason: why the prefill node has dropped the connection, without proof that its writes are over.
    """

    epoch: int
    name: str
    num_ranks: int = 1
    is_attached: bool = False
    num_token_ranges: int = 1
    units: tuple[PageSlice, ...] = ()
    transport: str = ""
    why: str = ""
    refusal: str = ""
    problem: str = ""
    was_attached: bool = False
    num_tries: int = 0
    retry_at: float | None = None
    answer_by: float | None = None
    beside: int = 0
    drop_reason: str = ""

    @property
    def is_awaited(self) -> bool:
        """Whether the answer to the offer of this epoch is awaited; not if the offer broke before its answer came."""
        return not self.is_attached and self.retry_at is None

    @property
    def is_usable(self) -> bool:
        """Whether pages can be granted."""
        return self.is_attached and not self.drop_reason

    @property
    def is_reconnecting(self) -> bool:
        """Whether the connection is to come back after a break."""
        return self.was_attached and not self.is_attached

    def broke(self, why: str, now: float) -> bool:
        """Nothing can come until the pool is offered again. False: transfers need not wait for that."""
        self.is_attached, self.answer_by, self.drop_reason, self.problem = False, None, "", why
        self.beside = 0
        self.retry_at = now
        if self.num_tries:
            self.retry_at += min(BACKOFF_S * 2 ** min(self.num_tries - 1, 30), MAX_BACKOFF_S)
        self.num_tries += 1
        return self.num_tries <= MAX_TRIES

    def note_dropped(self, why: str, now: float) -> None:
        """The prefill node has dropped the connection, but cannot call all of its writes back."""
        self.answer_by, self.drop_reason, self.problem = now + ANSWER_S, why, why

    def refused(self, why: str) -> None:
        """Transfers do not wait for this connection any more."""
        self.refusal, self.problem, self.answer_by = why, why, None

    def page_came(self) -> None:
        """The connection works, so the next break starts the count of tries again."""
        self.num_tries = 0

    def changed(self) -> None:
        """The prefill node has taken the offer of better transports up."""
        self.epoch, self.beside, self.is_attached = self.beside, 0, False

    def offered_again(self, epoch: int, now: float) -> None:
        """The pool is offered again under this epoch."""
        self.epoch, self.retry_at, self.answer_by = epoch, None, now + ANSWER_S

    def attached(self, num_token_ranges: int, units: Sequence[PageSlice], transport: str, why: str) -> None:
        """The prefill node has attached under the epoch of the last offer."""
        self.is_attached, self.transport, self.why = True, transport, why
        self.num_token_ranges, self.units = num_token_ranges, tuple(units)
        self.refusal, self.problem, self.answer_by, self.was_attached = "", "", None, True


class PrefillConnections:
    """The connections to all prefill nodes, by incarnation. Pure but for the transport.

    Args:
        transport: makes the offers.
        name, digest: of this node and its model.
        checksums: which pages come with one, at least.

    Attributes:
        by_peer: the connection to each.
        epoch: of the last offer; rises with every offer to any prefill node.
    """

    def __init__(self, transport: ReaderTransport, *, name: str, digest: str, checksums: Coverage) -> None:
        self._transport = transport
        self._name = name
        self._digest = digest
        self._checksums = checksums
        self.by_peer: dict[str, PrefillConnection] = {}
        self.epoch = 0

    def awaited(self, peer: str, epoch: int) -> PrefillConnection | None:
        """The connection whose offer of this epoch has not been answered yet."""
        connection = self.by_peer.get(peer)
        return connection if connection is not None and connection.epoch == epoch and connection.is_awaited else None

    def usable(self, peer: str, epoch: int) -> PrefillConnection | None:
        """The connection, if pages can be granted under this epoch."""
        connection = self.by_peer.get(peer)
        return connection if connection is not None and connection.is_usable and connection.epoch == epoch else None

    def taken_up(self, peer: str, epoch: int) -> PrefillConnection | None:
        """The connection that the prefill node has left for one under this epoch, which was offered beside it."""
        connection = self.by_peer.get(peer)
        if connection is None or not connection.is_usable or not connection.epoch < epoch <= self.epoch:
            return None
        return connection

    def offer_beside(self, peer: str) -> Connect:
        """Offer better transports than the one of a connection, which goes on; the endpoint is empty if there are
        none.
        """
        self.epoch += 1
        connection = self.by_peer[peer]
        endpoint = self._transport.offer_beside(peer, self.epoch)
        connection.beside = self.epoch if endpoint else 0
        return self._connect(peer, endpoint, beside=connection.epoch)

    def offer(self, peer: str, name: str, num_ranks: int) -> Connect:
        """Offer the pool to a prefill node of so many ranks for the first time, or from scratch."""
        self.epoch += 1
        self.by_peer[peer] = PrefillConnection(self.epoch, name, num_ranks)
        return self._connect(peer, self._endpoint(peer))

    def due_offers(self, now: float) -> list[tuple[str, Connect]]:
        """Offers to prefill nodes whose pause is over."""
        offers = []
        for peer, connection in self.by_peer.items():
            if connection.retry_at is not None and connection.retry_at <= now:
                self.epoch += 1
                connection.offered_again(self.epoch, now)
                offers.append((peer, self._connect(peer, self._endpoint(peer), resumes=True)))
        return offers

    def overdue(self, now: float) -> list[tuple[str, PrefillConnection]]:
        """Connections for which an answer or a proof has not come in time."""
        for connection in self.by_peer.values():
            if connection.is_awaited and connection.answer_by is None and not connection.refusal:
                connection.answer_by = now + FIRST_ANSWER_S
        return [
            (peer, connection)
            for peer, connection in self.by_peer.items()
            if connection.answer_by is not None and connection.answer_by <= now
        ]

    @property
    def due_at(self) -> float:
        """Before this instant, nothing is overdue, in doubt, or to be offered again."""
        instants = [math.inf]
        for connection in self.by_peer.values():
            if connection.drop_reason or (
                connection.is_awaited and connection.answer_by is None and not connection.refusal
            ):
                return -math.inf
            instants += [at for at in (connection.answer_by, connection.retry_at) if at is not None]
        return min(instants)

    def in_doubt(self) -> list[tuple[str, int]]:
        """(peer, epoch) of prefill nodes that have dropped the connection with writes under way."""
        return [(peer, connection.epoch) for peer, connection in self.by_peer.items() if connection.drop_reason]

    def states(self) -> list[PairState]:
        """Prefill nodes from which pages can come, and those from which they should and cannot, with the problem."""
        default = self._transport.name
        return [
            PairState(one.name, peer, one.transport or default, one.why, one.problem[:MAX_SENTENCE])
            for peer, one in self.by_peer.items()
            if one.is_usable or one.problem
        ]

    def drop(self, peer: str) -> None:
        """Forget the connection; no offer to this prefill node holds any more."""
        self.by_peer.pop(peer, None)
        self._transport.withdraw(peer)

    def _endpoint(self, peer: str) -> str:
        self._transport.expect(peer, self.by_peer[peer].num_ranks)
        return self._transport.offer(peer, self.epoch)

    def _connect(self, peer: str, endpoint: str, *, resumes: bool = False, beside: int = 0) -> Connect:
        store, num_ranks = self._transport.store, self.by_peer[peer].num_ranks
        return Connect(
            name=self._name,
            digest=self._digest,
            epoch=self.epoch,
            layout=LayoutMessage.of(store.layout),
            num_pages=store.num_pages,
            transport=self._transport.name,
            endpoint=endpoint,
            checksums=self._checksums,
            resumes=resumes,
            num_ranks=self._transport.num_ranks,
            num_peer_ranks=num_ranks,
            beside=beside,
        )
