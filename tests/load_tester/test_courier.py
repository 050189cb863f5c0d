"""The courier in C: what wakes it up, what it keeps until then, and that no connection gets another's bytes."""

import asyncio
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.load_line import Line

from scripts.load_tester.client.connection import Connection, Exchange
from scripts.load_tester.client.courier import (
    MAX_BYTES,
    MAX_PIECES,
    PLACE_DUE,
    RING_DUE,
    Courier,
    CourierSelector,
    find_library,
)

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
TOKEN = b"9\r\ndata: x\n\n\r\n"
LAST = b"0\r\n\r\n"
NO_STREAM = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx"
END = b"e\r\ndata: [DONE]\n\n\r\n" + LAST


@pytest.fixture
def courier() -> Iterator[Courier]:
    if not find_library():
        pytest.skip("no C compiler here")
    made = Courier(find_library())
    yield made
    assert not made._places, "every connection has been taken out"
    made.close()


def test_only_what_may_be_an_end_wakes_python_up_and_each_piece_is_stamped_when_it_is_read(courier: Courier) -> None:
    with Line("C", courier) as line:
        line.receive(HEAD)
        for _ in range(3):
            line.far.send(TOKEN)
            assert courier.wait(0.0) == 0
        read_by = time.monotonic()
        assert len(line.exchange.stamps) == 1, "they wait in C"
        time.sleep(0.01)
        line.far.send(LAST)
        assert courier.wait(-1.0) == PLACE_DUE
        courier.deliver()
        assert line.ended == [line.exchange]
        *_, third, last = line.exchange.stamps
        assert third <= read_by < read_by + 0.01 <= last <= time.monotonic()


def test_what_nobody_waits_for_wakes_nobody_up_until_somebody_does(courier: Courier) -> None:
    with Line("C, later", courier) as line:
        line.far.send(HEAD + TOKEN)
        assert courier.wait(0.0) == 0
        courier.deliver()  # something else woke the process up
        line.connection.hurry()
        line.far.send(TOKEN)
        assert courier.wait(0.0) == 0, "the body of a chunked response"
        line.far.send(LAST)
        assert courier.wait(0.0) == PLACE_DUE


@pytest.mark.parametrize("size", [1, 10_000])
def test_a_full_place_wakes_python_up_and_loses_nothing(courier: Courier, size: int) -> None:
    with Line("C, later", courier) as line:
        sent = 0
        while not courier.wait(0.0):
            sent += line.far.send(b"x" * size)
            assert sent <= min(MAX_BYTES, MAX_PIECES * size) + size
        assert sent >= min(MAX_BYTES, MAX_PIECES * size)
        sent += line.far.send(b"x" * size)
        courier.catch_up()
        courier.catch_up()
        assert sum(line.exchange.sizes) == sent and not courier.wait(0.0)


def test_a_connection_that_breaks_is_lost_with_its_error_behind_what_came(courier: Courier) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    with Line("C, later", courier, (near, far)) as line:
        line.far.send(HEAD)
        assert courier.wait(0.05) == 0
        line.far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        line.far.close()
        assert courier.wait(1.0) == PLACE_DUE
        courier.deliver()
        assert line.lost == [line.exchange] and isinstance(line.errors[0], ConnectionResetError)
        assert line.exchange.parts == [HEAD] and line.wire.is_aborted and courier.wait(0.0) == 0


def test_a_descriptor_that_is_used_again_brings_nobody_the_bytes_of_another(courier: Courier) -> None:
    with Line("C", courier) as first, Line("C", courier) as second:
        old = second.near.fileno()
        first.far.send(HEAD + LAST)
        second.far.send(HEAD)
        assert courier.wait(0.0) == PLACE_DUE and len(courier.marked) == 2, "both have something"
        second.connection.close()
        second.near.close()
        with Line("C", courier) as third:
            assert old in (third.near.fileno(), third.far.fileno())
            courier.deliver()
            assert first.ended == [first.exchange]
            assert not second.ended and not second.exchange.parts and not third.exchange.parts
            third.receive(HEAD + TOKEN + LAST)
            assert third.exchange.parts == [HEAD + TOKEN + LAST] and not second.exchange.parts


def test_many_connections_end_in_one_round(courier: Courier) -> None:
    with ExitStack() as stack:
        lines = [stack.enter_context(Line("C", courier)) for _ in range(200)]
        for line in lines:
            line.far.send(HEAD + TOKEN + LAST)
        while courier.wait(0.0):
            courier.deliver()
        assert all(line.ended == [line.exchange] for line in lines)
    assert courier.wait(0.0) == 0


# ---- sending --------------------------------------------------------------------------------------------------------


class Post:
    """Who sends: nothing but what a test puts into the courier's line."""

    def __init__(self, courier: Courier, *idle: Line) -> None:
        self.courier = courier
        self.idle = [line.connection for line in idle]
        self.line: list[Exchange] = []
        self.sent: list[Connection] = []
        courier.attend(self)

    def post(self, data: bytes, at: float, *, is_awaited: bool = False) -> Exchange:
        self.line.append(Exchange(None, data, at, is_awaited=is_awaited))
        self.courier.offer(self.line[-1])
        return self.line[-1]

    def line_up(self) -> None:
        self.courier.prepare(self.idle, float("inf"))

    def on_departed(self, connection: Connection, at: float, num_sent: int) -> None:
        if connection.exchange is None:
            self.idle.remove(connection)
        connection.sent(self.line.pop(0), at, num_sent)
        self.sent.append(connection)

    def ring(self) -> None: ...


def idle_line(stack: ExitStack, courier: Courier, pair: tuple[socket.socket, socket.socket] | None = None) -> Line:
    """A connection on which a stream has come to its end, after which it goes on."""
    line = stack.enter_context(Line("C", courier, pair))
    line.receive(HEAD + TOKEN + END)
    assert len(line.ended) == 1
    return line


def test_requests_go_out_at_their_instants_without_python_the_last_connection_first(courier: Courier) -> None:
    with ExitStack() as stack:
        lines = [idle_line(stack, courier) for _ in range(2)]
        post = Post(courier, *lines)
        begun_at = time.monotonic()
        exchanges = [post.post(b"%d" % number, begun_at + 0.02 * (number + 1)) for number in range(2)]
        assert courier.wait(0.06) == 0 and time.monotonic() >= begun_at + 0.06
        assert [line.far.recv(100) for line in lines] == [b"1", b"0"]
        assert post.sent == [lines[1].connection, lines[0].connection]
        for exchange in exchanges:
            assert exchange.intended_at <= exchange.sent_at <= time.monotonic()


def test_what_is_due_without_a_connection_rings_and_goes_nowhere(courier: Courier) -> None:
    post = Post(courier)
    post.post(b"POST", time.monotonic() + 0.02)
    assert courier.wait(5.0) == RING_DUE and time.monotonic() >= post.line[0].intended_at
    courier.withdraw_first()
    post.post(b"POST", time.monotonic() + 0.01)
    courier.withdraw_last()
    assert courier.wait(0.03) == 0 and not post.sent


def test_it_rings_at_an_instant_when_the_line_is_empty(courier: Courier) -> None:
    at = time.monotonic() + 0.02
    courier.prepare([], at)
    assert courier.wait(5.0) == RING_DUE and time.monotonic() >= at


@pytest.mark.parametrize("is_split", [False, True])
def test_where_a_stream_has_ended_the_next_request_goes_out_and_each_gets_its_own_response(
    courier: Courier, is_split: bool
) -> None:
    with ExitStack() as stack:
        line = idle_line(stack, courier)
        post = Post(courier, line)
        exchanges = [post.post(b"%d" % number, time.monotonic() + 0.03 * (number + 1)) for number in range(4)]

        def answer() -> None:
            while len(request := line.far.recv(100)) == 1:
                pieces = [HEAD, b"1\r\n%b\r\n" % request, END[: -len(LAST)], LAST]
                for piece in pieces if is_split else [b"".join(pieces)]:
                    line.far.send(piece)
                    time.sleep(0.002)

        answering = threading.Thread(target=answer)
        answering.start()
        assert courier.wait(0.5) == 0, "nobody waits for any of it"
        assert len(line.ended) == 1 and not any(exchange.parts for exchange in exchanges)
        line.near.send(b"that is all")
        answering.join()
        courier.deliver()
        assert line.ended[1:] == exchanges and line.connection.exchange is None
        for number, exchange in enumerate(exchanges):
            whole = b"".join(exchange.parts)
            assert whole == HEAD + b"1\r\n%d\r\n" % number + END
            assert sum(exchange.sizes) == len(whole) and len(exchange.sizes) == (4 if is_split else 1)
            assert exchange.sent_at < exchange.stamps[0] <= exchange.stamps[-1] == exchange.ended_at
            if number:
                assert exchanges[number - 1].ended_at <= exchange.sent_at


@pytest.mark.parametrize("what", ["nobody has seen it go on", "somebody waits", "it is no stream", "more came behind"])
def test_a_connection_that_somebody_has_to_look_at_first_is_not_used_again(courier: Courier, what: str) -> None:
    with ExitStack() as stack:
        is_first = what == "nobody has seen it go on"
        line = stack.enter_context(Line("C, later", courier)) if is_first else idle_line(stack, courier)
        post = Post(courier, *[] if is_first else [line])
        if not is_first:
            post.post(b"first", time.monotonic(), is_awaited=what == "somebody waits")
            assert courier.wait(0.0) == 0 and line.far.recv(100) == b"first"
        post.post(b"second", time.monotonic() + 0.05)
        if what == "more came behind":
            line.far.send(HEAD)
            assert courier.wait(0.0) == 0
            courier.deliver()
        line.far.send(NO_STREAM if what == "it is no stream" else HEAD + END)
        if what == "more came behind":
            threading.Timer(0.02, line.far.send, [b"more"]).start()
        assert courier.wait(5.0) == (PLACE_DUE if what == "somebody waits" else RING_DUE)
        assert [exchange.data for exchange in post.line] == [b"second"]


def test_what_does_not_fit_into_the_socket_is_written_by_the_transport(courier: Courier) -> None:
    with ExitStack() as stack:
        line = idle_line(stack, courier)
        post = Post(courier, line)
        data = bytes(range(256)) * 20_000
        post.post(data, time.monotonic())
        assert courier.wait(1.0) == RING_DUE
        line.far.setblocking(False)
        got = b""
        while True:
            try:
                got += line.far.recv(1 << 20)
            except BlockingIOError:
                break
        assert 0 < len(got) < len(data) and got + line.wire.written.removeprefix(b"POST") == data


def test_a_response_that_is_no_stream_behind_one_that_is_wakes_up_who_waits_for_it(courier: Courier) -> None:
    with ExitStack() as stack:
        line = idle_line(stack, courier)
        post = Post(courier, line)
        first = post.post(b"POST", time.monotonic())
        line.far.send(HEAD)
        assert courier.wait(0.0) == 0
        courier.deliver()
        second = post.post(b"POST", time.monotonic() + 0.03, is_awaited=True)
        line.far.send(END)
        threading.Timer(0.06, line.far.send, [NO_STREAM]).start()
        assert courier.wait(5.0) == PLACE_DUE and len(post.sent) == 2
        courier.deliver()
        assert line.ended[1:] == [first, second]


@pytest.mark.parametrize("framing", [b"Content-Length: 1\r\n", b""])
def test_a_request_behind_a_response_that_ended_otherwise_than_it_seemed_is_lost(
    courier: Courier, framing: bytes
) -> None:
    with ExitStack() as stack:
        line = idle_line(stack, courier)
        post = Post(courier, line)
        first, second = (post.post(b"POST", time.monotonic() + delay_s) for delay_s in (0.0, 0.01))
        assert courier.wait(0.0) == 0
        line.far.send(b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n" + END)
        assert courier.wait(0.03) == 0 and len(post.sent) == 2
        courier.deliver()
        if not framing:
            line.far.recv(100)
            line.far.close()
            assert courier.wait(1.0) == PLACE_DUE
            courier.deliver()
        assert line.ended[1:] == [first] and line.lost == [second] and line.wire.is_aborted


def test_what_came_last_and_the_end_of_the_connection_are_seen_together(courier: Courier) -> None:
    with Line("C, later", courier) as line:
        line.far.send(HEAD + TOKEN)
        line.far.close()
        assert courier.wait(0.0) == PLACE_DUE
        courier.deliver()
        assert line.lost == [line.exchange] and line.exchange.parts == [HEAD + TOKEN]


def test_a_connection_that_ends_loses_all_that_was_sent_on_it_in_order(courier: Courier) -> None:
    with ExitStack() as stack:
        line = idle_line(stack, courier)
        post = Post(courier, line)
        first, second = (post.post(b"POST", time.monotonic() + delay_s) for delay_s in (0.0, 0.01))
        assert courier.wait(0.0) == 0
        line.far.send(HEAD + END)
        assert courier.wait(0.02) == 0 and len(post.sent) == 2
        line.far.close()
        assert courier.wait(1.0) == PLACE_DUE
        courier.deliver()
        assert line.ended[1:] == [first] and line.lost == [second] and line.wire.is_aborted


def test_a_connection_whose_peer_has_gone_gets_no_request(courier: Courier) -> None:
    with ExitStack() as stack:
        line = idle_line(stack, courier)
        post = Post(courier, line)
        line.far.close()
        assert courier.wait(0.0) == PLACE_DUE
        courier.deliver()
        post.idle.clear()
        post.post(b"POST", time.monotonic())
        assert courier.wait(0.0) == RING_DUE and not post.sent


def test_a_loop_with_this_selector_keeps_its_timers_and_descriptors(courier: Courier) -> None:
    async def work() -> tuple[float, bytes, int]:
        began_at = time.monotonic()
        await asyncio.sleep(0.02)
        slept_s = time.monotonic() - began_at
        near, far = socket.socketpair()
        with near, far:
            near.setblocking(False)
            asyncio.get_running_loop().call_later(0.01, far.send, b"abc")
            got = await asyncio.get_running_loop().sock_recv(near, 10)
        with Line("C", courier) as line:
            line.far.send(HEAD + LAST)
            await asyncio.sleep(0.01)
        return slept_s, got, len(line.ended)

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(CourierSelector(courier))) as runner:
        slept_s, got, num_ended = runner.run(work())
    assert 0.02 <= slept_s < 10 and got == b"abc" and num_ended == 1
    with pytest.raises(ValueError):
        courier._poll.poll(0)  # closed with the loop


def test_nobody_else_reads_from_a_connection_that_was_handed_over(courier: Courier) -> None:
    selector = CourierSelector(courier)

    async def work(line: Line, address: tuple[str, int]) -> bool:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: Connection(line, courier), *address)
        connection.hand_over()
        await asyncio.sleep(0.01)
        read_by = [key.fd for key in selector.get_map().values()]
        fd = courier._places[connection.number][0].fd
        connection.close()
        return fd in read_by

    with Line("Python") as line, socket.create_server(("127.0.0.1", 0)) as server:
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
            assert not runner.run(work(line, server.getsockname()))


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
