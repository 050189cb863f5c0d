"""Serves in one role after the other, with the same model, engine, KV pool and cache."""

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from common.config.node import NodeConfig
from common.config.shared import Role
from common.discovery.gateway_directory import GatewayDirectory
from common.errors import BatonError, ConfigError, ErrorCode
from common.model_folder import tokenizer_digest
from common.node.adapters import NodeAdapters
from common.node.endpoint import ControlEndpoint, open_endpoint
from common.node.engine_thread import EngineThread
from common.node.event_loop import EventLoop
from common.node.loading.model_loading import pick_device
from common.node.monitoring.health import HealthCheck
from common.node.monitoring.http_server import HttpServer, address_of
from common.node.monitoring.metrics import Identity, NodeMetrics
from common.node.recording.recorder import RecordedRole, RecordedTransports
from common.node.recording.start import start_recording
from common.node.role import NodeRole
from common.node.worker_context import WorkerContext
from common.wire.address import in_url
from common.wire.curve import CurveKeys
from common.wire.messages import LayoutMessage, Register

if TYPE_CHECKING:
    from common.engine.models.base_config import BaseModelConfig

log = logging.getLogger(__name__)

MAX_UCX_VARIABLES, MAX_UCX_VALUE = 64, 256  # that are told to the gateway


@dataclass(frozen=True, slots=True)
class RoleFactory:
    """How to build a role.

    Attributes:
        open_transports: makes the ends of the transport over the worker's pool, a ``TransportEnds``.
        build: builds the role over them.
    """

    open_transports: Callable[[WorkerContext], Any]
    build: Callable[[WorkerContext, Any], NodeRole]


class LoadedNode:
    """A node whose model is loaded, in one role after the other.

    Model, engine, KV pool and cache live as long as the process. Everything by which other processes know the node is
    new for each role: incarnation, sockets, transport. So nothing that was meant for the last role can reach the
    next one, and other processes see a node that has gone and one that has come.

    Args:
        gateways: names the gateways to register with.
        http: listening socket of the node's own HTTP server; None without one.
        drain_timeout_s: how long requests may go on after SIGTERM.
    """

    def __init__(
        self,
        model: "BaseModelConfig",
        engine: EngineThread,
        factories: Mapping[Role, RoleFactory],
        gateways: GatewayDirectory,
        *,
        adapters: NodeAdapters,
        http: socket.socket | None,
        drain_timeout_s: float,
    ) -> None:
        self._model = model
        self._tokenizer_digest = tokenizer_digest(model.tokenizer_folder or model.folder)
        self._drain_timeout_s = drain_timeout_s
        self._engine = engine
        self._adapters = adapters
        self._factories = factories
        self._gateways = gateways
        self._http = http
        self._loop: EventLoop | None = None
        self._is_stopping = self._is_draining = False
        self._num_changes = 0
        self._previous = ""

    def drain(self) -> None:
        """Ask the node to end once its requests have, or after ``--drain-timeout``; a second time, to end now."""
        if self._is_draining:
            self.stop()
        self._is_draining = True
        if self._loop is not None:
            self._loop.drain(self._drain_timeout_s)

    def stop(self) -> None:
        """Ask the node to end now; safe in a signal handler."""
        self._is_stopping = True
        if self._loop is not None:
            self._loop.stop()

    def serve(self, worker: WorkerContext, endpoint: ControlEndpoint) -> int:
        """Serve in one role after the other; return the exit status.

        Raises:
            ConfigError: the first role cannot be built, or later neither can.
        """
        ends = self._factory(worker).open_transports(worker)
        while True:
            try:
                status, next_role = self._serve_role(worker, endpoint, ends)
            finally:
                endpoint.close()
            if next_role is None or self._is_stopping:
                return status
            ends.close()
            worker.check_released()
            self._previous = worker.incarnation
            worker, endpoint, ends = self._enter(worker, next_role, endpoint.keys)

    def _enter(
        self, worker: WorkerContext, role: Role, keys: CurveKeys | None
    ) -> tuple[WorkerContext, ControlEndpoint, Any]:
        """Open what the role needs, or what the last role had if that fails."""
        begun_at = time.monotonic()
        for attempted in (role, worker.config.role):
            endpoint = None
            try:
                config = replace(worker.config, role=attempted, name=worker.config.node_name)
                endpoint = open_endpoint(config, keys)
                entered = replace(worker, config=config, incarnation=endpoint.incarnation)
                ends = self._factory(entered).open_transports(entered)
            except ConfigError as error:
                log.error("cannot serve as a %s node: %s", attempted, error)
                if endpoint is not None:
                    endpoint.close()
                continue
            self._num_changes += attempted == role
            log.info("now a %s node, after %.3f s", attempted, time.monotonic() - begun_at)
            return entered, endpoint, ends
        raise ConfigError(f"node {worker.config.node_name} can serve in neither role any more")

    def _factory(self, worker: WorkerContext) -> RoleFactory:
        return self._factories[worker.config.role]

    def _serve_role(self, worker: WorkerContext, endpoint: ControlEndpoint, ends: Any) -> tuple[int, Role | None]:
        """Serve in one role; return the exit status, and the next role if there is one."""
        config = worker.config
        recorder = start_recording(worker, ends) if config.record else None
        role = self._factory(worker).build(worker, ends if recorder is None else RecordedTransports(ends, recorder))
        if recorder is not None:
            role = RecordedRole(role, recorder)
        loop = EventLoop(
            role,
            self._engine,
            register=lambda: self._register(worker, role, endpoint),
            gateways=self._gateways,
            orphan_timeout_s=config.orphan_timeout,
            max_running=worker.capacity.num_slots,
            adapters=self._adapters,
            endpoint=endpoint,
            clock=worker.clock,
        )
        self._loop = loop
        if self._is_draining:
            loop.drain(self._drain_timeout_s)
        if self._is_stopping:
            loop.stop()
        log.info(
            "%s node ready: %d pages of %d tokens, %s with %d bytes for each token; dialling %s",
            config.role,
            worker.capacity.num_pages,
            config.page_size,
            worker.layout.dtype,
            worker.layout.bytes_per_token * worker.layout.full_slabs,
            self._gateways.description,
        )
        if (window_pages := worker.allocator.window_pages) is not None:
            log.info(
                "window layers have %d pages of their own, %d bytes for each token, and keep %d tokens of a request",
                window_pages.num_pages,
                worker.layout.bytes_per_token * worker.layout.window_slabs,
                window_pages.groups.window,
            )
        if (kv_window := worker.kv_window).is_bounded:
            log.info(
                "a request needs at most %d pages: every layer attends within %d tokens",
                kv_window.max_held,
                kv_window.tokens,
            )
        server = None if self._http is None else self._http_server(self._http, worker, role=role, loop=loop)
        try:
            status = _until_stopped(loop)
        finally:
            if server is not None:
                server.close()
            if recorder is not None:
                recorder.close()
        return status, loop.next_role

    def _http_server(
        self, listener: socket.socket, worker: WorkerContext, *, role: NodeRole, loop: EventLoop
    ) -> HttpServer:
        config = worker.config
        identity = Identity(
            config.node_name, config.role, config.served_name, worker.capacity.num_pages, worker.pool.layout.page_size
        )
        health = HealthCheck(config, loop, self._engine, worker.clock)
        metrics = NodeMetrics(identity, lambda: loop.snapshots, role.stats, self._engine.steps)
        log.info("/health and /metrics at http://%s", address_of(listener, config.advertise_host))
        return HttpServer(listener.dup(), {"/health": health.answer, "/metrics": metrics.answer})

    def _register(self, worker: WorkerContext, role: NodeRole, endpoint: ControlEndpoint) -> Register:
        config, model, listen, keys = worker.config, self._model, endpoint.listen, endpoint.keys
        return Register(
            role=config.role,
            name=config.node_name,
            model=config.served_name,
            digest=model.digest,
            weight_version=model.weight_version,
            vocab_size=model.vocab_size,
            context_length=model.context_length,
            eos_token_ids=model.eos_token_ids,
            generation=model.generation,
            layout=LayoutMessage.of(worker.layout),
            num_pages=worker.capacity.num_pages,
            max_running=worker.capacity.num_slots,
            max_queued=worker.capacity.max_queued,
            transports=tuple(role.transports()),
            address=f"{in_url(config.advertise_host)}:{listen.port}",
            pid=os.getpid(),
            device=pick_device(config.device),
            http_address="" if self._http is None else address_of(self._http, config.advertise_host),
            tokenizer_digest=self._tokenizer_digest,
            public_key="" if keys is None else keys.public.hex(),
            num_role_changes=self._num_changes,
            previous=self._previous,
            fixed_role=self._fixed_role(config),
            num_ranks=config.tp,
            adapters=self._adapters.listed,
            longest_tokens=worker.longest_tokens,
            most_held_tokens=worker.most_held_tokens,
            nixl=_nixl_settings(config) if "nixl" in role.transports() else {},
            unloaded=self._adapters.unloaded,
        )

    def _fixed_role(self, config: NodeConfig) -> str:
        """Why this node cannot change its role; empty if it can."""
        if config.record:
            return f"node {config.node_name} records what it does (--record), and a recording has one role"
        if len(self._factories) == 1:
            return f"node {config.node_name} was started for one role only"
        return ""


def _nixl_settings(config: NodeConfig) -> dict[str, str]:
    """What decides how NIXL moves pages: its back-end, and what the environment tells UCX."""
    variables = sorted(name for name in os.environ if name.startswith("UCX_"))[:MAX_UCX_VARIABLES]
    return {"backend": config.nixl_backend, **{name: os.environ[name][:MAX_UCX_VALUE] for name in variables}}


def _until_stopped(loop: EventLoop) -> int:
    """Run the loop. When this returns the exit status, all requests are answered and all sockets are closed."""
    status, code, reason = 0, ErrorCode.SHUTTING_DOWN, "the node is stopping"
    try:
        loop.run()
        if loop.refused is not None:
            log.error("the gateway refuses this node: %s", loop.refused)
            status = 2
    except BatonError as error:
        log.error("%s", error)
        status, code, reason = 1, ErrorCode.INTERNAL, "the node failed"
    except Exception:
        log.exception("the node failed and stops")
        status, code, reason = 1, ErrorCode.INTERNAL, "the node failed"
    finally:
        loop.close(reason, code)
    return status
