"""One output under way, as the gateway's books have it, and as a queue sees it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from common.request import Request
from gateway.requests.output_processor import OutputStream
from gateway.workers.pool import WorkerPool
from gateway.workers.router import Pair


class Timer(Protocol):
    def cancel(self) -> None: ...


@dataclass(slots=True)
class InFlightRequest:
    """Attributes:
    fleet: of its model.
    timer: of its deadline.
    siblings: pairs of the outputs of its HTTP request that have been sent out, by the number of their prompt.
    request: as the backlog knows it; None if it never waited and nobody counts what it is served.
    pair, nodes: None and empty while it waits.
    attempt: its number among all that were sent out; nodes know it by this and its id.
    is_evicted: it gave way to a more urgent one.
    failed_at: the node that ended it, which need not be told.
    """

    relay: OutputStream
    fleet: WorkerPool
    timer: Timer
    siblings: dict[int, Pair]
    request: Request | None = None
    pair: Pair | None = None
    nodes: tuple[str, ...] = ()
    attempt: int = 0
    is_prefill_counted: bool = False
    is_evicted: bool = False
    failed_at: str = ""

    def still_working(self, pair: Pair) -> Iterable[str]:
        """Nodes that may not know of its end by themselves."""
        relay = self.relay
        if relay.finish and not isinstance(relay.matched, str):
            is_ended_by_prefill = pair.prefill is not None and len(relay.ids) <= 1
            return (pair.decode,) if is_ended_by_prefill else ()  # it may wait for a handoff
        return (node for node in pair.nodes if node != self.failed_at)


def request_of(relay: OutputStream) -> Request:
    """An output as a queue sees it."""
    ask = relay.ask
    return Request(
        rid=ask.rid,
        attempt=0,
        prompt=ask.prompt,
        sampling=ask.sampling,
        salt=ask.salt,
        priority=ask.priority,
        priority_class=ask.priority_class,
        tenant=ask.tenant,
        expected_output=ask.expected_output,
        arrived_at=relay.started_at,
        deadline_at=relay.started_at + ask.timeout_s,
    )
