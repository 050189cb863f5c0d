"""Fast copies and comparable states of a world of two nodes."""

import io
import pickle
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from support.exploration.two_nodes_parts import LAYOUT, Scope

from common.cache.page_allocator import Owner, PageAllocator
from common.cache.page_layout import PageLayout
from common.request import RequestKey
from kv_transfer.page_mapping import Units
from kv_transfer.receive.connections import PrefillConnection
from kv_transfer.send.connections import DecodeConnection
from kv_transfer.send.tombstones import TransferEnd
from kv_transfer.transports.negotiation import NegotiatingReader, NegotiatingWriter

if TYPE_CHECKING:
    from support.exploration.two_nodes import TwoNodes


def _by_fields(cls: type[Any]) -> "Callable[[Any], tuple[type[Any], tuple[Any, ...]]]":
    """Pickle a dataclass as a call with all of its fields, as a dataclass with slots does slowly."""
    values = attrgetter(*(one.name for one in fields(cls)))
    return lambda one: (cls, values(one))


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
        deque: lambda items: (deque, (tuple(items),)),
        **{cls: _by_fields(cls) for cls in (Units, DecodeConnection, PrefillConnection, TransferEnd)},
    }


def frozen(value: object, *, is_plain: bool = False) -> bytes:
    """Pickle a value; plain: without the memo, so that equal values have equal bytes."""
    into = io.BytesIO()
    freezer = Freezer(into, 5)
    freezer.fast = is_plain
    freezer.dump(value)
    return into.getvalue()


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
    if type(transport) is NegotiatingWriter:  # as ``isinstance`` says slowly, since a protocol is above it
        attempts = [
            (peer, a.connect.epoch, a.offers, len(a.left), a.is_attached, a.failures)
            for peer, a in transport._attempts.items()
        ]
        return (attempts, list(transport._draining))
    if type(transport) is NegotiatingReader:
        chosen = {peer: (epoch, one.name) for peer, (epoch, one) in transport._chosen.items()}
        return (transport._offered, chosen, transport._unasked, transport._news)
    return None


def states_of(world: "TwoNodes") -> Iterator[bytes]:
    """Return what determines all further behaviour: worlds that have one of these in common are in the same state.

    Two requests of the same size may exchange their names: nothing depends on which of them is called "a". It is the
    one that is less far; if they are equally far, it may be either.
    """
    if len(world.keys) != 2 or len(set(world.scope.sizes)) > 1 or world.scope.has_checksums:
        yield state_of(world)
        return
    first, second = (_progress_of(world, key) for key in world.keys)
    if first <= second:
        yield state_of(world)
    if second <= first:
        yield _renamed(frozen(_values_of(world, world.keys[::-1], _with_contents_exchanged), is_plain=True))


def state_of(world: "TwoNodes") -> bytes:
    """Return what determines all further behaviour, with the names that the requests have."""
    return frozen(_values_of(world, world.keys, bytes), is_plain=True)


def _progress_of(world: "TwoNodes", key: RequestKey) -> tuple[Any, ...]:
    prefill, decode = world.prefill, world.decode
    return (
        world.routes.get(key, ()),
        prefill.num_computed.get(key, -1),
        key in prefill.finished,
        prefill.released.get(key, -1),
        key in decode.begun,
        decode.ended.get(key, ""),
    )


def _renamed(state: bytes) -> bytes:
    a, b = b"\x8c\x01a", b"\x8c\x01b"  # as pickle writes these texts
    return b.join(part.replace(b, a) for part in state.split(a))


_EXCHANGED = bytes(value ^ 0x30 if value >> 4 in (1, 2) else value for value in range(256))  # see TwoNodes.content


def _with_contents_exchanged(memory: bytearray) -> bytes:
    return bytes(memory.translate(_EXCHANGED))


def _of_keys(values: Mapping[RequestKey, Any], keys: Sequence[RequestKey]) -> object:
    return [(key, values[key]) for key in keys if key in values]


def _values_of(world: "TwoNodes", keys: Sequence[RequestKey], memory_of: Callable[[bytearray], bytes]) -> object:
    """Return plain values that determine all further behaviour, with what is known of the requests in this order."""
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
        _of_keys(world.routes, keys),
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
        (_of_keys(prefill.pages, keys), _of_keys(prefill.num_computed, keys), _of_keys(prefill.finished, keys)),
        (_of_keys(prefill.released, keys), memory_of(prefill.store.memory), _of_allocator(prefill.allocator)),
        [(write.session.key, write.units) for write in (writes._tickets[ticket] for ticket in tickets)],
        list(writes._due),
        ([rank.get(t, -1) for t in prefill.writer.finished], prefill.writer._news),
        [(peer, reader.incarnation) for peer, reader in prefill.writer._readers.items()],
        (list(prefill.writer._leaving), prefill.writer.is_refused),
        _of_choice(prefill.transport),
        (receiver, incoming.sessions, incoming.prefill_dones, incoming.events, links.by_peer, links.epoch),
        (_of_keys(decode.begun, keys), _of_keys(decode.ended, keys), list(decode.dialled)),
        (memory_of(decode.store.memory), _of_allocator(decode.allocator)),
        [(w.incarnation, said) for w, said in decode.reader.writers.items()],
        (decode.reader._offers, decode.reader._news),
        _of_choice(decode.transport),
    )
