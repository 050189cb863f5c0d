"""Requests that move from this decode node to another one, with their pages.

The gateway names the other node and the attempt under which the request goes on there. Once no step computes the
request any more, its pages wait for the other node, which asks for them as it asks a prefill node for a prompt. They
are released when that node has them all, or when the transfer ends in another way; the gateway then continues the
request by other means.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from common.cache.page_allocator import PageAllocator
from common.errors import BatonError, ErrorCode, invariant
from common.request import Request, RequestKey
from common.wire.messages import (
    AttachFailed,
    CloseReason,
    Connect,
    Failed,
    Message,
    Move,
    PairState,
    PrefillDone,
    Resume,
)
from kv_transfer.send.sender import Sender

log = logging.getLogger(__name__)

#: Seconds within which the other node must ask for the pages.
MOVE_TIMEOUT_S = 30.0
#: Why a request is refused; see ``OutgoingMoves.in_circle``.
IN_CIRCLE = "no room: this node and the one that the request comes from wait for requests that move to the other"
#: Monotonic totals beside those of the sender.
COUNTERS = ("requests_moved", "failed_moves")


class Offer(NamedTuple):
    """Pages that wait for another decode node.

    Attributes:
        target: incarnation of that node.
        until: instant by which it must have asked for them.
    """

    target: str
    until: float


class OutgoingMoves:
    """The requests that leave one decode node. Pure but for the sender's transport.

    Args:
        open_sender: makes the sender, which is needed only if a request ever moves.
        allocator: of the pages.
        page_size: tokens of a page.
    """

    def __init__(self, open_sender: Callable[[], Sender], allocator: PageAllocator, page_size: int) -> None:
        self._open_sender = open_sender
        self._allocator = allocator
        self._page_size = page_size
        self._sender: Sender | None = None
        self._orders: dict[RequestKey, Move] = {}  # of requests that a step still computes
        self._requests: dict[RequestKey, RequestKey] = {}  # transfer -> request
        self._transfers: dict[RequestKey, RequestKey] = {}  # request -> transfer
        self._offers: dict[RequestKey, Offer] = {}  # by transfer, until it ends or its time to be asked for is over
        self._totals: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))

    @property
    def is_open(self) -> bool:
        """Whether a request has ever moved, or another node has asked for pages."""
        return self._sender is not None or bool(self._orders)

    # ---- calls of the role ------------------------------------------------------------------------------------------

    def order(self, message: Move) -> bool:
        """Remember where a request moves to. False: it is moving already."""
        key = (message.rid, message.attempt)
        if key in self._orders or key in self._transfers:
            return False
        self._orders[key] = message
        return True

    def start(self, request: Request, now: float) -> bool:
        """Offer the pages of a request that no step computes any more. False: nothing can be sent from here."""
        message = self._orders.pop(request.key)
        sender = self._opened()
        if sender is None:
            return False
        num_tokens = request.num_decodable
        assert request.num_computed == num_tokens, f"{request.key} is still computed"
        transfer = (request.rid, message.new_attempt)
        self._requests[transfer] = request.key
        self._transfers[request.key] = transfer
        self._offers[transfer] = Offer(message.decode.incarnation, now + MOVE_TIMEOUT_S)
        sender.open(transfer, message.decode.incarnation)
        length = self._allocator.transfer_length(num_tokens)
        done = PrefillDone(*transfer, length, token=request.output[-1])
        pages = request.pages[: -(-num_tokens // self._page_size)]
        sender.finish(transfer, done, self._allocator.to_transfer(pages, 0, num_tokens))
        return True

    def request_of(self, key: RequestKey) -> RequestKey:
        """The request's own key, for its own or for the key of its new attempt."""
        if key in self._requests:
            return self._requests[key]
        rid, attempt = key
        return next((own for own, order in self._orders.items() if own[0] == rid and order.new_attempt == attempt), key)

    def is_sending(self, key: RequestKey) -> bool:
        """Whether the request's pages are offered to the other node, so that they must not be released yet."""
        return key in self._transfers

    def in_circle(self, waiting_for: Callable[[str], Iterable[Request]]) -> list[Request]:
        """Requests to refuse, because this node and the node that they come from wait for each other's pages.

        They wait here for room, while the other node has no room for requests that move there from here. A request is
        refused if its id sorts before the ids of all requests that wait to move the other way, so that only one of the
        two nodes refuses. Circles of three nodes, and circles whose least id has not arrived yet, end after
        ``MOVE_TIMEOUT_S``.

        Args:
            waiting_for: returns the requests without pages that come from a node, by its incarnation.
        """
        least: dict[str, str] = {}  # by target: the least id of the requests that it has not asked for
        for (rid, attempt), offer in self._offers.items():
            if self._sender is not None and not self._sender.is_granted((rid, attempt)):
                least[offer.target] = min(rid, least.get(offer.target, rid))
        return [request for target, rid in least.items() for request in waiting_for(target) if request.rid < rid]

    def end(self, key: RequestKey, reason: CloseReason, why: str, code: ErrorCode) -> None:
        """Send no more pages of this request. ``take`` returns it once no page is in flight."""
        if self._sender is not None and key in self._transfers:
            self._sender.abort(self._transfers[key], reason, why, code)

    def forget(self, key: RequestKey) -> None:
        """The request has ended before it moved."""
        self._orders.pop(key, None)

    # ---- messages of other nodes ------------------------------------------------------------------------------------

    def on_peer(self, peer: str, message: Message, now: float) -> Message | None:
        """Handle a message of a decode node that requests move to; return an answer, if there is one at once."""
        sender = self._opened() if isinstance(message, Connect) else self._sender
        if isinstance(message, Connect) and sender is None:
            return AttachFailed(message.epoch, "this decode node cannot send pages now")
        if sender is None:
            return None
        if isinstance(message, Resume):
            key = (message.rid, message.attempt)
            sender.reject(key, peer, "a decode node computes nothing for others", ErrorCode.TRANSFER_FAILED)
        else:
            sender.on_message(peer, message, now)
        return None

    def peer_lost(self, peer: str) -> None:
        if self._sender is not None:
            self._sender.peer_lost(peer)

    # ---- results ----------------------------------------------------------------------------------------------------

    def pump(self, now: float) -> bool:
        """Write pages, and end transfers that the other node never asked for. True: more could be written at once."""
        if self._sender is None:
            return False
        for transfer in [transfer for transfer, offer in self._offers.items() if offer.until <= now]:
            del self._offers[transfer]
            if not self._sender.is_granted(transfer):
                why = f"the other decode node did not ask for the pages within {MOVE_TIMEOUT_S:g} s"
                self._sender.abort(transfer, "failed", why)
        return self._sender.pump(now)

    def take(self) -> tuple[list[tuple[str, Message]], list[RequestKey], list[Failed]]:
        """Messages to send to peers, requests whose pages may be released, and failures for the gateway; each is
        returned once."""
        if self._sender is None:
            return [], [], []
        messages, released = self._sender.take()
        gone, failed = [], []
        for release in released:
            key = self._requests.pop(release.key)
            del self._transfers[key]
            self._offers.pop(release.key, None)
            self._totals["requests_moved" if release.ok else "failed_moves"] += 1
            gone.append(key)
            if not (release.ok or release.is_told or release.code is ErrorCode.ABORTED):
                failed.append(Failed(*release.key, release.code, release.reason))
        return messages, gone, failed

    def _opened(self) -> Sender | None:
        if self._sender is None:
            try:
                self._sender = self._open_sender()
            except (BatonError, OSError) as error:
                log.error("requests cannot move to other decode nodes: %s", error)
        return self._sender

    # ---- state ------------------------------------------------------------------------------------------------------

    def files(self) -> Sequence[int]:
        return () if self._sender is None else self._sender.files()

    def pairs(self) -> list[PairState]:
        return [] if self._sender is None else self._sender.pairs()

    def peers(self) -> Sequence[str]:
        """Decode nodes that have offered their pools to this one."""
        return () if self._sender is None else self._sender.peers()

    def gauges(self) -> dict[str, float]:
        return {} if self._sender is None else self._sender.gauges()

    def counters(self) -> dict[str, float]:
        own = {name: float(count) for name, count in self._totals.items()}
        return own if self._sender is None else {**own, **self._sender.counters()}

    def check(self, moving: Mapping[RequestKey, Request], requests: Iterable[RequestKey]) -> None:
        """Prove that exactly the requests that are moving have a transfer; raises ``InvariantError``."""
        invariant(self._transfers.keys() == moving.keys(), "a request is moving without a transfer, or was forgotten")
        invariant(self._orders.keys() <= set(requests), "an order to move is kept for a request that has ended")
        invariant(self._offers.keys() <= self._requests.keys(), "a deadline is kept for a transfer that is over")
        if self._sender is not None:
            self._sender.check()
