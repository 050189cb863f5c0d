"""``POST /v1/responses``: requests that continue stored responses, and answers that are stored in turn."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec

from common.clock import Clock
from common.errors import ErrorCode, RequestError
from gateway.http.formatters.common import encode_json
from gateway.http.formatters.responses import ResponsesFormatter
from gateway.http.limits import LIGHT_BYTES, check_weight
from gateway.http.protocol.decoding import refuse
from gateway.http.protocol.openai import ChatCompletionRequest
from gateway.http.protocol.responses import InputItem, ResponsesRequest
from gateway.http.translation.common import own_name, with_own_names
from gateway.http.translation.responses import (
    FIELD_NAMES,
    input_items,
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

#: Why a prompt may fit once turns of it are dropped.
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


class ResponsesApi:
    """Args:
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
        chat = to_chat(body, await self._history(body, tenant))
        process = partial(self._inputs.chat, model=model, tenant=tenant, request_id=response_id)
        try:
            requests = await (_process_truncated(chat, process) if body.truncation == "auto" else process(chat))
        except RequestError as error:
            raise with_own_names(error, FIELD_NAMES) from error
        return [in_pieces(request, own_name(request.grammar_param, FIELD_NAMES)) for request in requests]

    async def count_tokens(self, body: ResponsesRequest, model: ServedModel, tenant: str) -> int:
        """Tokens of the prompt that the input becomes, nothing truncated. Raises RequestError."""
        chat = to_chat(body, await self._history(body, tenant))
        try:
            return await self._inputs.count_tokens(model, chat)
        except RequestError as error:
            raise with_own_names(error, FIELD_NAMES) from error

    def input_items(self, tenant: str, response_id: str) -> list[dict[str, Any]]:
        """The items of the request of a stored response, as clients see them. Raises RequestError."""
        stored = self._store.get(tenant, response_id, self._clock.now())
        return shown_items(_decode_items(stored.input_items), response_id)

    def formatter(self, model: ServedModel, body: ResponsesRequest, response_id: str) -> ResponsesFormatter:
        is_stored = body.store is not False and self._store.is_enabled
        return ResponsesFormatter(model, body, response_id, prepare=partial(self._prepare, body) if is_stored else None)

    async def _history(self, body: ResponsesRequest, tenant: str) -> list[InputItem]:
        """The items of the conversation that a request continues."""
        if body.previous_response_id is None:
            return []
        if not self._store.is_enabled:
            message = "the gateway stores no responses (--max-stored-responses 0); send the whole conversation as input"
            raise refuse(message, "previous_response_id", ErrorCode.NOT_SUPPORTED)
        stored = self._store.conversation(tenant, body.previous_response_id, self._clock.now())
        lists = [items for response in stored for items in (response.input_items, response.output_items)]
        num_bytes = sum(map(len, lists))
        if num_bytes > self._max_bytes:
            message = f"the stored conversation has {num_bytes} bytes, at most {self._max_bytes} can be continued"
            raise refuse(message, "previous_response_id", ErrorCode.BODY_TOO_LARGE)
        if num_bytes > LIGHT_BYTES:
            await check_weight(b"".join(lists), num_bytes)
        return [item for items in lists for item in _decode_items(items)]

    def _prepare(self, body: ResponsesRequest, output: OutputStream, response: dict[str, Any]) -> Callable[[], None]:
        """Encodes a response; what it returns stores it."""
        stored = StoredResponse(
            response["id"],
            body.previous_response_id,
            encode_json(input_items(body)),
            encode_json(response["output"]),
            encode_json(response),
        )
        return lambda: self._store.add(output.request.tenant, stored, self._clock.now())
