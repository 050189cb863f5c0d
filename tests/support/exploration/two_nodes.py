"""A prefill and a decode node, the wire and the control connections between them, as a world for ``state_explorer``.

Sender, Receiver, PageAllocator and the in-process wire are those of production. This module imitates what surrounds
them: the roles (``prefill_node.role`` and ``decode_node.role``), control connections, deaths and time. Pages arrive in
any order, and messages in the order of their connection; faults, at most ``Scope.num_faults`` in a run, break that
order too. When nothing else can happen, deadlines expire, then leases. So every run ends with no pages held, unless
there is a leak.
"""

from collections.abc import Callable, Iterator

from support.exploration.state_explorer import Action
from support.exploration.two_nodes_actions import actions_of
from support.exploration.two_nodes_parts import FAULTS, JUNK, LAYOUT, Decode, Link, Prefill, Scope, Store, WatchedWriter
from support.exploration.two_nodes_state import frozen, states_of

from common.cache.page_allocator import Owner, PageAllocator
from common.request import RequestKey
from common.wire.messages import Message, PrefillDone
from kv_transfer.events import Completed, Event, PairLost
from kv_transfer.receive.receiver import Receiver
from kv_transfer.send.sender import Sender
from kv_transfer.send.table import EARLY_LEASE_S
from kv_transfer.send.tombstones import LEASE_S
from kv_transfer.transports.base import ReaderTransport, WriterTransport
from kv_transfer.transports.negotiation import NegotiatingReader, NegotiatingWriter
from scripts.simulator.service.inprocess_transport import InProcessReader, Wire


class TwoNodes:
    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.now = 0.0
        self.num_faults = 0
        self.num_breaks = 0  # of data connections, which are restored
        self.is_late = False  # a deadline expired while each node had given all of its pages to another request
        self.num_starts = 0
        self.wire = Wire(latency=1, can_recall=scope.can_recall)  # it never ticks: actions deliver its pages
        self.links: list[Link] = []
        self.keys: list[RequestKey] = [(chr(ord("a") + n), 0) for n in range(len(scope.sizes))]
        self.sizes = dict(zip(self.keys, scope.sizes, strict=True))
        self.routes: dict[RequestKey, tuple[str, str]] = {}  # names of the nodes that serve each request
        self.prefill = self._start_prefill()
        self.decode = self._start_decode()

    def _start_prefill(self) -> Prefill:
        self.num_starts += 1
        name, store = f"p{self.num_starts}", Store(self.scope.num_pages)
        writer = WatchedWriter(self.wire, store, name)
        writer.world = self
        transport: WriterTransport = writer if self.scope.can_recall else NegotiatingWriter([writer])
        return Prefill(name, store, PageAllocator(self.scope.num_pages), writer, transport, Sender(transport))

    def _start_decode(self) -> Decode:
        self.num_starts += 1
        name, store, allocator = f"d{self.num_starts}", Store(self.scope.num_pages), PageAllocator(self.scope.num_pages)
        reader = InProcessReader(self.wire, store, name)
        transport: ReaderTransport = reader if self.scope.can_recall else NegotiatingReader([reader])
        return Decode(
            name,
            store,
            allocator,
            reader,
            transport,
            Receiver(transport, allocator, checksums="all" if self.scope.has_checksums else "off"),
        )

    def content(self, key: RequestKey, index: int) -> int:
        return 16 * (self.keys.index(key) + 1) + index

    # ---- actions ------------------------------------------------------------------------------------------------

    def actions(self) -> Iterator[Action]:
        return actions_of(self)

    def do(self, action: Action) -> None:
        name, *words = action
        if name in (*FAULTS, "corrupt"):
            self.num_faults += 1
            self.num_breaks += name == "drop"
        self.is_late = self.is_late or name.startswith("deadline")
        step: Callable[..., None] = getattr(self, f"_{name.replace(' ', '_')}")
        step(*words)
        self._settle()

    # ---- the prefill node ---------------------------------------------------------------------------------------

    def _route(self, key: RequestKey) -> tuple[str, str]:
        return self.routes.setdefault(key, (self.prefill.name, self.decode.name))

    def _open(self, key: RequestKey) -> None:
        node = self.prefill
        pages = node.allocator.alloc(self.sizes[key], Owner.REQUEST)
        assert pages is not None
        node.pages[key], node.num_computed[key] = pages, 0
        node.sender.open(key, self._route(key)[1])

    def _compute(self, key: RequestKey) -> None:
        """Compute one more page of the prompt; the last one completes it."""
        node, size = self.prefill, self.sizes[key]
        index = node.num_computed[key]
        node.num_computed[key] += 1
        node.store.fill(node.pages[key][index], self.content(key, index))
        if index + 1 < size:
            node.sender.computed(key, node.pages[key][: index + 1])
        else:
            node.finished[key] = None
            node.sender.finish(key, PrefillDone(*key, size * LAYOUT.page_size, 7), node.pages[key])

    def _pump(self) -> None:
        self.prefill.sender.pump(self.now, 1)

    def _abort(self, key: RequestKey) -> None:
        self.prefill.sender.abort(key, "aborted")

    _deadline_at_prefill = _abort

    def _finish_early(self, key: RequestKey) -> None:
        """The request ends with its first token."""
        self.prefill.sender.abort(key, "finished")

    def _retract(self, key: RequestKey) -> None:
        node = self.prefill
        node.sender.retract(key)
        for page in node.pages[key]:
            node.store.fill(page, JUNK)
        node.num_computed[key] = 0
        node.finished.pop(key, None)

    def _lease(self) -> None:
        self.now += EARLY_LEASE_S
        self.prefill.sender.pump(self.now, 0)

    _last_lease = _lease

    def _tombstones(self) -> None:
        self.now += LEASE_S
        self.prefill.sender.pump(self.now, 0)

    # ---- the decode node ----------------------------------------------------------------------------------------

    def _begin(self, key: RequestKey, count: int) -> None:
        node = self.decode
        peer = self._route(key)[0]
        if peer not in node.dialled:
            node.dialled[peer] = None
            link = Link(peer, node.name)
            if peer != self.prefill.name:  # that node is gone
                link.is_open_at_prefill, link.is_torn = False, True
            self.links.append(link)
            self._send_from_decode(peer, node.receiver.connect(peer))
        node.begun[key] = None
        pages = self._reserve(count)
        node.receiver.begin(key, peer, first=self.scope.first, pages=pages, length=self.sizes[key])

    def _reserve(self, count: int) -> list[int]:
        pages = self.decode.allocator.alloc(count, Owner.GRANT)
        assert pages is not None
        for page in pages:
            self.decode.store.fill(page, JUNK)
        return pages

    def _cancel(self, key: RequestKey) -> None:
        self.decode.ended[key] = "cancelled"
        self._keep(key, self.decode.receiver.cancel(key))

    _deadline_at_decode = _cancel

    def _poll(self) -> None:
        self.decode.receiver.poll(self.now)

    def _retry(self) -> None:
        """End the pause before a reconnection."""
        receiver = self.decode.receiver
        self.now = max(self.now, *(link.retry_at or 0.0 for link in receiver._connections.by_peer.values()))
        receiver.poll(self.now)

    def _lose_peer(self, peer: str) -> None:
        """Do what the role does when a connection or a pair is lost."""
        node = self.decode
        if peer not in node.dialled:
            return
        del node.dialled[peer]
        node.receiver.peer_lost(peer)
        for link in self.links:
            if link.prefill == peer and link.decode == node.name and link.is_open_at_decode:
                link.is_open_at_decode, link.is_torn = False, True
                link.to_decode.clear()

    def _on_event(self, event: Event) -> None:
        node = self.decode
        if isinstance(event, PairLost):
            self._lose_peer(event.peer)
            return
        assert event.key not in node.ended, f"{event.key} ended twice"
        node.ended[event.key] = type(event).__name__
        if isinstance(event, Completed):
            assert len(event.pages) == self.sizes[event.key] - self.scope.first, "complete without all of its pages"
            for index, page in enumerate(event.pages, self.scope.first):
                assert set(node.store.read(page)) == {self.content(event.key, index)}, f"page {index} has other bytes"
            node.allocator.free(event.pages, Owner.GRANT)  # an empty response: its pages are free at once
        else:
            self._keep(event.key, event.arrived)

    def _keep(self, key: RequestKey, arrived: tuple[int, ...]) -> None:
        """Free the pages that had arrived when the transfer ended: no write may reach them any more."""
        node = self.decode
        for index, page in enumerate(arrived, self.scope.first):
            assert set(node.store.read(page)) == {self.content(key, index)}, f"page {index} has other bytes"
        node.allocator.free(arrived, Owner.GRANT)

    # ---- the control connections --------------------------------------------------------------------------------

    def _prefill_hears(self, number: int, at: int) -> None:
        link = self.links[number]
        self.prefill.sender.on_message(link.decode, link.to_prefill.pop(at), self.now)

    def _decode_hears(self, number: int, at: int) -> None:
        link = self.links[number]
        self.decode.receiver.on_message(link.prefill, link.to_decode.pop(at), self.now)

    def _overtake(self, number: int, queue: str, at: int) -> None:
        if queue == "to_prefill":
            self._prefill_hears(number, at)
        else:
            self._decode_hears(number, at)

    def _repeat(self, number: int, queue: str) -> None:
        messages = getattr(self.links[number], queue)
        messages.insert(0, messages[0])
        self._overtake(number, queue, 0)

    def _lose(self, number: int, queue: str, at: int) -> None:
        """Lose a message, which breaks the connection; later messages in flight may still arrive."""
        del getattr(self.links[number], queue)[at]
        self.links[number].is_torn = True

    def _tear(self, number: int) -> None:
        self.links[number].is_torn = True

    def _prefill_notices(self, number: int) -> None:
        link = self.links[number]
        link.is_open_at_prefill = False
        link.to_prefill.clear()
        if link.decode in self.prefill.sender.peers():
            self.prefill.sender.peer_lost(link.decode)

    def _decode_notices(self, number: int) -> None:
        link = self.links[number]
        self._lose_peer(link.prefill)
        link.is_open_at_decode = False
        link.to_decode.clear()

    def _send_from_prefill(self, peer: str, message: Message) -> None:
        for link in reversed(self.links):
            if (link.prefill, link.decode) == (self.prefill.name, peer) and link.is_open_at_prefill:
                if not link.is_torn:
                    link.to_decode.append(message)
                return

    def _send_from_decode(self, peer: str, message: Message) -> None:
        for link in reversed(self.links):
            if (link.prefill, link.decode) == (peer, self.decode.name) and link.is_open_at_decode:
                if not link.is_torn:
                    link.to_prefill.append(message)
                return

    # ---- pages in flight, and deaths -----------------------------------------------------------------------------

    def _arrive(self, number: int) -> None:
        self.wire.arrive(number)

    def _drop(self, number: int) -> None:
        self.wire.befall(number, "drop")
        self.wire.arrive(number)

    def _corrupt(self, number: int) -> None:
        self.wire.befall(number, "corrupt")
        self.wire.arrive(number)

    def _copy(self, number: int) -> None:
        self.wire.befall(number, "duplicate")
        self.wire.arrive(number)

    def _refuse(self) -> None:
        self.prefill.writer.is_refused = True

    def _kill_prefill(self) -> None:
        self.prefill.writer.die()
        for link in self.links:
            if link.prefill == self.prefill.name:
                link.is_open_at_prefill, link.is_torn = False, True
                link.to_prefill.clear()
        self.prefill = self._start_prefill()

    def _kill_decode(self) -> None:
        self.decode.reader.die()
        for link in self.links:
            if link.decode == self.decode.name:
                link.is_open_at_decode, link.is_torn = False, True
                link.to_decode.clear()
        self.decode = self._start_decode()

    def watch(self, writer: WatchedWriter, peer: str, source: int, target: int) -> None:
        """Assert before a write that both pages belong to the same request.

        After the writer has dropped the peer it may read any page, as long as no node counts the page as arrived.
        """
        assert writer is self.prefill.writer, "a dead node writes"
        is_alive = writer._readers[peer] is self.decode.reader  # else the memory of a dead process
        if peer in writer._leaving:
            assert not is_alive or self._is_awaited(target), f"page {target} is written after it was reused"
            return
        found = [(key, pages.index(source)) for key, pages in self.prefill.pages.items() if source in pages]
        assert found, f"source page {source} is read after its release"
        key, index = found[0]
        assert set(self.prefill.store.read(source)) == {self.content(key, index)}, (
            "a page is sent before it is computed"
        )
        if not is_alive:
            return
        session = self.decode.receiver._table.sessions.get(key)
        assert session is not None, f"page {target} is written for {key}, which has ended"
        is_lacking = index >= session.first  # else it had arrived, and was given up when the transfer ended
        assert is_lacking and session.page_of(index) == target, f"page {target} is not that of page {index} of {key}"

    def _is_awaited(self, page: int) -> bool:
        """Whether this page of the decode node is reserved for a page that has not arrived."""
        sessions = self.decode.receiver._table.sessions.values()
        return any(page in pages for session in sessions for _, pages in session.lacking())

    # ---- after each action ---------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Send messages and process events of both nodes; then sort the free pages, so that equal states are equal."""
        prefill, decode = self.prefill, self.decode
        messages, released = prefill.sender.take()
        for peer, message in messages:
            self._send_from_prefill(peer, message)
        for release in released:
            assert release.key not in prefill.released, f"{release.key} was released twice"
            prefill.released[release.key] = release.ok
            pages = prefill.pages.pop(release.key)
            for page in pages:
                prefill.store.fill(page, JUNK)
            prefill.allocator.free(pages, Owner.REQUEST)
        replies, events = decode.receiver.take()
        for peer, message in replies:
            self._send_from_decode(peer, message)
        for event in events:
            self._on_event(event)
            assert not decode.receiver.take()[1], "an event caused another event"
        self.links = [link for link in self.links if link.is_open_at_prefill or link.is_open_at_decode]
        for allocator in (prefill.allocator, decode.allocator):
            allocator._stack.sort(reverse=True)
        for page in decode.allocator._stack:
            decode.store.fill(page, JUNK)

    def check(self) -> None:
        for node in (self.prefill, self.decode):
            node.allocator.check()
        self.prefill.sender.check()
        self.decode.receiver.check()
        held = sum(len(pages) for pages in self.prefill.pages.values())
        assert self.prefill.allocator.count(Owner.REQUEST) == held, "source pages leak"
        allocator = self.decode.allocator
        known = sum(len(session.pages) for session in self.decode.receiver._table.sessions.values())
        assert allocator.count(Owner.GRANT) + allocator.count(Owner.QUARANTINE) == known, "granted pages leak"

    def check_end(self) -> None:
        assert not self.wire.num_in_flight, "a page is in flight for ever"
        assert not self.prefill.sender._table.all(), "a transfer never ends at prefill"
        assert not self.decode.receiver._table.sessions, "a transfer never ends at decode"
        assert not self.prefill.pages and self.prefill.allocator.num_free == self.scope.num_pages, "source pages leak"
        assert self.decode.allocator.num_free == self.scope.num_pages, "pages leak"
        assert not any(link.to_prefill or link.to_decode for link in self.links)
        assert all(key in self.decode.ended for key in self.decode.begun), "a request hangs at decode"
        if self.num_faults == self.num_breaks and self.scope.can_recall and not self.is_late:
            assert list(self.decode.ended.values()) == ["Completed"] * len(self.keys), (
                "a request failed without a fault"
            )
            assert list(self.prefill.released.values()) == [True] * len(self.keys)

    # ---- copies and state ---------------------------------------------------------------------------------------

    def freeze(self) -> bytes:
        return frozen(self)

    def states(self) -> Iterator[bytes]:
        return states_of(self)
