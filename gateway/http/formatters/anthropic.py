"""Formats answers, stream events and errors of Anthropic's Messages API."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec

from common.errors import ErrorCode, RequestError
from gateway.http.formatters.common import ResponseFormatter, encode_json, named_event
from gateway.http.formatters.openai import usage
from gateway.http.protocol.anthropic import MessagesRequest
from gateway.requests.output_processor import Delta, OutputStream
from gateway.text.output_parser import (
    INVALID_JSON,
    OutputPiece,
    ReasoningPiece,
    TextPiece,
    ToolCallArguments,
    ToolCallBegin,
    joined,
)
from gateway.workers.served_models import ServedModel

Event = dict[str, Any]
BlockKind = Literal["text", "thinking", "tool_use"]

ERROR_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    408: "timeout_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
    504: "timeout_error",
}  # fmt: skip

#: Tells Anthropic's clients, whose tool runners ask for a conversation on the server, to send it with each request.
NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def anthropic_error(error: RequestError) -> dict[str, Any]:
    """Anthropic's form of an error."""
    kind = ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    message = error.message
    if error.code == ErrorCode.CONTEXT_LENGTH_EXCEEDED:
        message = f"prompt is too long: {message}"  # clients recognise the case by these words, and shorten the prompt
    body: dict[str, Any] = {"type": kind, "message": message}
    if error.param == "thread" and error.code == ErrorCode.NOT_SUPPORTED:
        body["details"] = NO_THREADS
    return {"type": "error", "error": body}


class BlockBuilder:
    """Makes the content blocks of an output, and the events that tell of them, from its pieces.

    Args:
        key: part of the ids of tool calls, the same for all of a message and in no other.
        hides_thinking: thinking blocks have no text.

    Attributes:
        blocks: the finished blocks.
    """

    def __init__(self, key: str, *, hides_thinking: bool) -> None:
        self._key = key
        self._hides_thinking = hides_thinking
        self._open: Event | None = None
        self._texts: list[str] = []
        self.blocks: list[Event] = []

    @property
    def has_calls(self) -> bool:
        return any(block["type"] == "tool_use" for block in self.blocks)

    def take(self, pieces: Iterable[OutputPiece]) -> list[Event]:
        """The events of more pieces."""
        events: list[Event] = []
        for piece in pieces:
            if isinstance(piece, ToolCallBegin):
                call_id = f"toolu_{self._key}{len(self.blocks) + (self._open is not None):02d}"
                events += self.finish()
                events.append(self._begin({"type": "tool_use", "id": call_id, "name": piece.name, "input": {}}))
                continue
            kind = _kind(piece)
            if self._open is None or self._open["type"] != kind:
                events += self.finish()
                events.append(
                    self._begin({"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})})
                )
            if not (kind == "thinking" and self._hides_thinking):
                self._texts.append(piece.text)
                events.append(self._delta(_change(kind, piece.text)))
        return events

    def finish(self) -> list[Event]:
        """End the last block."""
        block = self._open
        if block is None:
            return []
        events = []
        text = "".join(self._texts)
        if block["type"] == "tool_use":
            block = {**block, "input": _arguments(text)}
        elif block["type"] == "thinking":
            # Nothing is signed here, but clients send back only thinking that carries a signature.
            block = {**block, "thinking": text, "signature": self._key}
            events.append(self._delta({"type": "signature_delta", "signature": self._key}))
        else:
            block = {**block, "text": text}
        events.append({"type": "content_block_stop", "index": len(self.blocks)})
        self.blocks.append(block)
        self._open = None
        self._texts.clear()
        return events

    def _begin(self, block: Event) -> Event:
        self._open = block
        return {"type": "content_block_start", "index": len(self.blocks), "content_block": block}

    def _delta(self, delta: Event) -> Event:
        return {"type": "content_block_delta", "index": len(self.blocks), "delta": delta}


def _kind(piece: TextPiece | ReasoningPiece | ToolCallArguments) -> BlockKind:
    if isinstance(piece, TextPiece):
        return "text"
    return "thinking" if isinstance(piece, ReasoningPiece) else "tool_use"


def _change(kind: BlockKind, text: str) -> Event:
    if kind == "tool_use":
        return {"type": "input_json_delta", "partial_json": text}
    return {"type": f"{kind}_delta", kind: text}


def _arguments(text: str) -> dict[str, Any]:
    """The arguments of a call. They may be cut short by ``max_tokens``, or not be JSON without a grammar."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {INVALID_JSON: text}


class AnthropicFormatter(ResponseFormatter):
    """Answers and stream events of ``/v1/messages``."""

    def __init__(self, model: ServedModel, body: MessagesRequest, request_id: str) -> None:
        self._model = model.asked_name
        self._max_tokens = body.max_tokens
        self._message_id = request_id
        hides_thinking = body.thinking is not None and body.thinking.display == "omitted"
        self._builder = BlockBuilder(request_id.removeprefix("msg_"), hides_thinking=hides_thinking)

    def first(self, outputs: Sequence[OutputStream]) -> bytes:
        return _events([{"type": "message_start", "message": self._message(outputs[0])}, {"type": "ping"}])

    def chunk(self, output: OutputStream, delta: Delta) -> bytes:
        return _events(self._builder.take(joined(delta.pieces)))

    def last(self, outputs: Sequence[OutputStream]) -> bytes:
        output = outputs[0]
        events = self._builder.finish()
        delta = {"type": "message_delta", "delta": self._stop(output), "usage": _usage(output)}
        return _events([*events, delta, {"type": "message_stop"}])

    def error(self, error: RequestError) -> bytes:
        return _events([anthropic_error(error)])

    def answer(self, outputs: Sequence[OutputStream]) -> Iterator[bytes]:
        self._builder.take(joined(outputs[0].pieces))
        self._builder.finish()
        yield encode_json({**self._message(outputs[0]), **self._stop(outputs[0])})

    def _message(self, output: OutputStream) -> dict[str, Any]:
        return {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": self._builder.blocks,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(output),
        }

    def _stop(self, output: OutputStream) -> dict[str, Any]:
        if isinstance(output.matched, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": output.matched}
        if output.finish == "length":
            is_asked = len(output.ids) >= self._max_tokens
            reason = "max_tokens" if is_asked else "model_context_window_exceeded"
        else:
            reason = "tool_use" if self._builder.has_calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": None}


def _usage(output: OutputStream) -> dict[str, Any]:
    """Anthropic's ``usage``, in which ``input_tokens`` are those that were not cached."""
    counted = usage([output])
    cached = counted["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counted["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": counted["completion_tokens"],
        "output_tokens_details": {"thinking_tokens": output.num_reasoning_tokens},
    }


def _events(events: Iterable[Event]) -> bytes:
    return b"".join(named_event(event["type"], event) for event in events)
