"""A pair whose better transport breaks and works again: pages go on meanwhile, and each goes once."""

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from support.kv.kv_fakes import DECODE, PREFILL, TransferPair, WatchedWriter

from common.request import RequestKey
from common.wire.messages import Connect, Connected, LayoutMessage, OfferBeside
from kv_transfer.events import Completed
from kv_transfer.receive.receiver import Receiver
from kv_transfer.send.sender import Sender
from kv_transfer.transports.broken_transports import MIN_REST_S
from kv_transfer.transports.negotiation import NegotiatingReader, NegotiatingWriter
from scripts.simulator.service.inprocess_transport import InProcessReader, Wire

KEY = ("r", 1)


class Writer(WatchedWriter):
    def __init__(self, name: str, wire: Wire, pair: TransferPair) -> None:
        super().__init__(wire, pair.source, pair.source_allocator, pair.allocator)
        self.name = name


class Reader(InProcessReader):
    def __init__(self, name: str, wire: Wire, pair: TransferPair) -> None:
        super().__init__(wire, pair.target)
        self.name = name


class TwoTransports(TransferPair):
    """A pair with the transports ``best`` and ``other``, each over a wire of its own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.wires = {"best": Wire(latency=1), "other": self.wire}
        self.writers = {name: Writer(name, wire, self) for name, wire in self.wires.items()}
        self.negotiating = NegotiatingWriter(list(self.writers.values()), clock=lambda: self.now)
        self.sender = Sender(self.negotiating, digest="model")
        readers = [Reader(name, wire, self) for name, wire in self.wires.items()]
        self.receiver = Receiver(NegotiatingReader(readers), self.allocator, name="decode-0", digest="model")
        self.to_prefill.append(self.receiver.connect(PREFILL))
        self.settle()

    @property
    def carrier(self) -> str:
        return next((one.transport for one in self.sender.pairs()), "")

    def step(self) -> None:
        """All that is on its way arrives."""
        self.now += 0.05
        for wire in self.wires.values():
            wire.tick()
        self.poll()
        self.pump()
        self.drain_to_decode()
        self.drain_to_prefill()

    def until(self, is_so: Callable[[], bool]) -> None:
        for _ in range(2_000):
            if is_so():
                return
            self.step()
        raise AssertionError("it never came")

    def snap(self) -> None:
        """Break the transport that carries pages."""
        if self.carrier:
            self.writers[self.carrier].lose(DECODE, "a snap")


def broken_pair(latency: int = 1) -> TwoTransports:
    """A pair that goes by the other transport, since the best has broken."""
    pair = TwoTransports(Wire(latency=latency))
    pair.until(lambda: pair.carrier == "best")
    pair.snap()
    pair.pump()
    pair.until(lambda: pair.carrier == "other")
    return pair


def test_pages_go_on_while_the_better_transport_is_attached_and_each_goes_once() -> None:
    pair = broken_pair()
    pair.open(KEY, 6)
    pages = pair.begin(KEY, 6)
    pair.compute(KEY, 2)
    pair.until(lambda: len(pair.writers["other"].written) == 2)
    pair.step()
    pair.now += MIN_REST_S
    pair.pump()
    assert list(pair.to_decode) == [OfferBeside(2)]
    pair.hear_prefill()
    (offer,) = pair.to_prefill
    assert isinstance(offer, Connect)
    assert (offer.epoch, offer.beside, offer.resumes) == (3, 2, False)
    pair.compute(KEY, 4)
    pair.pump()
    pair.hear_decode()
    pair.compute(KEY, 5)
    pair.pump()
    assert pair.wires["other"].num_in_flight == 2, "no further write begins before the change"
    for _ in range(2):
        pair.wires["other"].tick()
    assert len(pair.writers["other"].written) == 4, "they go on"
    pair.until(lambda: pair.carrier == "best")
    pair.finish(KEY)
    pair.until(lambda: KEY in pair.events)
    assert isinstance(pair.events[KEY], Completed)
    assert [*pair.writers["other"].written, *pair.writers["best"].written] == pages
    assert len(pair.writers["other"].written) == 4
    assert pair.sender.counters()["broken_pairs"] == 1
    pair.give_back(KEY)
    pair.until(lambda: KEY in pair.released)
    pair.assert_nothing_is_held()


def pair_with_offer() -> TwoTransports:
    """A broken pair, half of whose transfer is written, with an offer of the better transport that is on its way."""
    pair = broken_pair()
    pair.open(KEY, 4)
    pair.begin(KEY, 4)
    pair.compute(KEY, 2)
    pair.until(lambda: len(pair.writers["other"].written) == 2)
    pair.step()
    pair.now += MIN_REST_S
    pair.pump()
    pair.hear_prefill()
    return pair


def test_a_connection_that_breaks_before_the_decode_node_hears_of_the_change_is_mended() -> None:
    pair = pair_with_offer()
    pair.hear_decode()
    pair.pump()
    assert [type(message) for message in pair.to_decode] == [Connected]
    pair.writers["best"].lose(DECODE, "a snap")
    pair.pump()
    pair.finish(KEY)
    pair.until(lambda: KEY in pair.events)
    assert isinstance(pair.events[KEY], Completed)
    pair.give_back(KEY)
    pair.until(lambda: KEY in pair.released)
    pair.assert_nothing_is_held()


@pytest.mark.parametrize(
    "change", [{"num_pages": 8}, {"num_ranks": 2}, {"layout": LayoutMessage(1, 1, 2, 8, "float32")}], ids=str
)
def test_an_offer_of_another_pool_beside_a_connection_is_counted_and_ignored(change: dict[str, Any]) -> None:
    """Grants are checked against the pool of the connection, so that a smaller one could be written beyond its end."""
    pair = pair_with_offer()
    (offer,) = pair.to_prefill
    assert isinstance(offer, Connect)
    pair.to_prefill[0] = msgspec.structs.replace(offer, **change)
    num_stale = pair.sender.counters()["stale_messages"]
    pair.hear_decode()
    pair.pump()
    assert pair.sender.counters()["stale_messages"] == num_stale + 1
    assert (pair.carrier, list(pair.to_decode)) == ("other", [])
    pair.finish(KEY)
    pair.until(lambda: KEY in pair.events)
    assert isinstance(pair.events[KEY], Completed)


@pytest.mark.slow(sample=0.4)
@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_no_page_is_lost_or_written_out_of_turn(seed: int) -> None:
    """The pools are checked after each step, and each write, by ``TransferPair``."""
    drawn = random.Random(seed)
    pair = broken_pair(latency=drawn.randrange(3))
    sizes: dict[RequestKey, int] = {}
    computed: dict[RequestKey, int] = {}  # of requests that are computed
    held: dict[RequestKey, None] = {}  # at the decode node
    for number in range(250):
        choice = drawn.random()
        if choice < 0.1 and pair.source_allocator.num_free >= 5 and pair.allocator.num_free >= 5:
            key = (f"r{number}", 1)
            sizes[key], computed[key], held[key] = drawn.randint(1, 5), 0, None
            pair.open(key, sizes[key])
            pair.begin(key, sizes[key])
        elif choice < 0.3 and computed:
            key = drawn.choice(list(computed))
            computed[key] += 1
            if key not in pair.released and computed[key] < sizes[key]:
                pair.compute(key, computed[key])
                continue
            del computed[key]
            if key not in pair.released:
                pair.finish(key)
        elif choice < 0.45:
            pair.pump(drawn.randint(1, 3))
        elif choice < 0.6:
            drawn.choice(list(pair.wires.values())).tick()
        elif choice < 0.75 and pair.to_decode:
            pair.hear_prefill()
        elif choice < 0.9 and pair.to_prefill:
            pair.hear_decode()
        elif choice < 0.94:
            pair.now += drawn.choice((0.1, MIN_REST_S, 4 * MIN_REST_S))
        elif choice < 0.95 and held:
            key = drawn.choice(list(held))
            if key not in pair.events:
                pair.cancel(key)
                del held[key]
        elif choice < 0.96:
            pair.snap()
        else:
            pair.poll()
        for key in [key for key in held if key in pair.events]:
            give_back(pair, key)
            del held[key]
    for key in [key for key in computed if key not in pair.released]:
        pair.finish(key)
    pair.until(lambda: all(key in pair.events for key in held))
    for key in held:
        give_back(pair, key)
    pair.until(lambda: pair.allocator.num_free == pair.num_pages and pair.released.keys() == pair.source_pages.keys())
    pair.assert_nothing_is_held()


def give_back(pair: TwoTransports, key: RequestKey) -> None:
    """As the gateway has the nodes do it."""
    if isinstance(pair.events[key], Completed):
        pair.give_back(key)
    else:
        pair.sender.abort(key, "cancelled")
        pair.settle()
