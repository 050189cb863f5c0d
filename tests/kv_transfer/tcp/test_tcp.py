"""The TCP handshake: which connections a data port accepts, which readers a writer accepts, and cut connections."""

import contextlib
import errno
import math
import os
import select
import socket
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.kv.kv_fakes import DECODE, LAYOUT, PREFILL, MemfdStore
from support.kv.raw_tcp_peer import (
    KEY,
    NUM_PAGES,
    SIZE,
    RawTcpPeer,
    join,
    offer,
)
from support.waiting import until

from common.errors import ConfigError
from common.wire.messages import Connect, LayoutMessage
from kv_transfer.transports import pending_connections as visitors
from kv_transfer.transports.base import Attached, AttachError
from kv_transfer.transports.tcp import TcpReader, TcpWriter, receive_thread
from kv_transfer.transports.tcp import writer as tcp_writer
from kv_transfer.transports.tcp.protocol import DONE, HELLO, MAGIC, WELCOME, Terms
from kv_transfer.transports.tcp.receive_thread import ReceiveThread
from kv_transfer.transports.tcp.send_thread import SendThread

# ---- accepted and rejected connections ---------------------------------------------------------------------------


def test_a_connection_without_the_token_of_an_offer_is_rejected(reader: TcpReader) -> None:
    offer(reader)
    raw_peer = RawTcpPeer(reader)
    raw_peer.hello(b"t" * 32, count=2)
    assert raw_peer.is_hung_up()
    assert reader._pending.dropped == {"token": 1}


def test_a_connection_without_the_cluster_key_is_rejected(reader: TcpReader) -> None:
    connect = offer(reader)
    raw_peer = RawTcpPeer(reader)
    assert raw_peer.handshake(connect, key=b"another") == b""
    assert reader._pending.dropped == {"key": 1}
    assert not reader.chosen(PREFILL, 1, "tcp")


def test_a_proof_is_valid_for_one_handshake_only(reader: TcpReader) -> None:
    """A recorded handshake does not answer the nonce of the next handshake."""
    token = bytes.fromhex(offer(reader).endpoint.split(":")[2])
    raw_peer = RawTcpPeer(reader)
    raw_peer.hello(token, index=0, count=2)
    nonce, _ = WELCOME.unpack(raw_peer.receive(WELCOME.size))
    proof = Terms(MAGIC, token, 0, 2, 1, SIZE, NUM_PAGES, b"n" * 32, nonce).proof(
        KEY, b"writer"
    )  # recorded, but never delivered
    again = RawTcpPeer(reader)
    again.hello(token, index=0, count=2)
    again.receive(WELCOME.size)
    again.connection.sendall(proof)
    assert again.is_hung_up()
    assert reader._pending.dropped == {"key": 1}


def test_an_offer_admits_one_connection(reader: TcpReader) -> None:
    connect = offer(reader)
    assert len(RawTcpPeer(reader).handshake(connect)) == 32
    second = RawTcpPeer(reader)
    second.hello(bytes.fromhex(connect.endpoint.split(":")[2]), index=0, count=2)
    assert second.is_hung_up()


def test_a_silent_connection_is_rejected_after_the_timeout(reader: TcpReader) -> None:
    raw_peer = RawTcpPeer(reader)
    until(lambda: reader.poll(100.0) or reader._pending)
    reader.poll(100.0 + visitors.PATIENCE_S)
    assert raw_peer.is_hung_up()
    assert reader._pending.dropped == {"silent": 1}


def test_a_writer_attaches_despite_many_pending_connections(reader: TcpReader, writer: TcpWriter) -> None:
    crowd = [RawTcpPeer(reader) for _ in range(visitors.MAX_PENDING + 10)]
    join(writer, reader)
    assert reader._pending.dropped["crowded"] >= 10
    for raw_peer in crowd:
        raw_peer.connection.close()


def test_any_number_of_writers_attach_at_once(reader: TcpReader) -> None:
    offers = {name: reader.offer(name, 1) for name in map(str, range(visitors.MAX_PENDING))}  # of two connections each
    peers = {name: [RawTcpPeer(reader) for _ in range(2)] for name in offers}
    for name, pair in peers.items():
        token = bytes.fromhex(offers[name].split(":")[2])
        for index, peer in enumerate(pair):
            peer.connection.sendall(HELLO.pack(MAGIC, index, 2, token, b"n" * 32))
    until(lambda: reader.poll(0.0) or len(reader._pending) == 2 * len(peers))
    assert all(len(peer.receive(WELCOME.size)) == WELCOME.size for pair in peers.values() for peer in pair)
    assert not reader._pending.dropped


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(noise=st.binary(min_size=1, max_size=200))
def test_random_bytes_on_the_port_are_rejected(reader: TcpReader, noise: bytes) -> None:
    offer(reader)
    raw_peer = RawTcpPeer(reader)
    raw_peer.connection.sendall(noise)
    raw_peer.turn()
    raw_peer.connection.close()
    until(lambda: reader.poll(0.0) or not reader._pending)


def test_a_writer_attaches_after_rejected_connections(reader: TcpReader, writer: TcpWriter) -> None:
    for noise in (b"GET / HTTP/1.1\r\n\r\n" * 10, b"", MAGIC, bytes(HELLO.size)):
        raw_peer = RawTcpPeer(reader)
        raw_peer.connection.sendall(noise)
        raw_peer.turn()
        raw_peer.connection.close()
    join(writer, reader)


# ---- the writer -------------------------------------------------------------------------------------------------


def test_a_writer_names_the_reader_that_it_cannot_reach(writer: TcpWriter) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    listener.close()
    endpoint = f"127.0.0.1:{port}:{'0' * 64}:2"
    connect = Connect("decode-0", "model", 1, LayoutMessage.of(LAYOUT), NUM_PAGES, "tcp", endpoint)
    writer.attach(DECODE, connect)
    [attached] = until(writer.poll)
    assert attached.problem == (
        f"the tcp connection to decode node decode-0 at 127.0.0.1 port {port} could not be made: Connection refused"
    )
    assert writer.detach(DECODE)


NO_ADDRESSES = ["\0", "name.invalid", "\u00fc", "fe80::1%\0", "fe80::1%\u00fc", "[::1]", "localhost"]


@pytest.mark.parametrize("host", NO_ADDRESSES, ids=repr)
def test_a_writer_takes_no_host_that_is_not_an_address(writer: TcpWriter, host: str) -> None:
    endpoint = f"{host}:1:{'0' * 64}:2"
    connect = Connect("decode-0", "model", 1, LayoutMessage.of(LAYOUT), NUM_PAGES, "tcp", endpoint)
    with pytest.raises(AttachError, match="the endpoint offered by decode-0 is not one of tcp"):
        writer.attach(DECODE, connect)


def test_a_reader_offers_the_address_of_a_name(store: MemfdStore) -> None:
    reader = TcpReader(store, host="localhost", key=KEY)
    assert offer(reader).endpoint.startswith("127.0.0.1:")
    reader.close()


def test_a_writer_gives_up_on_a_reader_that_never_answers(writer: TcpWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_writer, "ATTACH_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}:{'0' * 64}:2"
        writer.attach(DECODE, Connect("decode-0", "model", 1, LayoutMessage.of(LAYOUT), NUM_PAGES, "tcp", endpoint))
        [attached] = until(writer.poll)
    assert "did not answer within" in attached.problem


def test_a_connection_whose_first_packet_is_lost_is_dialled_again(
    writer: TcpWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_writer, "REDIAL_S", 0.01)
    monkeypatch.setattr(tcp_writer, "ATTACH_TIMEOUT_S", 120.0)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        listener.settimeout(60)
        address = listener.getsockname()
        stack.enter_context(socket.create_connection(address))  # fills the backlog: the kernel drops what comes next
        endpoint = f"127.0.0.1:{address[1]}:{'0' * 64}:1"
        writer.attach(DECODE, Connect("decode-0", "model", 1, LayoutMessage.of(LAYOUT), NUM_PAGES, "tcp", endpoint))
        [connection] = next(iter(writer._peers.values())).connections
        dialled = []
        while len(dialled) < 3:
            assert not writer.poll()
            dialled += [connection.sock] if connection.sock not in dialled else []
            select.select(writer.files(), [], [], 60)  # the writer wakes its loop by itself
        assert all(sock.fileno() < 0 for sock in dialled[:-1])
        listener.accept()[0].close()
        until(lambda: writer.poll() or connection.stage is not tcp_writer.Stage.DIALLING)
        assert connection.stage is not tcp_writer.Stage.DIALLING, "the attachment has failed"
        accepted = stack.enter_context(listener.accept()[0])
        while accepted.getpeername() != connection.sock.getsockname():  # one that was given up as the kernel took it
            accepted = stack.enter_context(listener.accept()[0])
        magic, *_ = HELLO.unpack(accepted.recv(HELLO.size, socket.MSG_WAITALL))
        assert magic == MAGIC
        assert not select.select(writer.files(), [], [], 0)[0], "the alarm rings on"
        assert writer.detach(DECODE)


class FullEpoll:
    """An ``epoll`` that takes no further socket, as at the limit ``fs.epoll.max_user_watches``."""

    def __init__(self, epoll: select.epoll) -> None:
        self._epoll = epoll

    def register(self, *_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def __getattr__(self, name: str) -> object:
        return getattr(self._epoll, name)


def test_a_connection_that_cannot_be_dialled_again_is_a_problem_and_leaves_no_socket(
    writer: TcpWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_writer, "REDIAL_S", 0.01)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        stack.enter_context(socket.create_connection(listener.getsockname()))  # fills the backlog
        before = os.listdir("/proc/self/fd")
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}:{'0' * 64}:1"
        writer.attach(DECODE, Connect("decode-0", "model", 1, LayoutMessage.of(LAYOUT), NUM_PAGES, "tcp", endpoint))
        monkeypatch.setattr(writer, "_epoll", FullEpoll(writer._epoll))
        [attached] = until(writer.poll)
        assert "could not be made: No space left on device" in attached.problem
        assert writer._peers == writer._by_descriptor == {}
        assert set(os.listdir("/proc/self/fd")) <= set(before)


@pytest.mark.parametrize("noise", [b"", b"x", bytes(WELCOME.size), b"y" * 500])
def test_a_writer_refuses_a_reader_without_the_key(writer: TcpWriter, noise: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}:{'0' * 64}:1"
        writer.attach(DECODE, Connect("decode-0", "model", 1, LayoutMessage.of(LAYOUT), NUM_PAGES, "tcp", endpoint))
        connection, _ = listener.accept()
        with connection:
            connection.sendall(noise)
            connection.shutdown(socket.SHUT_WR)
            [attached] = until(writer.poll)
    assert "cluster key" in attached.problem


@pytest.mark.parametrize(
    "answer", [DONE.pack(b"done", 1, 3, 1), DONE.pack(b"done", 1, 4, 0), DONE.pack(b"page", 1, 3, 0)]
)
def test_a_writer_accepts_only_the_next_acknowledgement(writer: TcpWriter, answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}:{'0' * 64}:1"
        writer.attach(DECODE, Connect("decode-0", "model", 1, LayoutMessage.of(LAYOUT), NUM_PAGES, "tcp", endpoint))
        connection, _ = listener.accept()
    with connection:
        writer.poll()
        nonce = HELLO.unpack(connection.recv(HELLO.size, socket.MSG_WAITALL))[-1]
        terms = Terms(MAGIC, bytes(32), 0, 1, 1, SIZE, NUM_PAGES, nonce, b"r" * 32)
        connection.sendall(WELCOME.pack(b"r" * 32, terms.proof(KEY, b"reader")))
        until(lambda: writer.poll() or select.select([connection], [], [], 0)[0])
        connection.recv(32, socket.MSG_WAITALL)
        connection.sendall(terms.proof(KEY, b"accepted"))
        assert until(writer.poll) == [Attached(DECODE, 1)]
        writer.write(DECODE, [(0, 3)])
        connection.sendall(answer + terms.seal(KEY, b"acknowledgements").mac(answer))
        [attached] = until(writer.poll)
        assert "acknowledge" in attached.problem
        assert writer.done() == []
        writer.detach(DECODE)


def test_both_ends_notice_a_cut_connection_and_the_pair_forms_again(
    reader: TcpReader, writer: TcpWriter, store: MemfdStore
) -> None:
    join(writer, reader)
    next(iter(writer._peers.values())).connections[1].sock.shutdown(socket.SHUT_RDWR)
    [broken] = until(writer.poll)
    assert broken.problem.startswith("the tcp connection to decode node decode-0 at 127.0.0.1")
    assert [(f.peer, f.epoch) for f in until(lambda: reader.poll(0.0))] == [(PREFILL, 1)]
    assert writer.detach(DECODE)
    join(writer, reader, epoch=2)
    reader.allow(PREFILL, 2, [3])
    assert isinstance(writer.store, MemfdStore)
    writer.store.fill(1, 42)
    ticket = writer.write(DECODE, [(1, 3)])
    assert until(writer.done) == [ticket]
    assert set(store.read(3)) == {42}


@pytest.mark.parametrize("name", ["send-pages", "receive-pages"])
def test_without_a_further_thread_attaching_fails_and_works_later(
    reader: TcpReader, writer: TcpWriter, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    def problem() -> str:
        reader.poll(0.0)
        return "".join(attached.problem for attached in writer.poll())

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        writer.attach(DECODE, offer(reader))
        why = "no further thread can be started" if name == "send-pages" else "it closed the connection"
        assert why in until(problem)
    assert writer.detach(DECODE)
    reader.withdraw(PREFILL)
    reader.poll(0.0)
    join(writer, reader, epoch=2)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("thread", [SendThread, ReceiveThread])
def test_both_ends_notice_a_thread_that_ends_by_an_unexpected_error(
    reader: TcpReader, writer: TcpWriter, monkeypatch: pytest.MonkeyPatch, thread: type
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    join(writer, reader)
    reader.allow(PREFILL, 1, [3])
    monkeypatch.setattr(thread, "_header" if thread is SendThread else "_understood", fail)
    writer.write(DECODE, [(1, 3)])
    assert until(writer.poll)[0].problem
    assert [(f.peer, f.epoch) for f in until(lambda: reader.poll(0.0))] == [(PREFILL, 1)]


def test_a_writer_breaks_a_pair_whose_packets_vanish_and_says_first_that_a_page_is_late(
    writer: TcpWriter, reader: TcpReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No page is sent, and the kernel's word is a fake."""
    join(writer, reader)
    is_silent = False
    monkeypatch.setattr(tcp_writer, "has_silent", lambda socks, waited_s: is_silent and len(socks) == 2)
    for connection in next(iter(writer._peers.values())).connections:
        assert connection.thread is not None
        monkeypatch.setattr(connection.thread, "put", lambda job: None)
    assert not select.select(writer.files(), [], [], 0)[0]
    writer.write(DECODE, [(0, 3)])
    late: list[str] = []
    while not late:
        select.select(writer.files(), [], [], 60)  # the writer wakes its loop by itself
        assert writer.poll() == []
        late = writer.late()
    assert late == [DECODE] and writer.late() == []
    is_silent = True
    select.select(writer.files(), [], [], 60)
    [broken] = until(writer.poll)
    assert broken.problem.endswith("broke: packets over it are lost without an error")
    assert writer.detach(DECODE) and writer.done() == []


def test_a_writer_that_has_nothing_to_send_does_not_wake_its_loop(writer: TcpWriter, reader: TcpReader) -> None:
    join(writer, reader)
    reader.allow(PREFILL, 1, [3])
    ticket = writer.write(DECODE, [(0, 3)])
    assert until(writer.done) == [ticket]
    until(lambda: writer.poll() or writer._look_at == math.inf)
    assert not select.select(writer.files(), [], [], 0)[0]
    assert writer.late() == []


def test_a_reader_whose_acknowledgements_vanish_ends_the_connection(
    reader: TcpReader, writer: TcpWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_silent = False
    monkeypatch.setattr(receive_thread, "LATE_S", 0.01)
    monkeypatch.setattr(receive_thread, "is_waiting", lambda sock: True)
    monkeypatch.setattr(receive_thread, "has_silent", lambda socks, waited_s: is_silent)
    join(writer, reader)
    is_silent = True
    [fenced] = until(lambda: reader.poll(0.0))
    assert "packets over it are lost" in fenced.reason


def test_detaching_ends_all_writes(reader: TcpReader, writer: TcpWriter, store: MemfdStore) -> None:
    join(writer, reader)
    writer.write(DECODE, [(0, 3)] * 50)
    assert writer.detach(DECODE) is True
    assert until(lambda: reader.poll(0.0))[0].epoch == 1
    assert writer.done() == []
    assert writer._remaining == {}
    assert set(store.read(3)) == {0}


def test_the_loop_is_woken_by_acknowledgements_and_ends(reader: TcpReader, writer: TcpWriter) -> None:
    join(writer, reader)
    assert select.select(writer.files(), [], [], 0)[0] == []
    reader.allow(PREFILL, 1, [0])
    writer.write(DECODE, [(0, 0)])
    assert select.select(writer.files(), [], [], 60)[0] == list(writer.files())
    assert until(writer.done) == [1]
    writer.detach(DECODE)
    assert select.select(reader.files(), [], [], 60)[0] == list(reader.files())


def test_an_address_that_is_not_ours_is_refused_with_the_flag_named(store: MemfdStore) -> None:
    with pytest.raises(ConfigError, match="--data-interface"):
        TcpReader(store, host="203.0.113.7")
