"""The endpoints that generate: one table, and the ASGI application that answers a request to any of them.

These are plain Starlette routes, which write straight to ``send``: as path functions of FastAPI they would take three
times the processor time. A client that disconnects cancels the application, whose ``finally`` aborts the outputs still
in flight.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from starlette.types import Message as AsgiMessage
from starlette.types import Receive, Scope, Send

from common.errors import RequestError
from gateway.http.access.request_checks import RequestChecks
from gateway.http.errors import Envelope, anthropic_envelope, error_headers, openai_envelope
from gateway.http.formatters.anthropic import AnthropicFormatter
from gateway.http.formatters.common import ResponseFormatter, as_error, ignored_header
from gateway.http.formatters.native import NativeFormatter
from gateway.http.formatters.openai import ChatFormatter, CompletionFormatter
from gateway.http.http_connection import REQUEST_ID, TRACEPARENT
from gateway.http.json_response import JsonResponse
from gateway.http.messages import MessagesApi
from gateway.http.openapi.generated import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    Generated,
    Message,
    MessageEvent,
    Response,
    ResponseEvent,
)
from gateway.http.protocol.anthropic import MessagesRequest
from gateway.http.protocol.decoding import decode_with_extras
from gateway.http.protocol.native import NativeRequest
from gateway.http.protocol.openai import ChatCompletionRequest, CompletionRequest
from gateway.http.protocol.responses import ResponsesRequest
from gateway.http.responses import ResponsesApi
from gateway.http.services import Services
from gateway.http.streaming import OutputEvents, TurnEnd, send_stream, send_whole
from gateway.requests.generate_request import GenerateRequest
from gateway.requests.output_processor import OutputStream
from gateway.requests.quotas import charge
from gateway.tracing.trace_context import TraceContext
from gateway.tracing.tracer import another_span
from gateway.workers.served_models import ServedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A generating endpoint.

    Attributes:
        body: the struct of the body, with the fields ``model``, ``stream``, ``priority`` and ``priority_class``.
        process: makes requests of a decoded body, its model, the tenant and the id of the answer.
        formatter: makes the formatter of a request from the model, the body and the id of the answer.
        id_prefix: begins the id of each answer.
        operation: its name in traces.
        envelope: the form of errors.
        repeats_request_id: answers carry ``x-request-id`` as ``request-id`` too, as Anthropic's clients know it.
        answer, event, summary: for the API's description: the types of the answer and of the events of a stream.
        has_typed_events: an error and the end of a stream are events of this type too. Otherwise an error is an event
            of its own, and the last event is ``[DONE]``.
    """

    path: str
    methods: tuple[str, ...] = ("POST",)
    body: type[msgspec.Struct]
    process: Callable[[Any, ServedModel, str, str], Awaitable[list[GenerateRequest]]]
    formatter: Callable[[ServedModel, Any, str], ResponseFormatter]
    id_prefix: str
    operation: str = "chat"
    envelope: Envelope = openai_envelope
    repeats_request_id: bool = False
    answer: Any
    event: Any
    has_typed_events: bool = False
    summary: str


def make_endpoints(services: Services) -> list[Endpoint]:
    inputs = services.inputs
    max_bytes = services.config.max_body_bytes
    responses = ResponsesApi(inputs, services.responses, services.clock, max_bytes=max_bytes)
    messages = MessagesApi(inputs)
    return [
        Endpoint(
            path="/v1/chat/completions",
            body=ChatCompletionRequest,
            process=inputs.chat,
            formatter=ChatFormatter,
            id_prefix="chatcmpl-",
            answer=ChatCompletion,
            event=ChatCompletionChunk,
            summary="Answer a chat (OpenAI)",
        ),
        Endpoint(
            path="/v1/responses",
            body=ResponsesRequest,
            process=responses.process,
            formatter=responses.formatter,
            id_prefix="resp_",
            answer=Response,
            event=ResponseEvent,
            has_typed_events=True,
            summary="Answer a chat, and keep the answer to continue it (OpenAI)",
        ),
        Endpoint(
            path="/v1/messages",
            body=MessagesRequest,
            process=messages.process,
            formatter=AnthropicFormatter,
            id_prefix="msg_",
            envelope=anthropic_envelope,
            repeats_request_id=True,
            answer=Message,
            event=MessageEvent,
            has_typed_events=True,
            summary="Answer a chat (Anthropic)",
        ),
        Endpoint(
            path="/v1/completions",
            body=CompletionRequest,
            process=inputs.completion,
            formatter=CompletionFormatter,
            id_prefix="cmpl-",
            operation="text_completion",
            answer=Completion,
            event=Completion,
            summary="Continue prompts (OpenAI)",
        ),
        Endpoint(
            path="/generate",
            methods=("POST", "PUT"),  # SGLang takes both
            body=NativeRequest,
            process=inputs.native,
            formatter=partial(NativeFormatter, is_incremental=services.config.incremental_streaming_output),
            id_prefix="",
            operation="text_completion",
            answer=Generated | list[Generated],
            event=Generated,
            summary="Continue prompts (SGLang)",
        ),
    ]


def _with_header(send: Send, name: bytes, value: bytes) -> Send:
    """Adds a header to the answer."""

    async def send_with_header(message: AsgiMessage) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (name, value)]}
        await send(message)

    return send_with_header


class GenerateApp:
    """The ASGI application of one generating endpoint, which a request finds as its route in ``scope["route"]``."""

    def __init__(self, endpoint: Endpoint, services: Services, checks: RequestChecks) -> None:
        self.endpoint = endpoint
        self.path = endpoint.path
        self._services = services
        self._checks = checks
        self._turn = TurnEnd()
        self._on_gap = {model.name: services.metrics.on_gap(model.name) for model in services.models}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["route"] = self  # FastAPI does this for path functions; answers are counted by it
        if self.endpoint.repeats_request_id:
            send = _with_header(send, b"request-id", scope["state"][REQUEST_ID].encode())
        try:
            tenant, body = await self._checks.admit(scope, receive)
            await self._generate(body, tenant, scope, send)
        except Exception as error:  # before the answer has begun: a stream sends its later errors itself
            known = as_error(error)
            envelope = self.endpoint.envelope(known, scope["state"][REQUEST_ID])
            await JsonResponse(envelope, known.status, error_headers(known))(scope, receive, send)
            if known is not error:
                raise  # to the log

    async def _generate(self, data: bytes, tenant: str, scope: Scope, send: Send) -> None:
        """Answers one request: decodes its body, sends its outputs to the nodes, and formats what they return.

        Outputs that have not ended when this ends are aborted. Refusals are counted by model; the empty name stands
        for requests that name no served model.
        """
        services, endpoint = self._services, self.endpoint
        arrived_at = services.clock.now()
        answer_id = endpoint.id_prefix + secrets.token_hex(16)
        model_name = ""
        try:
            body: Any
            body, ignored = decode_with_extras(endpoint.body, data, are_refused=services.config.strict_fields)
            model = services.inputs.model(body.model)
            model_name = model.name
            requests = await endpoint.process(body, model, tenant, answer_id)
            requests = services.priorities.assign(requests, body.priority, body.priority_class)
            events = self._events(only_ends=not body.stream)
            state = scope["state"]
            trace, traceparent = None, state.get(TRACEPARENT, "")
            if traceparent or services.tracer.is_sampling:
                trace = services.tracer.begin(traceparent, answer_id, endpoint.operation)
            streams = self._streams(requests, model, events, arrived_at, state[REQUEST_ID], trace)
            self._submit(streams)
        except RequestError as error:
            services.metrics.rejected(model_name, error)
            raise
        try:
            formatter = endpoint.formatter(model, body, answer_id)
            headers = ignored_header(ignored)
            if trace is not None:
                headers["traceparent"] = trace.traceparent
            if body.stream:
                await send_stream(scope, send, streams, events, formatter, headers=headers)
            else:
                await send_whole(send, streams, events, formatter, headers=headers)
        except asyncio.CancelledError:
            for output in streams:
                if not output.is_ended:
                    services.metrics.disconnected(output)
            raise
        finally:
            for output in streams:
                if not output.is_ended:
                    services.dispatcher.abort(output.request.rid, "the client has disconnected")

    def _events(self, *, only_ends: bool) -> OutputEvents:
        services = self._services
        max_unread = services.config.max_unread_tokens
        return OutputEvents(self._turn, services.dispatcher.set_paused, only_ends=only_ends, max_unread=max_unread)

    def _streams(
        self,
        requests: list[GenerateRequest],
        model: ServedModel,
        events: OutputEvents,
        arrived_at: float,
        x_request_id: str,
        trace: TraceContext | None,
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
                x_request_id,
                another_span(trace) if number else trace,
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
                services.quotas.ended(tenant, charged=charge(output.request), tokens=0, now=now)
            raise
