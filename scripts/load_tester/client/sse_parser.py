"""Parses received responses into tokens with time stamps, after the run.

Chunk framing is removed, server-sent events are split, and each event gets the instant at which the piece with its last
byte arrived. One JSON decoder, typed to the fields that are used, reads all dialects: OpenAI's completions and chat
(vLLM, SGLang, llama.cpp's server, Baton) and the native ``/generate`` of SGLang and Baton.
"""

import re
from array import array
from collections.abc import Iterator
from itertools import accumulate
from typing import Annotated, Any

import msgspec

from scripts.load_tester.client.http_framing import chunk_size, read_head
from scripts.load_tester.client.ipc import RequestDone

#: A number of tokens, or a token; no server has larger ones.
Int32 = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: Any = None


class _ToolCall(msgspec.Struct):
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None

    @property
    def text(self) -> str:
        """Everything that the model wrote."""
        text = self.content or self.reasoning_content or self.reasoning or ""
        if self.tool_calls:
            functions = [call.function for call in self.tool_calls if call.function]
            text += "".join(f"{function.name or ''}{function.arguments or ''}" for function in functions)
        return text


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    message: _Delta | None = None  # of chats without streaming
    finish_reason: Any = None
    token_ids: list[Int32] | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: Int32 | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: Int32 | None = None
    completion_tokens: Int32 | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Meta(msgspec.Struct):
    id: str = ""
    prompt_tokens: Int32 | None = None
    completion_tokens: Int32 | None = None
    cached_tokens: Int32 | None = None
    finish_reason: Any = None
    timings: dict[str, float] | None = None
    queue_time: float | None = None
    forward_entry_time: float | None = None
    prefill_finished_time: float | None = None


class _Event(msgspec.Struct):
    id: str | None = None
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    text: str | None = None
    output_ids: list[Int32] | None = None
    meta_info: _Meta | None = None
    timings: dict[str, Any] | None = None


#: Stage names of llama.cpp's server (milliseconds) and SGLang, with our name and the factor to seconds.
FOREIGN = {"prompt_ms": ("prefill_s", 1e-3), "predicted_ms": ("decode_s", 1e-3), "queue_time": ("queue_s", 1.0)}
CUT_OFF = ("abort", "error")  # finish reasons of outputs that are not whole
NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # bad syntax, no UTF-8, nested too deeply
LONGEST = 1e12  # of a server's durations; a longer one is none
NEWLINE = 10
EMPTY_LINE, LONGEST_EMPTY = re.compile(rb"\n\n|\r\n\r\n"), 4
_decode = msgspec.json.Decoder(_Event, strict=False).decode


class ParsedResponse:
    """A parsed response.

    Attributes:
        status: HTTP status; 0 without one.
        error, message: kind of failure and the server's words about it; empty if it succeeded.
        stamps, counts: instant and number of tokens (1 if unknown) of each event with output.
        has_counts: whether the server sent these numbers.
        text, ids: the output; ids only if the server sends them.
        timings: stages timed by the server, in seconds.
    """

    __slots__ = (
        "counts", "error", "finish", "has_counts", "ids", "message", "num_events", "request_id", "stamps", "status",
        "texts", "timings", "usage_cached", "usage_output", "usage_prompt",
    )  # fmt: skip

    def __init__(self) -> None:
        self.status = 0
        self.error = self.message = self.finish = self.request_id = ""
        self.stamps: list[float] = []
        self.counts: list[int] = []
        self.has_counts = False
        self.texts: list[str] = []
        self.ids: list[int] = []
        self.num_events = 0
        self.usage_prompt: int | None = None
        self.usage_output: int | None = None
        self.usage_cached: int | None = None
        self.timings: dict[str, float] = {}

    @property
    def text(self) -> str:
        return "".join(self.texts)


def parse_response(done: RequestDone) -> ParsedResponse:
    response = ParsedResponse()
    response.error = done.error
    head_end = done.raw.find(b"\r\n\r\n")
    if head_end < 0:
        response.error = response.error or "bad_http"
        return response
    response.status, headers = read_head(done.raw[:head_end])
    is_chunked = b"chunked" in headers.get(b"transfer-encoding", b"").lower()
    if response.status == 200 and b"event-stream" in headers.get(b"content-type", b""):
        _read_events(response, done, split_events(done.raw, head_end + 4, is_chunked))
        return response
    body = b"".join(body for _, body in body_parts(done.raw, head_end + 4, is_chunked))
    if response.status == 200:
        _read_whole(response, body, done.ended_at)
    else:
        _read_error_body(response, body)
    return response


def body_parts(raw: bytes, at: int, is_chunked: bool) -> Iterator[tuple[int, bytes]]:
    """Offset in ``raw`` and content of each chunk, the last one perhaps incomplete; or of an unchunked body."""
    if not is_chunked:
        yield at, raw[at:]
        return
    while True:
        line_end = raw.find(b"\r\n", at)
        if line_end < 0:
            return
        size = chunk_size(raw[at:line_end])
        if size <= 0:
            return
        begin = line_end + 2
        yield begin, raw[begin : begin + size]
        at = begin + size + 2


def split_events(raw: bytes, at: int, is_chunked: bool) -> Iterator[tuple[int, bytes]]:
    """Offset in ``raw`` of the end, and the data, of each server-sent event of the body at ``at``."""
    sizes: dict[bytes, int] = {}
    for chunk in raw[at:].split(b"\n\n\r\n")[:-1] if is_chunked else ():
        line, _, data = chunk.partition(b"\r\ndata: ")
        size = sizes.get(line)
        if size is None:
            size = sizes[line] = chunk_size(line) if line.isalnum() else -1
        if size != len(data) + 8 or NEWLINE in data:
            break
        at += len(chunk) + 4
        yield at - 2, data  # the fast path: a chunk that is one event of one line
    rest = bytearray()  # of an event; only its last bytes can begin an empty line
    for begin, body in body_parts(raw, at, is_chunked):
        origin, known = begin - len(rest), max(0, len(rest) - LONGEST_EMPTY + 1)
        rest += body
        at = 0
        for end, after in [empty.span() for empty in EMPTY_LINE.finditer(rest, known)]:
            yield origin + after, _data_of(bytes(rest[at:end]))
            at = after
        del rest[:at]


def _read_events(response: ParsedResponse, done: RequestDone, found: Iterator[tuple[int, bytes]]) -> None:
    stamps = array("d", done.stamps)
    piece_ends = list(accumulate(array("I", done.sizes)))
    piece, last = 0, len(stamps) - 1
    is_done = False
    for end, data in found:
        if not data:
            continue
        if data == b"[DONE]":
            is_done = True
            continue
        try:
            parsed = _decode(data)
        except NOT_JSON as error:
            response.error, response.message = response.error or "bad_json", str(error)
            return
        response.num_events += 1
        while piece < last and piece_ends[piece] < end:
            piece += 1
        _take(response, parsed, stamps[piece])
    if not response.error and not is_done and not response.finish:
        response.error, response.message = "truncated", "the stream ended without [DONE] and without a finish reason"
    if not response.error and not response.stamps:
        response.error, response.message = "empty", "the stream has no output"


def _data_of(event: bytes) -> bytes:
    lines = event.replace(b"\r\n", b"\n").split(b"\n")
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:"))


def _take(response: ParsedResponse, event: _Event, at: float) -> None:
    if event.error is not None:
        response.error = response.error or "stream_" + _error_kind(event.error)
        response.message = _error_message(event.error)
        return
    if event.id and not response.request_id:
        response.request_id = event.id
    if event.usage is not None:
        _take_usage(response, event.usage)
    if event.meta_info is not None:
        _take_native(response, event, event.meta_info, at)
    for choice in event.choices:
        delta = choice.delta or choice.message
        text = choice.text or ""
        if delta is not None:
            text = delta.text
        if text or choice.token_ids:
            response.stamps.append(at)
            response.counts.append(len(choice.token_ids) if choice.token_ids else 1)
            response.texts.append(text)
            if choice.token_ids:
                response.has_counts = True
                response.ids += choice.token_ids
        if choice.finish_reason:
            response.finish = str(choice.finish_reason)
        if choice.finish_reason in CUT_OFF:  # vLLM ends the outputs of an engine that shuts down or sleeps this way
            response.error = response.error or f"stream_{response.finish}"
            response.message = response.message or "the server cut the output off"
    if event.timings:
        response.timings.update(_stages(event.timings))


def _take_usage(response: ParsedResponse, usage: _Usage) -> None:
    response.usage_prompt, response.usage_output = usage.prompt_tokens, usage.completion_tokens
    if usage.prompt_tokens_details is not None:
        response.usage_cached = usage.prompt_tokens_details.cached_tokens


def _take_native(response: ParsedResponse, event: _Event, meta: _Meta, at: float) -> None:
    """Take an event of ``/generate``, cumulative or not; ``completion_tokens`` always counts from the beginning."""
    before = response.usage_output or 0
    num_new = (meta.completion_tokens or 0) - before
    response.request_id = meta.id
    response.usage_prompt, response.usage_cached = meta.prompt_tokens, meta.cached_tokens
    response.usage_output = meta.completion_tokens
    if num_new > 0:
        response.has_counts = True
        response.stamps.append(at)
        response.counts.append(num_new)
    text, ids = event.text or "", event.output_ids or []
    # An increment can begin with the same text as the output so far; token ids are unambiguous.
    is_whole = len(ids) == meta.completion_tokens
    if not ids:
        response.texts = [response.text]
        is_whole = text.startswith(response.texts[0])
    if is_whole:
        response.texts, response.ids = [text], ids or response.ids
    else:
        response.texts.append(text)
        response.ids += ids
    if meta.finish_reason:
        reason = meta.finish_reason if isinstance(meta.finish_reason, dict) else {"type": meta.finish_reason}
        response.finish = str(reason.get("type", ""))
        if response.finish == "abort":
            response.error = f"stream_{reason.get('status_code') or 'abort'}"
            response.message = str(reason.get("message") or reason)
    response.timings.update(_stages(meta.timings or {}))
    if meta.queue_time is not None:
        response.timings.update(_stages({"queue_time": meta.queue_time}))
    if meta.forward_entry_time and meta.prefill_finished_time:  # SGLang with --enable-metrics: instants of one clock
        response.timings["prefill_s"] = max(0.0, meta.prefill_finished_time - meta.forward_entry_time)


def _stages(timings: dict[str, Any]) -> dict[str, float]:
    """The durations among a server's timings, in seconds, by our names; rates and counts are left out."""
    found = {}
    for name, value in timings.items():
        ours, scale = FOREIGN.get(name, (name if name.endswith("_s") else "", 1.0))
        if ours and isinstance(value, int | float) and abs(value) < LONGEST:
            found[ours] = value * scale
    return found


def _read_whole(response: ParsedResponse, body: bytes, ended_at: float) -> None:
    """Read a response without streaming: all of its output arrived at its end."""
    try:
        event = _decode(body)
    except NOT_JSON as error:
        response.error, response.message = response.error or "bad_json", str(error)
        return
    _take(response, event, ended_at)
    response.num_events = 1
    if not response.error and not response.stamps:
        response.error, response.message = "empty", "the response has no output"


def _read_error_body(response: ParsedResponse, body: bytes) -> None:
    response.error = response.error or f"http_{response.status}"
    try:
        content = msgspec.json.decode(body)
        response.message = _error_message(content.get("error", content) if isinstance(content, dict) else content)
    except NOT_JSON:
        response.message = body[:300].decode(errors="replace").strip()


def _error_kind(error: Any) -> str:
    return str((error.get("code") or error.get("type") or "error") if isinstance(error, dict) else "error")


def _error_message(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)[:300]
