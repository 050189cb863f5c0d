"""``POST /v1/responses``: requests that continue stored responses, and answers that are stored in turn."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec

from common.clock import Clock
from common.errors import ErrorCode, RequestError
from gateway.http.formatters.common import encode_json
from gateway.http.formatters.responses import ResponsesFormatter, response_id_of
from gateway.http.limits import LIGHT_BYTES, check_weight
from gateway.http.protocol.decoding import refuse
from gateway.http.protocol.openai import ChatCompletionRequest
from gateway.http.protocol.responses import InputItem, ResponsesRequest
from gateway.http.translation.common import missing, own_name, with_own_names
from gateway.http.translation.responses import (
    FIELD_NAMES,
    functions,
    input_items,
    is_reference,
    shown_items,
    to_chat,
    turn_starts,
    without_turns,
)
from gateway.requests.input.generate_request import GenerateRequest, in_pieces
from gateway.requests.input.input_processor import InputProcessor
from gateway.requests.output_processor import OutputStream
from gateway.requests.response_store import ResponseStore, StoredResponse
from gateway.workers.served_models import ServedModel

_decode_items = msgspec.json.Decoder(list[InputItem]).decode

#: Errors of a prompt that may fit without some of its turns.
TOO_LONG = (ErrorCode.CONTEXT_LENGTH_EXCEEDED, ErrorCode.POOL_TOO_SMALL)

Process = Callable[[ChatCompletionRequest], Awaitable[list[GenerateRequest]]]


async def _process_truncated(chat: ChatCompletionRequest, process: Process) -> list[GenerateRequest]:
    """The requests of a chat without as many of its oldest turns as do not fit (``truncation: "auto"``).

    Raises RequestError: not even the last turn fits, or something else is wrong.
    """
    try:
        return await process(chat)
    except RequestError as error:
        if error.code not in TOO_LONG:
            raise
        too_long = error
    found: list[GenerateRequest] | None = None
    low, high = 1, len(turn_starts(chat.messages)) - 1  # turns to drop
    while low <= high:
        count = (low + high) // 2
        try:
            found = await process(without_turns(chat, count))
        except RequestError as error:
            if error.code not in TOO_LONG:
                raise
            too_long, low = error, count + 1
        else:
            high = count - 1
    if found is None:
        raise too_long
    return found


def _places_of_tools(body: ResponsesRequest) -> list[str]:
    return [function.where for function in functions(body)]


def _with_own_names(error: RequestError, body: ResponsesRequest) -> RequestError:
    return with_own_names(error, FIELD_NAMES, _places_of_tools(body))


def _without_logprobs(item: dict[str, Any]) -> dict[str, Any]:
    """An item of an answer as a later input needs it: log-probabilities mean nothing there, and have many parts."""
    if item["type"] != "message":
        return item
    return {**item, "content": [{**part, "logprobs": []} for part in item["content"]]}


class ResponsesApi:
    """The Responses API over chats: what ``/v1/responses`` adds to them.

    Args:
        max_bytes: largest conversation that ``previous_response_id`` may stand for, as if the client had sent it.
    """

    def __init__(self, inputs: InputProcessor, store: ResponseStore, clock: Clock, *, max_bytes: int) -> None:
        self._inputs = inputs
        self._store = store
        self._clock = clock
        self._max_bytes = max_bytes

    async def process(
        self, body: ResponsesRequest, model: ServedModel, tenant: str, response_id: str
    ) -> list[GenerateRequest]:
        """The request for the only output. Raises RequestError."""
        chat = await self._chat(body, tenant)
        process = partial(self._inputs.chat, model=model, tenant=tenant, request_id=response_id)
        try:
            requests = await (_process_truncated(chat, process) if body.truncation == "auto" else process(chat))
        except RequestError as error:
            raise _with_own_names(error, body) from error
        places = _places_of_tools(body)
        return [in_pieces(request, own_name(request.grammar_param, FIELD_NAMES, places)) for request in requests]

    async def count_tokens(self, body: ResponsesRequest, model: ServedModel, tenant: str) -> int:
        """Tokens of the prompt that the input becomes, nothing truncated. Raises RequestError."""
        chat = await self._chat(body, tenant)
        try:
            return await self._inputs.count_tokens(model, chat)
        except RequestError as error:
            raise _with_own_names(error, body) from error

    def input_items(self, tenant: str, response_id: str) -> list[dict[str, Any]]:
        """The items of the request of a stored response, as clients see them. Raises RequestError."""
        stored = self._store.get(tenant, response_id, self._clock.now())
        return shown_items(_decode_items(stored.input_items), response_id)

    def formatter(self, model: ServedModel, body: ResponsesRequest, response_id: str) -> ResponsesFormatter:
        is_stored = body.store is not False and self._store.is_enabled
        return ResponsesFormatter(model, body, response_id, stored=partial(self._stored, body) if is_stored else None)

    async def _chat(self, body: ResponsesRequest, tenant: str) -> ChatCompletionRequest:
        """The chat of a request, after what it continues; its input then has items instead of references to them."""
        history = await self._history(body, tenant)
        if isinstance(body.input, list):
            body.input = await self._without_references(body.input, tenant, "input")
        return to_chat(body, history)

    async def _history(self, body: ResponsesRequest, tenant: str) -> list[InputItem]:
        """The items of the conversation that a request continues."""
        if body.previous_response_id is None:
            return []
        self._check_enabled("previous_response_id")
        stored = self._store.conversation(tenant, body.previous_response_id, self._clock.now())
        lists = [items for response in stored for items in (response.input_items, response.output_items)]
        items = await self._decoded(lists, "previous_response_id")
        return await self._without_references(items, tenant, "previous_response_id")  # a retry is stored as it came

    async def _without_references(self, given: list[InputItem], tenant: str, param: str) -> list[InputItem]:
        """Items with those of stored answers to which they refer. Raises RequestError: one of these is not stored."""
        places = {item.id: f"{param}[{i}]" for i, item in enumerate(given) if is_reference(item)}
        if not places:
            return given
        self._check_enabled(param)
        if None in places:
            raise missing(f"{places[None]}.id")
        if len(places) < sum(map(is_reference, given)):
            raise refuse("refers to the same item twice", param)
        responses = dict.fromkeys(response_id_of(item_id or "") for item_id in places)
        stored = [found for one in responses if (found := self._store.find(tenant, one, self._clock.now()))]
        items = {item.id: item for item in await self._decoded([one.output_items for one in stored], param)}
        for item_id, place in places.items():
            if item_id not in items:
                message = f"the item {(item_id or '')[:200]!r} is not stored here (any more); send the item itself"
                raise refuse(message, place, ErrorCode.PREVIOUS_RESPONSE_NOT_FOUND)
        return [items[item.id] if is_reference(item) else item for item in given]

    def _check_enabled(self, param: str) -> None:
        if not self._store.is_enabled:
            message = "the gateway stores no responses (--max-stored-responses 0); send the whole conversation as input"
            raise refuse(message, param, ErrorCode.NOT_SUPPORTED)

    async def _decoded(self, lists: list[bytes], param: str) -> list[InputItem]:
        """Stored items. Raises RequestError: they are more than a body may have."""
        num_bytes = sum(map(len, lists))
        if num_bytes > self._max_bytes:
            message = f"the stored conversation has {num_bytes} bytes, at most {self._max_bytes} can be continued"
            raise refuse(message, param, ErrorCode.BODY_TOO_LARGE)
        if num_bytes > LIGHT_BYTES:
            try:
                await check_weight(b"".join(lists), num_bytes)
            except RequestError as error:
                message = f"the stored conversation {error.message.removeprefix('the body ')}"
                raise refuse(message, param, error.code) from error
        return [item for items in lists for item in _decode_items(items)]

    def _stored(self, body: ResponsesRequest, output: OutputStream, response: dict[str, Any]) -> Callable[[], None]:
        """Encode a response, perhaps on a thread; what this returns stores it and belongs to the event loop."""
        stored = StoredResponse(
            response["id"],
            body.previous_response_id,
            encode_json(input_items(body)),
            encode_json(list(map(_without_logprobs, response["output"]))),
            encode_json(response),
        )
        return lambda: self._store.add(output.request.tenant, stored, self._clock.now())
