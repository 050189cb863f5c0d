"""The gateway's start and stop, and its endpoints that generate; the others are in ``queries``.

A request's way through: ``front`` reads the body, ``schema`` decodes it, ``asks`` turns it into what is asked of the
nodes, ``control`` sends that out, each output's ``relay`` gathers what comes back, ``render`` writes it. A client that
goes away cancels its handler, and the handler's ``finally`` aborts what is still under way.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import zmq
from aiohttp import web

from common.clock import MonotonicClock
from common.config.gateway import GatewayConfig
from common.config.tenancy import parse_quotas
from common.errors import ConfigError, RequestError
from common.plugins import load_priority_function
from common.wire.address import in_url
from common.wire.process_id import new_incarnation
from gateway.http.admin import Queries
from gateway.http.app import HttpServer
from gateway.http.auth import make_callers
from gateway.http.limits import MAX_VALUES
from gateway.http.protocol import Chat, Codec, Completion, Native, OpenAI
from gateway.http.responses import ChatRender, CompletionRender, NativeRender, Usage
from gateway.http.streaming import OutputEvents, Render, stream, whole
from gateway.metrics.collectors import Metrics
from gateway.requests.input_processor import Terms
from gateway.requests.output_processor import GenerateRequest, OutputStream
from gateway.requests.priority import PriorityResolver
from gateway.requests.quotas import Quotas
from gateway.workers.control_plane import Control
from gateway.workers.pool import WorkerPools
from gateway.workers.served_models import Model, Models

GRACE_S = 2.0
Asked = TypeVar("Asked", Completion, Chat, Native)


class Gateway:
    """One gateway process's insides.

    Args:
        config: resolved configuration.
        folders: where the tokenizer's files of each model are, by the model's name; the first is the default.
        header_timeout_s, body_timeout_s: how slowly a client may send; idle connections live as long as the first.
    """

    def __init__(
        self,
        config: GatewayConfig,
        folders: Mapping[str, Path],
        *,
        header_timeout_s: float = 75.0,
        body_timeout_s: float = 30.0,
    ) -> None:
        self._config = config
        self._models = Models(config, folders)
        self._callers = make_callers(config)
        self._claims = PriorityResolver(config, load_priority_function(config.priority_function))
        self._quotas = Quotas(parse_quotas(config.tenant_quotas))
        self._codec = Codec()
        self._clock = MonotonicClock()
        self._header_timeout_s = header_timeout_s
        self._body_timeout_s = body_timeout_s
        self._context: zmq.Context[Any] = zmq.Context()

    # ---- start and stop ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Opens both ports. Raises ConfigError that names the flags of one that cannot be had."""
        config = self._config
        fleets = WorkerPools(model.fleet for model in self._models)
        self._metrics = Metrics(
            list(fleets), lambda: self._control.mailbox.dropped, starvation_bound_s=config.starvation_bound
        )
        try:
            self._control = Control(
                self._context,
                new_incarnation(),
                f"tcp://{in_url(config.control_host)}:{config.control_port or '*'}",
                self._clock,
                fleets=fleets,
                on_start=self._metrics.started,
                on_end=self._ended,
            )
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise _cannot_listen("control-port", config.control_port, config.control_host, error) from error
        self._control.start()
        queries = Queries(config, self._models, self._control, self._metrics, self._clock, self._claims)
        self._front = HttpServer(
            self._routes() | queries.routes(),
            callers=self._callers,
            max_body_bytes=config.max_body_bytes,
            body_timeout_s=self._body_timeout_s,
            max_values=self._max_values,
            on_done=self._metrics.answered,
        )
        queries.body, queries.tenant = self._front.body, self._front.tenant
        self._runner = web.ServerRunner(
            self._front.server(header_timeout_s=self._header_timeout_s), shutdown_timeout=1.0
        )
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, config.host, config.port, backlog=1024).start()
        except OSError as error:
            await self.stop()
            raise _cannot_listen("port", config.port, config.host, error) from error

    @property
    def http_address(self) -> str:
        """``http://host:port`` as really bound."""
        host, port = self._runner.addresses[0][:2]
        return f"http://{in_url(host)}:{port}"

    @property
    def control_address(self) -> str:
        """``host:port`` that nodes dial."""
        return self._control.address

    async def stop(self) -> None:
        """Accepts no more, lets what is under way finish for at most two seconds, ends the rest with an error."""
        self._front.is_stopping = self._control.is_stopping = True
        for site in list(self._runner.sites):
            await site.stop()
        until = self._clock.now() + GRACE_S
        while self._control.requests.num_in_flight and self._clock.now() < until:
            await asyncio.sleep(0.02)
        self._control.requests.shut()
        await self._runner.cleanup()
        self._control.close()
        self._models.close()
        self._context.destroy(linger=200)

    # ---- endpoints that generate -------------------------------------------------------------------------------------

    def _routes(self) -> dict[str, dict[str, Callable[[web.BaseRequest], Any]]]:
        return {
            "/v1/chat/completions": {"POST": self._chat},
            "/v1/completions": {"POST": self._completions},
            "/generate": {"POST": self._native},
        }

    async def _asked(self, request: web.BaseRequest, kind: type[Asked]) -> tuple[Asked, Model]:
        """The body, and the model that it is for."""
        with self._metrics.refusing[""]:
            body = self._codec.decode(kind, await self._front.body(request))
            return body, self._models.get(body.model)

    def _max_values(self) -> int:
        """Of a body: it may be all of the longest prompt's token ids."""
        limits = [model.fleet.registry.limits() for model in self._models]
        return max([MAX_VALUES, *(known.context_length for known in limits if known is not None)])

    def _terms(self, request: web.BaseRequest, body: Completion | Chat | Native, model: Model) -> Terms:
        claim = self._claims.claim(self._front.tenant(request), body.priority, body.priority_class)
        limits = model.fleet.limits()
        return Terms(limits, claim, model.fleet.admission.limit(limits.max_running))

    async def _completions(self, request: web.BaseRequest) -> web.StreamResponse:
        arrived_at = self._clock.now()
        body, model = await self._asked(request, Completion)
        head = new_head("cmpl-", model)
        with self._metrics.refusing[model.name]:
            asks = await model.asker.completion(body, head["id"], self._terms(request, body, model))
        render = CompletionRender(
            model.text,
            head,
            with_logprobs=body.logprobs is not None,
            with_ids=bool(body.return_token_ids),
            usage=usage_of(body),
        )
        return await self._answer(request, model, asks, render, arrived_at, is_stream=bool(body.stream))

    async def _chat(self, request: web.BaseRequest) -> web.StreamResponse:
        arrived_at = self._clock.now()
        body, model = await self._asked(request, Chat)
        head = new_head("chatcmpl-", model)
        with self._metrics.refusing[model.name]:
            asks = await model.asker.chat(body, head["id"], self._terms(request, body, model))
        render = ChatRender(
            model.text,
            head,
            with_logprobs=bool(body.logprobs),
            with_ids=bool(body.return_token_ids),
            usage=usage_of(body),
        )
        return await self._answer(request, model, asks, render, arrived_at, is_stream=bool(body.stream))

    async def _native(self, request: web.BaseRequest) -> web.StreamResponse:
        arrived_at = self._clock.now()
        body, model = await self._asked(request, Native)
        with self._metrics.refusing[model.name]:
            terms = self._terms(request, body, model)
            asks, is_list = await model.asker.native(body, secrets.token_hex(16), terms)
        render = NativeRender(
            model.text,
            with_logprobs=bool(body.return_logprob),
            with_text=bool(body.return_text_in_logprobs),
            is_batch=is_list,
            is_incremental=self._config.incremental_streaming_output,
        )
        return await self._answer(request, model, asks, render, arrived_at, is_stream=bool(body.stream))

    async def _answer(
        self, request: web.BaseRequest, model: Model, asks: list[GenerateRequest], render: Render, arrived_at: float,
        *, is_stream: bool,
    ) -> web.StreamResponse:  # fmt: skip
        asks = self._claims.judged(asks)
        async with self._under_way(model, asks, arrived_at, only_ends=not is_stream) as (relays, outlet):
            if is_stream:
                return await stream(request, relays, outlet, render)
            return await whole(relays, outlet, render)

    @contextlib.asynccontextmanager
    async def _under_way(
        self, model: Model, asks: list[GenerateRequest], arrived_at: float, *, only_ends: bool
    ) -> AsyncIterator[tuple[list[OutputStream], OutputEvents]]:
        """Outputs sent out, and where they report; whatever has not ended when the handler leaves is aborted."""
        outlet = OutputEvents(only_ends=only_ends)
        relays = []
        on_gap = self._metrics.on_gap(model.name)
        for number, ask in enumerate(asks):
            detokenizer = model.text.detokenizer(skip_special=ask.skip_special)
            relays.append(
                OutputStream(ask, number, detokenizer, outlet.wake, self._control.requests.ended, arrived_at, on_gap)
            )
        with self._metrics.refusing[model.name]:
            self._take(relays)
        try:
            yield relays, outlet
        except (ConnectionError, asyncio.CancelledError):
            for relay in relays:
                if not relay.is_ended:
                    self._metrics.disconnected(relay)
            raise
        finally:
            for relay in relays:
                if not relay.is_ended:
                    self._control.requests.abort(relay.ask.rid, "the client has gone")

    def _take(self, relays: list[OutputStream]) -> None:
        """Sends them on their way. Raises RequestError: too many, for their tenant or over all; none is taken then."""
        first, now = relays[0].ask, self._clock.now()
        self._quotas.admit(first.tenant, len(relays), sum(charge(relay) for relay in relays), now)
        try:
            self._control.requests.dispatch(relays)
        except RequestError:
            for relay in relays:
                self._quotas.ended(first.tenant, charged=charge(relay), tokens=0, now=now, is_refused=True)
            raise

    def _ended(self, relay: OutputStream) -> None:
        """One output is over: it is counted, paid for and learned from."""
        ask = relay.ask
        self._metrics.ended(relay)
        tokens = len(ask.prompt) + len(relay.ids)
        self._quotas.ended(ask.tenant, charged=charge(relay), tokens=tokens, now=relay.ended_at)
        if relay.finish and not ask.sampling.ignore_eos and not ask.is_prompt_only:
            predictor = self._models.get(ask.model).predictor
            predictor.learn(ask.tenant, ask.prompt, len(relay.ids), is_cut=relay.finish == "length")


def _cannot_listen(flag: str, port: int, host: str, error: OSError | zmq.ZMQError) -> ConfigError:
    reason = error.strerror or str(error)
    host_flag = flag.replace("port", "host")
    return ConfigError(f"--{flag} {port} on --{host_flag} {host} cannot be listened on: {reason}")


def charge(relay: OutputStream) -> int:
    """Tokens that an output is expected to cost its tenant."""
    return len(relay.ask.prompt) + relay.ask.expected_output


def new_head(prefix: str, model: Model) -> dict[str, Any]:
    """What every answer and chunk of an OpenAI endpoint begins with."""
    return {"id": prefix + secrets.token_hex(16), "object": "", "created": int(time.time()), "model": model.name}


def usage_of(body: OpenAI) -> Usage:
    """Which token counts the client wants in a stream."""
    options = body.stream_options
    if options is None or not options.include_usage:
        return ""
    return "each" if options.continuous_usage_stats else "last"
