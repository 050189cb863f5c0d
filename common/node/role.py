"""The interface between a node process and its role, and what both roles share.

Roles are pure except for the transfer endpoint that is handed to them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.cache.page_allocator import Owner, PageAllocator
from common.cache.radix_cache import RadixCache
from common.errors import ErrorCode, invariant
from common.node.gateways.outbox import Outbox
from common.node.monitoring.request_stats import RequestStats
from common.node.monitoring.step_times import StepTimes
from common.request import Request, RequestKey
from common.step_plan import StepPlan, StepResult
from common.wire.messages import (
    Heartbeat,
    Message,
    NodeCosts,
    PairState,
)

#: Seconds after a deadline at which a node ends the request if the gateway, which does so at the deadline, has not.
DEADLINE_GRACE_S = 5.0


def check_pages(allocator: PageAllocator, cache: RadixCache, requests: Iterable[Request]) -> None:
    """Check allocator and cache, and that every page owned by a request is owned by one of ``requests``."""
    allocator.check()
    cache.check()
    num_own = 0
    requests = list(requests)
    if allocator.window_pages is not None:
        allocator.window_pages.check_requests(requests)
    for request in requests:
        num_own += len(request.own)
        if request.is_wrapped and request.own:
            last = request.pages[len(request.pages) - len(request.own) :]
            invariant(request.own == last, f"{request.key}'s own pages are not the end of its page table")
    invariant(allocator.count(Owner.REQUEST) == num_own, "a page is owned by an unknown request")


@dataclass(frozen=True, slots=True)
class Load:
    """How full a node is."""

    num_waiting: int
    num_running: int
    num_free_pages: int
    num_cached_pages: int
    num_quarantined_pages: int

    @classmethod
    def of(cls, requests: Mapping[RequestKey, Request], num_waiting: int, cache: RadixCache) -> "Load":
        """The load of these requests, of which ``num_waiting`` hold no pages."""
        return cls(
            num_waiting=num_waiting,
            num_running=len(requests) - num_waiting,
            num_free_pages=cache.allocator.num_free,
            num_cached_pages=cache.num_pages,
            num_quarantined_pages=cache.allocator.count(Owner.QUARANTINE),
        )


class NodeRole(Protocol):
    """A prefill or decode role. Every call is one event; ``outbox`` holds afterwards what is to be sent."""

    outbox: Outbox
    stats: RequestStats

    def on_gateway(self, message: Message, now: float) -> None:
        """A ``RequestMessage``, or ``Flush``, ``GetDecisions`` or, on a decode node, ``PrefillNodes``."""
        ...

    def on_peer(self, peer: str, message: Message, now: float) -> None:
        """A message from another node, known by its incarnation."""
        ...

    def peer_lost(self, peer: str, now: float) -> None:
        """A node to which pages went, or from which they came, is out of reach."""
        ...

    def grammar_compiled(self, grammar: str, now: float) -> None:
        """A grammar that the outbox asked for is ready."""
        ...

    def grammar_failed(self, grammar: str, message: str, now: float) -> None:
        """A grammar that the outbox asked for cannot be followed: end the requests that wait for it."""
        ...

    def plan(self, now: float) -> StepPlan | None:
        """The next step, if there is anything to compute. Several may be planned before the first is committed."""
        ...

    def commit(self, result: StepResult, now: float) -> None:
        """Take in the result of a step. Steps are committed in the order in which they were planned."""
        ...

    def tick(self, now: float) -> bool:
        """Check deadlines and do some of the transfers' work. True if more of that work is waiting."""
        ...

    def stop(self, message: str, now: float, code: ErrorCode = ErrorCode.SHUTTING_DOWN) -> None:
        """End every request with this message and code: ``SHUTTING_DOWN``, or ``INTERNAL`` if the node failed."""
        ...

    def files(self) -> Sequence[int]:
        """File descriptors that wake the loop for a ``tick`` when they are readable."""
        ...

    def transports(self) -> Sequence[str]:
        """Names of the transports for KV pages, best first."""
        ...

    def pairs(self) -> Sequence[PairState]:
        """The nodes that pages travel to or from, and the transport of each pair."""
        ...

    def peers(self) -> Sequence[str]:
        """Incarnations of the nodes that have connected to this one to receive pages."""
        ...

    def load(self) -> Load: ...

    def gauges(self) -> dict[str, float]:
        """Present values beside the load. ``gateway.metrics`` and ``common.node.monitoring.metrics`` show them."""
        ...

    def counters(self) -> dict[str, float]:
        """Monotonic totals since the start of the process."""
        ...

    def requests(self) -> Mapping[RequestKey, Request]:
        """The requests that are on this node."""
        ...

    def check(self) -> None:
        """Prove that the state of the role is consistent; raises ``InvariantError``."""
        ...


def heartbeat_of(
    role: NodeRole,
    times: StepTimes,
    *,
    counters: Mapping[str, float],
    gauges: Mapping[str, float] | None = None,
    sent_at: float = 0.0,
) -> Heartbeat:
    """The heartbeat of a node.

    Args:
        times: of its engine's steps.
        counters, gauges: of the node, in addition to those of its role.
        sent_at: by the node's clock; 0: unknown.
    """
    load = role.load()
    totals = role.counters()
    write_s = sum(seconds for name, seconds in totals.items() if name.startswith("transfer_seconds_by_"))
    rate = totals.get("bytes_sent", 0.0) / write_s if write_s > 0 else 0.0
    return Heartbeat(
        num_waiting=load.num_waiting,
        num_running=load.num_running,
        num_free_pages=load.num_free_pages,
        num_cached_pages=load.num_cached_pages,
        num_quarantined_pages=load.num_quarantined_pages,
        counters={**totals, **counters},
        gauges={**role.gauges(), **(gauges or {})},
        sent_at=sent_at,
        costs=NodeCosts(times.step_s, times.prompt_token_s, rate),
    )
