"""The process around a role: model, pool, cache, loop. One piece for both roles, which are handed in.

Nothing heavy is imported before the configuration has been accepted, so that a wrong flag is answered at once.
"""

import gc
import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import zmq

from common.cache.page_allocator import PageAllocator
from common.cache.page_layout import PageLayout
from common.clock import MonotonicClock
from common.config.node import NodeConfig
from common.errors import BatonError, ConfigError
from common.node.engine_thread import EngineThread
from common.node.event_loop import Node, listen_mailbox
from common.node.memory_plan import Capacity, free_bytes, num_pages_that_fit, plan_capacity
from common.node.recording.format import VERSION as RECORDING_VERSION
from common.node.recording.format import Opening
from common.node.recording.recorder import RecordedRole, RecordedTransport, Recorder, plain_config, read_environ
from common.node.role import Role
from common.node.worker_context import Parts, cache_for
from common.plugins import load_policy
from common.scheduling.policies.factory import NEED_CACHE
from common.wire.address import in_url
from common.wire.mailbox import Mailbox
from common.wire.messages import Geometry, Register
from common.wire.process_id import new_incarnation

if TYPE_CHECKING:
    from common.engine.executor import TorchExecutor
    from common.engine.kv_pool import KVPool
    from common.engine.model_config import ModelConfig

log = logging.getLogger(__name__)

#: How many shapes oneDNN and torch's layer over it remember. By default 1,024 each, at up to a megabyte: a node that
#: meets prompts of every length would grow by a gigabyte. Preparing one anew takes about a millisecond.
REMEMBERED_SHAPES = {"LRU_CACHE_CAPACITY": "128", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128"}


#: How long a start may take longer so that KV pages need not wait for the kernel at their first use. Those with low
#: numbers are used first, and again and again.
POPULATE_S = 3.0


def run(config: NodeConfig, open_transport: Callable[[Parts], Any], build_role: Callable[[Parts, Any], Role]) -> int:
    """Serve until a signal or a refusal. Returns the exit status: 0 stopped on purpose, 1 failed, 2 refused."""
    logging.basicConfig(
        level=config.log_level.upper(),
        format=f"%(asctime)s %(levelname)s {config.node_name} %(message)s",
        datefmt="%H:%M:%S",
    )
    try:
        return _serve(config, open_transport, build_role)
    except ConfigError as error:
        log.error("%s", error)
        return 2


def _serve(config: NodeConfig, open_transport: Callable[[Parts], Any], build_role: Callable[[Parts, Any], Role]) -> int:
    if config.disable_radix_cache and config.schedule_policy in NEED_CACHE:
        log.warning("--schedule-policy %s is fcfs now, since --disable-radix-cache is set", config.schedule_policy)
    load_policy(config.schedule_policy)  # what cannot be imported is refused before the model is loaded
    incarnation = new_incarnation()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    listen = None
    try:
        if config.role == "prefill":  # a port that is taken is told of before the model is loaded, too
            listen = listen_mailbox(context, incarnation, config.advertise_host, config.data_port)
        return _serve_model(config, open_transport, build_role, Door(context, incarnation, listen))
    finally:
        if listen is not None:
            listen.close()
        context.term()


@dataclass(frozen=True, slots=True)
class Door:
    """Where a start of a process is reached: its ZMQ context, who it is, and what a prefill node listens on."""

    context: "zmq.Context[zmq.Socket[bytes]]"
    incarnation: str
    listen: Mailbox | None


def _serve_model(
    config: NodeConfig, open_transport: Callable[[Parts], Any], build_role: Callable[[Parts, Any], Role], door: Door
) -> int:
    model, executor, capacity = _load(config)
    parts = _parts(config, model, executor, capacity, door.incarnation)
    transport = open_transport(parts)
    recorder = start_recording(parts, transport) if config.record else None
    role = build_role(parts, transport if recorder is None else RecordedTransport(transport, recorder))
    if recorder is not None:
        role = RecordedRole(role, recorder)
    engine = EngineThread(executor)
    node = Node(
        role,
        engine,
        register=lambda: _register(config, model, capacity, role, listen=door.listen),
        gateway=config.gateway,
        context=door.context,
        incarnation=door.incarnation,
        listen=door.listen,
        clock=parts.clock,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: node.stop())
    gc.collect()
    gc.freeze()  # weights and modules are for ever; do not walk them again
    log.info("%s node ready: %d pages of %d tokens", config.role, capacity.num_pages, config.page_size)
    try:
        return _until_stopped(node)
    finally:
        engine.close()
        if recorder is not None:
            recorder.close()


def _parts(
    config: NodeConfig, model: "ModelConfig", executor: "TorchExecutor", capacity: Capacity, incarnation: str
) -> Parts:
    books = PageAllocator(capacity.num_pages)
    return Parts(
        config=config,
        capacity=capacity,
        pool=executor.pool,
        books=books,
        cache=cache_for(config, books),
        clock=MonotonicClock(),
        digest=model.identity,
        incarnation=incarnation,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
    )


def _until_stopped(node: Node) -> int:
    """Returns the exit status. Everybody has his answer then, and every socket is closed."""
    status, reason = 0, "the node is stopping"
    try:
        node.run()
        if node.refused is not None:
            log.error("the gateway refuses this node: %s", node.refused)
            status = 2
    except BatonError as error:
        log.error("%s", error)
        status, reason = 1, "the node failed"
    except Exception:
        log.exception("the node failed and stops")
        status, reason = 1, "the node failed"
    finally:
        node.close(reason)
    return status


def start_recording(parts: Parts, transport: Any) -> Recorder:
    """The recording that the configuration asks for; its first frame says what the role is built from.

    Raises:
        ConfigError: the file cannot be made.
    """
    config = parts.config
    assert config.record is not None
    try:
        recorder = Recorder(config.record)
    except OSError as error:
        raise ConfigError(f"--record {config.record} cannot be made: {error.strerror}") from error
    log.warning("recording into %s, prompts included", recorder.path)
    recorder.note(
        Opening(
            version=RECORDING_VERSION,
            role=config.role,
            config=plain_config(config),
            environ=read_environ(parts.environ),
            capacity=parts.capacity,
            geometry=Geometry.of(parts.pool.geometry),
            digest=parts.digest,
            incarnation=parts.incarnation,
            vocab_size=parts.vocab_size,
            eos_token_ids=parts.eos_token_ids,
            transport=transport.name,
            transports=tuple(transport.names),
        )
    )
    return recorder


def _load(config: NodeConfig) -> "tuple[ModelConfig, TorchExecutor, Capacity]":
    for name, value in REMEMBERED_SHAPES.items():  # read when torch is loaded
        os.environ.setdefault(name, value)
    from common.engine.checkpoint import weight_files
    from common.engine.executor import load_executor
    from common.engine.model_config import ModelConfig
    from common.engine.weight_version import fingerprint

    log.info("loading %s", config.model)
    model = ModelConfig.load(config.model, revision=config.revision)
    model = replace(model, weight_version=config.weight_version or fingerprint(weight_files(model.folder)))
    device = pick_device(config.device)
    geometry = model.geometry(config.page_size, model.resolve_dtype(config.dtype))
    capacity = plan_capacity(
        config,
        geometry,
        device=device,
        context_length=model.context_length,
        crossover_tokens=model.crossover_tokens,
    )

    num_pages = pages_of(config, geometry, capacity.num_pages, device)
    num_pages()  # what can never fit is refused before the weights are read
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


def pages_of(config: NodeConfig, geometry: PageLayout, planned: int, device: str) -> Callable[[], int]:
    """How many pages the pool can have, asked when the weights are in memory; see ``num_pages_that_fit``."""
    return lambda: num_pages_that_fit(config, geometry, planned, free_bytes(device))


def _populate(pool: "KVPool") -> None:
    begun_at = time.monotonic()
    try:
        if taken := pool.populate(POPULATE_S):
            whole, seconds = pool.geometry.pool_bytes(pool.num_pages), time.monotonic() - begun_at
            log.info("%.2f of %.2f GB of memory for KV pages taken in %.2f s", taken / 1e9, whole / 1e9, seconds)
    except MemoryError as error:
        raise ConfigError(f"--max-total-tokens or --memory-fraction asks for too much: {error}") from error


def pick_device(name: str) -> str:
    """``auto`` becomes ``cuda`` where torch finds a GPU, else ``cpu``. Raises ConfigError: it is not there."""
    if name == "cpu":
        return name
    import torch

    from common.engine.executor import check_device

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    check_device(name)
    return name


def _register(
    config: NodeConfig, model: "ModelConfig", capacity: Capacity, role: Role, *, listen: Mailbox | None
) -> Register:
    geometry = model.geometry(config.page_size, model.resolve_dtype(config.dtype))
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
        geometry=Geometry.of(geometry),
        num_pages=capacity.num_pages,
        max_running=capacity.num_slots,
        max_queued=capacity.max_queued,
        transports=tuple(role.transports()),
        address="" if listen is None else f"{in_url(config.advertise_host)}:{listen.port}",
        pid=os.getpid(),
        device=pick_device(config.device),
    )
