"""The gateway's endpoints, and its start and stop.

A request's way through: ``front`` reads the body, ``schema`` decodes it, ``asks`` turns it into what is asked of the
nodes, ``control`` sends that out, each output's ``relay`` gathers what comes back, ``render`` writes it. A client that
goes away cancels its handler, and the handler's ``finally`` aborts what is still under way.
"""

import asyncio
import contextlib
import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import zmq
from aiohttp import web

from common.clock import MonotonicClock
from common.config import GatewayConfig
from common.errors import ErrorCode, RequestError
from common.incarnation import new_incarnation
from gateway.admission import Admission
from gateway.asks import Asker
from gateway.chat import ChatTemplate
from gateway.control import Control
from gateway.front import Front, json_response
from gateway.metrics import Metrics
from gateway.outlet import Outlet, Render, stream, whole
from gateway.registry import Registry
from gateway.relay import Ask, Relay
from gateway.render import ChatRender, CompletionRender, NativeRender
from gateway.router import Router
from gateway.schema import AbortRequest, Body, Chat, Codec, Completion, Detokenize, Native, OpenAI, Tokenize, refuse
from gateway.text import Text

MAX_QUEUED_REQUESTS = 512
GRACE_S = 2.0


class Gateway:
    """One gateway process's insides.

    Args:
        config: resolved configuration.
        folder: where the tokenizer's files are.
        header_timeout_s, body_timeout_s: how slowly a client may send; idle connections live as long as the first.
    """

    def __init__(
        self, config: GatewayConfig, folder: Path, *, header_timeout_s: float = 75.0, body_timeout_s: float = 30.0
    ) -> None:
        self._config = config
        self._text = Text.load(folder)
        self._asker = Asker(self._text, ChatTemplate.load(folder), request_timeout_s=config.request_timeout)
        self._model = config.served_name
        self._codec = Codec()
        self._clock = MonotonicClock()
        self._started_at = self._clock.now()
        self._created = int(time.time())
        self._page = (Path(__file__).parent / "page.html").read_bytes()
        self._header_timeout_s = header_timeout_s
        self._front = Front(
            self._routes(),
            api_key=config.api_key,
            max_body_bytes=config.max_body_bytes,
            body_timeout_s=body_timeout_s,
            on_done=lambda path, status: self._metrics.answered(path, status),
        )
        self._context: zmq.Context[Any] = zmq.Context()

    # ---- start and stop ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Opens both ports. Raises OSError or zmq.ZMQError if one is taken."""
        config = self._config
        registry = Registry(
            model=self._model,
            num_token_ids=self._text.vocab_size,
            heartbeat_s=config.heartbeat_interval,
            lost_after_s=config.heartbeat_timeout,
        )
        queued = MAX_QUEUED_REQUESTS if config.max_queued_requests is None else config.max_queued_requests
        self._control = Control(
            self._context,
            new_incarnation(),
            f"tcp://{in_url(config.control_host)}:{config.control_port or '*'}",
            self._clock,
            registry=registry,
            router=Router(),
            admission=Admission(queued),
            on_end=lambda relay: self._metrics.ended(relay),
        )
        self._metrics = Metrics(registry.nodes.values, lambda: self._control.mailbox.dropped)
        self._metrics.in_flight.set_function(lambda: self._control.num_in_flight)
        self._control.start()
        self._runner = web.ServerRunner(
            self._front.server(header_timeout_s=self._header_timeout_s), shutdown_timeout=1.0
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, config.host, config.port, backlog=1024)
        await site.start()

    @property
    def http_address(self) -> str:
        """``http://host:port`` as really bound."""
        host, port = self._runner.addresses[0][:2]
        return f"http://{in_url(host)}:{port}"

    @property
    def control_address(self) -> str:
        """``host:port`` that nodes dial."""
        port = self._control.mailbox.address.rpartition(":")[2]
        return f"{in_url(self._config.control_host)}:{port}"

    async def stop(self) -> None:
        """Accepts no more, lets what is under way finish for at most two seconds, ends the rest with an error."""
        self._front.is_stopping = True
        for site in list(self._runner.sites):
            await site.stop()
        until = self._clock.now() + GRACE_S
        while self._control.num_in_flight and self._clock.now() < until:
            await asyncio.sleep(0.02)
        self._control.shut()
        await self._runner.cleanup()
        self._control.close()
        self._asker.close()
        self._context.destroy(linger=200)

    # ---- endpoints that generate -------------------------------------------------------------------------------------

    def _routes(self) -> dict[str, dict[str, Callable[[web.BaseRequest], Any]]]:
        return {
            "/v1/chat/completions": {"POST": self._chat},
            "/v1/completions": {"POST": self._completions},
            "/generate": {"POST": self._native},
            "/v1/models": {"GET": self._models},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
            "/abort_request": {"POST": self._abort_request},
            "/health": {"GET": self._health},
            "/ready": {"GET": self._ready},
            "/metrics": {"GET": self._metrics_text},
            "/server_info": {"GET": self._server_info},
            "/v1/workers": {"GET": self._workers},
            "/": {"GET": self._live_page},
        }

    async def _decoded(self, request: web.BaseRequest, kind: type[Body]) -> Body:
        body = self._codec.decode(kind, await self._front.body(request))
        model = getattr(body, "model", None)
        if model is not None and model != self._model:
            message = f"the model {model[:200]!r} is not served here, only {self._model!r}"
            raise refuse(message, "model", ErrorCode.MODEL_NOT_FOUND)
        return body

    async def _completions(self, request: web.BaseRequest) -> web.StreamResponse:
        arrived_at = self._clock.now()
        body = await self._decoded(request, Completion)
        request_id = f"cmpl-{secrets.token_hex(16)}"
        asks = await self._asker.completion(body, request_id, self._control.limits())
        render = CompletionRender(
            self._text,
            self._head(request_id),
            with_logprobs=body.logprobs is not None,
            with_ids=bool(body.return_token_ids),
        )
        return await self._openai(request, body, asks, render, arrived_at)

    async def _chat(self, request: web.BaseRequest) -> web.StreamResponse:
        arrived_at = self._clock.now()
        body = await self._decoded(request, Chat)
        request_id = f"chatcmpl-{secrets.token_hex(16)}"
        asks = await self._asker.chat(body, request_id, self._control.limits())
        render = ChatRender(
            self._text,
            self._head(request_id),
            with_logprobs=bool(body.logprobs),
            with_ids=bool(body.return_token_ids),
        )
        return await self._openai(request, body, asks, render, arrived_at)

    def _head(self, request_id: str) -> dict[str, Any]:
        return {"id": request_id, "object": "", "created": int(time.time()), "model": self._model}

    async def _openai(
        self, request: web.BaseRequest, body: OpenAI, asks: list[Ask], render: Render, arrived_at: float
    ) -> web.StreamResponse:
        with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        async with self._under_way(asks, arrived_at, only_ends=not body.stream) as (relays, outlet):
            if body.stream:
                return await stream(request, relays, outlet, render, with_usage=with_usage)
            return await whole(relays, outlet, render)

    async def _native(self, request: web.BaseRequest) -> web.StreamResponse:
        arrived_at = self._clock.now()
        body = await self._decoded(request, Native)
        asks, is_batch = await self._asker.native(body, secrets.token_hex(16), self._control.limits())
        render = NativeRender(
            self._text,
            with_logprobs=bool(body.return_logprob),
            with_text=bool(body.return_text_in_logprobs),
            is_batch=is_batch,
            is_incremental=self._config.incremental_streaming_output,
        )
        async with self._under_way(asks, arrived_at, only_ends=not body.stream) as (relays, outlet):
            if body.stream:
                return await stream(request, relays, outlet, render, with_usage=False)
            return await whole(relays, outlet, render)

    @contextlib.asynccontextmanager
    async def _under_way(
        self, asks: list[Ask], arrived_at: float, *, only_ends: bool
    ) -> AsyncIterator[tuple[list[Relay], Outlet]]:
        """Outputs sent out, and where they report; whatever has not ended when the handler leaves is aborted."""
        outlet = Outlet(only_ends=only_ends)
        relays = []
        for number, ask in enumerate(asks):
            detokenizer = self._text.detokenizer(skip_special=ask.skip_special)
            relays.append(Relay(ask, number, detokenizer, outlet.wake, self._control.ended, arrived_at))
        self._control.dispatch(relays)
        try:
            yield relays, outlet
        finally:
            for relay in relays:
                if not relay.is_ended:
                    self._control.abort(relay.ask.rid, "the client has gone")

    # ---- the others --------------------------------------------------------------------------------------------------

    async def _models(self, request: web.BaseRequest) -> web.Response:
        limits = self._control.registry.limits()
        model = {
            "id": self._model,
            "object": "model",
            "created": self._created,
            "owned_by": "baton",
            "max_model_len": limits.context_length if limits else None,
        }
        return json_response({"object": "list", "data": [model]})

    async def _tokenize(self, request: web.BaseRequest) -> web.Response:
        body = await self._decoded(request, Tokenize)
        given = [name for name in ("prompt", "text", "messages") if getattr(body, name) is not None]
        if len(given) != 1:
            raise refuse("give exactly one of prompt, text and messages", "prompt")
        if body.messages is not None:
            texts = [self._asker.render(body.messages, body.add_generation_prompt, body.chat_template_kwargs)]
        else:
            single = body.prompt if body.prompt is not None else body.text
            texts = single if isinstance(single, list) else [single or ""]
        special = body.add_special_tokens and body.messages is None
        ids = [await self._asker.tokenize(text, add_special_tokens=special, param=given[0]) for text in texts]
        is_batch = isinstance(getattr(body, given[0]), list) and body.messages is None
        limits = self._control.registry.limits()
        counts = [len(tokens) for tokens in ids]
        return json_response(
            {
                "tokens": ids if is_batch else ids[0],
                "count": counts if is_batch else counts[0],
                "max_model_len": limits.context_length if limits else None,
            }
        )

    async def _detokenize(self, request: web.BaseRequest) -> web.Response:
        body = await self._decoded(request, Detokenize)
        tokens: list[Any] = body.tokens
        is_batch = bool(tokens) and isinstance(tokens[0], list)
        if any(isinstance(item, list) is not is_batch for item in tokens):
            raise refuse("token ids and lists of token ids cannot be mixed", "tokens")
        skip = body.skip_special_tokens
        texts = [self._text.decode(ids, skip_special=skip) for ids in (tokens if is_batch else [tokens])]
        answer = texts if is_batch else texts[0]
        return json_response({"text": answer, "prompt": answer})

    async def _abort_request(self, request: web.BaseRequest) -> web.Response:
        body = await self._decoded(request, AbortRequest)
        if body.abort_all == (body.rid is not None):
            raise refuse("give either rid or abort_all: true", "rid")
        count = self._control.abort_all() if body.rid is None else self._control.abort_matching(body.rid)
        return json_response({"aborted": count})

    async def _health(self, request: web.BaseRequest) -> web.Response:
        return json_response({"status": "ok"})

    async def _ready(self, request: web.BaseRequest) -> web.Response:
        if self._front.is_stopping:
            raise RequestError(ErrorCode.SHUTTING_DOWN, "the server is stopping")
        self._control.limits()
        return json_response({"status": "ready"})

    async def _metrics_text(self, request: web.BaseRequest) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={"Content-Type": self._metrics.content_type})

    async def _server_info(self, request: web.BaseRequest) -> web.Response:
        config = {key: value for key, value in dataclasses.asdict(self._config).items() if key != "api_key"}
        return json_response(
            {
                "version": own_version(),
                "model": self._model,
                "uptime_s": round(self._clock.now() - self._started_at, 3),
                "num_in_flight": self._control.num_in_flight,
                "is_ready": self._control.registry.is_ready,
                "control_address": self.control_address,
                "limits": self._control.registry.limits(),
                "config": config,
            }
        )

    async def _workers(self, request: web.BaseRequest) -> web.Response:
        workers = [self._control.describe(node) for node in self._control.registry.nodes.values()]
        return json_response({"workers": workers, "num_in_flight": self._control.num_in_flight, "model": self._model})

    async def _live_page(self, request: web.BaseRequest) -> web.Response:
        return web.Response(body=self._page, content_type="text/html", charset="utf-8")


def in_url(host: str) -> str:
    """A host as it is written in a URL: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def own_version() -> str:
    try:
        return version("baton")
    except PackageNotFoundError:
        return "0+unknown"
