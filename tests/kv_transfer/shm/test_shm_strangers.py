"""Refused connections to a pool in shared memory: wrong offers, other users, impossible pools, random packets."""

import contextlib
import os
import platform
import secrets
import socket
import threading
from typing import Any

import msgspec
import pytest
from support.kv.kv_fakes import DECODE, LAYOUT, PREFILL, MemfdStore
from support.kv.shm_ends import NUM_PAGES, WriterProcess, attach, offer, open_descriptors

from common.errors import ConfigError
from common.wire.messages import Connect, LayoutMessage
from kv_transfer.transports import pending_connections as visitors
from kv_transfer.transports.shm import ShmReader, ShmWriter
from kv_transfer.transports.shm import protocol as shm_protocol

# ---- offers and pools --------------------------------------------------------------------------------------------


def test_an_offer_is_valid_once_per_pool(reader: ShmReader, writer: ShmWriter) -> None:
    connect = offer(reader)
    assert attach(reader, writer, connect) == ""
    second = ShmWriter(writer.store)
    assert "would not hand over its pool" in attach(reader, second, connect)
    second.close()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"endpoint": "baton-" + "0" * 32 + ":" + "0" * 64}, "is not on the host of this prefill node"),
        ({"endpoint": "/etc/passwd"}, "is not one of shared memory"),
        ({"endpoint": ""}, "is not one of shared memory"),
        ({"epoch": 2}, "over its socket differ"),
        ({"num_pages": NUM_PAGES + 1}, "over its socket differ"),
        ({"num_pages": 2**50}, "over its socket differ"),
    ],
    ids=["other host", "path", "empty", "other epoch", "other size", "huge"],
)
def test_a_wrong_offer_is_refused_with_an_explanation(
    reader: ShmReader, writer: ShmWriter, change: dict[str, Any], sentence: str
) -> None:
    assert sentence in attach(reader, writer, msgspec.structs.replace(offer(reader), **change))


def test_a_writer_with_a_wrong_token_is_refused(reader: ShmReader, writer: ShmWriter) -> None:
    connect = offer(reader)
    name = connect.endpoint.split(":")[0]
    wrong = msgspec.structs.replace(connect, endpoint=f"{name}:{'0' * 64}")
    assert "would not hand over its pool" in attach(reader, writer, wrong)
    assert reader._pending.dropped == {"token": 1}
    writer.detach(DECODE)
    assert attach(reader, writer, connect) == ""  # the writer's own token is still valid


def test_a_token_with_extra_bytes_is_refused(reader: ShmReader) -> None:
    token = bytes.fromhex(offer(reader).endpoint.split(":")[1])
    with _visit(reader) as pending:
        pending.send(token + b"!")
        reader.poll(0.0)
        assert pending.recv(100) == b""
    assert reader._pending.dropped == {"token": 1}


def test_an_offer_of_an_earlier_start_of_the_decode_node_is_refused(reader: ShmReader, writer: ShmWriter) -> None:
    assert "over its socket differ" in attach(reader, writer, offer(reader), peer="e" * 32)


def test_a_withdrawn_offer_is_void(reader: ShmReader, writer: ShmWriter) -> None:
    connect = offer(reader)
    reader.withdraw(PREFILL)
    assert "would not hand over its pool" in attach(reader, writer, connect)


def test_a_pool_whose_size_differs_from_the_offer_is_not_mapped(store: MemfdStore, writer: ShmWriter) -> None:
    reader = ShmReader(store, DECODE)
    small = MemfdStore(NUM_PAGES - 1)
    store.fd, right = small.fd, store.fd
    assert "is 448 bytes long, its pages have 512" in attach(reader, writer, offer(reader))
    store.fd = right
    small.close()
    reader.close()


def test_an_offer_of_more_bytes_than_an_address_can_have_is_refused(reader: ShmReader, writer: ShmWriter) -> None:
    connect = msgspec.structs.replace(offer(reader), num_pages=2**63)
    assert "over its socket differ" in attach(reader, writer, connect)


def test_a_pool_whose_file_has_another_size_is_refused_at_start(store: MemfdStore) -> None:
    store.num_pages += 1
    with pytest.raises(ConfigError, match="the file of the KV pool has 512 bytes, its pages need 576"):
        ShmReader(store, DECODE)


def test_a_mapped_pool_cannot_be_truncated(reader: ShmReader, store: MemfdStore) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(store.fd, 64)


@pytest.mark.skipif(os.geteuid() != 0 or platform.machine() != "x86_64", reason="becomes another user by system call")
def test_a_writer_of_another_user_is_refused(child: WriterProcess, reader: ShmReader) -> None:
    connect = offer(reader)
    child.ask(do="setuid", uid=65_534)
    assert child.attach(reader, connect) == "decode-0 runs as another user than this prefill node"
    pending = _as_nobody(lambda: _visit(reader))
    pending.send(bytes.fromhex(connect.endpoint.split(":")[1]))
    reader.poll(0.0)
    assert reader._pending.dropped == {"user": 2}
    with pytest.raises(ConnectionResetError):
        pending.recv(100)
    pending.close()


def _as_nobody(act: Any) -> Any:
    """Run ``act`` in a thread with another effective user."""
    result = []

    def run() -> None:
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.syscall(117, -1, 65_534, -1) == 0  # setresuid for this thread only
        result.append(act())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return result[0]


# ---- unknown peers -----------------------------------------------------------------------------------------------


def _visit(reader: ShmReader) -> socket.socket:
    pending = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pending.settimeout(60)
    pending.connect(f"\0{reader._name}")
    return pending


@pytest.mark.parametrize("garbage", [b"x", b"detached", b"\0" * 31, b"\0" * 33, b"\xff" * 60_000], ids=len)
def test_random_packets_are_rejected(reader: ShmReader, writer: ShmWriter, garbage: bytes) -> None:
    num_before = open_descriptors()
    with _visit(reader) as pending:
        socket.send_fds(pending, [garbage], [0, 1, 2])
        assert reader.poll(0.0) == []
        with contextlib.suppress(ConnectionResetError):
            assert pending.recv(100) == b""
    assert open_descriptors() <= num_before
    assert attach(reader, writer, offer(reader)) == ""


def test_silent_connections_are_limited_in_time_and_number(reader: ShmReader, writer: ShmWriter) -> None:
    num_before = open_descriptors()
    crowd = [_visit(reader) for _ in range(visitors.MAX_PENDING + 5)]
    reader.poll(0.0)
    reader.poll(0.0)
    assert reader._pending.dropped == {"crowded": 5}
    assert len(reader._pending) == visitors.MAX_PENDING
    assert attach(reader, writer, offer(reader)) == ""
    writer.detach(DECODE)
    reader.poll(visitors.PATIENCE_S)
    assert len(reader._pending) == 0
    for pending in crowd:
        pending.close()
    reader.poll(visitors.PATIENCE_S)
    assert open_descriptors() <= num_before


def test_a_writer_refuses_an_invalid_hello(writer: ShmWriter) -> None:
    name = f"baton-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0{name}")
    listener.listen(8)
    connect = Connect("decode-0", "model", 1, LayoutMessage.of(LAYOUT), NUM_PAGES, "shm", f"{name}:{'0' * 64}")
    hello = shm_protocol.HELLO.pack(shm_protocol.MAGIC, 1, LAYOUT.pool_bytes(NUM_PAGES), DECODE.encode())
    num_before = open_descriptors()
    directory = os.open("/", os.O_RDONLY)
    for frame, files, sentence in [
        (b"hello", [], "over its socket differ"),
        (hello, [], "as one file"),
        (hello, [directory, directory], "as one file"),
        (hello + b"!", [directory], "as one file"),
        (b"!" + hello, [directory], "over its socket differ"),
        (hello, [directory], "bytes long"),
        (b"", [], "would not hand over"),
    ]:
        writer.attach(DECODE, connect)
        pending, _ = listener.accept()
        assert pending.recv(100) == b"\0" * 32
        if frame:
            socket.send_fds(pending, [frame], files)
        else:
            pending.close()
        (news,) = writer.poll()
        assert sentence in news.problem
        pending.close()
    os.close(directory)
    assert open_descriptors() <= num_before
    listener.close()
