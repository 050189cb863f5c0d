"""TCP from the inside: what strangers, liars and cut connections can do to a data port, and what leave stops."""

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_fakes import DECODE, GEOMETRY, PREFILL, MemfdStore, content

from common.errors import ConfigError, ErrorCode
from common.messages import Connect, Handoff
from common.pages import Owner, PageBooks
from kv_transfer import links
from kv_transfer.events import Completed, PairLost, TransferFailed
from kv_transfer.fit import Fit
from kv_transfer.pieces import Box, whole
from kv_transfer.receiver import Receiver
from kv_transfer.sender import Sender
from kv_transfer.transports import tcp_reader, tcp_writer
from kv_transfer.transports.base import Attached, Fenced, to_message
from kv_transfer.transports.tcp import TcpReader, TcpWriter
from kv_transfer.transports.tcp_inlet import Inlet
from kv_transfer.transports.tcp_wire import (
    DONE,
    DONE_FRAME_BYTES,
    HELLO,
    MAC_BYTES,
    MAGIC,
    PAGE,
    PAGE_FRAME_BYTES,
    WELCOME,
    Terms,
)

NUM_PAGES = 8
SIZE = GEOMETRY.page_bytes
WHOLE = whole(GEOMETRY)
KEY = b"the cluster's key"


@pytest.fixture
def store() -> Iterator[MemfdStore]:
    store = MemfdStore(NUM_PAGES)
    yield store
    store.close()


@pytest.fixture
def reader(store: MemfdStore) -> Iterator[TcpReader]:
    reader = TcpReader(store, key=KEY, num_connections=2)
    yield reader
    reader.close()


@pytest.fixture
def writer() -> Iterator[TcpWriter]:
    store = MemfdStore(NUM_PAGES)
    writer = TcpWriter(store, key=KEY)
    yield writer
    writer.close()
    store.close()


def offer(reader: TcpReader, epoch: int = 1) -> Connect:
    return Connect("decode-0", "model", epoch, to_message(GEOMETRY), NUM_PAGES, "tcp", reader.offer(PREFILL, epoch))


def until(look: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if found := look():
            return found
        time.sleep(0.002)
    raise AssertionError("it never came")


def join(writer: TcpWriter, reader: TcpReader, epoch: int = 1) -> None:
    writer.attach(DECODE, offer(reader, epoch))
    assert until(lambda: reader.poll(0.0) or writer.poll()) == [Attached(DECODE, epoch)]
    assert reader.chosen(PREFILL, epoch, "tcp")


class Stranger:
    """Speaks to a data port by hand: the handshake as a writer would, and then whatever a test likes."""

    met: ClassVar[list["Stranger"]] = []

    def __init__(self, reader: TcpReader) -> None:
        self.reader = reader
        self.met.append(self)
        self.connection = socket.create_connection(("127.0.0.1", reader.port))
        self.connection.settimeout(5.0)
        self.terms: Terms | None = None
        self.num_sent = 0

    def hello(self, token: bytes, index: int = 0, count: int = 1, magic: bytes = MAGIC) -> None:
        self.connection.sendall(HELLO.pack(magic, index, count, token, b"n" * 32))
        self.turn()

    def shake(self, connect: Connect, *, key: bytes = KEY, index: int = 0) -> bytes:
        """The whole handshake. Returns the last frame, empty if the reader hung up."""
        _, _, token, count = connect.endpoint.split(":")
        self.hello(bytes.fromhex(token), index, int(count), self.reader.magic)
        nonce, _ = WELCOME.unpack(self.receive(WELCOME.size))
        self.terms = Terms(
            self.reader.magic, bytes.fromhex(token), index, int(count), connect.epoch, SIZE, NUM_PAGES, b"n" * 32, nonce
        )
        self.connection.sendall(self.terms.proof(key, b"writer"))
        self.turn()
        return self.receive(32)

    def turn(self) -> None:
        """Time for the reader to hear it."""
        for _ in range(5):
            self.reader.poll(0.0)
            time.sleep(0.002)

    def receive(self, size: int) -> bytes:
        data = b""
        try:
            while len(data) < size and (more := self.connection.recv(size - len(data))):
                data += more
        except ConnectionResetError:
            return b""
        return data

    def header(
        self, page: int, *, number: int | None = None, size: int = SIZE, magic: bytes = b"page", box: Box = WHOLE
    ) -> bytes:
        assert self.terms is not None
        header = PAGE.pack(magic, size, page, self.num_sent if number is None else number, *box)
        return header + self.terms.seal(KEY, b"pages").mac(header)

    def frame(self, page: int, value: int, *, size: int = SIZE, **words: Any) -> bytes:
        """A header, the bytes of a page or a part, and the mac of both."""
        assert self.terms is not None
        header, data = self.header(page, size=size, **words), bytes([value]) * size
        body = self.terms.seal(KEY, b"pages").body(header)
        assert body is not None
        body.add(memoryview(data))
        return header + data + body.mac()

    def page(self, page: int, value: int, **words: Any) -> None:
        self.connection.sendall(self.frame(page, value, **words))
        self.num_sent += 1

    def part(self, page: int, value: int, box: Box) -> None:
        self.page(page, value, size=box.num_bytes(GEOMETRY), box=box)

    def answer(self) -> tuple[int, int] | None:
        """(was it placed, page) of the next acknowledgement; None if the reader hung up."""
        frame = self.receive(DONE_FRAME_BYTES)
        if not frame:
            return None
        _, is_placed, page, _ = DONE.unpack(frame[: DONE.size])
        return is_placed, page

    def is_hung_up(self) -> bool:
        self.turn()
        return self.receive(1) == b""


@pytest.fixture(autouse=True)
def _strangers_leave() -> Iterator[None]:
    yield
    while Stranger.met:
        Stranger.met.pop().connection.close()


@pytest.fixture
def stranger(store: MemfdStore) -> Iterator[Stranger]:
    """A writer let in under epoch 1, over one connection, that may write pages 2 and 3."""
    reader = TcpReader(store, key=KEY, num_connections=1)
    stranger = Stranger(reader)
    assert len(stranger.shake(offer(reader))) == 32
    reader.allow(PREFILL, 1, [2, 3])
    yield stranger
    stranger.connection.close()
    reader.close()


# ---- who gets in ------------------------------------------------------------------------------------------------


def test_nobody_gets_in_without_the_token_of_an_offer(reader: TcpReader) -> None:
    offer(reader)
    stranger = Stranger(reader)
    stranger.hello(b"t" * 32, count=2)
    assert stranger.is_hung_up()
    assert reader.dropped == {"token": 1}


def test_nobody_gets_in_without_the_cluster_key(reader: TcpReader) -> None:
    connect = offer(reader)
    stranger = Stranger(reader)
    assert stranger.shake(connect, key=b"another") == b""
    assert reader.dropped == {"key": 1}
    assert not reader.chosen(PREFILL, 1, "tcp")


def test_a_proof_is_good_for_one_handshake_only(reader: TcpReader) -> None:
    """What an eavesdropper has seen of a handshake does not answer the nonce of the next."""
    token = bytes.fromhex(offer(reader).endpoint.split(":")[2])
    stranger = Stranger(reader)
    stranger.hello(token, index=0, count=2)
    nonce, _ = WELCOME.unpack(stranger.receive(WELCOME.size))
    proof = Terms(MAGIC, token, 0, 2, 1, SIZE, NUM_PAGES, b"n" * 32, nonce).proof(
        KEY, b"writer"
    )  # said, and never arrived
    again = Stranger(reader)
    again.hello(token, index=0, count=2)
    again.receive(WELCOME.size)
    again.connection.sendall(proof)
    assert again.is_hung_up()
    assert reader.dropped == {"key": 1}


def test_a_connection_of_an_offer_can_be_made_once(reader: TcpReader) -> None:
    connect = offer(reader)
    assert len(Stranger(reader).shake(connect, index=0)) == 32
    second = Stranger(reader)
    second.hello(bytes.fromhex(connect.endpoint.split(":")[2]), index=0, count=2)
    assert second.is_hung_up()


def test_a_silent_visitor_is_dropped_after_a_while(reader: TcpReader) -> None:
    stranger = Stranger(reader)
    until(lambda: reader.poll(100.0) or reader._visitors)
    reader.poll(100.0 + tcp_reader.PATIENCE_S)
    assert stranger.is_hung_up()
    assert reader.dropped == {"silent": 1}


def test_a_crowd_of_visitors_keeps_no_writer_out(reader: TcpReader, writer: TcpWriter) -> None:
    crowd = [Stranger(reader) for _ in range(tcp_reader.MAX_VISITORS + 10)]
    join(writer, reader)
    assert reader.dropped["crowd"] >= 10
    for stranger in crowd:
        stranger.connection.close()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(noise=st.binary(min_size=1, max_size=200))
def test_noise_on_the_port_harms_nobody(reader: TcpReader, noise: bytes) -> None:
    offer(reader)
    stranger = Stranger(reader)
    stranger.connection.sendall(noise)
    stranger.turn()
    stranger.connection.close()
    until(lambda: reader.poll(0.0) or not reader._visitors)


def test_a_writer_gets_in_after_all_of_that(reader: TcpReader, writer: TcpWriter) -> None:
    for noise in (b"GET / HTTP/1.1\r\n\r\n" * 10, b"", MAGIC, bytes(HELLO.size)):
        stranger = Stranger(reader)
        stranger.connection.sendall(noise)
        stranger.turn()
        stranger.connection.close()
    join(writer, reader)


# ---- what one may do inside ---------------------------------------------------------------------------------------


def test_a_page_is_placed_where_it_is_allowed_and_nowhere_else(stranger: Stranger, store: MemfdStore) -> None:
    stranger.page(2, 7)
    stranger.page(4, 8)
    stranger.page(3, 9)
    assert [stranger.answer() for _ in range(3)] == [(1, 2), (0, 4), (1, 3)]
    assert [set(store.read(page)) for page in (2, 3, 4)] == [{7}, {9}, {0}]
    assert stranger.reader.counters()["refused_pages"] == 1
    assert stranger.reader.counters()["bytes_by_tcp"] == 2 * SIZE


def test_a_page_can_be_written_once_per_grant(stranger: Stranger, store: MemfdStore) -> None:
    stranger.page(2, 7)
    stranger.page(2, 8)
    assert [stranger.answer(), stranger.answer()] == [(1, 2), (0, 2)]
    assert set(store.read(2)) == {7}


def test_what_comes_after_leave_was_taken_is_thrown_away(stranger: Stranger, store: MemfdStore) -> None:
    stranger.reader.forbid([2])
    stranger.page(2, 7)
    assert stranger.answer() == (0, 2)
    assert set(store.read(2)) == {0}


def test_leave_can_be_taken_in_the_middle_of_a_page(stranger: Stranger, store: MemfdStore) -> None:
    frame = stranger.frame(2, 7)
    half = PAGE_FRAME_BYTES + SIZE // 2
    stranger.connection.sendall(frame[:half])
    until(lambda: store.read(2)[SIZE // 2 - 1] == 7)
    stranger.reader.forbid([2])
    store.fill(2, 99)  # someone else's by now
    stranger.connection.sendall(frame[half:])
    assert stranger.answer() == (0, 2)
    assert set(store.read(2)) == {99}


def test_leave_of_another_epoch_is_no_leave(stranger: Stranger, store: MemfdStore) -> None:
    stranger.reader.allow(PREFILL, 2, [2])
    stranger.page(2, 7)
    assert stranger.answer() == (0, 2)
    assert set(store.read(2)) == {0}


def test_taking_leave_waits_for_the_copy_under_way(
    stranger: Stranger, store: MemfdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_copying, receive = threading.Event(), Inlet._receive

    def slow(inlet: Inlet, into: memoryview) -> int:
        is_copying.set()
        time.sleep(0.2)
        return receive(inlet, into)

    monkeypatch.setattr(Inlet, "_receive", slow)
    stranger.page(2, 7)
    assert is_copying.wait(5)
    stranger.reader.forbid([2])
    store.fill(2, 99)  # someone else's by now
    assert stranger.answer() == (0, 2)
    assert set(store.read(2)) == {99}


def test_withdrawing_is_a_fence_even_in_the_middle_of_a_page(stranger: Stranger, store: MemfdStore) -> None:
    frame = stranger.frame(2, 7)
    half = PAGE_FRAME_BYTES + SIZE // 2
    stranger.connection.sendall(frame[:half])
    until(lambda: store.read(2)[SIZE // 2 - 1] == 7)
    stranger.reader.withdraw(PREFILL)
    store.fill(2, 99)
    with contextlib.suppress(OSError):
        stranger.connection.sendall(frame[half:])
    time.sleep(0.05)
    assert set(store.read(2)) == {99}
    assert stranger.reader.poll(0.0) == [Fenced(PREFILL, 1, "the connection was closed on our side")]


@pytest.mark.parametrize(
    "frame",
    [
        {"page": NUM_PAGES},
        {"page": 2**63},
        {"page": 2, "size": SIZE + 1},
        {"page": 2, "size": 2**32 - 1},
        {"page": 2, "size": 0},
        {"page": 2, "number": 1},
        {"page": 2, "magic": b"done"},
        {"page": 2, "box": Box(0, 1, 0, 1, 1, 4)},
        {"page": 2, "box": Box(0, 2, 0, 1, 0, 4), "size": 2 * SIZE},
        {"page": 2, "box": Box(0, 1, 0, 1, 0, 0), "size": 0},
        {"page": 2, "box": Box(0, 1, 0, 1, 0, 2)},
    ],
)
def test_a_frame_that_cannot_be_meant_ends_the_connection(
    stranger: Stranger, store: MemfdStore, frame: dict[str, Any]
) -> None:
    stranger.connection.sendall(stranger.header(**frame) + b"\7" * SIZE)
    news = until(lambda: stranger.reader.poll(0.0))
    assert [(fenced.peer, fenced.epoch) for fenced in news] == [(PREFILL, 1)]
    assert set(store.memory[:]) == {0}
    assert stranger.answer() is None


def test_parts_of_a_page_go_where_they_belong_each_once(stranger: Stranger, store: MemfdStore) -> None:
    """A page is 4 tokens: 32 bytes of keys, 32 of values."""
    first, last = Box(0, 1, 0, 1, 0, 3), Box(0, 1, 0, 1, 3, 1)
    stranger.part(2, 7, last)
    assert stranger.answer() == (1, 2)
    stranger.part(2, 9, first)
    assert stranger.answer() == (1, 2)
    keys_then_values = (b"\x09" * 24 + b"\x07" * 8) * 2
    assert store.read(2) == keys_then_values
    for again in (last, first, WHOLE):
        stranger.part(2, 5, again)
        assert stranger.answer() == (0, 2)
    assert store.read(2) == keys_then_values
    stranger.reader.allow(PREFILL, 1, [2])
    stranger.part(2, 5, last)
    assert stranger.answer() == (1, 2)
    assert store.read(2) == (b"\x09" * 24 + b"\x05" * 8) * 2
    assert stranger.reader.counters()["bytes_by_tcp"] == SIZE + 16
    assert stranger.reader.counters()["refused_pages"] == 3


def test_leave_that_is_given_anew_is_not_for_what_was_on_its_way(stranger: Stranger, store: MemfdStore) -> None:
    frame = stranger.frame(2, 7)
    half = PAGE_FRAME_BYTES + SIZE // 2
    stranger.connection.sendall(frame[:half])
    until(lambda: store.read(2)[SIZE // 2 - 1] == 7)
    stranger.reader.forbid([2])
    store.fill(2, 99)
    stranger.reader.allow(PREFILL, 1, [2])
    stranger.connection.sendall(frame[half:])
    assert stranger.answer() == (0, 2)
    assert set(store.read(2)) == {99}


def test_a_replayed_frame_ends_the_connection(stranger: Stranger, store: MemfdStore) -> None:
    frame = stranger.frame(2, 7)
    stranger.connection.sendall(frame)
    assert stranger.answer() == (1, 2)
    stranger.reader.allow(PREFILL, 1, [2])
    store.fill(2, 99)
    stranger.connection.sendall(frame)
    assert "number 1 was to come" in until(lambda: stranger.reader.poll(0.0))[0].reason
    assert set(store.read(2)) == {99}


def test_a_header_without_the_key_ends_the_connection(stranger: Stranger, store: MemfdStore) -> None:
    header = stranger.header(2)
    stranger.connection.sendall(header[:-MAC_BYTES] + bytes(MAC_BYTES) + b"\7" * SIZE)
    assert "no page of this writer" in until(lambda: stranger.reader.poll(0.0))[0].reason
    assert set(store.read(2)) == {0}


@pytest.mark.parametrize("at", [PAGE_FRAME_BYTES, PAGE_FRAME_BYTES + SIZE // 2, -MAC_BYTES - 1, -MAC_BYTES, -1])
def test_a_page_whose_bytes_were_changed_on_the_way_counts_for_nothing_and_ends_the_connection(
    stranger: Stranger, at: int
) -> None:
    stranger.page(3, 6)
    assert stranger.answer() == (1, 3)
    frame = bytearray(stranger.frame(2, 7))
    frame[at] ^= 1
    stranger.connection.sendall(frame)
    [fenced] = until(lambda: stranger.reader.poll(0.0))
    assert (fenced.peer, fenced.epoch) == (PREFILL, 1)
    assert "came changed" in fenced.reason
    assert stranger.answer() is None
    assert stranger.reader.counters()["bytes_by_tcp"] == SIZE


def test_a_few_bytes_are_enough_to_go_on_after_many_were_waited_for(stranger: Stranger) -> None:
    frame = stranger.frame(2, 7)
    for begin, end in ((0, 1), (1, -MAC_BYTES - SIZE + 1), (-MAC_BYTES - SIZE + 1, -MAC_BYTES), (-MAC_BYTES, -1)):
        stranger.connection.sendall(frame[begin:end])
        time.sleep(0.05)  # the reader waits for all of what must follow at least
    stranger.connection.sendall(frame[-1:])
    assert stranger.answer() == (1, 2)


def test_the_bytes_of_one_page_are_not_taken_for_those_of_another(stranger: Stranger, store: MemfdStore) -> None:
    two, three = stranger.frame(2, 7), stranger.frame(3, 8)
    stranger.connection.sendall(two[:PAGE_FRAME_BYTES] + three[PAGE_FRAME_BYTES:])
    assert "came changed" in until(lambda: stranger.reader.poll(0.0))[0].reason


def test_pieces_travel_under_a_cluster_key(reader: TcpReader, store: MemfdStore) -> None:
    ours = replace(GEOMETRY, page_size=2 * GEOMETRY.page_size)
    source = MemfdStore(NUM_PAGES, ours)
    writer = TcpWriter(source, key=KEY)
    try:
        join(writer, reader)
        reader.allow(PREFILL, 1, [3, 4])
        half = SIZE // 2
        source.memory[: 2 * SIZE] = b"a" * half + b"b" * half + b"c" * half + b"d" * half  # keys, then values
        for target, piece in zip((3, 4), Fit(ours, GEOMETRY).pieces, strict=True):
            writer.write(DECODE, [(0, target)], piece)
        done: list[int] = []
        until(lambda: done.extend(writer.done()) or len(done) == 2)
        assert store.read(3) == b"a" * half + b"c" * half
        assert store.read(4) == b"b" * half + b"d" * half
    finally:
        writer.close()
        source.close()


def test_parts_of_a_page_are_authenticated_each_for_itself(stranger: Stranger) -> None:
    first, second = Box(0, 1, 0, 1, 0, 1), Box(0, 1, 0, 1, 1, 1)
    stranger.part(2, 7, first)
    assert stranger.answer() == (1, 2)
    size = second.num_bytes(GEOMETRY)
    frame, other = (stranger.frame(2, value, size=size, box=second) for value in (8, 9))
    stranger.connection.sendall(frame[:-MAC_BYTES] + other[-MAC_BYTES:])
    assert "came changed" in until(lambda: stranger.reader.poll(0.0))[0].reason


@pytest.mark.parametrize(
    "num_bytes", [0, 1, PAGE_FRAME_BYTES - 1, PAGE_FRAME_BYTES, PAGE_FRAME_BYTES + 5, -MAC_BYTES, -1]
)
def test_a_connection_that_is_cut_anywhere_is_a_fence(stranger: Stranger, num_bytes: int) -> None:
    stranger.connection.sendall(stranger.frame(2, 7)[:num_bytes])
    stranger.connection.close()
    assert [(f.peer, f.epoch) for f in until(lambda: stranger.reader.poll(0.0))] == [(PREFILL, 1)]


@settings(max_examples=40, deadline=None)
@given(noise=st.binary(min_size=PAGE_FRAME_BYTES, max_size=300))
def test_noise_inside_ends_the_connection_and_touches_no_page(noise: bytes) -> None:
    store = MemfdStore(NUM_PAGES)
    reader = TcpReader(store, key=KEY, num_connections=1)
    stranger = Stranger(reader)
    try:
        assert len(stranger.shake(offer(reader))) == 32
        reader.allow(PREFILL, 1, range(NUM_PAGES))
        stranger.connection.sendall(noise)
        assert until(lambda: reader.poll(0.0))
        assert set(store.memory[:]) == {0}
    finally:
        stranger.connection.close()
        reader.close()
        store.close()


# ---- the writer -------------------------------------------------------------------------------------------------


def test_a_writer_tells_who_cannot_be_reached(writer: TcpWriter) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    listener.close()
    connect = Connect("decode-0", "model", 1, to_message(GEOMETRY), NUM_PAGES, "tcp", f"127.0.0.1:{port}:{'0' * 64}:2")
    writer.attach(DECODE, connect)
    [attached] = until(writer.poll)
    assert attached.problem == (
        f"the tcp connection to decode node decode-0 at 127.0.0.1 port {port} could not be made: Connection refused"
    )
    assert writer.detach(DECODE)


def test_a_writer_gives_up_on_a_reader_that_never_answers(writer: TcpWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_writer, "ATTACH_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}:{'0' * 64}:2"
        writer.attach(DECODE, Connect("decode-0", "model", 1, to_message(GEOMETRY), NUM_PAGES, "tcp", endpoint))
        [attached] = until(writer.poll)
    assert "did not answer within" in attached.problem


@pytest.mark.parametrize("noise", [b"", b"x", bytes(WELCOME.size), b"y" * 500])
def test_a_writer_believes_no_reader_without_the_key(writer: TcpWriter, noise: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}:{'0' * 64}:1"
        writer.attach(DECODE, Connect("decode-0", "model", 1, to_message(GEOMETRY), NUM_PAGES, "tcp", endpoint))
        connection, _ = listener.accept()
        with connection:
            connection.sendall(noise)
            connection.shutdown(socket.SHUT_WR)
            [attached] = until(writer.poll)
    assert "cluster key" in attached.problem


@pytest.mark.parametrize(
    "answer", [DONE.pack(b"done", 1, 3, 1), DONE.pack(b"done", 1, 4, 0), DONE.pack(b"page", 1, 3, 0)]
)
def test_a_writer_believes_no_acknowledgement_but_the_next(writer: TcpWriter, answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}:{'0' * 64}:1"
        writer.attach(DECODE, Connect("decode-0", "model", 1, to_message(GEOMETRY), NUM_PAGES, "tcp", endpoint))
        connection, _ = listener.accept()
    with connection:
        writer.poll()
        nonce = HELLO.unpack(connection.recv(HELLO.size, socket.MSG_WAITALL))[-1]
        terms = Terms(MAGIC, bytes(32), 0, 1, 1, SIZE, NUM_PAGES, nonce, b"r" * 32)
        connection.sendall(WELCOME.pack(b"r" * 32, terms.proof(KEY, b"reader")))
        until(lambda: writer.poll() or select.select([connection], [], [], 0)[0])
        connection.recv(32, socket.MSG_WAITALL)
        connection.sendall(terms.proof(KEY, b"let in"))
        assert until(writer.poll) == [Attached(DECODE, 1)]
        writer.write(DECODE, [(0, 3)])
        connection.sendall(answer + terms.seal(KEY, b"acknowledgements").mac(answer))
        [attached] = until(writer.poll)
        assert "acknowledge" in attached.problem
        assert writer.done() == []
        writer.detach(DECODE)


def test_a_cut_connection_is_noticed_at_both_ends_and_the_pair_forms_anew(
    reader: TcpReader, writer: TcpWriter, store: MemfdStore
) -> None:
    join(writer, reader)
    next(iter(writer._routes.values())).lanes[1].connection.shutdown(socket.SHUT_RDWR)
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


def test_detaching_ends_all_that_is_under_way(reader: TcpReader, writer: TcpWriter, store: MemfdStore) -> None:
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
    assert select.select(writer.files(), [], [], 5)[0] == list(writer.files())
    assert until(writer.done) == [1]
    writer.detach(DECODE)
    assert select.select(reader.files(), [], [], 5)[0] == list(reader.files())


def test_a_port_that_is_taken_is_refused_with_the_flag_named(reader: TcpReader, store: MemfdStore) -> None:
    with pytest.raises(ConfigError, match="--data-interface"):
        TcpReader(store, port=reader.port)
    with pytest.raises(ConfigError, match="--data-interface"):
        TcpReader(store, host="203.0.113.7")


# ---- with the sessions on top -----------------------------------------------------------------------------------


class Node:
    """Both roles' endpoints, joined by queues that deliver at once."""

    def __init__(self, reader: TcpReader, writer: TcpWriter) -> None:
        self.books = PageBooks(NUM_PAGES)
        self.sender = Sender(writer, digest="model")
        self.receiver = Receiver(reader, self.books, name="decode-0", digest="model")
        self.events: list[Any] = []
        self.released: list[Any] = []

    def connect(self) -> None:
        self.sender.on_message(DECODE, self.receiver.connect(PREFILL), 0.0)
        until(lambda: self.turn() or self.receiver.is_connected(PREFILL))

    def turn(self) -> None:
        self.receiver.poll(time.monotonic())
        self.sender.pump(time.monotonic())
        messages, released = self.sender.take()
        self.released += released
        for _, message in messages:
            self.receiver.on_message(PREFILL, message, time.monotonic())
        replies, events = self.receiver.take()
        self.events += events
        for _, message in replies:
            self.sender.on_message(DECODE, message, time.monotonic())
        self.sender.check()
        self.receiver.check()
        self.books.check()


def test_a_whole_transfer_over_tcp(reader: TcpReader, writer: TcpWriter, store: MemfdStore) -> None:
    node, key = Node(reader, writer), ("r", 0)
    node.connect()
    pages = node.books.alloc(3, Owner.GRANT)
    assert pages is not None and isinstance(writer.store, MemfdStore)
    node.receiver.begin(key, PREFILL, first=1, pages=pages, num_tokens=15)
    node.sender.open(key, DECODE)
    for index in range(4):
        writer.store.fill(index, content(key, index))
    node.sender.finish(key, Handoff("r", 0, 15, 9), [0, 1, 2, 3])
    until(lambda: node.turn() or (node.events and node.released))
    assert node.events == [Completed(key, Handoff("r", 0, 15, 9), tuple(pages))]
    assert [release.ok for release in node.released] == [True]
    assert [set(store.read(page)) for page in pages] == [{content(key, index)} for index in (1, 2, 3)]
    node.books.free(pages, Owner.GRANT)
    node.sender.close()


def test_pages_come_back_at_once_when_the_peer_is_lost(reader: TcpReader, writer: TcpWriter, store: MemfdStore) -> None:
    node, key = Node(reader, writer), ("r", 0)
    node.connect()
    pages = node.books.alloc(2, Owner.GRANT)
    assert pages is not None
    node.receiver.begin(key, PREFILL, first=0, pages=pages, num_tokens=7)
    node.turn()
    node.receiver.peer_lost(PREFILL)
    assert node.books.count(Owner.QUARANTINE) == 2
    node.receiver.poll(0.0)  # no word of the writer's
    assert node.books.num_free == NUM_PAGES
    assert isinstance(node.receiver.take()[1][0], TransferFailed)
    node.sender.close()


def cut(writer: TcpWriter) -> None:
    for route in writer._routes.values():
        route.lanes[0].connection.shutdown(socket.SHUT_RDWR)


def test_a_cut_connection_is_mended_and_its_transfers_go_on(
    reader: TcpReader, writer: TcpWriter, store: MemfdStore
) -> None:
    node, key = Node(reader, writer), ("r", 0)
    node.connect()
    pages = node.books.alloc(3, Owner.GRANT)
    assert pages is not None and isinstance(writer.store, MemfdStore)
    for index in range(3):
        writer.store.fill(index, content(key, index))
    node.sender.open(key, DECODE)
    node.receiver.begin(key, PREFILL, first=0, pages=pages, num_tokens=11)
    node.sender.computed(key, [0])
    until(lambda: node.turn() or node.receiver.counters()["pages_received"] == 1)
    cut(writer)
    until(lambda: node.turn() or not node.receiver.is_connected(PREFILL))
    node.sender.finish(key, Handoff("r", 0, 11, 9), [0, 1, 2])
    until(lambda: node.turn() or (node.released and node.events))
    assert node.events == [Completed(key, Handoff("r", 0, 11, 9), tuple(pages))]
    assert [set(store.read(page)) for page in pages] == [{content(key, index)} for index in range(3)]
    assert node.receiver.counters()["reconnects"] == node.sender.counters()["broken_pairs"] == 1
    assert node.sender.counters()["pages_sent"] == 3
    node.sender.close()


def test_a_connection_that_is_cut_again_and_again_ends_its_transfers_with_pair_and_transport_named(
    reader: TcpReader, writer: TcpWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "BACKOFF_S", 0.01)
    node, key = Node(reader, writer), ("r", 0)
    node.connect()
    pages = node.books.alloc(2, Owner.GRANT)
    assert pages is not None
    node.sender.open(key, DECODE)
    node.receiver.begin(key, PREFILL, first=0, pages=pages, num_tokens=7)

    def turn() -> bool:
        node.turn()
        if node.receiver.is_connected(PREFILL):
            cut(writer)
        return bool(node.events)

    until(turn)
    failed, lost = node.events
    assert isinstance(failed, TransferFailed) and isinstance(lost, PairLost)
    assert failed.code is ErrorCode.TRANSFER_FAILED
    assert failed.message.startswith("tcp from prefill node pppppppp to decode node decode-0 broke and could not be")
    assert "in 4 tries" in failed.message
    assert node.receiver.counters()["reconnects"] == 4
    assert node.books.num_free == NUM_PAGES
    node.sender.peer_lost(DECODE)  # the role hangs up
    node.turn()
    assert [release.ok for release in node.released] == [False]
    node.connect()
    node.sender.close()
