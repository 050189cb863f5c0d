"""The fast path through usual chunks finds the same events as a byte-by-byte parser."""

import re
from array import array
from collections.abc import Iterator
from itertools import accumulate

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.examples import examples

from scripts.load_tester.client.http_framing import chunk_size
from scripts.load_tester.client.ipc import RequestDone
from scripts.load_tester.client.sse_parser import EMPTY_LINE, ParsedResponse, parse_response, split_events

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
SAID = [
    b'{"id":"a","choices":[{"text":" t0","token_ids":[5,6]},{"text":"x","index":1}]}', b"[DONE]", b": ping",
    b'{"choices":[{"delta":{"role":"assistant","content":""}}]}', b'{"choices":[{"text":"\xc3"}]}', b"", b"\r", b"{",
    b'{"choices":[{"delta":{"content":"y"},"finish_reason":"stop"}],"usage":{"completion_tokens":2}}', b"[]", b"1,2",
    b'{"error":{"code":503,"message":"m"}}', b'{"text":"ab","output_ids":[1,2],"meta_info":{"completion_tokens":2}}',
    b'{"choices":\ndata: []}', b'{"choices":\r\ndata: []}', b'{"timings":{"prompt_ms":5}}', b"\n", b"\r\n",
]  # fmt: skip
LINES = [b"data: %b\n\n", b"data:%b\n\n", b"data: %b\r\n\r\n", b"%b\n\n", b"data: %b\n\r\n", b"data: %b\n", b"%b"]
USUAL = st.sampled_from(SAID[:5]).map(lambda data: b"data: %b\n\n" % data)
BODIES = USUAL | st.builds(lambda line, data: line % data, st.sampled_from(LINES), st.sampled_from(SAID))
ODD_LINES = [b"%X", b"0%x", b"%x;a=b", b" %x ", b"\r\n%x", b"%x;\r\ndata: ", b"", b"-%x"]
FRAMES = st.just((b"%x", 0, b"\r\n")) | st.one_of(
    st.tuples(st.sampled_from(ODD_LINES), st.just(0), st.just(b"\r\n")),
    st.tuples(st.just(b"%x"), st.sampled_from([-1, 1, 2]), st.just(b"\r\n")),
    st.tuples(st.just(b"%x"), st.just(0), st.sampled_from([b"", b"\n\n"])),
)  # size line, error of the size, end of the chunk: at most one of them unusual
CUT = [(b"data: {}\n\n", (b"%x", 0, b"\r\n"))], 0, 9, True  # where an event, and its chunk, would end


def one_by_one(raw: bytes, at: int, is_chunked: bool) -> list[tuple[int, bytes]]:
    """A slow ``split_events``: the bytes of the body with their offsets, then lines, then events."""
    body = list(enumerate(raw[at:], at + 1))
    if is_chunked:
        body = []
        while (line_end := raw.find(b"\r\n", at)) >= 0 and (size := chunk_size(raw[at:line_end])) > 0:
            at = line_end + 2 + size
            body += list(enumerate(raw[line_end + 2 : at], line_end + 3))
            at += 2
    found, text = [], bytes(byte for _, byte in body)
    begin = 0
    for empty in re.finditer(rb"\n\n|\r\n\r\n", text):
        lines = re.split(rb"\r?\n", text[begin : empty.start()])
        data = b"\n".join(line[6 if line.startswith(b"data: ") else 5 :] for line in lines if line.startswith(b"data:"))
        found.append((body[empty.end() - 1][0], data))
        begin = empty.end()
    return found


@settings(max_examples=examples(400))
@example(*CUT)
@given(st.lists(st.tuples(BODIES, FRAMES), max_size=6), st.integers(0, 9), st.integers(0, 40), st.booleans())
def test_events_are_found_in_whatever_chunks_they_come_and_where_the_framing_breaks(
    parts: list[tuple[bytes, tuple[bytes, int, bytes]]], begin: int, num_missing: int, is_chunked: bool
) -> None:
    raw = b"." * begin
    for body, (size, error, end) in parts:
        line = size % max(0, len(body) + error) if b"%" in size else size
        raw += line + b"\r\n" + body + end
    raw = (raw + b"0\r\n\r\n")[: -num_missing or None]
    assert list(split_events(raw, begin, is_chunked)) == one_by_one(raw, begin, is_chunked)


def done_of(head: bytes, raw: bytes, stamps: list[float], sizes: list[int]) -> RequestDone:
    sizes[0] += len(head)
    return RequestDone(
        0, 0.0, 0.0, 0.0, 9.0, array("d", stamps).tobytes(), array("I", sizes).tobytes(), head + raw, "", False
    )


def facts(answer: ParsedResponse) -> dict[str, object]:
    return {name: getattr(answer, name) for name in ParsedResponse.__slots__}


@given(st.lists(BODIES, max_size=6), st.integers(0, 20), st.sets(st.integers(1, 400), max_size=12), st.data())
def test_a_response_is_parsed_alike_however_it_is_chunked_and_cut(
    bodies: list[bytes], num_missing: int, cuts: set[int], data: st.DataObject
) -> None:
    """Compare with the same bytes without chunks, where each byte is a piece with its own instant."""
    body = b"".join(bodies)[: -num_missing or None]
    edges = set(accumulate(map(len, bodies))) if data.draw(st.booleans()) else cuts
    inner = sorted(edge for edge in edges if edge < len(body))
    raw = b""
    where: list[int] = []  # in ``raw``, of each byte of the body
    for begin, end in zip([0, *inner], [*inner, len(body)], strict=True):
        if begin < end:
            raw += b"%x\r\n" % (end - begin)
            where += range(len(raw), len(raw) + end - begin)
            raw += body[begin:end] + b"\r\n"
    raw += b"0\r\n\r\n"
    ends = [*sorted(cut for cut in cuts if cut < len(raw)), len(raw)]
    sizes = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    came = [next(float(piece) for piece, end in enumerate(ends) if place < end) for place in where]
    chunked = parse_response(
        done_of(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", raw, [*map(float, range(len(ends)))], sizes)
    )
    plain = parse_response(done_of(HEAD + b"\r\n", body, came or [0.0], [1] * len(body) or [0]))
    assert facts(chunked) == facts(plain)


def test_each_byte_of_a_stream_without_empty_lines_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    num_searched = 0

    class Counting:
        def finditer(self, data: bytes, begin: int = 0) -> Iterator[re.Match[bytes]]:
            nonlocal num_searched
            num_searched += len(data) - begin
            return EMPTY_LINE.finditer(data, begin)

    monkeypatch.setattr("scripts.load_tester.client.sse_parser.EMPTY_LINE", Counting())
    raw = b"9\r\ndata: {}\n\r\n" * 1_000 + b"b\r\ndata: {}\n\n\n\r\n0\r\n\r\n"
    ((_, data),) = split_events(raw, 0, True)
    assert data.count(b"{}") == 1_001
    assert num_searched < len(raw)
