"""A reader and a writer of TCP in this process, and a peer that sends frames by hand."""

import select
import socket
import time
from typing import Any, ClassVar

from support.kv.kv_fakes import DECODE, LAYOUT, PREFILL
from support.waiting import until

from common.wire.messages import Connect, LayoutMessage
from kv_transfer.page_slices import PageSlice, whole
from kv_transfer.transports.base import Attached
from kv_transfer.transports.tcp import TcpReader, TcpWriter
from kv_transfer.transports.tcp.protocol import DONE, DONE_FRAME_BYTES, HELLO, MAGIC, PAGE, WELCOME, Terms

NUM_PAGES = 8
SIZE = LAYOUT.page_bytes
WHOLE = whole(LAYOUT)
KEY = b"the cluster's key"


def offer(reader: TcpReader, epoch: int = 1) -> Connect:
    return Connect("decode-0", "model", epoch, LayoutMessage.of(LAYOUT), NUM_PAGES, "tcp", reader.offer(PREFILL, epoch))


def join(writer: TcpWriter, reader: TcpReader, epoch: int = 1) -> None:
    writer.attach(DECODE, offer(reader, epoch))
    assert until(lambda: reader.poll(0.0) or writer.poll()) == [Attached(DECODE, epoch)]
    assert reader.chosen(PREFILL, epoch, "tcp")


class RawTcpPeer:
    """A peer that makes the handshake of a writer, and then sends the frames that a test gives it."""

    open_peers: ClassVar[list["RawTcpPeer"]] = []

    def __init__(self, reader: TcpReader) -> None:
        self.reader = reader
        self.open_peers.append(self)
        self.connection = socket.create_connection(("127.0.0.1", reader._port))
        self.connection.settimeout(60)
        self.terms: Terms | None = None
        self.num_sent = 0

    def hello(self, token: bytes, index: int = 0, count: int = 1, magic: bytes = MAGIC) -> None:
        self.connection.sendall(HELLO.pack(magic, index, count, token, b"n" * 32))

    def handshake(self, connect: Connect, *, key: bytes = KEY) -> bytes:
        """Make the whole handshake; return the last frame, empty if the reader closed the connection."""
        _, _, token, count = connect.endpoint.split(":")
        self.hello(bytes.fromhex(token), 0, int(count), self.reader.magic)
        nonce, _ = WELCOME.unpack(self.receive(WELCOME.size))
        self.terms = Terms(
            self.reader.magic, bytes.fromhex(token), 0, int(count), connect.epoch, SIZE, NUM_PAGES, b"n" * 32, nonce
        )
        self.connection.sendall(self.terms.proof(key, b"writer"))
        return self.receive(32)

    def turn(self) -> None:
        """Give the reader time to receive it."""
        for _ in range(5):
            self.reader.poll(0.0)
            time.sleep(0.002)

    def receive(self, size: int) -> bytes:
        """Receive so many bytes while the reader has its turns; fewer if the reader closes the connection."""
        data = b""
        try:
            while len(data) < size and until(self._has_answer) and (more := self.connection.recv(size - len(data))):
                data += more
        except ConnectionResetError:
            return b""
        return data

    def _has_answer(self) -> bool:
        if select.select([self.connection], [], [], 0)[0]:
            return True
        self.reader.poll(0.0)
        return False

    def header(
        self,
        page: int,
        *,
        number: int | None = None,
        size: int = SIZE,
        magic: bytes = b"page",
        page_slice: PageSlice = WHOLE,
    ) -> bytes:
        assert self.terms is not None
        header = PAGE.pack(magic, size, page, self.num_sent if number is None else number, *page_slice[:4])
        return header + self.terms.seal(KEY, b"pages").mac(header)

    def frame(self, page: int, value: int, *, size: int = SIZE, **words: Any) -> bytes:
        """Return a header, the bytes of a page or slice, and the MAC of both."""
        assert self.terms is not None
        header, data = self.header(page, size=size, **words), bytes([value]) * size
        body = self.terms.seal(KEY, b"pages").body(header)
        assert body is not None
        body.add(memoryview(data))
        return header + data + body.mac()

    def page(self, page: int, value: int, **words: Any) -> None:
        self.connection.sendall(self.frame(page, value, **words))
        self.num_sent += 1

    def part(self, page: int, value: int, page_slice: PageSlice) -> None:
        self.page(page, value, size=page_slice.num_bytes(LAYOUT), page_slice=page_slice)

    def answer(self) -> tuple[int, int] | None:
        """Return (is placed, page) of the next acknowledgement; None if the reader closed the connection."""
        frame = self.receive(DONE_FRAME_BYTES)
        if not frame:
            return None
        _, is_placed, page, _ = DONE.unpack(frame[: DONE.size])
        return is_placed, page

    def is_hung_up(self) -> bool:
        return self.receive(1) == b""
