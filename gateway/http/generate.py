"""The endpoints that generate: OpenAI's completions and chat completions, and ``/generate``.

A client that disconnects cancels its handler, whose ``finally`` aborts the outputs still in flight.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from aiohttp import web

from common.errors import RequestError
from gateway.http.app import HttpCall, Route
from gateway.http.protocol import ChatCompletionRequest, Codec, CompletionRequest, NativeRequest, OpenAIRequest
from gateway.http.responses import ChatFormatter, CompletionFormatter, NativeFormatter, Usage
from gateway.http.services import Services
from gateway.http.streaming import OutputEvents, ResponseFormatter, stream, whole
from gateway.requests.generate_request import GenerateRequest
from gateway.requests.input_processor import is_list_of_prompts
from gateway.requests.output_processor import OutputStream
from gateway.requests.quotas import charge
from gateway.workers.served_models import ServedModel

Body = TypeVar("Body", CompletionRequest, ChatCompletionRequest, NativeRequest)


class GenerateRoutes:
    """Handlers of the generating endpoints."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._codec = Codec()
        self._on_gap = {model.name: services.metrics.on_gap(model.name) for model in services.models}

    def routes(self) -> dict[str, Route]:
        return {
            "/v1/chat/completions": Route({"POST": self._chat}),
            "/v1/completions": Route({"POST": self._completions}),
            "/generate": Route({"POST": self._native}),
        }

    async def _completions(self, call: HttpCall) -> web.StreamResponse:
        request_id = "cmpl-" + secrets.token_hex(16)
        process = partial(self._services.inputs.completion, tenant=call.tenant, request_id=request_id)
        async with self._submitted(call, CompletionRequest, process) as (body, model, streams, events):
            formatter = CompletionFormatter(
                model.tokenizer,
                new_head(request_id, model),
                with_logprobs=body.logprobs is not None,
                with_ids=bool(body.return_token_ids),
                usage=usage_of(body),
            )
            return await answer(call, body, streams, events, formatter)

    async def _chat(self, call: HttpCall) -> web.StreamResponse:
        request_id = "chatcmpl-" + secrets.token_hex(16)
        process = partial(self._services.inputs.chat, tenant=call.tenant, request_id=request_id)
        async with self._submitted(call, ChatCompletionRequest, process) as (body, model, streams, events):
            formatter = ChatFormatter(
                model.tokenizer,
                new_head(request_id, model),
                with_logprobs=bool(body.logprobs),
                with_ids=bool(body.return_token_ids),
                usage=usage_of(body),
            )
            return await answer(call, body, streams, events, formatter)

    async def _native(self, call: HttpCall) -> web.StreamResponse:
        process = partial(self._services.inputs.native, tenant=call.tenant, request_id=secrets.token_hex(16))
        async with self._submitted(call, NativeRequest, process) as (body, model, streams, events):
            formatter = NativeFormatter(
                model.tokenizer,
                with_logprobs=bool(body.return_logprob),
                with_text=bool(body.return_text_in_logprobs),
                is_batch=len(streams) > 1 or is_list_of_prompts(body.text if body.text is not None else body.input_ids),
                is_incremental=self._services.config.incremental_streaming_output,
            )
            return await answer(call, body, streams, events, formatter)

    @contextlib.asynccontextmanager
    async def _submitted(
        self, call: HttpCall, kind: type[Body], process: Callable[[Body, ServedModel], Awaitable[list[GenerateRequest]]]
    ) -> AsyncIterator[tuple[Body, ServedModel, list[OutputStream], OutputEvents]]:
        """Decodes a body and sends its outputs to the nodes; what has not ended on exit is aborted.

        Refusals are counted by model; the empty name stands for requests that name no served model.
        """
        services = self._services
        arrived_at = services.clock.now()
        model_name = ""
        try:
            body = self._codec.decode(kind, call.body)
            model = services.inputs.model(body.model)
            model_name = model.name
            requests = await process(body, model)
            requests = services.priorities.assign(requests, body.priority, body.priority_class)
            events = OutputEvents(only_ends=not body.stream)
            streams = self._streams(requests, model, events, arrived_at)
            self._submit(streams)
        except RequestError as error:
            services.metrics.rejected(model_name, error)
            raise
        try:
            yield body, model, streams, events
        except (ConnectionError, asyncio.CancelledError):
            for output in streams:
                if not output.is_ended:
                    services.metrics.disconnected(output)
            raise
        finally:
            for output in streams:
                if not output.is_ended:
                    services.dispatcher.abort(output.request.rid, "the client has disconnected")

    def _streams(
        self, requests: list[GenerateRequest], model: ServedModel, events: OutputEvents, arrived_at: float
    ) -> list[OutputStream]:
        on_gap = self._on_gap[model.name]
        return [
            OutputStream(
                request,
                number,
                partial(model.tokenizer.detokenizer, skip_special=request.skip_special),
                events.wake,
                arrived_at,
                on_gap,
            )
            for number, request in enumerate(requests)
        ]

    def _submit(self, streams: list[OutputStream]) -> None:
        """Sends all outputs of a request, or none. Raises RequestError: too many for their tenant or in all."""
        services = self._services
        tenant = streams[0].request.tenant
        if not tenant:
            services.dispatcher.dispatch(streams)
            return
        now = services.clock.now()
        services.quotas.admit(tenant, len(streams), sum(charge(output.request) for output in streams), now)
        try:
            services.dispatcher.dispatch(streams)
        except RequestError:
            for output in streams:
                services.quotas.ended(tenant, charged=charge(output.request), tokens=0, now=now, is_refused=True)
            raise


async def answer(
    call: HttpCall,
    body: CompletionRequest | ChatCompletionRequest | NativeRequest,
    streams: list[OutputStream],
    events: OutputEvents,
    formatter: ResponseFormatter,
) -> web.StreamResponse:
    """The answer of a generating endpoint, streamed or whole."""
    if body.stream:
        return await stream(call.http, streams, events, formatter)
    return await whole(streams, events, formatter)


def new_head(request_id: str, model: ServedModel) -> dict[str, Any]:
    """The fields that begin every answer and chunk of an OpenAI endpoint."""
    return {"id": request_id, "object": "", "created": int(time.time()), "model": model.name}


def usage_of(body: OpenAIRequest) -> Usage:
    """Which token counts the client wants in a stream."""
    options = body.stream_options
    if options is None or not options.include_usage:
        return ""
    return "each" if options.continuous_usage_stats else "last"
