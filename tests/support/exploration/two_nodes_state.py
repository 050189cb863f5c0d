"""Fast copies and comparable states of a world of two nodes."""

import pickle
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from support.exploration.two_nodes_parts import LAYOUT, Scope

from common.cache.page_allocator import Owner, PageAllocator
from common.cache.page_layout import PageLayout
from kv_transfer.page_mapping import Units
from kv_transfer.transports.negotiation import NegotiatingReader, NegotiatingWriter

if TYPE_CHECKING:
    from support.exploration.two_nodes import TwoNodes


class Freezer(pickle.Pickler):
    """A pickler with fast paths for frequent types; counters, on which nothing depends, are dropped."""

    dispatch_table = {  # noqa: RUF012
        Counter: lambda counter: (_counter, ()),
        PageLayout: lambda layout: (_layout, ()),
        PageAllocator: lambda allocator: (
            _allocator,
            (allocator.num_pages, allocator._owner.tobytes(), bytes(allocator._stack)),
        ),
        Scope: lambda scope: (_scope, (_number_of(scope),)),
        Units: lambda units: (Units, (units.tokens, units.per_source, units.per_target)),
    }


_SCOPES: list[Scope] = []


def _number_of(scope: Scope) -> int:
    if scope not in _SCOPES:
        _SCOPES.append(scope)
    return _SCOPES.index(scope)


def _scope(number: int) -> Scope:
    return _SCOPES[number]


def _layout() -> PageLayout:
    return LAYOUT


def _counter() -> Counter[str]:
    return Counter.__new__(Counter)


def _allocator(num_pages: int, owners: bytes, free: bytes) -> PageAllocator:
    """Restore an allocator; the parts that only steps change are shared by all copies."""
    allocator = PageAllocator.__new__(PageAllocator)
    vars(allocator).update(vars(_fresh_books(num_pages)))
    allocator._owner = np.frombuffer(bytearray(owners), np.int8)
    allocator._stack = list(free)
    allocator._counts = [owners.count(owner) for owner in range(len(Owner))]
    return allocator


@cache
def _fresh_books(num_pages: int) -> PageAllocator:
    return PageAllocator(num_pages)


_NOT_OF_SENDER = ("_transport", "_connections", "_queue", "_totals")
_NOT_OF_WRITES = (
    *("_transport", "_connections", "_checksums", "clock", "_due", "_tickets"),
    *("_totals", "_seconds", "_write_time"),
)
_NOT_OF_RECEIVER = ("_transport", "_table", "_connections", "_checksums", "_totals")


def _of_allocator(allocator: PageAllocator) -> object:
    return (allocator._owner.tobytes(), allocator._stack, allocator.num_lingering)


def _of_choice(transport: object) -> object:
    """Return the state of a negotiating transport; its tickets equal those of the transport below."""
    if isinstance(transport, NegotiatingWriter):
        attempts = [
            (peer, a.connect.epoch, a.offers, len(a.rest), a.is_attached, a.failures)
            for peer, a in transport._attempts.items()
        ]
        return (attempts, list(transport._draining))
    if isinstance(transport, NegotiatingReader):
        chosen = {peer: (epoch, one.name) for peer, (epoch, one) in transport._chosen.items()}
        return (transport._offered, chosen, transport._unasked, transport._news)
    return None


def state_of(world: "TwoNodes") -> object:
    """Return plain values that determine all further behaviour; worlds with equal values are in the same state."""
    prefill, decode = world.prefill, world.decode
    writes = prefill.sender._queue
    tickets = sorted(writes._tickets)
    rank = {ticket: number for number, ticket in enumerate(tickets)}
    sender = {name: value for name, value in vars(prefill.sender).items() if name not in _NOT_OF_SENDER}
    receiver = {name: value for name, value in vars(decode.receiver).items() if name not in _NOT_OF_RECEIVER}
    incoming, links = decode.receiver._table, decode.receiver._connections
    return (
        world.now,
        (world.num_faults, world.num_breaks, world.is_late),
        world.num_starts,
        sorted(world.routes.items()),
        [tuple(vars(link).values()) for link in world.links],
        [
            (p.writer.incarnation, p.peer, rank.get(p.ticket, -1), p.source, p.target, p.fault)
            for p in world.wire._pages.values()
        ],
        list(world.wire.offers),
        (
            sender,
            prefill.sender._connections.by_peer,
            {n: v for n, v in vars(writes).items() if n not in _NOT_OF_WRITES},
        ),
        (sorted(prefill.pages.items()), sorted(prefill.num_computed.items()), sorted(prefill.finished)),
        (sorted(prefill.released.items()), prefill.store.memory, _of_allocator(prefill.allocator)),
        [(write.session.key, write.units) for write in (writes._tickets[ticket] for ticket in tickets)],
        list(writes._due),
        ([rank.get(t, -1) for t in prefill.writer.finished], prefill.writer._news),
        [(peer, reader.incarnation) for peer, reader in prefill.writer._readers.items()],
        (list(prefill.writer._leaving), prefill.writer.is_refused),
        _of_choice(prefill.transport),
        (receiver, incoming.sessions, incoming.prefill_dones, incoming.events, links.by_peer, links.epoch),
        (sorted(decode.begun), sorted(decode.ended.items()), list(decode.dialled)),
        (decode.store.memory, _of_allocator(decode.allocator)),
        [(w.incarnation, said) for w, said in decode.reader.writers.items()],
        (decode.reader._offers, decode.reader._news),
        _of_choice(decode.transport),
    )
