"""Responses parsed from bytes: their end, events and output. No sockets."""

import itertools
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.load.connection import FedConnection

from scripts.load_tester.client.http_framing import follow_chunks, read_head
from scripts.load_tester.client.ipc import (
    ClientReady,
    MessageReader,
    Progress,
    RequestDone,
    RequestsDone,
    encode,
    parent_decoder,
)
from scripts.load_tester.client.sse_parser import parse_response

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = [b'data: {"choices":[{"text":"%d"}]}\n\n' % number for number in range(4)]
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":4}}\n\n'
LAST = b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


WHOLE = HEAD + b"".join(map(chunk, [*EVENTS, USAGE, LAST])) + b"0\r\n\r\n"


def done_of(pieces: list[bytes], error: str = "") -> RequestDone:
    stamps = array("d", range(1, len(pieces) + 1)).tobytes()
    sizes = array("I", map(len, pieces)).tobytes()
    return RequestDone(0, 0.0, 0.0, 0.0, float(len(pieces)), stamps, sizes, b"".join(pieces), error, False)


@given(cuts=st.sets(st.integers(1, len(WHOLE) - 1)))
def test_a_response_ends_exactly_with_its_last_byte_however_it_is_cut(cuts: set[int]) -> None:
    edges = [0, *sorted(cuts), len(WHOLE)]
    pieces = [WHOLE[begin:end] for begin, end in itertools.pairwise(edges)]
    line = FedConnection()
    for piece in pieces:
        assert not line.ended
        line.receive(piece)
    assert line.ended == [line.exchange] and line.connection.is_reusable
    assert b"".join(line.exchange.parts) == WHOLE
    assert line.exchange.sizes.tolist() == [len(piece) for piece in pieces]
    stamps = line.exchange.stamps.tolist()
    assert stamps == sorted(stamps) and len(stamps) == len(pieces) and line.exchange.ended_at == stamps[-1]
    answer = parse_response(done_of(pieces))
    assert (answer.text, answer.error, answer.usage_output) == ("0123", "", 4)
    # Each event has the instant of the piece with its last byte.
    at, expected = len(HEAD), []
    for event in EVENTS:
        end = at + len(b"%x\r\n" % len(event)) + len(event)
        expected.append(next(float(number) for number, edge in enumerate(edges) if edge >= end))
        at = end + 2
    assert answer.stamps == expected


@given(cuts=st.sets(st.integers(1, len(WHOLE) + 3)), framing=st.sampled_from(["chunks", "length", "trailers"]))
def test_bytes_after_a_response_are_dropped_and_close_the_connection(cuts: set[int], framing: str) -> None:
    whole = {
        "chunks": WHOLE,
        "length": b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nabcdef",
        "trailers": WHOLE[:-2] + b"A: b\r\nC: d\r\n\r\n",
    }[framing]
    raw = b"HTTP/1.1 100 Continue\r\n\r\n" + whole + b"\r\n\r\n"
    edges = [0, *sorted(cut for cut in cuts if cut < len(raw)), len(raw)]
    line = FedConnection()
    for begin, end in itertools.pairwise(edges):
        line.receive(raw[begin:end])
    assert line.ended == [line.exchange] and not line.exchange.error
    assert not line.connection.is_reusable and line.transport.is_aborted
    assert b"".join(line.exchange.parts) == whole
    assert sum(line.exchange.sizes) == len(whole) and len(line.exchange.sizes) == len(line.exchange.stamps)


@given(st.sets(st.integers(1, 200)))
def test_events_may_have_crlf_line_ends_and_comments(cuts: set[int]) -> None:
    body = b": ping\r\n\r\n" + b"".join(event.replace(b"\n", b"\r\n") for event in [*EVENTS, LAST])
    raw = HEAD + chunk(body) + b"0\r\n\r\n"
    edges = [0, *sorted(cut for cut in cuts if cut < len(raw)), len(raw)]
    pieces = [raw[begin:end] for begin, end in itertools.pairwise(edges)]
    answer = parse_response(done_of(pieces))
    assert (answer.text, answer.error, len(answer.stamps)) == ("0123", "", 4)


def test_output_that_looks_like_the_last_chunk_is_not_taken_for_it() -> None:
    """With CRLF line ends a chunk may end in exactly these bytes."""
    line = FedConnection()
    line.receive(HEAD)
    line.receive(chunk(b"data: 0\r\n"))
    assert not line.ended
    line.receive(b"0\r\n\r\n")
    assert line.ended


def test_chunks_with_trailers_and_extensions_end_where_they_should() -> None:
    data = b"3;x=y\r\nabc\r\n0\r\nTrailer: z\r\n\r\n"
    assert follow_chunks(data) == (12, True)
    assert follow_chunks(data[:-1])[1] is False
    assert follow_chunks(b"xyz\r\n") == (-1, False)


@pytest.mark.parametrize("size", [b"-10", b"+5", b"0x5", b"1_0", b"", b"fffffffff"])
def test_an_invalid_chunk_size_ends_the_response_with_an_error(size: bytes) -> None:
    """A size of -16 would lead back to the same offset."""
    end = b"0" * 16 + size + b"\r\n" if size.isdigit() else size + b"\r\nabc\r\n"
    raw = HEAD + chunk(EVENTS[0]) + end
    line = FedConnection()
    line.receive(raw)
    if not line.ended:  # the framing is checked only where the response could end
        line.receive(b"\r\n\r\n")
    assert line.ended == [line.exchange] and line.exchange.error == "bad_http"
    assert parse_response(done_of([raw], "bad_http")).error == "bad_http"


BODIES = st.one_of(
    st.binary(max_size=60),
    st.sampled_from([
        b'data: {"choices":[{"text":"\xc3"}]}\n\n', b'data: {"choices":[{"text":"\xff"}]}\n\n', b"data: [1]\n\n",
        b'data: {"error":null,"choices":null}\n\n', b'data: {"choices":[{"delta":{"content":[1]}}]}\n\n',
        b'data: {"error":["x"]}\n\n', b'data: {"meta_info":{"completion_tokens":-3}}\n\n', b'{"choices":["x"]}',
        b'data:{"choices":[{"text":"\xc3"\n\n', b'{"choices":[{"message":"x"}]}',
        b'{"choices":[{"message":{"content":[1]}}]}', b'{"choices":[]}', b"null",
        b'{"error":{"message":7,"code":[1]}}', b'{"choices":[{"message":{"content":"x"},"text":1}]}', EVENTS[0], LAST,
        b'data: {"meta_info":{"completion_tokens":2,"finish_reason":{"type":"abort","message":[1]}}}\n\n',
        b'data: {"timings":{"prompt_ms":"x","cache_n":{}}}\n\n', b'{"choices":[null]}', b'{"choices":{"0":1}}',
    ]),
)  # fmt: skip


@pytest.mark.parametrize("text", [b"\xc3", b"\xff", b"a\xe2\x82"])
@pytest.mark.parametrize("kind", [b"text/event-stream", b"application/json"])
def test_an_incomplete_character_fails_one_response_not_the_run(kind: bytes, text: bytes) -> None:
    body = b'{"choices":[{"text":"%b"}]}' % text
    data = b"data: %b\n\n" % body if kind == b"text/event-stream" else body
    answer = parse_response(done_of([b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\n\r\n%b" % (kind, data)]))
    assert (answer.error, answer.texts) == ("bad_json", [])
    answer = parse_response(done_of([b"HTTP/1.1 500 X\r\nContent-Type: %b\r\n\r\n%b" % (kind, b'"%b"' % text)]))
    assert answer.error == "http_500" and "\ufffd" in answer.message


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        (b'"usage":{"completion_tokens":%d}' % 10**30, "bad_json"),
        (b'"meta_info":{"prompt_tokens":%d}' % 2**31, "bad_json"),
        (b'"output_ids":[%d]' % -(10**30), "bad_json"),
        (b'"timings":{"prompt_ms":%d}' % 10**400, ""),
    ],
)
def test_numbers_that_no_file_holds_fail_one_response_not_the_run(fields: bytes, error: str) -> None:
    body = b'{"choices":[{"text":"a","finish_reason":"stop"}],%b}' % fields
    answer = parse_response(done_of([b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n%b" % body]))
    assert answer.error == error and not answer.timings


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"error":%b' % (b"[" * 100_000), b'{"x":%b' % (b"[" * 100_000)])
def test_a_response_that_is_nested_too_deeply_fails_alone(body: bytes) -> None:
    for head, error in ((b"200 OK", "bad_json"), (b"500 X", "http_500")):
        answer = parse_response(done_of([b"HTTP/1.1 %b\r\nContent-Type: application/json\r\n\r\n%b" % (head, body)]))
        assert answer.error == error
    event = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: %b\n\n" % body
    assert parse_response(done_of([event])).error == "bad_json"


@pytest.mark.parametrize("field", [b"content", b"reasoning_content"])
def test_a_chat_without_streaming_is_parsed(field: bytes) -> None:
    body = b'{"choices":[{"message":{"%b":"ab"},"finish_reason":"stop"}],"usage":{"completion_tokens":2}}' % field
    answer = parse_response(done_of([b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n%b" % body]))
    assert (answer.error, answer.text, answer.usage_output, answer.stamps) == ("", "ab", 2, [1.0])


@given(st.lists(BODIES, max_size=4), st.sampled_from([200, 302, 404, 500]), st.booleans(), st.booleans(), st.booleans())
def test_any_bytes_become_output_or_a_named_failure(
    bodies: list[bytes], status: int, is_stream: bool, is_chunked: bool, is_cut: bool
) -> None:
    kind = b"text/event-stream" if is_stream else b"application/json"
    head = b"HTTP/1.1 %d X\r\nContent-Type: %b\r\n" % (status, kind)
    if is_chunked:
        raw = head + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(map(chunk, filter(None, bodies))) + b"0\r\n\r\n"
    else:
        raw = head + b"\r\n" + b"".join(bodies)
    raw = raw[: len(raw) * 2 // 3] if is_cut else raw
    answer = parse_response(done_of([raw]))
    assert isinstance(answer.text, str) and all(isinstance(word, str) for word in (answer.error, answer.message))
    assert answer.error or (answer.stamps and len(answer.stamps) == len(answer.counts))
    assert status == 200 or answer.error


def test_a_content_length_or_a_closed_connection_can_end_a_response() -> None:
    line = FedConnection()
    line.receive(b"HTTP/1.1 429 X\r\nContent-Length: 5\r\n\r\nab")
    assert not line.ended
    line.receive(b"cde")
    assert line.ended == [line.exchange] and line.connection.is_reusable
    line = FedConnection()
    line.receive(b"HTTP/1.1 200 OK\r\n\r\nabc")
    line.hang_up()
    assert line.ended == [line.exchange] and not line.connection.is_reusable
    assert line.exchange.ended_at >= line.exchange.stamps[-1]


def test_an_interim_head_is_skipped() -> None:
    line = FedConnection()
    line.receive(b"HTTP/1.1 100 Continue\r\n\r\n")
    line.receive(WHOLE)
    assert line.ended == [line.exchange]
    assert b"".join(line.exchange.parts) == WHOLE and line.exchange.sizes.tolist() == [len(WHOLE)]


def test_many_interim_heads_are_skipped() -> None:
    line = FedConnection()
    line.receive(b"HTTP/1.1 102 Processing\r\n\r\n" * 2000 + WHOLE)
    assert line.ended == [line.exchange] and b"".join(line.exchange.parts) == WHOLE


@pytest.mark.parametrize("head", [HEAD, b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_a_response_beyond_the_size_limit_is_dropped(monkeypatch: pytest.MonkeyPatch, head: bytes) -> None:
    monkeypatch.setattr("scripts.load_tester.client.connection.MAX_RESPONSE", len(head) + 50)
    line = FedConnection()
    line.receive(head)
    line.receive(b"28\r\n" + b"x" * 40)
    line.receive(b"\r\n11\r\n")
    assert not line.ended and sum(line.exchange.sizes) == len(head) + 50
    line.receive(b"x")
    exchange = line.exchange
    assert line.ended == [exchange] and exchange.error == "too_large" and not line.connection.is_reusable
    assert b"".join(exchange.parts) == head, "what is given up is not kept"
    assert exchange.sizes.tolist() == [len(head)] and len(exchange.stamps) == 1
    assert parse_response(done_of(exchange.parts, exchange.error)).error == "too_large"


def test_an_enormous_content_length_is_too_large() -> None:
    line = FedConnection()
    line.receive(b"HTTP/1.1 200 OK\r\nContent-Length: %b\r\n\r\n" % (b"9" * 5000))
    assert line.ended == [line.exchange] and line.exchange.error == "too_large"


def test_a_cut_connection_is_lost_and_other_protocols_are_an_error() -> None:
    line = FedConnection()
    line.receive(WHOLE[:-3])
    line.hang_up()
    assert line.lost == [line.exchange] and not line.ended
    assert b"".join(line.exchange.parts) == WHOLE[:-3], "what came before is there"
    line = FedConnection()
    line.receive(b"SSH-2.0-OpenSSH\r\n\r\n")
    assert line.exchange.error == "bad_http" and not line.connection.is_reusable


def test_unrequested_bytes_close_the_connection() -> None:
    line = FedConnection()
    line.receive(WHOLE)
    assert line.connection.is_reusable
    line.receive(b"more")
    assert not line.connection.is_reusable


@pytest.mark.parametrize(
    ("events", "error"),
    [
        (EVENTS, "truncated"),
        ([LAST], "empty"),
        ([b'data: {"error":{"message":"m","code":"node_lost"}}\n\n', LAST], "stream_node_lost"),
        ([b"data: {oops\n\n"], "bad_json"),
        ([b'data: {"choices":[{"text":"a","finish_reason":"stop"}]}\n\n'], ""),
    ],
)
def test_an_incomplete_stream_is_a_named_failure(events: list[bytes], error: str) -> None:
    assert parse_response(done_of([HEAD + b"".join(map(chunk, events)) + b"0\r\n\r\n"])).error == error


def test_reasoning_counts_as_output_and_an_empty_role_does_not() -> None:
    events = [
        b'{"choices":[{"delta":{"role":"assistant","content":""}}]}',
        b'{"choices":[{"delta":{"reasoning":"r"}}]}',
    ]
    events += [b'{"choices":[{"delta":{"content":"c"},"finish_reason":"stop"}]}']
    answer = parse_response(done_of([HEAD + b"".join(chunk(b"data: %b\n\n" % event) for event in events)]))
    assert (answer.text, len(answer.stamps), answer.finish) == ("rc", 2, "stop")


def test_an_error_response_has_the_servers_message() -> None:
    body = b'{"error":{"message":"too much","code":"queue_full"}}'
    answer = parse_response(done_of([b"HTTP/1.1 429 X\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)]))
    assert (answer.status, answer.error, answer.message) == (429, "http_429", "too much")


def test_header_names_are_case_insensitive() -> None:
    assert read_head(b"HTTP/1.0 204\r\nX-A: b ") == (204, {b"x-a": b"b"})
    assert read_head(b"nonsense")[0] == 0


@given(st.lists(st.integers(1, 60), max_size=10))
def test_messages_arrive_whole_however_a_pipe_cuts_them(sizes: list[int]) -> None:
    frames = [ClientReady(), RequestsDone([done_of([WHOLE])] * 2), Progress(1.0, 2, 3, 4, 5, [0.5], [0.1])]
    data = b"".join(map(encode, frames))
    seen: list[Any] = []
    reader = MessageReader(parent_decoder, seen.append, lambda: None)
    at = 0
    for size in [*sizes, len(data)]:
        reader.data_received(data[at : at + size])
        at += size
    assert seen == frames


def test_an_error_that_is_no_json_is_shown_without_the_line_end_behind_it() -> None:
    answer = parse_response(done_of([b"HTTP/1.1 404 X\r\nContent-Type: text/plain\r\n\r\nNot Found\n"]))
    assert (answer.error, answer.message) == ("http_404", "Not Found")
