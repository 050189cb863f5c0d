"""Events of streams on their way from the nodes' messages to the clients' connections."""

import asyncio
import contextlib
import gc
import json
import socket
import threading
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from support.gateway.fake_nodes import events, running
from support.gateway.toy_stack import ids_of

from common.errors import ErrorCode
from common.sampling_params import TokenLogprobs
from common.wire.messages import SetPaused, Tokens
from common.wire.packed_logprobs import pack_logprobs
from gateway.http.formatters.openai import CompletionFormatter
from gateway.http.request_cycle import RequestCycle
from gateway.http.streaming import PING, OutputEvents, TurnEnd

COMPLETIONS = "/v1/completions"
STREAM = {"prompt": "x", "max_tokens": 100, "stream": True}
BODIES = {
    COMPLETIONS: {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x", "store": False},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9},
    "/generate": {"text": "x"},
}


@pytest.fixture
async def stack(folder):
    async with running(folder) as running_stack:
        await running_stack.silent_pair()
        yield running_stack


async def begin(stack, first="a", **fields):
    """A stream whose first token has reached the client: its id, the answer, and its further events."""
    prefill = stack.nodes[0]
    known = set(prefill.generates)
    call = asyncio.ensure_future(stack.client.post(stack.url + COMPLETIONS, json={**STREAM, **fields}))
    await prefill.until(lambda: set(prefill.generates) - known)
    (rid,) = set(prefill.generates) - known
    prefill.tokens(rid, 0, ids_of(first))
    answer = await call
    arriving = events(answer)
    assert (await anext(arriving))["choices"][0]["text"] == first
    return rid, answer, arriving


def message(node, rid, index, text, finish=""):
    return Tokens(rid, node.attempt(rid), index, ids_of(text), finish=finish)


async def texts(arriving):
    return [event["choices"][0]["text"] async for event in arriving if event != "[DONE]"]


async def test_messages_that_arrive_together_make_one_event_for_each_stream(stack):
    decode = stack.nodes[1]
    streams = [await begin(stack) for _ in range(3)]
    rids = [rid for rid, _, _ in streams]
    decode.mailbox.send(*[message(decode, rid, 1 + step, "bc"[step]) for step in range(2) for rid in rids])
    for _, _, arriving in streams:
        assert (await anext(arriving))["choices"][0]["text"] == "bc"
    decode.mailbox.send(*[message(decode, rid, 3, text, "length") for rid, text in zip(rids, "xyz", strict=True)])
    for (_, answer, arriving), text in zip(streams, "xyz", strict=True):
        assert await texts(arriving) == [text]
        answer.close()


@pytest.mark.parametrize(("path", "body"), BODIES.items())
async def test_events_of_all_apis_are_written_without_their_task(stack, monkeypatch, path, body):
    written, write = [], OutputEvents.write

    def noted(events, data, now):
        written.append(data)
        write(events, data, now)

    monkeypatch.setattr(OutputEvents, "write", noted)
    prefill, decode = stack.nodes
    call = asyncio.ensure_future(stack.client.post(stack.url + path, json={**body, "stream": True}))
    await prefill.until(lambda: prefill.generates)
    (rid,) = prefill.generates
    prefill.tokens(rid, 0, ids_of("a"))
    async with await call as answer:
        await answer.content.readline()
        decode.mailbox.send(message(decode, rid, 1, "bcd"))
        await decode.until(lambda: written)
        decode.mailbox.send(message(decode, rid, 4, "e", "length"))
        assert b"bcd" in written[0]
        assert written[0] in await answer.read()


@pytest.mark.parametrize(("path", "body"), BODIES.items())
async def test_a_silent_stream_gets_comments_before_its_first_text_and_after(folder, path, body):
    async with running(folder, sse_ping_interval=0.05) as stack:
        prefill, decode = await stack.silent_pair()
        async with stack.client.post(stack.url + path, json={**body, "stream": True}) as answer:
            assert answer.status == 200
            assert await answer.content.readuntil(b"\n\n") == b": ping\n\n"
            rid = await prefill.only_rid()
            prefill.tokens(rid, 0, ids_of("a"))
            while (data := await answer.content.readuntil(b"\n\n")) == b": ping\n\n":
                pass
            while b": ping" not in data:
                data += await answer.content.readuntil(b"\n\n")
            decode.mailbox.send(message(decode, rid, 1, "bc", "length"))
            data += await answer.read()
        assert data.replace(b": ping\n\n", b"").startswith((b"data: ", b"event: "))
        assert b"bc" in data


@pytest.mark.parametrize(("path", "body"), BODIES.items())
async def test_a_stream_that_fails_after_a_comment_ends_with_an_error(folder, path, body):
    async with running(folder, sse_ping_interval=0.05) as stack:
        prefill, _ = await stack.silent_pair()
        async with stack.client.post(stack.url + path, json={**body, "stream": True}) as answer:
            await answer.content.readuntil(b": ping\n\n")
            rid = await prefill.only_rid()
            prefill.fail(rid, ErrorCode.INVALID_REQUEST, "a wild failure")
            assert b"a wild failure" in await answer.read()


@pytest.mark.parametrize("interval", [0, 3600])
async def test_without_silence_or_an_interval_a_stream_has_no_comments(folder, interval):
    async with running(folder, sse_ping_interval=interval) as stack:
        await stack.silent_pair()
        rid, answer, _ = await begin(stack)
        await asyncio.sleep(0.1)
        stack.nodes[1].mailbox.send(message(stack.nodes[1], rid, 1, "b", "length"))
        data = await answer.read()
        assert b'"text":"b"' in data and b": ping" not in data


async def test_a_comment_comes_only_after_as_much_silence(folder, monkeypatch):
    written, on_written, write = [], OutputEvents.on_written, RequestCycle.write_chunk
    monkeypatch.setattr(RequestCycle, "write_chunk", lambda self, data: [written.append(data), write(self, data)])

    def noted(events, at):
        on_written(events, at)
        written.append(events._written_at)

    monkeypatch.setattr(OutputEvents, "on_written", noted)
    async with running(folder, sse_ping_interval=0.2) as stack:
        decode = (await stack.silent_pair())[1]
        rid, answer, arriving = await begin(stack)
        index = 1
        while written.count(PING) < 3:
            decode.mailbox.send(message(decode, rid, index, "b"))
            index += 1
            await asyncio.sleep(0.19 if index % 3 else 0.3)
        decode.mailbox.send(message(decode, rid, index, "c", "length"))
        assert "".join(await texts(arriving)) == "b" * (index - 1) + "c"
        answer.close()
    pings = [at for at, data in enumerate(written) if data == PING]
    assert all(written[at + 1] - written[at - 1] >= 0.199 for at in pings)  # the loop's clock shows milliseconds


@pytest.mark.parametrize("leaves", [False, True])
async def test_nothing_waits_for_the_silence_of_a_stream_that_is_over(stack, leaves):
    """A timer that still ran would hold what it would wake."""
    before = waiting_objects()
    rid, answer, arriving = await begin(stack)
    assert len(waiting_objects()) > len(before)
    if leaves:
        answer.close()
    else:
        stack.nodes[1].mailbox.send(message(stack.nodes[1], rid, 1, "b", "length"))
        assert await texts(arriving) == ["b"]
    async with asyncio.timeout(60):
        while len(waiting_objects()) > len(before):
            await asyncio.sleep(0.02)


def waiting_objects():
    gc.collect()
    return [one for one in gc.get_objects() if isinstance(one, OutputEvents)]


async def test_a_stream_that_ends_in_the_turn_of_an_event_sends_both(stack):
    decode = stack.nodes[1]
    rid, answer, arriving = await begin(stack)
    decode.mailbox.send(message(decode, rid, 1, "b"), message(decode, rid, 2, "c", "length"))
    assert await texts(arriving) == ["bc"]
    answer.close()


async def test_a_stream_that_cannot_be_formatted_ends_with_an_error_and_others_go_on(stack, monkeypatch):
    decode = stack.nodes[1]
    (bad, bad_answer, bad_events), (good, good_answer, good_events) = await begin(stack), await begin(stack)
    chunk = CompletionFormatter.chunk

    def failing(self, output, delta):
        if delta.text == "!":
            raise LookupError("not this one")
        return chunk(self, output, delta)

    monkeypatch.setattr(CompletionFormatter, "chunk", failing)
    decode.mailbox.send(message(decode, bad, 1, "!"), message(decode, good, 1, "b"))
    (error,) = [event async for event in bad_events]
    assert error["error"]["code"] == "internal"
    await decode.until(lambda: bad in decode.aborts)
    decode.mailbox.send(message(decode, good, 2, "c", "length"))
    assert "".join(await texts(good_events)) == "bc"
    bad_answer.close()
    good_answer.close()


async def test_many_log_probabilities_of_a_prompt_are_formatted_on_a_thread(stack, monkeypatch):
    places = []  # of the first events
    chunk = CompletionFormatter.chunk

    def noted(self, output, delta):
        if not delta.first:
            places.append((output.number, threading.current_thread() is threading.main_thread()))
        return chunk(self, output, delta)

    monkeypatch.setattr(CompletionFormatter, "chunk", noted)
    monkeypatch.setattr("gateway.http.streaming.MANY_LOGPROBS", 4)
    prefill, decode = stack.nodes
    body = {**STREAM, "prompt": "abcdef", "echo": True, "logprobs": 0, "n": 2}
    call = asyncio.ensure_future(stack.client.post(stack.url + COMPLETIONS, json=body))
    await prefill.until(lambda: len(prefill.generates) == 2)
    first, second = prefill.generates
    known = {"logprobs": (TokenLogprobs(-1.0),), "prompt_logprobs": (TokenLogprobs(-2.0),) * 5}
    prefill.tokens(first, 0, ids_of("g"), **known)
    answer = await call
    arriving = events(answer)
    assert (await anext(arriving))["choices"][0]["text"] == "abcdefg"
    prefill.tokens(second, 0, ids_of("h"), **known)  # while the stream goes on
    (choice,) = (await anext(arriving))["choices"]
    assert (choice["text"], choice["logprobs"]["token_logprobs"]) == ("abcdefh", [None, *[-2.0] * 5, -1.0])
    for rid in (first, second):
        decode.tokens(rid, 1, ids_of("i"), logprobs=(TokenLogprobs(-3.0),), finish="length")
    assert await texts(arriving) == ["i", "i"]
    answer.close()
    assert places == [(0, False), (1, False)]


async def begin_samples(stack, count):
    """As ``begin``, for several samples with log-probabilities: their ids, the answer, and its further events."""
    prefill = stack.nodes[0]
    body = {**STREAM, "n": count, "logprobs": 0}
    call = asyncio.ensure_future(stack.client.post(stack.url + COMPLETIONS, json=body))
    await prefill.until(lambda: len(prefill.generates) == count)
    rids = list(prefill.generates)
    for rid in rids:
        prefill.tokens(rid, 0, ids_of("a"), logprobs=(TokenLogprobs(-1.0),))
    answer = await call
    arriving = events(answer)
    for _ in rids:
        await anext(arriving)
    return rids, answer, arriving


async def test_an_output_that_ends_while_another_is_formatted_has_one_end(stack, monkeypatch):
    decode = stack.nodes[1]
    (first, second, third), answer, arriving = await begin_samples(stack, 3)
    is_formatted, goes_on = threading.Event(), threading.Event()
    chunk = CompletionFormatter.chunk

    def slow(self, output, delta):
        if output.number == 0:
            is_formatted.set()
            assert goes_on.wait(60)
        return chunk(self, output, delta)

    monkeypatch.setattr(CompletionFormatter, "chunk", slow)
    monkeypatch.setattr("gateway.http.streaming.MANY_LOGPROBS", 0)  # the last event of an output is made on a thread
    packed = (pack_logprobs(TokenLogprobs(-1.0)),)
    end = Tokens(first, decode.attempt(first), 1, ids_of("b"), logprobs=packed, finish="length")
    decode.mailbox.send(end, message(decode, second, 1, "c"))
    await asyncio.to_thread(is_formatted.wait, 60)
    decode.send(message(decode, second, 2, "d", "length"))
    await decode.round_trip()
    goes_on.set()
    ended = [(await anext(arriving))["choices"][0] for _ in range(2)]
    assert [(choice["text"], choice["finish_reason"]) for choice in ended] == [("b", "length"), ("cd", "length")]
    decode.send(message(decode, third, 1, "e", "length"))
    assert await texts(arriving) == ["e"]
    answer.close()


async def test_the_event_loop_has_turns_between_many_bytes_of_one_stream(stack, monkeypatch):
    decode = stack.nodes[1]
    rids, answer, arriving = await begin_samples(stack, 3)
    loop, num_turns, turns = asyncio.get_running_loop(), 0, []
    chunk = CompletionFormatter.chunk

    def count():
        nonlocal num_turns
        num_turns += 1
        timer = loop.call_soon(count)
        monkeypatch.setattr(stack, "timer", timer, raising=False)

    def noted(self, output, delta):
        turns.append(num_turns)
        return chunk(self, output, delta)

    monkeypatch.setattr(CompletionFormatter, "chunk", noted)
    monkeypatch.setattr("gateway.http.streaming.MANY_BYTES", 0)
    count()
    decode.mailbox.send(*[message(decode, rid, 1, "b") for rid in rids])
    assert [(await anext(arriving))["choices"][0]["text"] for _ in rids] == ["b", "b", "b"]
    stack.timer.cancel()
    assert len(set(turns)) == 3
    decode.mailbox.send(*[message(decode, rid, 2, "c", "length") for rid in rids])
    assert await texts(arriving) == ["c", "c", "c"]
    answer.close()


@pytest.mark.parametrize(("num_logprobs", "is_paused"), [(None, False), (8, False), (9, True)])
async def test_alternatives_that_wait_for_a_client_count_as_tokens(num_logprobs, is_paused):
    paused = []
    waiting = OutputEvents(TurnEnd(), lambda rid, _: paused.append(rid), only_ends=False, max_unread=100)
    request = SimpleNamespace(rid="r", sampling=SimpleNamespace(logprobs=num_logprobs))
    waiting.wake(SimpleNamespace(number=0, is_ended=False, num_untaken=11, request=request))
    assert paused == ["r"] * is_paused


async def test_a_client_that_reads_late_gets_all_text_and_the_gateway_writes_nothing_until_then(folder):
    async with running(folder) as stack:
        prefill, decode = await stack.silent_pair(context_length=1 << 21, num_pages=1 << 17)
        reader, writer = await post_slowly(stack, {**STREAM, "max_tokens": 1 << 20})
        rid = await prefill.only_rid()
        prefill.tokens(rid, 0, ids_of("a"))
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        (connection,) = [other for other in stack.gateway._http.connections if other._active]
        ids, num_tokens = ids_of("abcdefgh" * 2_000), 1
        held: list[int] = []  # bytes in the gateway's buffer since the client is late
        while len(held) < 10:
            decode.mailbox.send(Tokens(rid, decode.attempt(rid), num_tokens, ids))
            num_tokens += len(ids)
            await decode.round_trip()
            await asyncio.sleep(0)  # the events of the turn are written
            if connection.flow.write_paused:
                held.append(connection.transport.get_write_buffer_size())
        assert len(set(held)) == 1
        decode.mailbox.send(message(decode, rid, num_tokens, "!", "length"))
        data = b""
        async with asyncio.timeout(60):
            while not data.endswith(b"\r\n0\r\n\r\n"):
                data += await reader.read(1 << 16)
        writer.close()
        shown = [json.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: {")]
        text = "".join(event["choices"][0]["text"] for event in shown)
        assert text == "a" + "abcdefgh" * 2_000 * ((num_tokens - 1) // len(ids)) + "!"


async def post_slowly(stack, body):
    """A connection with small buffers, which has sent a request and reads only what it is asked for."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    url = urlsplit(stack.url)
    await asyncio.get_running_loop().sock_connect(client, (url.hostname, url.port))
    reader, writer = await asyncio.open_connection(sock=client, limit=1 << 10)
    data = json.dumps(body).encode()
    writer.write(
        b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (COMPLETIONS.encode(), len(data)) + data
    )
    return reader, writer


async def test_a_stream_that_its_client_does_not_read_is_paused_until_it_reads(folder):
    """The decode node is fake: it sends single tokens while it is not told to pause, as a node without a limit."""
    async with running(folder, max_unread_tokens=100) as stack:
        await stack.silent_pair(max_running=1, num_pages=1 << 20, context_length=1 << 21)
        prefill, decode = stack.nodes
        reader, writer = await post_slowly(stack, {**STREAM, "max_tokens": 1 << 20})
        rid = await prefill.only_rid()
        prefill.tokens(rid, 0, ids_of("a"))
        index, token, num_bytes = 1, ids_of("b"), 0
        for is_paused in (True, False, True, False):
            async with asyncio.timeout(60):
                while pauses(decode) != is_paused:
                    if is_paused:
                        decode.tokens(rid, index, token)
                        index += 1
                        await asyncio.sleep(0)
                        if not index % 50:
                            await decode.round_trip()
                    else:
                        num_bytes += await read_what_has_come(reader)
            await decode.round_trip()  # the gateway has counted every token
        waiting = stack.gateway._dispatcher._in_flight[rid].stream.num_untaken
        assert waiting <= 50
        decode.tokens(rid, index, token, finish="length")
        async with asyncio.timeout(60):
            while not (data := await reader.read(1 << 16)).endswith(b"\r\n0\r\n\r\n"):
                num_bytes += len(data)
        writer.close()
        assert num_bytes < 2 << 20  # the buffers of the connection are small


async def read_what_has_come(reader):
    """Return the number of bytes; wait briefly, as there may be no more bytes until another token is sent."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.1):
            return len(await reader.read(1 << 12))
    return 0


def pauses(node):
    """What the node was told last about pausing."""
    return next((message.is_paused for message in reversed(node.received) if isinstance(message, SetPaused)), False)


async def test_a_paused_request_makes_room_for_another_one(folder):
    async with running(folder, max_unread_tokens=100, max_dispatch_ahead=0) as stack:
        await stack.silent_pair(max_running=1, num_pages=1 << 20, context_length=1 << 21)
        prefill, decode = stack.nodes
        _, writer = await post_slowly(stack, {**STREAM, "max_tokens": 1 << 20})
        slow = await prefill.only_rid()
        prefill.tokens(slow, 0, ids_of("a"))
        index = 1
        async with asyncio.timeout(60):
            while not pauses(decode):
                decode.tokens(slow, index, ids_of("b") * 50)
                index += 50
                await decode.round_trip()
        rid, answer, arriving = await begin(stack, "c")
        decode.send(message(decode, rid, 1, "d", "length"))
        assert await texts(arriving) == ["d"]
        answer.close()
        writer.close()
        await decode.until(lambda: slow in decode.aborts)
        _, workers = await stack.get("/v1/workers")
        assert {worker["load_tokens"] for worker in workers["workers"]} == {0}
        rid, answer, arriving = await begin(stack, "e")  # one place, as before
        decode.send(message(decode, rid, 1, "f", "length"))
        assert await texts(arriving) == ["f"]
        answer.close()
