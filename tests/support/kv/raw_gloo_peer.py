"""Readers and writers of Gloo in this process, and a peer with valid token and key that sends frames by hand."""

import threading

import torch
from support.kv.kv_fakes import DECODE, LAYOUT, PREFILL
from support.kv.raw_tcp_peer import KEY, NUM_PAGES, SIZE, RawTcpPeer
from support.waiting import until

from common.wire.messages import Connect, LayoutMessage
from kv_transfer.transports.base import Attached
from kv_transfer.transports.tcp.protocol import MAC_BYTES, PAGE_FRAME_BYTES, AuthenticatedConnection
from kv_transfer.transports.torch_distributed import GroupReader, GroupWriter
from kv_transfer.transports.torch_distributed.backend import Group, Pages
from kv_transfer.transports.torch_distributed.rendezvous import WRITER, form


def offer(reader: GroupReader, epoch: int = 1) -> Connect:
    layout, endpoint = LayoutMessage.of(LAYOUT), reader.offer(PREFILL, epoch)
    return Connect("decode-0", "model", epoch, layout, NUM_PAGES, "gloo", endpoint)


def attach(writer: GroupWriter, reader: GroupReader, epoch: int = 1) -> None:
    writer.attach(DECODE, offer(reader, epoch))
    assert until(lambda: reader.poll(0.0) or writer.poll()) == [Attached(DECODE, epoch)]
    assert reader.chosen(PREFILL, epoch, "gloo")


class RawGlooPeer(RawTcpPeer):
    """A peer that joins a group with valid token and key, and then sends the frames that a test gives it."""

    group: Group

    def authenticated(self, connect: Connect) -> AuthenticatedConnection:
        assert len(self.handshake(connect)) == 32
        assert self.terms is not None
        return AuthenticatedConnection(self.connection, self.terms, KEY)

    def join(self, connect: Connect, pages: Pages) -> None:
        self.group = form(self.authenticated(connect), "gloo", WRITER, pages)
        self.connection.settimeout(60)

    def announce(self, page: int, value: int) -> None:
        frame = self.frame(page, value)
        self.connection.sendall(frame[:PAGE_FRAME_BYTES] + frame[-MAC_BYTES:])  # the bytes of the page go through Gloo
        self.num_sent += 1

    def send(self, page: int, value: int, changed: int | None = None) -> None:
        """Announce a page and send it, with the byte at index ``changed`` flipped."""
        self.announce(page, value)
        data = torch.full((SIZE,), value, dtype=torch.uint8)
        if changed is not None:
            data[changed] ^= 1
        self.group.wait(self.group.send(data))


def threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]
