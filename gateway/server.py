"""Builds a gateway process from its parts, starts it and stops it.

A request passes through ``http.app``, ``http.generate``, ``requests.input_processor``, ``requests.dispatcher`` and
``workers.control_plane``. Its tokens come back through ``workers.control_plane``, ``requests.dispatcher``,
``requests.output_processor`` and ``http.streaming``.
"""

import asyncio
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import zmq
from aiohttp import web

from common.clock import MonotonicClock
from common.config.gateway import GatewayConfig
from common.config.tenancy import parse_quotas
from common.errors import ConfigError
from common.plugins import load_priority_function
from common.wire.address import in_url
from common.wire.mailbox import Mailbox
from common.wire.messages import FromNode
from common.wire.process_id import new_incarnation
from gateway.http.admin import AdminRoutes
from gateway.http.app import HttpServer
from gateway.http.auth import make_authenticator
from gateway.http.generate import GenerateRoutes
from gateway.http.limits import MAX_VALUES, BodyLimits
from gateway.http.services import Services
from gateway.metrics.collectors import Metrics
from gateway.requests.dispatcher import Dispatcher
from gateway.requests.input_processor import InputProcessor
from gateway.requests.output_processor import OutputStream
from gateway.requests.priority import PriorityResolver
from gateway.requests.quotas import Quotas
from gateway.workers.control_plane import ControlPlane, MailboxChannel
from gateway.workers.pool import WorkerPools
from gateway.workers.served_models import load_models

#: Requests in flight at a stop may go on for so long.
GRACE_S = 2.0


class Gateway:
    """One gateway.

    Args:
        folders: where the tokenizer files of each model are, by name; the first is the default model.
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
        self._models = load_models(config, folders)
        self._inputs = InputProcessor(self._models, request_timeout_s=config.request_timeout)
        self._authenticator = make_authenticator(config)
        self._priorities = PriorityResolver(config, load_priority_function(config.priority_function))
        self._quotas = Quotas(parse_quotas(config.tenant_quotas))
        self._clock = MonotonicClock()
        self._header_timeout_s = header_timeout_s
        self._body_limits = BodyLimits(config.max_body_bytes, body_timeout_s, self._max_values)
        self._context: zmq.Context[Any] = zmq.Context()

    # ---- start and stop ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Opens both ports. Raises ConfigError naming the flags of a port that cannot be bound."""
        config = self._config
        mailbox, channel = self._open_channel()
        pools = WorkerPools(model.pool for model in self._models.values())
        self._metrics = Metrics(list(pools), mailbox.dropped, starvation_bound_s=config.starvation_bound)
        self._dispatcher = Dispatcher(
            pools,
            channel,
            asyncio.get_running_loop(),
            self._clock,
            on_end=self._ended,
            first_attempt=secrets.randbits(31),
        )
        self._control = ControlPlane(channel, pools, self._dispatcher, self._clock)
        services = Services(
            config=config,
            clock=self._clock,
            models=tuple(self._models.values()),
            inputs=self._inputs,
            priorities=self._priorities,
            quotas=self._quotas,
            dispatcher=self._dispatcher,
            control=self._control,
            metrics=self._metrics,
        )
        self._http = HttpServer(
            {**GenerateRoutes(services).routes(), **AdminRoutes(services).routes()},
            authenticator=self._authenticator,
            limits=self._body_limits,
            metrics=self._metrics,
        )
        self._control.start()
        self._runner = web.ServerRunner(
            self._http.server(header_timeout_s=self._header_timeout_s), shutdown_timeout=1.0
        )
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, config.host, config.port, backlog=1024).start()
        except OSError as error:
            await self.stop()
            raise _cannot_bind("port", config.port, config.host, error) from error

    def _open_channel(self) -> tuple[Mailbox, MailboxChannel]:
        config = self._config
        bind = f"tcp://{in_url(config.control_host)}:{config.control_port or '*'}"
        try:
            mailbox = Mailbox(self._context, new_incarnation(), FromNode, bind=bind)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise _cannot_bind("control-port", config.control_port, config.control_host, error) from error
        return mailbox, MailboxChannel(mailbox, bind)

    @property
    def http_address(self) -> str:
        """``http://host:port`` as bound."""
        host, port = self._runner.addresses[0][:2]
        return f"http://{in_url(host)}:{port}"

    @property
    def control_address(self) -> str:
        """``host:port`` that nodes dial."""
        return self._control.address

    async def stop(self) -> None:
        """Refuses new requests, gives those in flight two seconds, and ends the rest with an error."""
        self._http.begin_stop()
        for site in list(self._runner.sites):
            await site.stop()
        until = self._clock.now() + GRACE_S
        while self._dispatcher.num_in_flight and self._clock.now() < until:
            await asyncio.sleep(0.02)
        self._dispatcher.shut_down()
        await self._runner.cleanup()
        self._control.close()
        self._inputs.close()
        self._context.destroy(linger=200)

    # ---- given to the parts ------------------------------------------------------------------------------------------

    def _max_values(self) -> int:
        """Values that a body may have: all token ids of the longest possible prompt, or ``MAX_VALUES``."""
        limits = [model.pool.registry.limits for model in self._models.values()]
        return max([MAX_VALUES, *(known.context_length for known in limits if known is not None)])

    def _ended(self, stream: OutputStream) -> None:
        """Counts an ended output, charges its tenant and teaches the predictor."""
        request = stream.request
        self._metrics.ended(stream)
        self._quotas.settle(stream)
        if stream.finish and not request.sampling.ignore_eos and not request.is_prompt_only:
            predictor = self._models[request.model].predictor
            predictor.learn(request.tenant, request.prompt, len(stream.ids), is_cut=stream.finish == "length")


def _cannot_bind(flag: str, port: int, host: str, error: OSError | zmq.ZMQError) -> ConfigError:
    reason = (error.strerror or str(error)).lower()
    host_flag = flag.replace("port", "host")
    return ConfigError(f"cannot bind --{host_flag} {host} --{flag} {port}: {reason}")
