"""A decode node without free file descriptors: it accepts no connection, does not spin, and recovers later."""

import contextlib
import logging
import os
import resource
import select
import socket
from collections.abc import Callable, Iterator

import pytest
from support.kv.kv_fakes import MemfdStore

from kv_transfer.transports.pending_connections import PAUSE_S
from kv_transfer.transports.shm import ShmReader
from kv_transfer.transports.tcp import TcpReader


def open_shm(store: MemfdStore) -> tuple[ShmReader, Callable[[], socket.socket]]:
    reader = ShmReader(store)

    def visit() -> socket.socket:
        pending = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pending.connect(f"\0{reader._name}")
        return pending

    return reader, visit


def open_tcp(store: MemfdStore) -> tuple[TcpReader, Callable[[], socket.socket]]:
    reader = TcpReader(store)
    return reader, lambda: socket.create_connection(("127.0.0.1", reader._port))


@contextlib.contextmanager
def no_descriptors_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    hoard: list[int] = []
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
        with contextlib.suppress(OSError):
            while True:
                hoard.append(os.dup(1))
        yield
    finally:
        for descriptor in hoard:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("open_reader", [open_shm, open_tcp])
def test_a_listener_pauses_while_there_are_no_descriptors(
    open_reader: Callable[[MemfdStore], tuple[ShmReader | TcpReader, Callable[[], socket.socket]]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = MemfdStore(4)
    reader, visit = open_reader(store)
    with contextlib.ExitStack() as stack:
        stack.callback(store.close)
        stack.callback(reader.close)
        stack.enter_context(visit())
        with no_descriptors_left(), caplog.at_level(logging.ERROR):
            for now in (0.0, PAUSE_S, PAUSE_S + 0.1):
                reader.poll(now)
                assert bool(select.select(reader.files(), [], [], 0)[0]) is (now == PAUSE_S), (
                    "the listener is not paused as expected"
                )
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        assert "Too many open files" in caplog.text
        reader.poll(2 * PAUSE_S)
        assert len(reader._pending) == 0
        for now in (2 * PAUSE_S + 0.1, 2 * PAUSE_S + 0.2):
            reader.poll(now)
        assert len(reader._pending) == 1
