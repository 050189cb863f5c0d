"""The receiver in C: what wakes it up, what it keeps until then, and that no connection gets another's bytes."""

import asyncio
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from load_line import Line

from scripts.load.receiver import MAX_BYTES, MAX_PIECES, PLACE_DUE, Receiver, ReceivingSelector, find_library

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
TOKEN = b"9\r\ndata: x\n\n\r\n"
LAST = b"0\r\n\r\n"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    if not find_library():
        pytest.skip("no C compiler here")
    made = Receiver(find_library())
    yield made
    assert not made._places, "every connection has been taken out"
    made.close()


def test_only_what_may_be_an_end_wakes_python_up_and_each_piece_is_stamped_when_it_is_read(receiver: Receiver) -> None:
    with Line("C", receiver) as line:
        line.receive(HEAD)
        for _ in range(3):
            line.far.send(TOKEN)
            assert receiver.wait(0.0) == 0
        read_by = time.monotonic()
        assert len(line.exchange.stamps) == 1, "they wait in C"
        time.sleep(0.01)
        line.far.send(LAST)
        assert receiver.wait(-1.0) == PLACE_DUE
        receiver.deliver()
        assert line.ended == [line.exchange]
        *_, third, last = line.exchange.stamps
        assert third <= read_by < read_by + 0.01 <= last <= time.monotonic()


def test_what_nobody_waits_for_wakes_nobody_up_until_somebody_does(receiver: Receiver) -> None:
    with Line("C, later", receiver) as line:
        line.far.send(HEAD + TOKEN)
        assert receiver.wait(0.0) == 0
        receiver.deliver()  # something else woke the process up
        line.connection.hurry()
        line.far.send(TOKEN)
        assert receiver.wait(0.0) == 0, "the body of a chunked response"
        line.far.send(LAST)
        assert receiver.wait(0.0) == PLACE_DUE


@pytest.mark.parametrize("size", [1, 10_000])
def test_a_full_place_wakes_python_up_and_loses_nothing(receiver: Receiver, size: int) -> None:
    with Line("C, later", receiver) as line:
        sent = 0
        while not receiver.wait(0.0):
            sent += line.far.send(b"x" * size)
            assert sent <= min(MAX_BYTES, MAX_PIECES * size) + size
        assert sent > min(MAX_BYTES, MAX_PIECES * size)
        receiver.catch_up()
        receiver.catch_up()
        assert sum(line.exchange.sizes) == sent and not receiver.wait(0.0)


def test_a_connection_that_breaks_is_lost_with_its_error_behind_what_came(receiver: Receiver) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    with Line("C, later", receiver, (near, far)) as line:
        line.far.send(HEAD)
        assert receiver.wait(0.05) == 0
        line.far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        line.far.close()
        assert receiver.wait(1.0) == PLACE_DUE
        receiver.deliver()
        assert line.lost == [line.exchange] and isinstance(line.errors[0], ConnectionResetError)
        assert line.exchange.parts == [HEAD] and line.wire.is_aborted and receiver.wait(0.0) == 0


def test_a_descriptor_that_is_used_again_brings_nobody_the_bytes_of_another(receiver: Receiver) -> None:
    with Line("C", receiver) as first, Line("C", receiver) as second:
        old = second.near.fileno()
        first.far.send(HEAD + LAST)
        second.far.send(HEAD)
        assert receiver.wait(0.0) == PLACE_DUE and len(receiver.marked) == 2, "both have something"
        second.connection.close()
        second.near.close()
        with Line("C", receiver) as third:
            assert old in (third.near.fileno(), third.far.fileno())
            receiver.deliver()
            assert first.ended == [first.exchange]
            assert not second.ended and not second.exchange.parts and not third.exchange.parts
            third.receive(HEAD + TOKEN + LAST)
            assert third.exchange.parts == [HEAD + TOKEN + LAST] and not second.exchange.parts


def test_many_connections_end_in_one_round(receiver: Receiver) -> None:
    with ExitStack() as stack:
        lines = [stack.enter_context(Line("C", receiver)) for _ in range(200)]
        for line in lines:
            line.far.send(HEAD + TOKEN + LAST)
        while receiver.wait(0.0):
            receiver.deliver()
        assert all(line.ended == [line.exchange] for line in lines)
    assert receiver.wait(0.0) == 0


def test_a_loop_with_this_selector_keeps_its_timers_and_descriptors(receiver: Receiver) -> None:
    async def work() -> tuple[float, bytes, int]:
        began_at = time.monotonic()
        await asyncio.sleep(0.02)
        slept_s = time.monotonic() - began_at
        near, far = socket.socketpair()
        with near, far:
            near.setblocking(False)
            asyncio.get_running_loop().call_later(0.01, far.send, b"abc")
            got = await asyncio.get_running_loop().sock_recv(near, 10)
        with Line("C", receiver) as line:
            line.far.send(HEAD + LAST)
            await asyncio.sleep(0.01)
        return slept_s, got, len(line.ended)

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(ReceivingSelector(receiver))) as runner:
        slept_s, got, num_ended = runner.run(work())
    assert 0.02 <= slept_s < 10 and got == b"abc" and num_ended == 1
    with pytest.raises(ValueError):
        receiver._poll.poll(0)  # closed with the loop


def test_without_a_compiler_python_receives_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    find_library.cache_clear()
    try:
        assert [find_library(), find_library()] == ["", ""]
    finally:
        find_library.cache_clear()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no-such-compiler" in caplog.text
