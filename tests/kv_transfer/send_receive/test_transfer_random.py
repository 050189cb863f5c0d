"""Random orders of events at both ends of many transfers: pages stay correct, all come back, nothing hangs.

A history is a list of (action, number). The number selects one of the things that the action can work on at that
point; an action without anything to work on does nothing. Every list is therefore a valid history, and a failing list
shrinks to a short one.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.kv.kv_fakes import DECODE, JUNK, LAYOUT, PREFILL, TransferPair

from common.cache.page_allocator import Owner
from common.request import RequestKey
from common.wire.messages import CloseReason, Message
from kv_transfer.events import Completed
from scripts.simulator.service.inprocess_transport import Fault, Wire

Faults = Mapping[int, Fault]

REASONS: tuple[CloseReason, ...] = ("finished", "aborted", "failed")


class Nodes:
    """Two nodes with a faulty, slow wire and a control connection that may break and reorders the two directions.

    Checksums are on if pages may be damaged.
    """

    def __init__(self, latency: int, bytes_per_tick: int | None, faults: Faults) -> None:
        wire = Wire(latency=latency, bytes_per_tick=bytes_per_tick, faults=faults)
        self.pair = TransferPair(wire, num_pages=12, checksums=("all" if faults else "off", "off"))
        self.sizes: dict[RequestKey, int] = {}
        self.begun: dict[RequestKey, None] = {}
        self.finished: dict[RequestKey, None] = {}
        self.called_off: dict[RequestKey, None] = {}  # ended on purpose by either side
        self.is_alive = True
        self.sender_must_notice = self.receiver_must_notice = False
        self.has_dialled = False
        self.dial(0)

    # ---- actions of the roles ------------------------------------------------------------------------------------

    def arrive(self, number: int) -> None:
        """Add a request that neither node knows yet."""
        self.sizes["r", len(self.sizes)] = number % 4 + 1

    def open(self, number: int) -> None:
        free = self.pair.source_allocator.num_free if self.is_alive else 0
        for key in pick((k for k, n in self.sizes.items() if k not in self.pair.source_pages and n <= free), number):
            self.pair.open(key, self.sizes[key])

    def opened(self) -> list[RequestKey]:
        keys = self.pair.source_pages if self.is_alive else ()
        return [k for k in keys if k not in self.pair.released and k not in self.finished]

    def compute(self, number: int) -> None:
        for key in pick(self.opened(), number):
            num_known = len(self.pair.sender._table.sessions[key].sources)
            self.pair.compute(key, max(num_known, min(number % 4, self.sizes[key] - 1)))

    def finish(self, number: int) -> None:
        for key in pick(self.opened(), number):
            self.finished[key] = None
            self.pair.finish(key)

    def retract(self, number: int) -> None:
        """Take back the source pages of a prompt without grants, which is then computed again."""
        keys = self.pair.source_pages if self.is_alive else ()
        waiting = (k for k in keys if k not in self.pair.released and not self.pair.sender.is_granted(k))
        for key in pick(waiting, number):
            for page in self.pair.source_pages[key]:
                self.pair.source.fill(page, JUNK)
            self.finished.pop(key, None)
            self.pair.sender.retract(key)
            self.settle()

    def abort(self, number: int) -> None:
        for key in pick(self.sizes, number):
            if self.is_alive:
                self.called_off[key] = None
                self.pair.sender.abort(key, REASONS[number % 3])
                self.settle()

    def begin(self, number: int) -> None:
        free = self.pair.allocator.num_free
        for key in pick((k for k, n in self.sizes.items() if k not in self.begun and n <= free), number):
            first = min(number // 7 % 2, self.sizes[key])
            self.begun[key] = None
            self.pair.begin(key, self.sizes[key], first=first)

    def cancel(self, number: int) -> None:
        for key in pick(self.begun, number):
            self.called_off[key] = None
            self.pair.cancel(key)
            self.settle()

    def completed(self) -> list[RequestKey]:
        return [e.key for e in self.pair.events.values() if isinstance(e, Completed) and self.pair.grants[e.key]]

    def give_back(self, number: int) -> None:
        for key in pick(self.completed(), number):
            self.pair.give_back(key)
            self.pair.grants[key] = []

    # ---- time and messages --------------------------------------------------------------------------------------

    def hear_prefill(self, number: int) -> None:
        for _ in range(min(number % 4 + 1, len(self.pair.to_decode))):
            self.pair.hear_prefill()
        self.settle()

    def hear_decode(self, number: int) -> None:
        for _ in range(min(number % 4 + 1, len(self.pair.to_prefill)) if self.is_alive else 0):
            self.pair.hear_decode()
        self.settle()

    def pump(self, number: int) -> None:
        if self.is_alive:
            self.pair.pump(number % 5 + 1)
        self.settle()

    def tick(self, number: int) -> None:
        self.pair.tick()

    def poll(self, number: int) -> None:
        before = self.pair.pairs_lost
        self.pair.poll()
        if self.pair.pairs_lost > before:
            self.has_dialled = False
            self.pair.to_prefill.clear()

    def go_on(self, number: int) -> None:
        """Run one turn of both loops."""
        self.tick(0)
        self.poll(0)
        self.pump(3)
        self.hear_prefill(3)
        self.hear_decode(3)

    def repeat(self, number: int) -> None:
        """Deliver a message that will be delivered a second time."""
        queue, hear = self.directions()[number % 2]
        if queue:
            queue.appendleft(queue[0])
            hear(0)

    def overtake(self, number: int) -> None:
        """Deliver a message before the message that was sent earlier."""
        queue, hear = self.directions()[number % 2]
        if len(queue) > 1:
            queue[0], queue[1] = queue[1], queue[0]
            hear(0)

    def directions(self) -> list[tuple[deque[Message], Callable[[int], None]]]:
        return [(self.pair.to_decode, self.hear_prefill), (self.pair.to_prefill, self.hear_decode)]

    def wait(self, number: int) -> None:
        self.pair.now += number % 25

    # ---- connections --------------------------------------------------------------------------------------------

    def dial(self, number: int) -> None:
        """Connect the decode node, sometimes without need."""
        if self.receiver_must_notice or (self.has_dialled and number % 8):
            return
        self.pair.to_prefill.append(self.pair.receiver.connect(PREFILL))
        self.has_dialled = True
        self.settle()

    def tear(self, number: int) -> None:
        """Drop all messages in flight. Each side notices later, perhaps after the other side has reconnected."""
        if self.has_dialled and number % 3 == 0:
            self.sender_must_notice = self.receiver_must_notice = True
            self.settle()

    def sender_notices(self, number: int) -> None:
        if self.is_alive and self.sender_must_notice:
            self.sender_must_notice = False
            self.pair.to_decode.clear()
            self.pair.sender.peer_lost(DECODE)
            self.settle()

    def receiver_notices(self, number: int) -> None:
        if self.receiver_must_notice:
            self.receiver_must_notice = self.has_dialled = False
            self.pair.receiver.peer_lost(PREFILL)
            self.pair.to_prefill.clear()
            self.settle()

    def break_data_connection(self, number: int) -> None:
        """Break the data connection; the control connection holds."""
        if self.is_alive and DECODE in self.pair.writer._readers:
            self.pair.writer.lose(DECODE, "a snap")

    def die(self, number: int) -> None:
        """Kill the prefill node as ``kill -9`` does."""
        if number % 10 == 0 and self.is_alive:
            self.is_alive = False
            self.pair.writer.die()
            self.settle()

    def settle(self) -> None:
        self.pair.settle()
        if self.receiver_must_notice or not self.is_alive:
            self.pair.to_prefill.clear()
        if self.receiver_must_notice:
            self.pair.to_decode.clear()

    # ---- the end of a history ------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until nothing is left to do and a pair that breaks meanwhile is connected again."""
        for _ in range(10):
            before = self.pair.pairs_lost
            self.pair.run()
            self.pair.pump()  # the write was lost as soon as it began
            self.pair.poll()
            if self.pair.pairs_lost == before:
                return
            self.has_dialled = False
            self.dial(1)
        raise AssertionError("it never ends")

    def let_everything_finish(self) -> None:
        """With a working connection, every transfer that both sides want completes."""
        pair = self.pair
        self.receiver_notices(0)
        self.sender_notices(0)
        self.poll(0)
        self.dial(1)
        self.run()
        while self.opened():
            self.finish(0)
        self.run()
        for key in self.begun:
            is_wanted = key in pair.source_pages and key not in self.called_off
            assert not is_wanted or key in pair.events, f"{key} hangs"

    def end_everything(self) -> None:
        """Once all transfers are cancelled and the writer is alive or proven dead, every page is free again."""
        pair = self.pair
        for key in self.begun:
            pair.cancel(key)
        if self.is_alive:
            for key in self.sizes:
                pair.sender.abort(key, "aborted")
            self.settle()
            pair.run()
            assert pair.released.keys() == pair.source_pages.keys(), "source pages are never released"
            assert pair.source_allocator.num_free == pair.num_pages
        else:
            self.poll(0)
        while self.completed():
            self.give_back(0)
        assert pair.allocator.count(Owner.GRANT) == pair.allocator.count(Owner.QUARANTINE) == 0
        assert pair.allocator.num_free == pair.num_pages
        pair.close()


def pick(keys: Iterable[RequestKey], number: int) -> list[RequestKey]:
    """The selected item, or None if there are none."""
    choices = list(keys)
    return [choices[number % len(choices)]] if choices else []


WEIGHTS = {
    **dict.fromkeys(("arrive", "open", "begin", "compute"), 5),
    **dict.fromkeys(("go_on", "hear_prefill", "hear_decode", "pump", "tick", "finish", "give_back"), 3),
    **dict.fromkeys(("poll", "cancel", "abort", "retract"), 2),
    **dict.fromkeys(("dial", "sender_notices", "receiver_notices", "tear", "wait", "die"), 1),
    "break_data_connection": 1,
    **dict.fromkeys(("repeat", "overtake"), 1),
}
ACTIONS = [name for name, weight in WEIGHTS.items() for _ in range(weight)]

histories = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 840)), min_size=40, max_size=150)
kinds = st.sampled_from(("drop", "duplicate", "reorder", "delay", "corrupt", "partition"))
all_faults = st.dictionaries(st.integers(0, 30), st.builds(Fault, kinds, st.integers(1, 4)), max_size=8)
speeds = st.sampled_from([None, LAYOUT.page_bytes, 3 * LAYOUT.page_bytes])


def walk(history: list[tuple[str, int]], latency: int, bytes_per_tick: int | None, faults: Faults) -> Nodes:
    nodes = Nodes(latency, bytes_per_tick, faults)
    for action, number in history:
        getattr(nodes, action)(number)
    if nodes.is_alive:
        nodes.let_everything_finish()
    nodes.end_everything()
    return nodes


@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
@given(history=histories, latency=st.integers(0, 2), bytes_per_tick=speeds, faults=all_faults)
def test_page_counts_balance_after_any_history(
    history: list[tuple[str, int]], latency: int, bytes_per_tick: int | None, faults: Faults
) -> None:
    walk(history, latency, bytes_per_tick, faults)


@pytest.mark.slow
@settings(max_examples=750, deadline=None, suppress_health_check=list(HealthCheck))
@given(history=histories, latency=st.integers(0, 2), bytes_per_tick=speeds, faults=all_faults)
def test_page_counts_balance_after_many_more_histories(
    history: list[tuple[str, int]], latency: int, bytes_per_tick: int | None, faults: Faults
) -> None:
    walk(history, latency, bytes_per_tick, faults)
