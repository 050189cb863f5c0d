"""Frames of the Gloo rendezvous that are lost, repeated, swapped, cut, changed or invented on the way.

No group forms from frames that the peer did not send, and the next group forms. The node under test runs in its own
process, with a cluster key, because Gloo may abort a process. The other end is a real one in this process, and the
test relays its frames.
"""

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from itertools import count

import msgspec
import pytest
from hypothesis import example, given, settings
from support.examples import examples
from support.kv.frame_damage import Change, changes, mangled
from support.kv.kv_fakes import DECODE, PREFILL, MemfdStore
from support.kv.raw_tcp_peer import KEY
from support.kv.transport_ends import End, digests, ship, try_to_join
from support.service.fork_server import ForkServer
from support.waiting import until

from common.wire.messages import Connect
from kv_transfer.transports.tcp.protocol import HELLO, MAC_BYTES, WELCOME, AuthenticatedConnection, Terms
from kv_transfer.transports.torch_distributed import rendezvous
from kv_transfer.transports.torch_distributed.backend import Group, Pages
from kv_transfer.transports.torch_distributed.reader import magic_of
from kv_transfer.transports.torch_distributed.rendezvous import HEADER, MADE_MAGIC, READER, WRITER, form

epochs = count(1)


@pytest.fixture(scope="module")
def ends(fork_server: ForkServer) -> Iterator[tuple[End, End]]:
    words = ("gloo", KEY.decode())
    ends = (
        End(fork_server, "writer", *words, TEST_PATIENCE_S="30"),
        End(fork_server, "reader", *words, TEST_PATIENCE_S="30"),
    )
    yield ends
    for end in ends:
        end.close()


def exactly(connection: socket.socket, size: int) -> bytes:
    data = connection.recv(size, socket.MSG_WAITALL)
    assert len(data) == size, "the peer closed the connection"
    return data


class Relay:
    """Forms a group over a connection that changes frames. ``group`` is None unless it has formed."""

    def __init__(self, authenticated: AuthenticatedConnection, rank: int, changes: list[Change]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.inner = socket.create_connection(listener.getsockname())
            self.outer, _ = listener.accept()
        self.authenticated = authenticated
        self.group: Group | None = None
        self._store = MemfdStore(1)
        self._threads = [
            threading.Thread(target=self._form, args=(rank,)),
            threading.Thread(target=self._carry_back),
        ]
        for thread in self._threads:
            thread.start()
        header = exactly(self.outer, HEADER.size)
        _, key_bytes, value_bytes = HEADER.unpack(header)
        entry = header + exactly(self.outer, MAC_BYTES + key_bytes + value_bytes)
        header = HEADER.pack(MADE_MAGIC, 0, 0)
        made = header + authenticated.seal(b"rendezvous " + (b"writer", b"reader")[rank]).mac(header)
        self.meant, self.said = entry + made, b"".join(mangled([entry, made], changes))
        with contextlib.suppress(OSError):
            authenticated.connection.sendall(self.said)
            if len(self.said) < len(self.meant):  # otherwise the peer has enough bytes to reject
                authenticated.connection.shutdown(socket.SHUT_WR)

    def _form(self, rank: int) -> None:
        with contextlib.suppress(OSError):
            authenticated = AuthenticatedConnection(self.inner, self.authenticated.terms, self.authenticated.key)
            self.group = form(authenticated, "gloo", rank, Pages(self._store, "gloo"))

    def _carry_back(self) -> None:
        with contextlib.suppress(OSError):
            while data := self.authenticated.connection.recv(4096):
                self.outer.sendall(data)
        with contextlib.suppress(OSError):
            self.outer.shutdown(socket.SHUT_RDWR)

    def end(self) -> bool:
        """Close everything once the outcome is known. Return whether a group has formed."""
        self._threads[0].join(60)
        assert not self._threads[0].is_alive()
        for connection in (self.authenticated.connection, self.outer, self.inner):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self._threads[1].join(60)
        if self.group is not None:
            self.group.close()
        return self.group is not None


def terms(connect: Connect, token: bytes, nonces: tuple[bytes, bytes]) -> Terms:
    size = connect.layout.layout().page_bytes
    return Terms(magic_of("gloo"), token, 0, 1, connect.epoch, size, connect.num_pages, *nonces)


def as_writer(connect: Connect) -> AuthenticatedConnection:
    """Perform the writer's handshake with the reader of this offer."""
    host, port, token, _ = json.loads(connect.endpoint)["gloo"].split(":")
    connection = socket.create_connection((host, int(port)), 10)
    connection.sendall(HELLO.pack(magic_of("gloo"), 0, 1, bytes.fromhex(token), b"n" * 32))
    nonce, _ = WELCOME.unpack(exactly(connection, WELCOME.size))
    agreed = terms(connect, bytes.fromhex(token), (b"n" * 32, nonce))
    connection.sendall(agreed.proof(KEY, b"writer"))
    exactly(connection, 32)
    connection.settimeout(None)
    return AuthenticatedConnection(connection, agreed, KEY)


def as_reader(writer: End, connect: Connect) -> AuthenticatedConnection:
    """Have the writer attach to a socket of this test, and perform the reader's handshake."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = json.dumps({"gloo": f"127.0.0.1:{listener.getsockname()[1]}:{'0' * 64}:1"})
        offer = msgspec.json.encode(msgspec.structs.replace(connect, endpoint=endpoint)).decode()
        assert writer.ask("attach", peer=DECODE, connect=offer) == ""
        connection, _ = listener.accept()
    nonce = HELLO.unpack(exactly(connection, HELLO.size))[-1]
    agreed = terms(connect, bytes(32), (nonce, b"r" * 32))
    connection.sendall(WELCOME.pack(b"r" * 32, agreed.proof(KEY, b"reader")))
    exactly(connection, 32)
    connection.sendall(agreed.proof(KEY, b"accepted"))
    return AuthenticatedConnection(connection, agreed, KEY)


def join_soon(writer: End, reader: End) -> int:
    """Form a group; return its epoch.

    Gloo dials the port of a group that did not form a few times more. By then another group's end may listen there,
    which does not form either; so nodes try again, and one more attempt may be needed here.
    """
    problems = []
    for _ in range(3):
        epoch = next(epochs)
        ((_, _, problem, _),) = try_to_join(writer, reader, epoch)
        if not problem:
            assert reader.ask("chosen", peer=PREFILL, epoch=epoch, transport="gloo")
            return epoch
        problems.append(problem)
        until(lambda: writer.ask("detach", peer=DECODE))
    raise AssertionError(f"no group formed: {problems}")


@pytest.mark.slow(sample=0.5)
@pytest.mark.parametrize("rank", [WRITER, READER], ids=["to the reader", "to the writer"])
def test_damaged_frames_form_no_group_and_the_next_group_forms(
    ends: tuple[End, End], rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "FORM_S", 30.0)
    writer, reader = ends
    formed: list[bool] = []

    @settings(max_examples=examples(25), deadline=None)
    @example(changes=[("repeat", 0, 0), ("lose", 0, 0)])  # no change
    @example(changes=[("flip", 0, HEADER.size)])  # the MACs of the address and of the last frame
    @example(changes=[("flip", 1, HEADER.size)])
    @given(changes=changes)
    def run(changes: list[Change]) -> None:
        epoch = next(epochs)
        connect = msgspec.json.decode(reader.ask("offer", peer=PREFILL, epoch=epoch), type=Connect)
        relay = Relay(as_writer(connect) if rank == WRITER else as_reader(writer, connect), rank, changes)
        has_formed = relay.end()
        formed.append(has_formed)
        assert has_formed or relay.said != relay.meant, "no group formed although nothing was changed"
        assert not has_formed or relay.said.startswith(relay.meant), "a group formed from frames that were not sent"
        if rank == WRITER:
            assert reader.ask("chosen", peer=PREFILL, epoch=epoch, transport="gloo")
            assert until(lambda: reader.ask("news"))[0][:2] == [PREFILL, epoch]
        else:
            until(lambda: writer.ask("news"))
        until(lambda: writer.ask("detach", peer=DECODE))
        writer.ask("news")
        epoch = join_soon(writer, reader)
        ship(writer, reader, [(epoch, 0, 1)], epoch)
        assert reader.ask("digest", pages=[1]) == digests(epoch)
        until(lambda: writer.ask("detach", peer=DECODE))
        until(lambda: reader.ask("news"))

    run()
    assert any(formed) and not all(formed), "the examples covered only one of the two outcomes"
