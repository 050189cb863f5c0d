"""The in-process wire in virtual seconds instead of ticks: every node's data connection carries so much, each way."""

from collections.abc import Callable, Sequence
from typing import Any

from kv_transfer.transports.base import PageStore
from scripts.simulator.costs import Costs
from scripts.simulator.event_queue import Agenda
from scripts.simulator.inprocess_transport import InProcessWriter, Wire


class TimedWire(Wire):
    """A write waits for the writer's line and the reader's, then takes its bytes' time, then the way."""

    def __init__(self, agenda: Agenda, costs: Costs) -> None:
        super().__init__()
        self.busy_s = 0.0
        self._agenda = agenda
        self._costs = costs
        self._free_at: dict[tuple[str, str], float] = {}  # (way, whose line) -> when it is idle
        self._under_way: dict[tuple[InProcessWriter, str], dict[int, int]] = {}  # tickets, and how many pages each has

    def carry(self, writer: "TimedWriter", peer: str, ticket: int, num_pages: int, land: Callable[[], None]) -> None:
        """Call ``land`` when these pages have arrived, unless they are called off before."""
        lines = (("out", writer.incarnation), ("in", peer))
        takes_s = num_pages * writer.store.geometry.page_bytes / self._costs.wire_bytes_per_s
        over_at = max(self._agenda.now(), *(self._free_at.get(line, 0.0) for line in lines)) + takes_s
        self._free_at.update(dict.fromkeys(lines, over_at))
        self.busy_s += takes_s
        self._under_way.setdefault((writer, peer), {})[ticket] = num_pages
        self._agenda.at(over_at + self._costs.wire_s, self._arrive, writer, peer, ticket, land)

    def _arrive(self, writer: "TimedWriter", peer: str, ticket: int, land: Callable[[], None]) -> None:
        if self._under_way.get((writer, peer), {}).pop(ticket, 0):
            land()

    @property
    def num_in_flight(self) -> int:
        return sum(num_pages for tickets in self._under_way.values() for num_pages in tickets.values())

    def is_carrying(self, writer: InProcessWriter, peer: str) -> bool:
        return bool(self._under_way.get((writer, peer)))

    def drop(self, writer: InProcessWriter, peer: str) -> list[int]:
        self._under_way.pop((writer, peer), None)
        return []  # nobody keeps count of what was called off


class TimedWriter(InProcessWriter):
    """Args:
    wake: called whenever a write is over.
    """

    def __init__(self, wire: TimedWire, store: PageStore, incarnation: str, wake: Callable[[], None]) -> None:
        super().__init__(wire, store, incarnation)
        self._timed = wire
        self._wake = wake
        self._num_writes = 0

    def write(self, peer: str, pages: Sequence[tuple[int, int]], *rest: Any) -> int:
        self._num_writes += 1
        ticket = self._num_writes

        def land() -> None:
            if len(self.store.memory):  # else pages are numbers, without contents
                for source, target in pages:
                    self.put(peer, source, target, *rest)
            self.finished.append(ticket)
            self._wake()

        self._timed.carry(self, peer, ticket, len(pages), land)
        return ticket
