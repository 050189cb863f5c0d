"""The main function of a node process: loads the model, makes the pool and the cache, and runs the event loop.

It is the same for both roles; ``scripts.serving.worker`` hands in how to build each. Heavy modules are imported only
after the configuration has been accepted, so that a wrong flag is answered at once.
"""

import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import zmq

from common.cache.page_allocator import PageAllocator
from common.cache.page_layout import PageLayout
from common.clock import MonotonicClock
from common.config.node import NodeConfig
from common.config.shared import Role as RoleName
from common.errors import BatonError, ConfigError
from common.logs import configure_logging
from common.model_folder import find_checkpoint, tokenizer_digest
from common.node.engine_thread import EngineThread
from common.node.event_loop import ControlEndpoint, EventLoop, listen_mailbox
from common.node.memory_plan import Capacity, free_bytes, num_pages_that_fit, plan_capacity
from common.node.monitoring.health import HealthCheck
from common.node.monitoring.http_server import HttpServer, address_of, listen
from common.node.monitoring.metrics import Identity, NodeMetrics
from common.node.profiler import Profiler
from common.node.recording.format import VERSION as RECORDING_VERSION
from common.node.recording.format import RecordingHeader
from common.node.recording.recorder import RecordedRole, RecordedTransports, Recorder, plain_config, read_environ
from common.node.role import Role
from common.node.worker_context import WorkerContext, make_cache
from common.plugins import load_policy
from common.scheduling.policies.factory import NEED_CACHE
from common.wire.address import in_url
from common.wire.curve import CurveKeys
from common.wire.key_folder import load_keys
from common.wire.messages import LayoutMessage, Register
from common.wire.process_id import new_incarnation

if TYPE_CHECKING:
    from common.engine.executor import TorchExecutor
    from common.engine.kv_pool import KVPool
    from common.engine.model_config import ModelConfig

log = logging.getLogger(__name__)

#: Shapes that oneDNN and torch's layer over it cache. The default is 1,024 each, at up to a megabyte: prompts of every
#: length would make a node grow by a gigabyte. Preparing a shape again takes about a millisecond.
SHAPE_CACHE = {"LRU_CACHE_CAPACITY": "128", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128"}

#: The longest time that a start spends on touching KV pages, so that the kernel need not provide them at their first
#: use. Pages with low numbers are touched first, and are used first and most.
POPULATE_S = 3.0


@dataclass(frozen=True, slots=True)
class RoleFactory:
    """How to build a role.

    Attributes:
        open_transports: makes the ends of the transport over the worker's pool, a ``TransportEnds``.
        build: builds the role over them.
    """

    open_transports: Callable[[WorkerContext], Any]
    build: Callable[[WorkerContext, Any], Role]


def run(config: NodeConfig, factories: Mapping[RoleName, RoleFactory]) -> int:
    """Serve until a signal or a refusal.

    Args:
        factories: of both roles, so that the gateway can change the role of this node; or of its own alone.
    Returns:
        The exit status: 0 stopped on purpose, 1 failed, 2 refused.
    """
    writer = configure_logging(config.node_name, level=config.log_level, log_format=config.log_format)
    try:
        return _serve(config, factories)
    except ConfigError as error:
        log.error("%s", error)
        return 2
    finally:
        if writer is not None:
            writer.close()


def end_process(status: int) -> NoReturn:
    """End this process with an exit status, although a step may still run.

    The interpreter's own end waits until torch's threads have finished their operation, which takes many seconds on a
    busy machine if that is a large product of matrices. All requests are answered and all sockets closed by now.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _serve(config: NodeConfig, factories: Mapping[RoleName, RoleFactory]) -> int:
    if config.disable_radix_cache and config.schedule_policy in NEED_CACHE:
        log.warning(
            "--schedule-policy %s needs the radix cache: serving with fcfs, since --disable-radix-cache is set",
            config.schedule_policy,
        )
    load_policy(config.schedule_policy)  # refuse a policy that cannot be imported before the model is loaded
    keys = load_keys(config.keys, is_insecure=config.insecure, role="node")
    endpoint = open_endpoint(config, keys)  # refuse ports that are in use before the model is loaded, too
    http = None
    try:
        if config.http_port is not None:
            http = listen(config.http_host, config.http_port)
        return _serve_model(config, factories, endpoint, http)
    finally:
        if http is not None:
            http.close()
        endpoint.close()


def open_endpoint(config: NodeConfig, keys: CurveKeys | None) -> ControlEndpoint:
    """A control endpoint with an incarnation of its own.

    Raises:
        ConfigError: the address at which decode nodes reach this node cannot be bound.
    """
    incarnation = new_incarnation("" if keys is None else keys.fingerprint)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        host, port, silence_s = config.advertise_host, config.data_port, config.node_timeout
        mailbox = listen_mailbox(context, incarnation, host, port, keys=keys, silence_s=silence_s)
    except ConfigError:
        context.term()
        raise
    return ControlEndpoint(context, incarnation, mailbox, keys, config.node_timeout)


def _serve_model(
    config: NodeConfig,
    factories: Mapping[RoleName, RoleFactory],
    endpoint: ControlEndpoint,
    http: socket.socket | None,
) -> int:
    profiler = Profiler(Path(config.profile_dir), config.node_name) if config.profile_dir else None
    model, executor, capacity = _load(config)
    worker = _worker_context(config, model, executor, capacity, endpoint.incarnation)
    engine = EngineThread(executor, profiler)
    node = LoadedNode(model, engine, factories, http, drain_timeout_s=config.drain_timeout)
    signal.signal(signal.SIGTERM, lambda *_: node.drain())
    signal.signal(signal.SIGINT, lambda *_: node.stop())
    gc.collect()
    gc.freeze()  # weights and modules stay; the collector need not visit them again
    try:
        return node.serve(worker, endpoint)
    finally:
        engine.close()


class LoadedNode:
    """A node whose model is loaded, in one role after the other.

    Model, engine, KV pool and cache live as long as the process. Everything by which other processes know the node is
    made anew for each role: incarnation, sockets, transport. So nothing that was meant for the last role can reach the
    next one, and other processes see a node that has gone and one that has come.

    Args:
        http: listening socket of the node's own HTTP server; None without one.
        drain_timeout_s: how long requests may go on after SIGTERM.
    """

    def __init__(
        self,
        model: "ModelConfig",
        engine: EngineThread,
        factories: Mapping[RoleName, RoleFactory],
        http: socket.socket | None,
        *,
        drain_timeout_s: float,
    ) -> None:
        self._model = model
        self._drain_timeout_s = drain_timeout_s
        self._engine = engine
        self._factories = factories
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
        """Serve in one role after the other; returns the exit status.

        Raises:
            ConfigError: the first role cannot be built.
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
        self, worker: WorkerContext, role: RoleName, keys: CurveKeys | None
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

    def _serve_role(self, worker: WorkerContext, endpoint: ControlEndpoint, ends: Any) -> tuple[int, RoleName | None]:
        """Serve in one role; returns the exit status, and the next role if there is one."""
        config = worker.config
        recorder = start_recording(worker, ends) if config.record else None
        role = self._factory(worker).build(worker, ends if recorder is None else RecordedTransports(ends, recorder))
        if recorder is not None:
            role = RecordedRole(role, recorder)
        loop = EventLoop(
            role,
            self._engine,
            register=lambda: self._register(worker, role, endpoint),
            gateway=config.gateway,
            endpoint=endpoint,
            clock=worker.clock,
        )
        self._loop = loop
        if self._is_draining:
            loop.drain(self._drain_timeout_s)
        if self._is_stopping:
            loop.stop()
        log.info(
            "%s node ready: %d pages of %d tokens; dialling the gateway at %s",
            config.role,
            worker.capacity.num_pages,
            config.page_size,
            config.gateway,
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
        self, listener: socket.socket, worker: WorkerContext, *, role: Role, loop: EventLoop
    ) -> HttpServer:
        config = worker.config
        identity = Identity(
            config.node_name, config.role, config.served_name, worker.capacity.num_pages, worker.pool.layout.page_size
        )
        health = HealthCheck(config, loop, self._engine, worker.clock)
        metrics = NodeMetrics(identity, lambda: loop.snapshots, role.stats, self._engine.steps)
        log.info("/health and /metrics at http://%s", address_of(listener, config.advertise_host))
        return HttpServer(listener.dup(), {"/health": health.answer, "/metrics": metrics.answer})

    def _register(self, worker: WorkerContext, role: Role, endpoint: ControlEndpoint) -> Register:
        config, model, listen, keys = worker.config, self._model, endpoint.listen, endpoint.keys
        layout = model.layout(config.page_size, model.resolve_dtype(config.dtype))
        return Register(
            role=config.role,
            name=config.node_name,
            model=config.served_name,
            digest=model.digest,
            weight_version=model.weight_version,
            vocab_size=model.vocab_size,
            context_length=min(model.context_length, config.context_length or model.context_length),
            eos_token_ids=model.eos_token_ids,
            generation=model.generation,
            layout=LayoutMessage.of(layout),
            num_pages=worker.capacity.num_pages,
            max_running=worker.capacity.num_slots,
            max_queued=worker.capacity.max_queued,
            transports=tuple(role.transports()),
            address=f"{in_url(config.advertise_host)}:{listen.port}",
            pid=os.getpid(),
            device=pick_device(config.device),
            http_address="" if self._http is None else address_of(self._http, config.advertise_host),
            tokenizer_digest=tokenizer_digest(model.folder),
            public_key="" if keys is None else keys.public.hex(),
            num_role_changes=self._num_changes,
            previous=self._previous,
            fixed_role=self._fixed_role(config),
        )

    def _fixed_role(self, config: NodeConfig) -> str:
        """Why this node cannot change its role; empty if it can."""
        if config.record:
            return f"node {config.node_name} records what it does (--record), and a recording has one role"
        if len(self._factories) == 1:
            return f"node {config.node_name} was started for one role only"
        return ""


def _worker_context(
    config: NodeConfig, model: "ModelConfig", executor: "TorchExecutor", capacity: Capacity, incarnation: str
) -> WorkerContext:
    allocator = PageAllocator(capacity.num_pages)
    return WorkerContext(
        config=config,
        capacity=capacity,
        pool=executor.pool,
        allocator=allocator,
        cache=make_cache(config, allocator),
        clock=MonotonicClock(),
        digest=model.identity,
        incarnation=incarnation,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
    )


def _until_stopped(loop: EventLoop) -> int:
    """Run the loop. When this returns the exit status, all requests are answered and all sockets are closed."""
    status, reason = 0, "the node is stopping"
    try:
        loop.run()
        if loop.refused is not None:
            log.error("the gateway refuses this node: %s", loop.refused)
            status = 2
    except BatonError as error:
        log.error("%s", error)
        status, reason = 1, "the node failed"
    except Exception:
        log.exception("the node failed and stops")
        status, reason = 1, "the node failed"
    finally:
        loop.close(reason)
    return status


def start_recording(worker: WorkerContext, ends: Any) -> Recorder:
    """Open the recording that ``--record`` asks for, and write its header.

    Raises:
        ConfigError: the file cannot be created.
    """
    config = worker.config
    assert config.record is not None
    try:
        recorder = Recorder(config.record)
    except OSError as error:
        raise ConfigError(f"cannot create --record {config.record}: {error.strerror}") from error
    log.warning("recording into %s, prompts included", recorder.path)
    transport = ends.writer if config.role == "prefill" else ends.reader
    recorder.note(
        RecordingHeader(
            version=RECORDING_VERSION,
            role=config.role,
            config=plain_config(config),
            environ=read_environ(worker.environ),
            capacity=worker.capacity,
            layout=LayoutMessage.of(worker.pool.layout),
            digest=worker.digest,
            incarnation=worker.incarnation,
            vocab_size=worker.vocab_size,
            eos_token_ids=worker.eos_token_ids,
            transport=transport.name,
            transports=tuple(transport.names),
        )
    )
    return recorder


def _load(config: NodeConfig) -> "tuple[ModelConfig, TorchExecutor, Capacity]":
    for name, value in SHAPE_CACHE.items():  # read when torch is loaded
        os.environ.setdefault(name, value)
    from common.engine.checkpoint import weight_files
    from common.engine.model_config import ModelConfig
    from common.engine.weight_version import fingerprint

    find_checkpoint(config.model, config.revision)
    log.info("loading %s", config.model)
    model = ModelConfig.load(config.model, revision=config.revision)
    model = replace(model, weight_version=config.weight_version or fingerprint(weight_files(model.folder)))
    device = pick_device(config.device)
    layout = model.layout(config.page_size, model.resolve_dtype(config.dtype))
    capacity = plan_capacity(
        config,
        layout,
        device=device,
        context_length=model.context_length,
        crossover_tokens=model.crossover_tokens,
    )

    num_pages = pages_of(config, layout, capacity.num_pages, device)
    num_pages()  # refuse a pool that can never fit before the weights are read
    from common.engine.executor import load_executor  # loads torch

    executor = load_executor(
        model,
        device=device,
        dtype=config.dtype,
        num_slots=capacity.num_slots,
        num_pages=num_pages,
        page_size=config.page_size,
        attention=config.attention_backend,
        num_threads=config.threads or len(os.sched_getaffinity(0)),
    )
    _populate(executor.pool)
    executor.warm_up()
    num_pages_made = executor.pool.num_pages
    capacity = replace(capacity, num_pages=num_pages_made, num_slots=min(capacity.num_slots, num_pages_made))
    return model, executor, capacity


def pages_of(config: NodeConfig, layout: PageLayout, planned: int, device: str) -> Callable[[], int]:
    """A function that tells, once the weights are in memory, how many pages the pool can have."""
    return lambda: num_pages_that_fit(config, layout, planned, free_bytes(device))


def _populate(pool: "KVPool") -> None:
    begun_at = time.monotonic()
    try:
        if taken := pool.populate(POPULATE_S):
            whole, seconds = pool.layout.pool_bytes(pool.num_pages), time.monotonic() - begun_at
            log.debug("touched %.2f of %.2f GB of KV pages in %.2f s", taken / 1e9, whole / 1e9, seconds)
    except MemoryError as error:
        raise ConfigError(f"--max-total-tokens or --memory-fraction is too large: {error}") from error


def pick_device(name: str) -> str:
    """The device for ``--device``: ``auto`` is ``cuda`` where torch finds a GPU, else ``cpu``.

    Raises:
        ConfigError: there is no such device.
    """
    if name == "cpu":
        return name
    import torch

    from common.engine.executor import check_device

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    check_device(name)
    return name
