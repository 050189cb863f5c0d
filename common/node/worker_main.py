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
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from common.cache.kv_window import UNBOUNDED
from common.cache.page_allocator import PageAllocator
from common.cache.window_pages import WindowPages
from common.clock import MonotonicClock
from common.config.node import NodeConfig
from common.config.shared import Role
from common.discovery.etcd import EtcdStore
from common.discovery.gateway_directory import (
    EtcdGateways,
    FileGateways,
    FixedGateways,
    GatewayDirectory,
    ListedGateways,
)
from common.errors import BatonError, ConfigError
from common.logs import configure_logging
from common.node.adapters import NodeAdapters
from common.node.endpoint import ControlEndpoint, open_endpoint
from common.node.engine_thread import EngineThread
from common.node.loading.loaded_node import LoadedNode, RoleFactory
from common.node.loading.memory_plan import Capacity
from common.node.loading.model_loading import load_model, takes_all_cpus
from common.node.monitoring.http_server import listen
from common.node.profiler import Profiler
from common.node.tensor_parallel.rank_processes import RankProcesses
from common.node.worker_context import WorkerContext, make_cache
from common.plugins import load_policy
from common.scheduling.policies.factory import NEED_CACHE
from common.system.open_files import raise_open_file_limit
from common.wire.key_folder import load_keys

if TYPE_CHECKING:
    from common.engine.executor import TorchExecutor
    from common.engine.models.base_config import BaseModelConfig

log = logging.getLogger(__name__)

#: By how much threads that compute steps on every CPU of a node are nicer than its loop: messages and pages that wait
#: for a CPU delay requests more than a step that ends a little later.
NICENESS = 5


def run(config: NodeConfig, factories: Mapping[Role, RoleFactory], rank_module: str) -> int:
    """Serve until a signal or a refusal.

    Args:
        factories: of both roles, so that the gateway can change the role of this node; or of its own alone.
        rank_module: the main module of the other ranks of this node.
    Returns:
        The exit status: 0 stopped on purpose, 1 failed, 2 refused by every gateway or wrongly configured.
    """
    raise_open_file_limit()
    writer = configure_logging(config.node_name, level=config.log_level, log_format=config.log_format)
    try:
        return _serve(config, factories, rank_module)
    except ConfigError as error:
        log.error("%s", error)
        return error.exit_status
    except BatonError as error:  # a rank was lost before the node served
        log.error("%s", error)
        return 1
    except Exception:  # which the interpreter would report too late: after the writer is closed
        log.exception("the node failed")
        return 1
    finally:
        if writer is not None:
            writer.close()


def end_process(status: int) -> NoReturn:
    """End this process with an exit status, although a step may still run.

    The interpreter's own end waits until torch's threads have finished their operation, which takes many seconds on a
    busy machine if that is a large product of matrices. All requests are answered and all sockets closed by now.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # it was closed when this process started
            stream.flush()
    os._exit(status)


def _serve(config: NodeConfig, factories: Mapping[Role, RoleFactory], rank_module: str) -> int:
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
        with RankProcesses(config.tp, rank_module) as ranks:
            return _serve_model(config, factories, ranks, endpoint=endpoint, http=http)
    finally:
        if http is not None:
            http.close()
        endpoint.close()


def _serve_model(
    config: NodeConfig,
    factories: Mapping[Role, RoleFactory],
    ranks: RankProcesses,
    *,
    endpoint: ControlEndpoint,
    http: socket.socket | None,
) -> int:
    profiler = Profiler(Path(config.profile_dir), config.node_name) if config.profile_dir else None
    model, executor, capacity = load_model(config, ranks)
    has_overlap = executor.is_asynchronous and not config.disable_overlap_schedule
    niceness = NICENESS if not executor.is_asynchronous and takes_all_cpus(config) else 0
    engine = EngineThread(executor, profiler, max_outstanding=2 if has_overlap else 1, niceness=niceness)
    adapters = NodeAdapters(executor, config, engine.notify)
    try:
        adapters.load_given()
        worker = _worker_context(config, model, executor, capacity, endpoint.incarnation)
        worker = replace(worker, other_ranks=ranks.transfer_ends(), adapters=adapters)
        ranks.watch(engine.fail)
        with open_directory(config) as gateways:
            node = LoadedNode(
                model,
                engine,
                factories,
                gateways,
                adapters=adapters,
                http=http,
                drain_timeout_s=config.drain_timeout,
            )
            signal.signal(signal.SIGTERM, lambda *_: node.drain())
            signal.signal(signal.SIGINT, lambda *_: node.stop())
            gc.collect()
            gc.freeze()  # weights and modules stay; the collector need not visit them again
            return node.serve(worker, endpoint)
    finally:
        adapters.close()
        engine.close()


def open_directory(config: NodeConfig) -> AbstractContextManager[GatewayDirectory]:
    """Return where the node learns of its gateways. Raises ConfigError: the extra etcd is not installed."""
    if config.is_listed:
        return nullcontext(ListedGateways(config.role, config.check_gateway, MonotonicClock()))
    if config.gateway_file is not None:
        return FileGateways(Path(config.gateway_file), config.check_gateway)
    if config.etcd is None:
        return nullcontext(FixedGateways(config.gateways))
    return EtcdGateways(EtcdStore(config), config.check_gateway)


def _worker_context(
    config: NodeConfig, model: "BaseModelConfig", executor: "TorchExecutor", capacity: Capacity, incarnation: str
) -> WorkerContext:
    pool, window_pages = executor.pool, None
    if pool.groups is not None:
        window_pages = WindowPages(
            pool.groups,
            capacity.num_pages,
            pool.num_window_pages,
            page_size=config.page_size,
            chunk_tokens=capacity.alignment.most_at_once(capacity.chunk_tokens, config.page_size) or UNBOUNDED,
        )
    allocator = PageAllocator(capacity.num_pages, window_pages)
    own = pool.layout
    return WorkerContext(
        config=config,
        capacity=capacity,
        pool=pool,
        layout=own if config.tp == 1 else own.of_heads(model.num_kv_heads),
        allocator=allocator,
        cache=make_cache(config, allocator),
        clock=MonotonicClock(),
        digest=model.identity,
        incarnation=incarnation,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
    )
