"""The in-process transport in virtual seconds: each node's data connection has a bandwidth in each direction."""

from collections.abc import Callable, Sequence
from typing import Any

from kv_transfer.page_store import PageStore
from scripts.simulator.costs import Costs
from scripts.simulator.event_queue import EventQueue
from scripts.simulator.service.inprocess_transport import InProcessReader, InProcessWriter, Wire


class Network(Wire):
    """A write waits until both links are idle, then takes its transmission time and the latency.

    Two threads wake up for it one after the other, as with shared memory: one copies, the node's loop notices the end.

    Args:
        passes: lets something arrive from one node at another, called with both, the call to make, and its arguments.
        wait_s: how long a thread that wakes now waits for a core.
    """

    def __init__(
        self, events: EventQueue, costs: Costs, passes: Callable[..., None], wait_s: Callable[[], float]
    ) -> None:
        super().__init__()
        self.busy_s = 0.0
        self._events = events
        self._costs = costs
        self._passes = passes
        self._wait_s = wait_s
        self._free_at: dict[tuple[str, str], float] = {}  # (direction, node) -> when the link is idle
        self._in_flight: dict[tuple[InProcessWriter, str], dict[int, int]] = {}  # ticket -> number of pages

    def carry(self, writer: "NetworkWriter", peer: str, ticket: int, num_pages: int, land: Callable[[], None]) -> None:
        """Call ``land`` when these pages have arrived, unless ``drop`` comes first."""
        out, into, free_at = ("out", writer.incarnation), ("in", peer), self._free_at
        takes_s = num_pages * writer.page_bytes / self._costs.wire_bytes_per_s
        begins_at = self._events.now() + self._wait_s() + self._wait_s()
        over_at = max(begins_at, free_at.get(out, 0.0), free_at.get(into, 0.0)) + takes_s
        free_at[out] = free_at[into] = over_at
        self.busy_s += takes_s
        self._in_flight.setdefault((writer, peer), {})[ticket] = num_pages
        arrival = (writer.incarnation, peer, self._arrive, (writer, peer, ticket, land))
        self._events.at(over_at + self._costs.wire_s, self._passes, *arrival)

    def _arrive(self, writer: "NetworkWriter", peer: str, ticket: int, land: Callable[[], None]) -> None:
        if self._in_flight.get((writer, peer), {}).pop(ticket, 0):
            land()

    @property
    def num_in_flight(self) -> int:
        return sum(num_pages for tickets in self._in_flight.values() for num_pages in tickets.values())

    def drop(self, writer: InProcessWriter, peer: str) -> list[int]:
        self._in_flight.pop((writer, peer), None)
        return []  # `NetworkWriter` keeps no state of unfinished writes


class NetworkWriter(InProcessWriter):
    def __init__(self, network: Network, store: PageStore, incarnation: str, wake: Callable[[], None]) -> None:
        super().__init__(network, store, incarnation)
        self.page_bytes = store.layout.page_bytes
        self._network = network
        self._wake = wake

    def write(self, peer: str, pages: Sequence[tuple[int, int]], *rest: Any) -> int:
        self._num_tickets += 1
        ticket = self._num_tickets

        def land() -> None:
            if len(self.store.memory):  # an `EmptyPageStore` has no contents
                for source, target in pages:
                    self.put(peer, source, target, *rest)
            self.finished.append(ticket)
            self._wake()

        self._network.carry(self, peer, ticket, len(pages), land)
        return ticket


class NetworkReader(InProcessReader):
    """A reader that lets its node know of news.

    Args:
        on_news: called when there is some.
    """

    def __init__(self, network: Network, store: PageStore, incarnation: str, on_news: Callable[[], None]) -> None:
        super().__init__(network, store, incarnation)
        self._on_news = on_news

    def gone(self, writer: InProcessWriter, reason: str, *, is_dead: bool = False) -> None:
        super().gone(writer, reason, is_dead=is_dead)
        self._on_news()
