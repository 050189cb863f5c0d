"""The endpoints that generate: one table, and the ASGI application that answers a request to any of them.

These are plain Starlette routes, which write straight to ``send``: as path functions of FastAPI they would take three
times the processor time. A client that disconnects cancels the application, whose ``finally`` aborts the outputs still
in flight, unless the request has a key by which the client may ask for them again.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from starlette.types import Receive, Scope, Send

from common.errors import ErrorCode, RequestError
from common.wire.messages import KeptOutput, Tokens
from gateway.http.access.request_checks import RequestChecks
from gateway.http.errors import api_headers, error_response
from gateway.http.formatters.anthropic import AnthropicFormatter
from gateway.http.formatters.common import ResponseFormatter, as_error, ignored_header
from gateway.http.formatters.native import NativeFormatter
from gateway.http.formatters.openai import ChatFormatter, CompletionFormatter
from gateway.http.http_connection import IDEMPOTENCY_KEY, REQUEST_ID, TRACEPARENT
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
from gateway.http.protocol.decoding import MAX_NAMED_EXTRAS, Strict, decode_with_extras
from gateway.http.protocol.native import NativeRequest
from gateway.http.protocol.openai import ChatCompletionRequest, CompletionRequest
from gateway.http.protocol.responses import ResponsesRequest
from gateway.http.responses import ResponsesApi
from gateway.http.retries import Retries, draws_seed
from gateway.http.services import Services
from gateway.http.streaming import OutputEvents, TurnEnd, send_stream, send_whole
from gateway.requests.admission.quotas import charge
from gateway.requests.idempotency import KeyedRequest, RequestIdentity, identify, with_key
from gateway.requests.input.generate_request import GenerateRequest
from gateway.requests.output_processor import OutputStream
from gateway.siblings.forwarding import ClientRequest, Siblings
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
        answer, event, summary: for the API's description: the types of the answer and of the events of a stream.
        has_typed_events: an error and the end of a stream are events of this type too. Otherwise an error is an event
            of its own, and the last event is ``[DONE]``.
    """

    path: str
    methods: tuple[str, ...] = ("POST",)
    body: type[Strict]
    process: Callable[[Any, ServedModel, str, str], Awaitable[list[GenerateRequest]]]
    formatter: Callable[[ServedModel, Any, str], ResponseFormatter]
    id_prefix: str
    operation: str = "chat"
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


class _Answer(NamedTuple):
    """What is written to a client.

    Attributes:
        model: of the outputs.
        keyed: the request by its key; None without one.
        is_retry: an earlier request has sent the outputs, perhaps from another gateway.
    """

    model: ServedModel
    answer_id: str
    streams: list[OutputStream]
    events: OutputEvents
    keyed: KeyedRequest | None
    is_retry: bool = False


class GenerateApp:
    """The ASGI application of one generating endpoint, which a request finds as its route in ``scope["route"]``."""

    def __init__(self, endpoint: Endpoint, services: Services, checks: RequestChecks) -> None:
        self.endpoint = endpoint
        self.path = endpoint.path
        self._services = services
        self._checks = checks
        self._turn = TurnEnd()
        self._retries = Retries(
            services.idempotency,
            services.dispatcher,
            services.control,
            metrics=services.metrics,
            clock=services.clock,
            grace_s=services.config.retry_grace,
        )
        self._on_gap = {model.name: services.metrics.on_gap(model.name) for model in services.models}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["route"] = self  # FastAPI does this for path functions; answers are counted by it
        try:
            tenant, body = await self._checks.admit(scope, receive)
            await self._generate(body, tenant, scope, send)
        except Exception as error:  # before the answer has begun: a stream sends its later errors itself
            await error_response(as_error(error), self.path, scope["state"][REQUEST_ID])(scope, receive, send)
            if not isinstance(error, RequestError):
                raise  # to the log

    async def _generate(self, data: bytes, tenant: str, scope: Scope, send: Send) -> None:
        """Answer one request: decode its body, send its outputs to the nodes, and write what they return.

        Refusals are counted by model; the empty name stands for requests that name no served model.
        """
        services = self._services
        siblings, request = services.siblings, None
        arrived_at = services.clock.now()
        model_name = ""
        try:
            body: Any
            body, ignored = decode_with_extras(self.endpoint.body, data, are_refused=services.config.strict_fields)
            model = services.models.find(body.model)
            model_name = "" if model is None else model.name
            key, rid = scope["state"].get(IDEMPOTENCY_KEY), getattr(body, "rid", None)
            identity = None if key is None and not rid else identify(self.path, data, tenant, key, rid)
            if siblings is not None:
                request = ClientRequest(scope, data, send, body.deadline_ms)
                if await self._pass_home(siblings, tenant, identity, request):
                    return
            answer = await self._begin(
                body, model, tenant, state=scope["state"], arrived_at=arrived_at, identity=identity
            )
        except RequestError as error:
            is_elsewhere = error.code is ErrorCode.PREVIOUS_RESPONSE_NOT_FOUND
            if is_elsewhere and siblings is not None and request is not None:
                if await siblings.pass_to_holder(error.code, request):
                    return
            services.metrics.rejected(model_name, error)
            raise
        if body.priority is not None and not services.priorities.is_enabled:
            ignored = ("priority", *ignored)[:MAX_NAMED_EXTRAS]
        await self._write(answer, body, ignored, scope, send)

    async def _write(self, answer: _Answer, body: Any, ignored: Sequence[str], scope: Scope, send: Send) -> None:
        """Write the outputs of an answer, formatted, while they come or when all have ended.

        Outputs that have not ended when this ends are aborted, or go on for a grace if they have a key.

        Args:
            ignored: fields of the body that had no effect.
        """
        services, streams = self._services, answer.streams
        try:
            formatter = self.endpoint.formatter(answer.model, body, answer.answer_id)
            headers = api_headers(self.path, scope["state"][REQUEST_ID])
            headers |= ignored_header(ignored)
            if streams[0].trace is not None:
                headers["traceparent"] = streams[0].trace.traceparent
            if answer.is_retry:
                headers["idempotent-replayed"] = "true"
            if body.stream:
                await send_stream(scope, send, streams, answer.events, formatter, headers=headers)
            else:
                await send_whole(send, streams, answer.events, formatter, headers=headers)
        except asyncio.CancelledError:
            for output in streams:
                if not output.is_ended:
                    services.metrics.disconnected(output)
            raise
        finally:
            answer.events.close()
            if answer.keyed is not None:
                self._retries.leave(answer.keyed, answer.events)
            else:
                for output in streams:
                    if not output.is_ended:
                        services.dispatcher.abort(output.request.rid, "the client has disconnected")

    async def _pass_home(
        self, siblings: Siblings, tenant: str, identity: RequestIdentity | None, request: ClientRequest
    ) -> bool:
        """Have the home of a tenant with a quota, or of a key, answer the request; False if it has no other home."""
        if self._services.quotas.has_limits(tenant):
            return await siblings.pass_home("tenant", tenant, request)
        return identity is not None and await siblings.pass_home("key", identity.key, request)

    async def _begin(
        self, body: Any, model: ServedModel | None, tenant: str,
        *, state: dict[str, Any], arrived_at: float, identity: RequestIdentity | None,
    ) -> _Answer:  # fmt: skip
        """Send the outputs of a request to the nodes, or find those of the request that it repeats.

        Args:
            model: None if it is not served, or not any more.

        Raises RequestError: it is refused.
        """
        services, endpoint = self._services, self.endpoint
        if identity is not None and (repeated := self._repeated(identity, body)) is not None:
            return repeated
        if model is None:
            raise services.models.refusal(body.model)
        if tenant:
            services.quotas.check(tenant, services.clock.now())  # before the work that comes before outputs are counted
        answer_id = endpoint.id_prefix + os.urandom(16).hex()
        requests = await endpoint.process(body, model, tenant, answer_id)
        if not services.priorities.is_neutral or body.priority is not None or body.priority_class is not None:
            requests = services.priorities.assign(requests, body.priority, body.priority_class)
        known: dict[str, KeptOutput] = {}
        if identity is not None:
            if (repeated := self._repeated(identity, body)) is not None:
                return repeated  # it came again meanwhile, and nodes that are asked for its outputs would end them
            if tenant:
                services.quotas.check(tenant, services.clock.now(), count=len(requests))  # while nodes keep the outputs
            requests = with_key(requests, identity, draws_seed=partial(draws_seed, body))
            known = await self._retries.take_over(model, requests)
            if (repeated := self._repeated(identity, body)) is not None:
                return repeated
        events = self._events(only_ends=not body.stream)
        keyed = None if identity is None else KeyedRequest(identity, answer_id, services.idempotency)
        trace, traceparent = None, state.get(TRACEPARENT, "")
        if traceparent or services.tracer.is_sampling:
            trace = services.tracer.begin(traceparent, answer_id, endpoint.operation)
        wake = events.wake if keyed is None else keyed.wake
        streams = self._streams(requests, model, wake, arrived_at, state[REQUEST_ID], trace)
        for stream in streams if known else ():
            if (output := known.get(stream.request.key)) is not None and output.tokens:
                stream.on_tokens(Tokens(stream.request.rid, 0, 0, output.tokens, finish=output.finish), arrived_at)
        self._submit(streams)
        if keyed is not None:
            self._retries.add(keyed, streams, events)
        is_retry = any(output.tokens for output in known.values())
        return _Answer(model, answer_id, streams, events, keyed, is_retry=is_retry)

    def _repeated(self, identity: RequestIdentity, body: Any) -> _Answer | None:
        """The answer from the outputs of the request that this one repeats; None if it is new."""
        events = self._events(only_ends=not body.stream)
        known = self._retries.attach(identity, events)
        if known is None:
            return None
        model = self._services.models.of(known.streams[0].request)
        return _Answer(model, known.answer_id, known.streams, events, known, is_retry=True)

    def _events(self, *, only_ends: bool) -> OutputEvents:
        services, config = self._services, self._services.config
        return OutputEvents(
            self._turn,
            services.dispatcher.set_paused,
            only_ends=only_ends,
            max_unread=config.max_unread_tokens,
            ping_s=0.0 if only_ends else config.sse_ping_interval,
        )

    def _streams(
        self,
        requests: list[GenerateRequest],
        model: ServedModel,
        wake: Callable[[OutputStream], None],
        arrived_at: float,
        x_request_id: str,
        trace: TraceContext | None,
    ) -> list[OutputStream]:
        on_gap, created = self._on_gap[model.name], int(time.time())
        return [
            OutputStream(
                request,
                number,
                partial(model.tokenizer.detokenizer, request.text_before, skip_special=request.skip_special),
                wake,
                arrived_at,
                on_gap,
                x_request_id,
                another_span(trace) if number else trace,
                created,
            )
            for number, request in enumerate(requests)
        ]

    def _submit(self, streams: list[OutputStream]) -> None:
        """Send all outputs of a request, or none; those that a node has kept whole have ended already.

        Raises RequestError: too many for their tenant or in all.
        """
        services = self._services
        kept = [output for output in streams if output.is_ended]
        running = [output for output in streams if not output.is_ended] if kept else streams
        tenant, now = streams[0].request.tenant, services.clock.now()
        if tenant:
            tokens, is_continued = sum(charge(output.request) for output in streams), any(o.ids for o in streams)
            services.quotas.admit(tenant, len(streams), tokens, now, is_continued=is_continued)
        try:
            if running:
                services.dispatcher.dispatch(running)
        except Exception as error:
            is_refused = isinstance(error, RequestError)  # none is in flight, and a rid may be another request's
            for output in streams:
                if is_refused or not services.dispatcher.fail_internal(output.request.rid):
                    services.quotas.ended(tenant, charged=charge(output.request), tokens=0, now=now)
            raise
        for output in kept:
            services.dispatcher.end_kept(output)
