"""Frames that are lost, repeated, swapped, cut, changed or invented, on every socket between nodes.

Only an accepted peer writes pages, and only pages that it may write. No process fails, and the next valid peer is
accepted.
"""

import contextlib
import json
import secrets
import select
import socket
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.kv.frame_damage import Change, changes, mangled
from support.kv.kv_fakes import DECODE, LAYOUT, PREFILL, MemfdStore
from support.kv.raw_tcp_peer import KEY, NUM_PAGES, SIZE, RawTcpPeer
from support.kv.raw_tcp_peer import offer as offer_tcp
from support.kv.shm_ends import attach as attach_shm
from support.kv.shm_ends import offer as offer_shm
from support.kv.transport_ends import End
from support.service.fork_server import shared_fork_server
from support.waiting import until

from common.wire.mailbox import Mailbox
from common.wire.messages import (
    PROTOCOL_VERSION,
    AbortTransfer,
    Closed,
    Connect,
    Connected,
    FromDecode,
    FromPrefill,
    Grant,
    Header,
    LayoutMessage,
    PagesWritten,
    Ping,
    PrefillDone,
    TransferAck,
)
from common.wire.process_id import new_incarnation
from kv_transfer.transports.base import Attached
from kv_transfer.transports.shm import ShmReader, ShmWriter
from kv_transfer.transports.shm.protocol import HELLO as SHM_HELLO
from kv_transfer.transports.shm.protocol import MAGIC as SHM_MAGIC
from kv_transfer.transports.tcp import TcpReader, TcpWriter
from kv_transfer.transports.tcp.protocol import DONE, HELLO, MAGIC, PAGE_FRAME_BYTES, WELCOME, Terms

# ---- TCP ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def tcp_reader() -> Iterator[tuple[MemfdStore, TcpReader, RawTcpPeer, RawTcpPeer]]:
    """A pool, its reader, and two peers of it."""
    store = MemfdStore(NUM_PAGES)
    reader = TcpReader(store, key=KEY, num_connections=1)
    peers = RawTcpPeer(reader), RawTcpPeer(reader)
    try:
        yield store, reader, *peers
    finally:
        for peer in peers:
            peer.connection.close()
        reader.close()
        store.close()


@settings(max_examples=examples(60), deadline=None)
@given(changes=changes)
def test_a_mangled_stream_of_pages_touches_no_page_that_is_not_allowed(changes: list[Change]) -> None:
    with tcp_reader() as (store, reader, raw_peer, again):
        assert len(raw_peer.handshake(offer_tcp(reader))) == 32
        reader.allow(PREFILL, 1, range(4))
        frames = [raw_peer.header(page, number=page) + bytes([page + 10]) * SIZE for page in range(6)]
        raw_peer.connection.sendall(b"".join(mangled(frames, changes, PAGE_FRAME_BYTES)))
        raw_peer.connection.shutdown(socket.SHUT_WR)
        until(lambda: reader.poll(0.0))
        for page in range(NUM_PAGES):
            if page >= 4:
                assert set(store.read(page)) == {0}, "a page was written without permission"
        assert len(again.handshake(offer_tcp(reader, 2))) == 32
        reader.allow(PREFILL, 2, [7])
        again.page(7, 99)
        assert again.answer() == (1, 7)


@settings(max_examples=examples(60), deadline=None)
@given(changes=changes)
def test_a_mangled_handshake_is_never_accepted(changes: list[Change]) -> None:
    with tcp_reader() as (_, reader, raw_peer, again):
        connect = offer_tcp(reader)
        token = bytes.fromhex(connect.endpoint.split(":")[2])
        hello = HELLO.pack(MAGIC, 0, 1, token, b"n" * 32)
        sent = mangled([hello], changes)
        with contextlib.suppress(OSError):
            raw_peer.connection.sendall(b"".join(sent))
            raw_peer.turn()
            if b"".join(sent) != hello:
                raw_peer.connection.shutdown(socket.SHUT_WR)
                raw_peer.turn()
                assert not reader._offers[PREFILL].threads
        assert len(again.handshake(offer_tcp(reader, 2))) == 32


@settings(max_examples=examples(60), deadline=None)
@given(changes=changes)
def test_mangled_acknowledgements_end_no_other_write(changes: list[Change]) -> None:
    store = MemfdStore(NUM_PAGES)
    writer = TcpWriter(store, key=KEY)
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            endpoint = f"127.0.0.1:{listener.getsockname()[1]}:{'0' * 64}:1"
            writer.attach(DECODE, Connect("decode-0", "model", 1, LayoutMessage.of(LAYOUT), NUM_PAGES, "tcp", endpoint))
            connection, _ = listener.accept()
        with connection:
            until(lambda: writer.poll() or select.select([connection], [], [], 0)[0])
            nonce = HELLO.unpack(connection.recv(HELLO.size, socket.MSG_WAITALL))[-1]
            terms = Terms(MAGIC, bytes(32), 0, 1, 1, SIZE, NUM_PAGES, nonce, b"r" * 32)
            connection.sendall(WELCOME.pack(b"r" * 32, terms.proof(KEY, b"reader")))
            connection.sendall(terms.proof(KEY, b"accepted"))
            assert until(writer.poll) == [Attached(DECODE, 1)]
            tickets = [writer.write(DECODE, [(page, page)]) for page in range(4)]
            seal = terms.seal(KEY, b"acknowledgements")
            frames = [header + seal.mac(header) for header in (DONE.pack(b"done", 1, n, n) for n in range(4))]
            sent = b"".join(mangled(frames, changes))
            right = max(n for n in range(5) if sent.startswith(b"".join(frames[:n])))
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            done: list[int] = []
            until(lambda: done.extend(writer.done()) or writer.poll())
            assert done + writer.done() == tickets[:right]
            assert writer.detach(DECODE)
    finally:
        writer.close()
        store.close()


# ---- shared memory --------------------------------------------------------------------------------------------------


@settings(max_examples=examples(60), deadline=None)
@given(changes=changes, is_first=st.booleans())
def test_mangled_packets_never_open_a_pool(changes: list[Change], is_first: bool) -> None:
    store, ours = MemfdStore(NUM_PAGES), MemfdStore(NUM_PAGES)
    reader, writer = ShmReader(store, DECODE), ShmWriter(ours)
    try:
        connect = offer_shm(reader)
        token = bytes.fromhex(connect.endpoint.split(":")[1])
        for packet in mangled([token], changes):
            if packet == token or not packet:
                continue
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as pending:
                pending.settimeout(60)
                pending.connect(f"\0{reader._name}")
                pending.send(packet)
                assert reader.poll(0.0) == []
                with contextlib.suppress(ConnectionResetError):
                    assert pending.recv(100) == b""
        assert not reader._writers
        assert attach_shm(reader, writer, connect if is_first else offer_shm(reader, 2)) == ""
    finally:
        writer.close()
        reader.close()
        store.close()
        ours.close()


@settings(max_examples=examples(60), deadline=None)
@given(changes=changes)
def test_a_writer_maps_no_pool_after_a_mangled_greeting(changes: list[Change]) -> None:
    theirs, ours = MemfdStore(NUM_PAGES), MemfdStore(NUM_PAGES)
    writer = ShmWriter(ours)
    name = f"baton-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(f"\0{name}")
        listener.listen(1)
        hello = SHM_HELLO.pack(SHM_MAGIC, 1, LAYOUT.pool_bytes(NUM_PAGES), DECODE.encode())
        connect = Connect("decode-0", "model", 1, LayoutMessage.of(LAYOUT), NUM_PAGES, "shm", f"{name}:{'0' * 64}")
        packets = [packet for packet in mangled([hello], changes) if packet] or [b"?"]
        writer.attach(DECODE, connect)
        pending, _ = listener.accept()
        with pending:
            socket.send_fds(pending, [packets[0]], [theirs.fd])
            [news] = until(writer.poll)
        assert bool(news.problem) == (packets[0] != hello), news
        writer.detach(DECODE)
    finally:
        writer.close()
        listener.close()
        theirs.close()
        ours.close()


# ---- NIXL -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nixl_ends() -> Iterator[tuple[End, End]]:
    fork_server = shared_fork_server()
    ends = (End(fork_server, "writer", "nixl", TEST_ATTACH_TIMEOUT_S="60"), End(fork_server, "reader", "nixl"))
    yield ends
    for end in ends:
        end.close()


@settings(max_examples=25, deadline=None)
@given(
    changes=changes,
    field=st.sampled_from(("agent", "pool_at", "probe_at", "watch_address", "voided", "kind", "device", "seal")),
)
def test_a_mangled_nixl_offer_is_refused_and_the_next_is_accepted(
    nixl_ends: tuple[End, End], changes: list[Change], field: str
) -> None:
    """The writer runs in its own process: NIXL aborts a process that loads a mangled offer. The writer refuses such an
    offer before NIXL sees it, and accepts the next one."""
    writer, reader = nixl_ends
    connect = json.loads(reader.ask("offer", peer=PREFILL, epoch=1))
    offers = json.loads(connect["endpoint"])
    true, offer = (json.loads(offers["nixl"]) for _ in range(2))
    changed = b"".join(mangled([str(offer[field]).encode()], changes)).decode(errors="replace")
    offer[field] = changed if isinstance(offer[field], str) else len(changed)
    offers["nixl"] = json.dumps(offer)
    connect["endpoint"] = json.dumps(offers)
    problem = writer.ask("attach", peer=DECODE, connect=json.dumps(connect))
    if offer == true:
        assert problem == ""
        assert until(lambda: writer.ask("news"), 60) == [[DECODE, 1, "", "nixl"]]
        until(lambda: writer.ask("detach", peer=DECODE))
    else:
        assert problem.startswith("nixl: the endpoint offered by decode-0 is not one of nixl: "), problem
    reader.ask("withdraw", peer=PREFILL)
    reader.ask("news")
    assert writer.ask("attach", peer=DECODE, connect=reader.ask("offer", peer=PREFILL, epoch=2)) == ""
    assert until(lambda: writer.ask("news"), 60) == [[DECODE, 2, "", "nixl"]]
    assert reader.ask("chosen", peer=PREFILL, epoch=2, transport="nixl")
    until(lambda: writer.ask("detach", peer=DECODE))
    until(lambda: reader.ask("news"))


# ---- the control plane ----------------------------------------------------------------------------------------------


def _frames(sender: str, message: Any) -> list[bytes]:
    return [msgspec.msgpack.encode(Header(PROTOCOL_VERSION, sender, "")), msgspec.msgpack.encode(message)]


@pytest.mark.parametrize(
    ("kind", "messages"),
    [
        (FromDecode, [Grant("r", 0, 1, 0, (1, 2)), TransferAck("r", 0), AbortTransfer("r", 0), Ping()]),
        (
            FromPrefill,
            [Connected(1, "shm"), PagesWritten("r", 0, 1, (0, 1)), PrefillDone("r", 0, 9, 7), Closed("r", 0, "failed")],
        ),
    ],
    ids=["decode to prefill", "prefill to decode"],
)
def test_mangled_messages_are_dropped_and_the_next_is_received(
    context: "zmq.Context[Any]", kind: Any, messages: list[Any]
) -> None:
    bound = Mailbox(context, new_incarnation(), kind, bind="tcp://127.0.0.1:*")
    me = new_incarnation()
    dealer = context.socket(zmq.DEALER)
    dealer.set(zmq.ROUTING_ID, me.encode())
    dealer.connect(bound.address)

    @settings(max_examples=examples(100), deadline=None, suppress_health_check=list(HealthCheck))
    @given(changes=changes, number=st.integers(0, 3))
    def run(changes: list[Change], number: int) -> None:
        if frames := mangled(_frames(me, messages[number]), changes):
            dealer.send_multipart(frames)
        dealer.send_multipart(_frames(me, messages[0]))
        received: list[Any] = []
        ends = time.monotonic() + 60
        while not received or received[-1].message != messages[0]:
            received += bound.receive()
            assert time.monotonic() < ends, "the next message was not received"
        assert all(isinstance(letter.message, msgspec.Struct) and letter.sender == me for letter in received)

    try:
        run()
    finally:
        bound.close()
        dealer.close(linger=0)
