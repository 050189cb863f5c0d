"""Formats answers and stream events of OpenAI's Responses API."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from common.errors import RequestError
from gateway.http.formatters.common import ResponseFormatter, encode_json, named_event, token_logprobs, token_text
from gateway.http.formatters.openai import usage
from gateway.http.protocol.responses import (
    ReasoningConfig,
    ResponseFunction,
    ResponsesRequest,
    ResponseTool,
    TextConfig,
    TextFormat,
)
from gateway.http.translation.responses import called_functions
from gateway.requests.output_processor import Delta, OutputStream
from gateway.text.output_parser import OutputPiece, ReasoningPiece, TextPiece, ToolCallArguments, ToolCallBegin, joined
from gateway.workers.served_models import ServedModel

Event = dict[str, Any]
ItemKind = Literal["message", "reasoning", "function_call"]

#: Codes that a failed response may have, by status; any other error is a ``server_error``.
FAILURE_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
#: Characters of the id of a response behind its prefix.
KEY_LENGTH = 32


def response_id_of(item_id: str) -> str:
    """The id of the response that has this item in its output, if it is an item of ours."""
    return f"resp_{item_id.partition('_')[2][:KEY_LENGTH]}"


@dataclass(slots=True)
class _Item:
    """One item of an output."""

    kind: ItemKind
    index: int
    key: str  # the id of the response without its prefix
    name: str = ""
    namespace: str | None = None
    texts: list[str] = field(default_factory=list)
    logprobs: list[msgspec.Raw] = field(default_factory=list)  # of the tokens of a message

    @property
    def item_id(self) -> str:
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[self.kind]
        return f"{prefix}_{self.key}{self.index:02d}"

    def part(self, text: str) -> Event:
        """The only part of a message or of reasoning."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self.logprobs)}

    def shown(self, status: str) -> Event:
        """The item as clients see it; without its content while it is in progress."""
        shown: Event = {"id": self.item_id, "type": self.kind, "status": status}
        text = "".join(self.texts)
        if self.kind == "function_call":
            if self.namespace is not None:
                shown["namespace"] = self.namespace
            return {**shown, "call_id": f"call_{self.key}{self.index:02d}", "name": self.name, "arguments": text}
        content = [] if status == "in_progress" else [self.part(text)]
        if self.kind == "reasoning":
            return {**shown, "summary": [], "content": content}
        return {**shown, "role": "assistant", "content": content}


class ItemBuilder:
    """Makes the items of an output, and the events that tell of them, from its pieces.

    Args:
        functions: namespace and name of functions in namespaces, by the names of the model.

    Attributes:
        items: the finished items.
    """

    def __init__(self, key: str, functions: Mapping[str, tuple[str, str]]) -> None:
        self._key = key
        self._functions = functions
        self._open: _Item | None = None
        self.items: list[Event] = []

    def take(self, pieces: Iterable[tuple[OutputPiece, list[msgspec.Raw]]]) -> list[Event]:
        """The events of more pieces, each with the log-probabilities of its tokens if it is text."""
        events: list[Event] = []
        for piece, logprobs in pieces:
            if isinstance(piece, ToolCallBegin):
                events += self.finish("completed")
                events += self._begin("function_call", piece.name)
                continue
            kind = _kind(piece)
            if self._open is None or self._open.kind != kind:
                events += self.finish("completed")
                events += self._begin(kind)
            events.append(self._delta(piece.text, logprobs))
        return events

    def finish(self, status: str) -> list[Event]:
        """End the last item, with the status ``completed`` or ``incomplete``."""
        item, self._open = self._open, None
        if item is None:
            return []
        text, shown = "".join(item.texts), item.shown(status)
        self.items.append(shown)
        done = {**_place(item), "arguments" if item.kind == "function_call" else "text": text}
        if item.kind == "message":
            done["logprobs"] = item.logprobs
        elif item.kind == "function_call":
            done["name"] = item.name
        events = [_event(f"{_TEXT_EVENTS[item.kind]}.done", done)]
        if item.kind != "function_call":
            events.append(_event("response.content_part.done", {**_place(item), "part": item.part(text)}))
        return [*events, _event("response.output_item.done", {"output_index": item.index, "item": shown})]

    def _begin(self, kind: ItemKind, name: str = "") -> list[Event]:
        namespace, own_name = self._functions.get(name, (None, name))
        item = self._open = _Item(kind, len(self.items), self._key, own_name, namespace)
        added = {"output_index": item.index, "item": item.shown("in_progress")}
        events = [_event("response.output_item.added", added)]
        if kind != "function_call":
            events.append(_event("response.content_part.added", {**_place(item), "part": item.part("")}))
        return events

    def _delta(self, text: str, logprobs: list[msgspec.Raw]) -> Event:
        item = self._open
        assert item is not None, "arguments follow the beginning of their call"
        item.texts.append(text)
        delta = {**_place(item), "delta": text}
        if item.kind == "message":
            item.logprobs += logprobs
            delta["logprobs"] = logprobs
        return _event(f"{_TEXT_EVENTS[item.kind]}.delta", delta)


_TEXT_EVENTS: dict[ItemKind, str] = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}


def _kind(piece: TextPiece | ReasoningPiece | ToolCallArguments) -> ItemKind:
    if isinstance(piece, TextPiece):
        return "message"
    return "reasoning" if isinstance(piece, ReasoningPiece) else "function_call"


def _event(name: str, fields: Event) -> Event:
    return {"type": name, **fields}


def _place(item: _Item) -> Event:
    place: Event = {"item_id": item.item_id, "output_index": item.index}
    return place if item.kind == "function_call" else {**place, "content_index": 0}


class ResponsesFormatter(ResponseFormatter):
    """Answers and stream events of ``/v1/responses``.

    Args:
        stored: called with the output and the finished response; what it returns stores the response. None to store
            nothing.
    """

    def __init__(
        self,
        model: ServedModel,
        body: ResponsesRequest,
        request_id: str,
        *,
        stored: Callable[[OutputStream, dict[str, Any]], Callable[[], None]] | None = None,
    ) -> None:
        self._stored = stored
        self._keep: Callable[[], None] | None = None
        self._head = _head(model.asked_name, body, request_id, is_stored=stored is not None)
        self._builder = ItemBuilder(request_id.removeprefix("resp_"), called_functions(body))
        self._tokenizer = model.tokenizer
        self._num_events = 0
        self._num_pieces = self._num_spans = 0  # that the builder has taken

    def first(self, outputs: Sequence[OutputStream]) -> bytes:
        begun = self._response(outputs[0], "in_progress")
        return self._events(
            [_event("response.created", {"response": begun}), _event("response.in_progress", {"response": begun})]
        )

    def chunk(self, output: OutputStream, delta: Delta) -> bytes:
        return self._events(self._builder.take(self._with_logprobs(output, delta.pieces)))

    def last(self, outputs: Sequence[OutputStream]) -> bytes:
        status = _status(outputs[0])
        events = self._builder.finish(status)
        response = self._finished(outputs[0], status)
        return self._events([*events, _event(f"response.{status}", {"response": response})])

    def error(self, error: RequestError) -> bytes:
        events = self._builder.finish("incomplete")
        code = FAILURE_CODES.get(error.status, "server_error")
        failed = {
            **self._head,
            "status": "failed",
            "output": self._builder.items,
            "usage": None,
            "error": {"code": code, "message": error.message},
        }
        return self._events([*events, _event("response.failed", {"response": failed})])

    def answer(self, outputs: Sequence[OutputStream]) -> Iterator[bytes]:
        status = _status(outputs[0])
        self._builder.take(self._with_logprobs(outputs[0], outputs[0].pieces))
        self._builder.finish(status)
        yield encode_json(self._finished(outputs[0], status))

    def keep(self) -> None:
        if self._keep is not None:
            self._keep()

    def _finished(self, output: OutputStream, status: str) -> dict[str, Any]:
        response = self._response(output, status)
        if self._stored is not None:
            self._keep = self._stored(output, response)
        return response

    def _with_logprobs(
        self, output: OutputStream, pieces: Sequence[OutputPiece]
    ) -> list[tuple[OutputPiece, list[msgspec.Raw]]]:
        """The next pieces, each with the log-probabilities of its tokens."""
        if output.request.sampling.logprobs is None:
            return [(piece, []) for piece in joined(pieces)]
        found: list[list[msgspec.Raw]] = [[] for _ in pieces]
        for piece, first, end in output.text_spans[self._num_spans :]:
            found[piece - self._num_pieces] += self._logprobs(output, first, end)
        self._num_pieces += len(pieces)
        self._num_spans = len(output.text_spans)
        return list(zip(pieces, found, strict=True))

    def _logprobs(self, output: OutputStream, first: int, end: int) -> list[msgspec.Raw]:
        markers = () if output.request.output_format is None else output.request.output_format.markers
        entries = zip(output.ids[first:end], output.logprobs[first:end], strict=False)
        return [token_logprobs(packed, token, self._shown_token) for token, packed in entries if token not in markers]

    def _shown_token(self, token: int) -> Event:
        piece = self._tokenizer.piece(token)
        return {"token": token_text(piece), "bytes": list(piece)}

    def _response(self, output: OutputStream, status: str) -> dict[str, Any]:
        self._head["created_at"] = output.created
        sampling = output.request.sampling
        completed_at = output.created + int(output.ended_at - output.started_at)
        return {
            **self._head,
            "status": status,
            "completed_at": completed_at if status == "completed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": self._builder.items,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "usage": None if status == "in_progress" else _usage(output),
        }

    def _events(self, events: Sequence[Event]) -> bytes:
        data = b"".join(
            named_event(event["type"], {**event, "sequence_number": self._num_events + i})
            for i, event in enumerate(events)
        )
        self._num_events += len(events)
        return data


def _status(output: OutputStream) -> str:
    return "incomplete" if output.finish == "length" else "completed"


def _usage(output: OutputStream) -> dict[str, Any]:
    counted = usage([output])
    return {
        "input_tokens": counted["prompt_tokens"],
        "input_tokens_details": {**counted["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": counted["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": output.num_reasoning_tokens},
        "total_tokens": counted["total_tokens"],
    }


def _head(model: str, body: ResponsesRequest, request_id: str, *, is_stored: bool) -> dict[str, Any]:
    """The fields of a response that are known at its beginning."""
    text, reasoning = body.text or TextConfig(), body.reasoning or ReasoningConfig()
    return {
        "id": request_id,
        "object": "response",
        "created_at": 0,  # set with the first event
        "background": False,
        "error": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
        "service_tier": "default",
        "store": is_stored,
        "text": {"format": msgspec.to_builtins(text.format or TextFormat(type="text"))},
        "tool_choice": msgspec.to_builtins(body.tool_choice or "auto"),
        "tools": [_shown_tool(tool) for tool in body.tools or [] if not tool.is_ignored],
        "top_logprobs": body.top_logprobs or 0,
        "truncation": body.truncation or "disabled",
    }


def _shown_tool(tool: ResponseFunction) -> dict[str, Any]:
    if isinstance(tool, ResponseTool) and tool.type == "namespace":
        tools = [_shown_tool(one) for one in tool.tools or []]
        return {"type": "namespace", "name": tool.name, "description": tool.description or "", "tools": tools}
    shown = {"type": "function", "name": tool.name, "description": tool.description}
    return {**shown, "parameters": tool.parameters, "strict": bool(tool.strict)}
