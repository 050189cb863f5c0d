"""Builds a gateway process from its parts, starts it and stops it.

A request passes through ``http.http_connection``, ``http.generate``, ``requests.input.input_processor``,
``requests.dispatcher`` and ``workers.control_plane``. Its tokens come back through ``workers.control_plane``,
``requests.dispatcher``, ``requests.output_processor`` and ``http.streaming``.
"""

import asyncio
import functools
import re
import secrets
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import zmq
from fastapi import FastAPI
from starlette.types import ASGIApp

from common.clock import MonotonicClock
from common.config.gateway import GatewayConfig
from common.config.tenancy import parse_quotas
from common.discovery.announcement import Announcement
from common.discovery.etcd import EtcdStore
from common.errors import ConfigError
from common.plugins import load_app_plugin, load_priority_function
from common.wire.address import cannot_bind, in_url, zmq_endpoint
from common.wire.key_folder import load_keys
from common.wire.mailbox import Mailbox
from common.wire.messages import FromNode
from common.wire.process_id import new_incarnation
from gateway.http.access.api_keys import ApiKeyFile, KeyFile, permanent_keys
from gateway.http.access.auth import Authenticator
from gateway.http.access.hosts import allowed_hosts
from gateway.http.access.origins import AllowedOrigins
from gateway.http.access.request_checks import RequestChecks
from gateway.http.access.tls import make_tls_context
from gateway.http.app import make_app
from gateway.http.generate import GenerateApp, make_endpoints
from gateway.http.http_server import HttpServer
from gateway.http.limits import MAX_VALUES
from gateway.http.request_cycle import ConnectionOptions
from gateway.http.services import Services
from gateway.metrics.collectors import Metrics
from gateway.metrics.live import INTERVAL_S, LiveHistory
from gateway.requests.admission.priority import PriorityResolver
from gateway.requests.admission.priority_review import PriorityReview
from gateway.requests.admission.quotas import Quotas
from gateway.requests.dispatcher import Dispatcher
from gateway.requests.idempotency import IdempotencyStore
from gateway.requests.input.input_processor import InputProcessor
from gateway.requests.output_processor import OutputStream
from gateway.requests.request_log import log_request
from gateway.requests.response_store import ResponseStore
from gateway.siblings.app import CombiningApp
from gateway.siblings.connection import inherited_listener, listen_at
from gateway.siblings.forwarding import PASSED, PassedOnApp, Siblings
from gateway.siblings.group import GatewayGroup
from gateway.text.tokenizer import AsyncTokenizer
from gateway.tracing.otlp import OtlpExporter
from gateway.tracing.timelines import Timelines
from gateway.tracing.tracer import Tracer
from gateway.workers.control_plane import ControlPlane, MailboxChannel
from gateway.workers.invitations import Invitations, raise_socket_limit
from gateway.workers.pool import WorkerPools
from gateway.workers.served_models import ServedModel, ServedModels

#: How long requests in flight may go on after SIGINT. After SIGTERM, ``--drain-timeout`` says it.
GRACE_S = 2.0
#: How long a gateway that stops waits for the first requests of clients that it has accepted.
FIRST_REQUEST_S = 0.2
#: A gateway of a group does not accept clients before a request could be served. It waits for that at most this long,
#: and looks this often.
ACCEPT_WITHIN_S, READY_POLL_S = 10.0, 0.02
#: How long a client may take to send headers, and how long an idle connection lives.
HEADER_TIMEOUT_S = 75.0


class Gateway:
    """One gateway.

    Args:
        models: the served models by name; the first is the default.
        header_timeout_s, body_timeout_s: how slowly a client may send; idle connections live as long as the first.
    """

    def __init__(
        self,
        config: GatewayConfig,
        models: Mapping[str, ServedModel],
        *,
        header_timeout_s: float = HEADER_TIMEOUT_S,
        body_timeout_s: float = 30.0,
    ) -> None:
        self._config = config
        self._models = ServedModels(models)
        self._tokenizer = AsyncTokenizer()
        self._inputs = InputProcessor(
            self._tokenizer,
            request_timeout_s=config.request_timeout,
            slo_ttft_ms=config.slo_ttft_ms,
            slo_itl_ms=config.slo_itl_ms,
        )
        self._authenticator = Authenticator(permanent_keys(config), is_header_taken=config.tenant_header)
        self._function = load_priority_function(config.priority_function)
        self._priorities = PriorityResolver(config, self._function, is_strict=config.strict_fields)
        self._clock = MonotonicClock()
        quotas = parse_quotas(config.tenant_quotas)
        self._quotas = Quotas(quotas)
        self._key_file: ApiKeyFile | None = None
        if config.api_key_file is not None:
            self._key_file = ApiKeyFile(Path(config.api_key_file), permanent_keys(config), quotas)
            self._take_keys(self._key_file.read())
        self._exporter = OtlpExporter(config.otlp_endpoint, self._clock) if config.otlp_endpoint else None
        self._tracer = Tracer(self._exporter, config.trace_sample_rate)
        self._app_plugins = [load_app_plugin(spec) for spec in config.app_plugin]
        self._keys = load_keys(config.keys, is_insecure=config.insecure, role="gateway")
        if config.listed_nodes and self._keys is not None and not self._keys.permitted:
            raise ConfigError("--prefill and --decode need the public keys of nodes, in the folder nodes of --keys")
        self._options = ConnectionOptions(
            header_timeout_s=header_timeout_s,
            body_timeout_s=body_timeout_s,
            max_body_bytes=config.max_body_bytes,
            on_answer=self._answered,
            hosts=allowed_hosts(config.allowed_hosts, config.host),
        )
        self._tls: ssl.SSLContext | None = None
        if config.tls_cert is not None and config.tls_key is not None:
            self._tls = make_tls_context(config.tls_cert, config.tls_key)
        self._context: zmq.Context[Any] = zmq.Context()
        raise_socket_limit(self._context, len(config.listed_nodes))
        self._is_grace_over = False
        self._group = None if config.group is None else GatewayGroup.parse(config.group)
        self._siblings: Siblings | None = None
        if self._group is not None:
            self._siblings = Siblings(self._group, request_timeout_s=config.request_timeout)
        self._listener = None if config.listen_fd is None else inherited_listener(config.listen_fd)
        self._private: HttpServer | None = None  # for siblings
        self._accepting: asyncio.Task[None] | None = None
        self._store = None if config.etcd is None else EtcdStore(config)
        self._announcement: Announcement | None = None
        self._invitations: Invitations | None = None

    # ---- start and stop ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open both ports. Raises ConfigError naming the flags of a port that cannot be bound."""
        config = self._config
        mailbox, channel = self._open_channel()
        services = self._make_services(mailbox, channel)
        self._checks = RequestChecks(
            self._authenticator,
            AllowedOrigins(config.allowed_origins),
            max_values=self._max_values,
            on_rejected=lambda error: self._metrics.rejected("", error),
        )
        generating = [GenerateApp(endpoint, services, self._checks) for endpoint in make_endpoints(services)]
        try:
            app = make_app(services, self._checks, generating, lifespan=self._lifespan, plugins=self._app_plugins)
            private = None if self._group is None else listen_at(self._group.address(self._group.index))
        except ConfigError:
            self._close_listener()
            self._context.destroy(linger=0)
            raise
        try:
            await self._listen(app, private)
            self._announce(mailbox.incarnation)
        except ConfigError:
            await self.stop()
            raise

    def _make_services(self, mailbox: Mailbox, channel: MailboxChannel) -> Services:
        """Build the parts that need the channel to the nodes, and collect all that HTTP handlers use."""
        config = self._config
        pools = WorkerPools(model.pool for model in self._models)
        self._dispatcher = Dispatcher(
            pools,
            channel,
            asyncio.get_running_loop(),
            self._clock,
            on_end=self._ended,
            first_attempt=secrets.randbits(31),
        )
        self._metrics = Metrics(
            list(pools), mailbox, self._dispatcher, self._exporter,
            function=self._function, starvation_bound_s=config.starvation_bound,
        )  # fmt: skip
        self._live = LiveHistory()
        self._timelines = Timelines(config.timeline_requests, self._dispatcher.newest_streams)
        self._control = ControlPlane(
            channel,
            pools,
            self._dispatcher,
            clock=self._clock,
            timelines=self._timelines,
            review=PriorityReview(self._priorities, self._dispatcher),
        )
        return Services(
            config=config,
            clock=self._clock,
            models=self._models,
            tokenizer=self._tokenizer,
            inputs=self._inputs,
            responses=ResponseStore(
                max_responses=config.max_stored_responses,
                max_bytes=config.max_stored_response_bytes,
                max_age_s=config.stored_response_ttl,
            ),
            idempotency=IdempotencyStore(
                max_results=config.max_idempotent_results,
                max_bytes=config.max_idempotent_result_bytes,
                max_age_s=config.idempotency_ttl,
            ),
            priorities=self._priorities,
            quotas=self._quotas,
            dispatcher=self._dispatcher,
            control=self._control,
            metrics=self._metrics,
            live=self._live,
            timelines=self._timelines,
            tracer=self._tracer,
            siblings=self._siblings,
        )

    async def _listen(self, app: ASGIApp, private: socket.socket | None) -> None:
        """Open the HTTP port. Raises ConfigError: it cannot be bound."""
        config = self._config
        try:
            if self._listener is not None:
                await self._start_in_group(app, self._listener, private)
            else:
                self._http = HttpServer(app, self._options, self._tls)
                await self._http.start(config.host, config.port)
        except OSError as error:
            raise cannot_bind("--host", config.host, "--port", config.port, error) from error

    def _announce(self, incarnation: str) -> None:
        """Make this gateway known: through etcd, and to the nodes that ``--prefill`` and ``--decode`` name."""
        config = self._config
        address = f"{in_url(config.announced_host)}:{self._control.address.rpartition(':')[2]}"
        if self._store is not None:
            self._announcement = Announcement(self._store, address)
        self._invitations = Invitations(
            self._context, incarnation, config.listed_nodes, keys=self._keys, address=address
        )
        self._invitations.start()

    async def _start_in_group(self, app: ASGIApp, listener: socket.socket, private: socket.socket | None) -> None:
        """Listen for siblings at once, and accept clients from the shared socket once a request could be served.

        Until then, the siblings take them, and after a start they wait in the socket's queue.
        """
        public = app if self._siblings is None else CombiningApp(app, self._siblings)
        self._http = HttpServer(public, self._options, self._tls)
        await self._http.start_app()
        if private is not None:
            self._private = HttpServer(PassedOnApp(app), self._options, starts_app=False)
            await self._private.accept_from(private)
        self._accepting = asyncio.create_task(self._accept_when_ready(listener))

    async def _accept_when_ready(self, listener: socket.socket) -> None:
        ends_at = self._clock.now() + ACCEPT_WITHIN_S
        while self._clock.now() < ends_at and not self._models.is_ready:
            await asyncio.sleep(READY_POLL_S)
        await self._http.accept_from(listener)

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Nodes can register as long as the application runs."""
        self._control.start()
        tasks = [asyncio.create_task(self._sample())]
        if self._key_file is not None:
            tasks.append(asyncio.create_task(self._key_file.follow(self._take_keys)))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            self._control.close()
            await self._inputs.close()
            self._tokenizer.close()

    def _open_channel(self) -> tuple[Mailbox, MailboxChannel]:
        config = self._config
        bind = zmq_endpoint(f"{in_url(config.control_host)}:{config.control_port or '*'}")
        incarnation = new_incarnation("" if self._keys is None else self._keys.fingerprint)
        curve = None if self._keys is None else self._keys.server
        try:
            mailbox = Mailbox(self._context, incarnation, FromNode, bind=bind, curve=curve)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise cannot_bind(
                "--control-host", config.control_host, "--control-port", config.control_port, error
            ) from error
        return mailbox, MailboxChannel(mailbox, bind)

    @property
    def http_address(self) -> str:
        """``http://host:port`` as bound, or ``https://``."""
        host, port = self._http.address if self._listener is None else self._listener.getsockname()[:2]
        return f"{'http' if self._tls is None else 'https'}://{in_url(host)}:{port}"

    @property
    def control_address(self) -> str:
        """``host:port`` that nodes dial."""
        return self._control.address

    async def stop(self, grace_s: float = GRACE_S) -> None:
        """Refuse new requests, give those in flight ``grace_s``, and end the rest with an error.

        A client that was accepted before may still send its first request, if it does so at once.
        """
        if self._announcement is not None:
            announcement, self._announcement = self._announcement, None
            await asyncio.to_thread(announcement.close)
        if self._invitations is not None:
            self._invitations.close()
        if self._accepting is not None:
            self._accepting.cancel()
        servers = [self._http] if self._private is None else [self._private, self._http]
        for server in servers:
            server.close_listeners()
        until = self._clock.now() + FIRST_REQUEST_S
        while any(server.has_new_connections for server in servers) and self._clock.now() < until:
            await asyncio.sleep(0.005)
        self._checks.begin_stop()
        until = self._clock.now() + grace_s
        while self._clock.now() < until and not self._is_grace_over:
            if not self._dispatcher.num_in_flight and not any(server.is_answering for server in servers):
                break
            await asyncio.sleep(0.02)
        self._dispatcher.shut_down()
        for server in servers:
            await server.stop()
        self._close_listener()
        if self._exporter is not None:
            await asyncio.to_thread(self._exporter.close)
        self._context.destroy(linger=200)

    def _close_listener(self) -> None:
        """Close the inherited socket, from which clients may not have been accepted yet."""
        if self._listener is not None:
            self._listener.close()

    def end_grace(self) -> None:
        """End the requests that ``stop`` waits for."""
        self._is_grace_over = True

    async def _sample(self) -> None:
        """Add to the live history every second, also while no page is open: a sample takes microseconds."""
        while True:
            self._live.add(self._metrics.totals(self._clock.now()))
            await asyncio.sleep(INTERVAL_S)

    # ---- given to the parts ------------------------------------------------------------------------------------------

    def _take_keys(self, content: KeyFile) -> None:
        self._authenticator.replace_keys(content.keys)
        self._quotas.replace(content.quotas, self._clock.now())

    def _max_values(self) -> int:
        """Values that a body may have: all token ids of the longest possible prompt, or ``MAX_VALUES``."""
        return max(MAX_VALUES, *(model.context_length or 0 for model in self._models))

    def _answered(self, scope: Mapping[str, Any], status: int) -> None:
        """Count an answer by path; all below a path with a parameter count together.

        Of a request that a sibling has passed on, the sibling counts the answer.
        """
        if PASSED in scope["state"]:
            return
        route = scope.get("route")
        self._metrics.answered("other" if route is None else _without_parameters(route.path), status)

    def _ended(self, stream: OutputStream) -> None:
        """Count and log an ended output, charge its tenant and teach the predictor."""
        request = stream.request
        self._metrics.ended(stream)
        if self._config.log_requests:
            log_request(stream)
        timeline = self._timelines.ended(stream)
        if timeline is not None:
            self._tracer.ended(timeline)
        if request.tenant:
            self._quotas.settle(stream)
        if stream.finish and not request.sampling.ignore_eos and not request.is_prompt_only:
            predictor = self._models[request.model].predictor
            predictor.learn(request.tenant, request.prompt, len(stream.ids), is_cut=stream.finish == "length")


@functools.cache
def _without_parameters(path: str) -> str:
    return re.sub(r"\{.*", "*", path)
