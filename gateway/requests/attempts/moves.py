"""Requests that move away from draining decode nodes, with their KV pages.

A few requests of a node move at a time, to decode nodes that have room for them. The node stops a request, sends the
tokens that it still has, and says after how many tokens it stopped. As soon as the stream has all of these, the request
goes on at the other node, for which the draining node is now the node that its pages come from. A request that cannot
move, or whose move fails, is continued like one whose node was lost. Pure.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gateway.requests.in_flight import InFlightRequest
from gateway.requests.output_processor import OutputStream
from gateway.workers.pool import WorkerPool
from gateway.workers.registry import Worker
from gateway.workers.routing.candidates import can_pair
from gateway.workers.routing.router import WorkerPair

#: Requests of one node that move at the same time.
MAX_AT_ONCE = 8


@dataclass(slots=True)
class PendingMove:
    """A move that was ordered.

    Attributes:
        pair: the draining node and the target, as the router counts them.
        attempt: under which the request goes on.
        num_output: tokens after which the node has stopped it; None: it has not yet.
        is_lost: the target is gone, and what the router counted for it.
    """

    pair: WorkerPair
    attempt: int
    num_output: int | None = None
    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class MoveOrder:
    """A request that is to move, and where to."""

    rid: str
    source: str
    attempt: int
    target: Worker


class Moves:
    """The moves of one gateway that are in progress.

    Args:
        attempts: numbers of further attempts.
    """

    def __init__(self, attempts: Iterator[int]) -> None:
        self._attempts = attempts
        self._pending: dict[str, PendingMove] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def begin(self, pool: WorkerPool, flights: Iterable[InFlightRequest]) -> list[MoveOrder]:
        """Moves to order now: of requests that decode on draining nodes, as far as others have room."""
        registry, orders = pool.registry, list[MoveOrder]()
        num_free = {
            source: MAX_AT_ONCE - sum(move.pair.prefill == source for move in self._pending.values())
            for source in sorted(registry.draining)
            if _has_target(pool, registry.workers[source])  # otherwise one would be sought for each request
        }
        if not any(num_free.values()):
            return orders
        for flight in flights:
            source = "" if flight.pair is None else flight.pair.decode
            rid = flight.stream.request.rid
            if not source or num_free.get(source, 0) <= 0 or rid in self._pending or not flight.is_prefilled:
                continue  # a request that has sent no token of this attempt has no pages that could move
            pair = self._choose(pool, flight.stream, source)
            if pair is None or pair.decode is None:
                continue
            num_free[source] -= 1
            move = self._pending[rid] = PendingMove(pair, next(self._attempts))
            orders.append(MoveOrder(rid, source, move.attempt, registry.workers[pair.decode]))
        return orders

    @staticmethod
    def _choose(pool: WorkerPool, stream: OutputStream, source: str) -> WorkerPair | None:
        request, node = stream.request, pool.registry.workers[source]
        num_left = max(request.sampling.max_new_tokens - len(stream.ids), 1)
        return pool.router.choose_target(
            node,
            pool.registry.able(request.adapter)[1],
            num_tokens=len(request.prompt) + len(stream.ids),
            num_new=num_left,
            num_expected=max(request.expected_output - len(stream.ids), 0),
        )

    def stopped(self, rid: str, num_output: int) -> None:
        """The node has stopped a request."""
        if rid in self._pending:
            self._pending[rid].num_output = num_output

    def lose_target(self, incarnation: str) -> None:
        """A node is gone, or has forgotten its requests. Those that were to move there are continued in another way."""
        for move in self._pending.values():
            move.is_lost |= move.pair.decode == incarnation

    def take_complete(self, flight: InFlightRequest) -> PendingMove | None:
        """The move of a request that has stopped and whose tokens are all here. It is not pending any more."""
        move = self._pending.get(flight.stream.request.rid)
        if move is None or move.num_output is None or len(flight.stream.ids) < move.num_output:
            return None
        return self._pending.pop(flight.stream.request.rid)

    def drop(self, flight: InFlightRequest) -> bool:
        """The request has ended, or begins another attempt. False: it was not moving."""
        move = self._pending.pop(flight.stream.request.rid, None)
        if move is not None and not move.is_lost:
            flight.pool.router.prefill_done(move.pair)
            flight.pool.router.decode_done(move.pair)
        return move is not None


def _has_target(pool: WorkerPool, source: Worker) -> bool:
    """Whether some request may move from a decode node to another one, which has a place in its batch."""
    targets = [node for node in pool.registry.decodes if can_pair(source, node)]
    return source.register.role == "decode" and any(
        pool.router.num_requests(node.incarnation) < node.max_running for node in targets
    )
