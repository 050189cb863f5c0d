"""The node process: its sizes, its engine thread and its event loop."""

import contextlib
import logging
import os
import platform
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace

import msgspec
import pytest
import torch
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.synchronous_executor import SynchronousExecutor
from support.kv.kv_fakes import MemfdStore

from common.cache.page_allocator import PageAllocator
from common.cache.page_layout import PageLayout
from common.clock import MonotonicClock
from common.config.node import NodeConfig
from common.discovery.gateway_directory import FixedGateways
from common.errors import ConfigError, ErrorCode
from common.finish_reason import finish_reason
from common.node import worker_main as process
from common.node.adapters import NodeAdapters
from common.node.endpoint import ControlEndpoint, listen_mailbox
from common.node.engine_thread import EngineThread
from common.node.event_loop import EventLoop
from common.node.gateways.gateway_link import GatewayLink
from common.node.gateways.outbox import Outbox
from common.node.loading import loaded_node, model_loading
from common.node.loading.device_plan import DeviceReserve
from common.node.loading.memory_plan import (
    CPU_CHUNK_TOKENS,
    CPU_POOL_TOKENS,
    Capacity,
    num_pages_that_fit,
    plan_capacity,
)
from common.node.role import Load
from common.node.worker_context import WorkerContext, make_cache
from common.request import Request, RequestKey
from common.sampling_params import SamplingParams
from common.step_plan import StepPlan, StepResult
from common.wire.mailbox import ConnectionEvents, Envelope, Mailbox
from common.wire.messages import (
    Abort,
    Adapter,
    Adapters,
    AdapterUnused,
    Connect,
    Deregister,
    Find,
    FromNode,
    Generate,
    Message,
    Peer,
    Ping,
    PrefillNodes,
    Refused,
    Registered,
    Tokens,
    Unknown,
    UnloadAdapter,
)
from decode_node.factory import build
from scripts.simulator.service.inprocess_transport import InProcessReader, Wire

TINY = PageLayout(num_layers=1, num_kv_heads=1, head_dim=8, page_size=16, dtype="float32")


def test_the_flags_set_the_sizes_of_a_node() -> None:
    config = NodeConfig(max_total_tokens=100, max_running_requests=4, max_queued_requests=7, chunked_prefill_size=32)
    capacity = plan_capacity(config, TINY, device="cpu", context_length=1000)
    assert capacity.num_pages == 6  # whole pages of 16
    assert capacity.num_slots == 4
    assert capacity.max_queued == 7
    assert capacity.chunk_tokens == 32


def test_without_flags_a_cpu_node_takes_a_bounded_pool_and_chunks() -> None:
    capacity = plan_capacity(NodeConfig(), TINY, device="cpu", context_length=1000)
    assert capacity.num_pages == CPU_POOL_TOKENS // 16
    assert capacity.chunk_tokens == CPU_CHUNK_TOKENS
    assert capacity.num_slots == 256


def test_minus_one_turns_chunking_off() -> None:
    assert (
        plan_capacity(NodeConfig(chunked_prefill_size=-1), TINY, device="cpu", context_length=99).chunk_tokens is None
    )


@pytest.mark.parametrize(("policy", "is_off", "num_said"), [("lpm", True, 1), ("lpm", False, 0), ("lof", True, 0)])
def test_a_policy_that_lacks_its_cache_is_warned_of_once(
    policy: str, is_off: bool, num_said: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "_serve_model", lambda *args, **named: 0)
    config = NodeConfig(role="decode", schedule_policy=policy, disable_radix_cache=is_off)
    assert process._serve(config, {}, "a.module") == 0
    said = f"--schedule-policy {policy} needs the radix cache: serving with fcfs, since --disable-radix-cache is set"
    assert [record.getMessage() for record in caplog.records] == [said] * num_said


def test_a_pool_without_a_single_page_is_refused_by_flag() -> None:
    huge = PageLayout(num_layers=4096, num_kv_heads=65536, head_dim=65536, page_size=16, dtype="float32")
    with pytest.raises(ConfigError, match="--memory-fraction"):
        plan_capacity(NodeConfig(), huge, device="cpu", context_length=1000)


def test_a_configured_pool_without_room_beside_the_weights_is_refused_by_flag() -> None:
    page = 2 * 8 * 16 * 4  # bytes
    config = NodeConfig(max_total_tokens=160)
    assert num_pages_that_fit(config, TINY, 10, 10 * page + 99, 99) == 10
    needs = (
        r"^--max-total-tokens 160 needs 0\.00 GB for KV pages and 0\.00 GB for the copies of its threads, and 0\.00 GB"
    )
    with pytest.raises(ConfigError, match=needs):
        num_pages_that_fit(config, TINY, 10, 10 * page + 98, 99)


def test_a_pool_of_default_size_takes_most_of_the_memory_that_the_weights_leave() -> None:
    page = 2 * 8 * 16 * 4
    assert num_pages_that_fit(NodeConfig(), TINY, 10, 13 * page, 0) == 10
    assert num_pages_that_fit(NodeConfig(), TINY, 10, 10 * page, 0) == 8, "steps have no memory left"
    assert num_pages_that_fit(NodeConfig(), TINY, 1000, 110 * page, 10 * page) == 80
    for num_bytes in (page, 0, -page):
        with pytest.raises(ConfigError, match="no memory for KV pages"):
            num_pages_that_fit(NodeConfig(), TINY, 1000, num_bytes + 7, 7)


def test_the_pool_of_a_gpu_is_that_of_the_memory_which_the_weights_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    page = 2 * 8 * 16 * 4
    free = iter([1000 * page, 100 * page])  # before the weights are read, and after
    monkeypatch.setattr(model_loading, "free_bytes", lambda device: next(free) if device == "cuda:0" else 0)
    capacity = Capacity(4, 10_000, 0, None)
    config = NodeConfig(memory_fraction=0.5)
    num_pages = model_loading.pages_of(config, TINY, capacity, "cuda:0", DeviceReserve(), num_heads=1)
    assert num_pages() == 500
    assert num_pages() == 50


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_missing_gpu_is_refused_by_flag() -> None:
    with pytest.raises(ConfigError, match=r"^--device cuda:3: torch finds no CUDA device"):
        model_loading.pick_device("cuda:3")


def test_a_port_in_use_is_refused_by_flag_and_leaves_no_socket() -> None:
    context = zmq.Context()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--data-port {port}: .*; choose another with --data-port$"):
            listen_mailbox(context, "i" * 32, "127.0.0.1", port, keys=None)
    context.term()  # would wait for any socket that is left


class Engine(SynchronousExecutor):
    """An executor whose steps end when the test says so."""

    def __init__(self) -> None:
        self.may_run = threading.Event()

    def compile_grammar(self, grammar: str) -> Future[None]:
        raise NotImplementedError

    def drop_grammar(self, grammar: str) -> None:
        raise NotImplementedError

    def run(self, plan: StepPlan) -> StepResult:
        assert self.may_run.wait(60)
        if plan.step == 13:
            raise RuntimeError("the device is on fire")
        return StepResult(plan.step, (plan.step,))


def plan(step: int) -> StepPlan:
    return StepPlan(step, (), (), ())


def test_the_engine_thread_wakes_the_loop_once_for_each_step() -> None:
    engine = Engine()
    thread = EngineThread(engine)
    for step in (1, 2, 3):
        engine.may_run.clear()
        thread.submit(plan(step))
        assert thread.is_busy
        assert thread.take() is None
        engine.may_run.set()
        assert select.select([thread.fileno()], [], [], 60)[0]
        result = thread.take()
        assert result is not None
        assert result.tokens == (step,)
        assert not thread.is_busy
        assert not select.select([thread.fileno()], [], [], 0)[0]
    thread.close()


def test_an_exception_of_the_engine_is_raised_in_the_loop() -> None:
    engine = Engine()
    engine.may_run.set()
    thread = EngineThread(engine)
    thread.submit(plan(13))
    assert select.select([thread.fileno()], [], [], 60)[0]
    with pytest.raises(RuntimeError, match="on fire"):
        thread.take()
    thread.close()


class Watched:
    """A role whose tick after the first step records what was unsent, and whether the next step had started."""

    def __init__(self) -> None:
        self.outbox = Outbox()
        self.plans = [plan(1)]
        self.is_committed = False
        self.seen: tuple[int, bool] | None = None
        self.node: EventLoop | None = None

    def plan(self, now: float) -> StepPlan | None:
        return self.plans.pop() if self.plans else None

    def commit(self, result: StepResult, now: float) -> None:
        self.is_committed = True
        self.outbox.gateway.append(Ping())
        self.plans.append(plan(2))

    def tick(self, now: float) -> bool:
        assert self.node is not None
        if self.is_committed:
            self.seen = (len(self.outbox.gateway), self.node._engine.is_busy)
            self.node.stop()
        return True

    def files(self) -> tuple[int, ...]:
        return ()

    def load(self) -> Load:
        return Load(0, 1, 0, 0, 0)

    def counters(self) -> dict[str, float]:
        return {}

    gauges = counters

    def pairs(self) -> tuple[()]:
        return ()

    peers = pairs

    def requests(self) -> dict[RequestKey, Request]:
        return {}

    def stop(self, reason: str, now: float, code: ErrorCode) -> None:
        self.ended_with = code


@contextlib.contextmanager
def node_of(role: "Watched", *gateways: str, max_outstanding: int = 1) -> Iterator[EventLoop]:
    """A node with this role; its loop does not run."""
    engine = Engine()
    thread = EngineThread(engine, max_outstanding=max_outstanding)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    endpoint = ControlEndpoint(context, "n" * 32, listen_mailbox(context, "n" * 32, "127.0.0.1", 0, keys=None))
    role.node = node = EventLoop(
        role, thread, register=lambda: None, gateways=FixedGateways(gateways or ("127.0.0.1:1",)), orphan_timeout_s=1.0,
        max_running=1, endpoint=endpoint, clock=MonotonicClock(),
        adapters=NodeAdapters(engine, NodeConfig(), thread.notify),
    )  # type: ignore[arg-type]  # fmt: skip
    engine.may_run.set()
    try:
        yield node
    finally:
        node.close("the test is over")
        thread.close()
        context.term()


def test_results_are_sent_and_the_next_step_starts_before_pages_are_moved() -> None:
    role = Watched()
    with node_of(role) as node:
        os.eventfd_write(node._wake, 1)  # the only wake-up
        node.run()
    assert role.seen == (0, True)


def test_a_drain_wakes_the_loop_once() -> None:
    with node_of(Watched()) as node:
        node.drain(60.0)
        node._wait(60.0)
        with pytest.raises(BlockingIOError):
            os.eventfd_read(node._wake)


@pytest.mark.parametrize(("step", "expected"), [(1, (0, ErrorCode.SHUTTING_DOWN)), (13, (1, ErrorCode.INTERNAL))])
def test_requests_are_told_whether_their_node_stops_or_has_failed(
    step: int, expected: tuple[int, ErrorCode], monkeypatch: pytest.MonkeyPatch
) -> None:
    role = Watched()
    role.plans = [plan(step)]
    with node_of(role) as node:
        os.eventfd_write(node._wake, 1)
        status = loaded_node._until_stopped(node)
        monkeypatch.setattr(node, "close", lambda reason: None)  # it is closed
    assert (status, role.ended_with) == expected


class Eager(Watched):
    """A role that always has something to compute; it notes how many steps were outstanding when it planned one."""

    def __init__(self) -> None:
        super().__init__()
        self.outstanding: list[int] = []
        self.committed: list[int] = []

    def plan(self, now: float) -> StepPlan | None:
        assert self.node is not None
        self.outstanding.append(self.node._engine.num_outstanding)
        return plan(len(self.outstanding))

    def commit(self, result: StepResult, now: float) -> None:
        self.committed.append(result.step)

    def tick(self, now: float) -> bool:
        assert self.node is not None
        if len(self.committed) >= 5:
            self.node.stop()
        return False


def test_with_overlap_the_loop_plans_a_step_while_another_one_runs() -> None:
    role = Eager()
    with node_of(role, max_outstanding=2) as node:
        os.eventfd_write(node._wake, 1)
        node.run()
    assert role.outstanding[:2] == [0, 1]
    assert role.committed == list(range(1, len(role.committed) + 1))


class Named(Watched):
    """Keeps the prefill nodes that gateways name."""

    def on_gateway(self, message: object, now: float) -> None:
        if isinstance(message, PrefillNodes):
            self.named = [peer.name for peer in message.nodes]


def test_prefill_nodes_are_those_of_all_gateways() -> None:
    """Gateways that differ for a moment cost no connection."""
    role = Named()
    first, second = (Peer(f"prefill-{i}", str(i) * 32, f"host:{i}") for i in range(2))
    expected = [(0, (first,), {0}), (1, (first, second), {0, 1}), (0, (), {0, 1}), (1, (second,), {1}), (1, (), set())]
    with node_of(role, "127.0.0.1:1", "127.0.0.1:2") as node:
        links = list(node._links)
        for gateway, nodes, names in expected:
            node._on_gateway(links[gateway], str(gateway) * 32, PrefillNodes(nodes), 0.0)
            assert sorted(role.named) == [f"prefill-{i}" for i in sorted(names)]


def test_only_a_node_that_stays_says_that_prefill_nodes_are_missing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with node_of(Named()) as node:
        (link,) = node._links
        node._on_gateway(link, "0" * 32, PrefillNodes(()), 0.0)
        node._begin_drain(1.0, 0.0)
        node._on_gateway(link, "0" * 32, PrefillNodes(()), 0.0)
    assert [record.message for record in caplog.records if "prefill node" in record.message] == [
        "no gateway has a prefill node; until one comes, only local prefill works (--local-prefill)"
    ]


def test_a_withdrawn_adapter_waits_for_every_connected_gateway_and_is_told_to_one_that_registers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapter = Adapter("a", "0" * 32)
    sent: list[tuple[GatewayLink, Message]] = []
    monkeypatch.setattr(GatewayLink, "send", lambda self, *messages: sent.extend((self, one) for one in messages))
    with node_of(Watched(), "127.0.0.1:1", "127.0.0.1:2") as node:
        node._adapters._serving["a"] = adapter
        monkeypatch.setattr(node._adapters._executor, "drop_adapter", lambda dropped: None, raising=False)
        first, second = node._links
        first.is_dialling = False
        node._on_gateway(first, "1" * 32, Registered(1, 1.0), 0.0)
        assert sent == [], "nothing has changed"
        node._on_gateway(first, "1" * 32, UnloadAdapter("a", 1, number=5), 0.0)
        node._change_adapters()
        withdrawn = Adapters((msgspec.structs.replace(adapter, change=1, is_withdrawn=True),))
        assert sent == [(first, withdrawn), (second, withdrawn)]
        second.is_dialling = False  # it registers the node as it was, and may send it requests with the adapter
        node._on_gateway(first, "1" * 32, AdapterUnused(adapter.id), 0.0)
        node._change_adapters()
        node._on_gateway(second, "2" * 32, Registered(1, 1.0), 0.0)
        assert sent[2:] == [(second, withdrawn)]
        node._change_adapters()
        assert len(sent) == 3, "a gateway may still send requests with the adapter"
        node._on_gateway(second, "2" * 32, AdapterUnused(adapter.id), 0.0)
        node._change_adapters()
        assert sent[3:] == [(first, Adapters((), {"a": 1}, number=5)), (second, Adapters((), {"a": 1}))]


def test_a_link_that_is_left_while_others_are_read_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with node_of(Watched(), "localhost:1", "127.0.0.1:1") as node:
        first, second = node._links
        second.incarnation = "1" * 32
        first.is_dialling = False
        arrived = {first.mailbox: [Envelope("1" * 32, Registered(1, 1.0))]}
        monkeypatch.setattr(Mailbox, "receive", lambda self, **_: [] if self._socket.closed else arrived.pop(self, []))
        followed: list[GatewayLink] = []
        monkeypatch.setattr(GatewayLink, "follow", lambda self, now, level: followed.append(self) or "")
        node._receive(0.0)
        assert (followed, list(node._links)) == ([first], [first])


def test_a_process_ends_although_a_thread_of_it_never_does() -> None:
    """The interpreter would wait for it, as it waits for a step of torch's."""
    program = (
        "import logging, sys, threading, time\n"
        "from common.node.worker_main import end_process\n"
        "threading.Thread(target=time.sleep, args=(3_600,)).start()\n"
        "logging.warning('the last line of the log')\n"
        "print('the last line', end='')\n"
        "end_process(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (3, "the last line")
    assert "the last line of the log" in done.stderr


@pytest.mark.parametrize("closed", ["1>&-", "2>&-"])
def test_a_process_without_an_output_ends_with_its_status(closed: str) -> None:
    program = "from common.node.worker_main import end_process; end_process(3)"
    done = subprocess.run(["sh", "-c", f'"$0" -c "$1" {closed}', sys.executable, program], timeout=120, check=False)
    assert done.returncode == 3


@pytest.mark.parametrize(
    ("token", "num_output", "options", "expected"),
    [
        (5, 1, {}, ""),
        (5, 3, {}, "length"),
        (9, 1, {}, "stop"),
        (9, 3, {}, "stop"),
        (9, 1, {"ignore_eos": True}, ""),
        (9, 3, {"ignore_eos": True}, "length"),
        (7, 1, {"stop_token_ids": (7,), "ignore_eos": True}, "stop"),
    ],
)
def test_an_output_ends_at_its_last_allowed_token_or_at_an_end_token(
    token: int, num_output: int, options: dict[str, object], expected: str
) -> None:
    sampling = SamplingParams(max_new_tokens=3, **options)  # type: ignore[arg-type]
    assert finish_reason(sampling, (9,), token=token, num_output=num_output) == expected


def test_a_node_without_a_configured_name_uses_one_name_everywhere() -> None:
    """The gateway and the errors of prefill nodes name it alike."""
    config, store = NodeConfig(role="decode"), MemfdStore(8)
    allocator = PageAllocator(8)
    parts = WorkerContext(
        config=config, capacity=Capacity(2, 8, 2, None), pool=store, layout=store.layout,
        allocator=allocator, cache=make_cache(config, allocator), clock=MonotonicClock(), digest="d",
        incarnation="i" * 32, vocab_size=100, eos_token_ids=(),
    )  # fmt: skip
    role = build(parts, SimpleNamespace(reader=InProcessReader(Wire(), store)))
    prefill, me = Peer("prefill-0", "p" * 32, "host:1"), Peer("?", "i" * 32, "")
    role.on_gateway(Generate("r", 0, (1, 2), SamplingParams(), prefill, me, 60.0), 0.0)
    [connect] = [message for _, message in role.outbox.peers if isinstance(message, Connect)]
    assert connect.name == f"decode-{platform.node()}-{os.getpid()}" == config.node_name
    assert NodeConfig(role="decode", name="d7").node_name == "d7"
    store.close()


class Told(Watched):
    """Keeps what gateways say."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[Message] = []

    def on_gateway(self, message: Message, now: float) -> None:
        self.heard.append(message)


def test_a_letter_that_came_before_the_connection_broke_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    role = Told()
    generate = Generate("r", 0, (1,), SamplingParams(), prefill=None, decode=None, timeout_s=9.0)
    with node_of(role) as node:
        (link,) = node._links
        monkeypatch.setattr(link.mailbox, "connection_events", lambda: ConnectionEvents(False, True))
        monkeypatch.setattr(link.mailbox, "receive", lambda: [Envelope("g" * 32, generate)])
        node._receive(0.0)
        assert link.incarnation == ""
    assert role.heard == []


def test_a_letter_that_came_before_the_connection_was_made_again_in_one_turn_is_dropped(
    context: "zmq.Context[zmq.Socket[bytes]]", monkeypatch: pytest.MonkeyPatch
) -> None:
    role = Told()
    generate = Generate("r", 0, (1,), SamplingParams(), prefill=None, decode=None, timeout_s=9.0)
    gateway = Mailbox(context, "g" * 32, FromNode, bind="tcp://127.0.0.1:*")
    with node_of(role, gateway.address.removeprefix("tcp://")) as node:
        (link,) = node._links
        link.send(Deregister())
        assert gateway.sockets[0].poll(60_000)
        gateway.receive()
        assert gateway.send(generate, target="n" * 32)
        assert link.mailbox.sockets[0].poll(60_000)
        monkeypatch.setattr(link.mailbox, "connection_events", lambda: ConnectionEvents(True, True))
        monkeypatch.setattr(link, "register", lambda: None)
        node._receive(0.0)
    gateway.close()
    assert role.heard == []


@pytest.mark.parametrize("has_signal", [False, True])
def test_the_loss_of_a_gateway_is_a_warning_unless_this_process_stops_too_and_nodes_may_leave(
    has_signal: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), node_of(Watched()) as node:
        (link,) = node._links
        monkeypatch.setattr(link.mailbox, "connection_events", lambda: ConnectionEvents(False, True))
        monkeypatch.setattr(node._listen, "lost_peers", lambda peers: ["d" * 32])
        monkeypatch.setattr(node._sources, "lost", lambda: ["p" * 32])
        monkeypatch.setattr(node._role, "peer_lost", lambda peer, now: None, raising=False)
        if has_signal:
            node.drain(1.0)
        node._receive(0.0)
        level = "INFO" if has_signal else "WARNING"
        assert [record.levelname for record in caplog.records if "is gone" in record.message] == [level, "INFO", "INFO"]


def test_the_requests_of_a_gateway_that_refuses_the_node_end_there() -> None:
    role = Told()
    with node_of(role, "127.0.0.1:1", "127.0.0.1:2") as node:
        first, second = node._links
        for link, gateway in ((first, "1" * 32), (second, "2" * 32)):
            node._on_gateway(link, gateway, Registered(1, 1.0), 0.0)
            for rid, key in (("plain", ""), ("with-key", "k")):
                sampling = SamplingParams()
                own = {"timeout_s": 9.0, "key": key and gateway}
                generate = Generate(rid + gateway[0], 0, (1,), sampling, prefill=None, decode=None, **own)
                node._on_gateway(link, gateway, generate, 0.0)
        role.heard.clear()
        node._on_gateway(first, "1" * 32, Refused("its weights are others"), 0.0)
        assert role.heard == [Abort("plain1", 0, "continued"), Abort("with-key1", 0, "continued")]
        assert list(node._links) == [second]


class Computing(Watched):
    """Has the requests that gateways have sent and not ended."""

    def __init__(self) -> None:
        super().__init__()
        self.on_node: dict[RequestKey, Request] = {}

    def on_gateway(self, message: Message, now: float) -> None:
        if isinstance(message, Generate):
            key = (message.rid, message.attempt)
            self.on_node[key] = Request(*key, prompt=message.prompt, sampling=message.sampling)
        elif isinstance(message, Abort):
            self.on_node.pop((message.rid, message.attempt), None)

    def requests(self) -> dict[RequestKey, Request]:
        return self.on_node


GATEWAY_EVENTS = ("generate", "generate", "keyed", "registered", "unknown", "refused", "lost", "restarted", "find")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(GATEWAY_EVENTS), st.integers(0, 1)), max_size=20))
def test_a_node_computes_nothing_that_no_gateway_waits_for_or_may_ask_for(events: list[tuple[str, int]]) -> None:
    role = Computing()
    with pytest.MonkeyPatch.context() as patch, node_of(role, "127.0.0.1:1", "127.0.0.1:2") as node:
        patch.setattr(GatewayLink, "register", lambda self: None)
        patch.setattr(GatewayLink, "send", lambda self, *messages: None)
        links, names = list(node._links), ["a" * 32, "b" * 32]
        for number, (kind, index) in enumerate([("registered", 0), ("registered", 1), *events]):
            link = links[index]
            if link not in node._links or (link.is_dialling and kind != "registered"):
                continue
            say = partial(node._on_gateway, link, names[index], now=0.0)
            if kind in ("generate", "keyed"):
                key = f"k{number}" if kind == "keyed" else ""
                say(message=Generate(f"r{number}", 0, (1,), SamplingParams(), None, None, timeout_s=9.0, key=key))
            elif kind in ("registered", "restarted"):
                names[index] = f"{number}".rjust(32, names[index][0]) if kind == "restarted" else names[index]
                link.is_dialling = False
                node._on_gateway(link, names[index], Registered(1, 1.0), 0.0)
            elif kind == "find":
                say(message=Find(tuple(owned.digest for owned in node._owners._requests.values() if owned.digest)))
            elif kind == "lost":
                with patch.context() as broken:
                    broken.setattr(link.mailbox, "connection_events", lambda: ConnectionEvents(False, True))
                    node._receive(0.0)
            else:
                say(message=Unknown() if kind == "unknown" else Refused("its weights are others"))
            waiting = {one.incarnation for one in node._links if one.is_registered}
            for request_key in role.on_node:
                owned = node._owners._requests[request_key]
                assert owned.gateway in waiting or (owned.digest and owned.gateway in node._owners._lost)
            if node.refused is not None:
                break


def test_the_tokens_of_a_turn_leave_together_for_each_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    with node_of(Watched(), "127.0.0.1:1", "127.0.0.1:2") as node:
        sent: list[tuple[str, tuple[Message, ...]]] = []
        for name, link in zip("ab", node._links, strict=True):
            link.incarnation, link.is_registered = name * 32, True
            monkeypatch.setattr(link, "send", lambda *messages, name=name: sent.append((name, messages)))
        monkeypatch.setattr(node._owners, "owner", lambda message: message.rid * 32)
        first = [Tokens("a", 0, index, (1,)) for index in range(10)]
        node._send_to_owners([*first, Tokens("b", 0, 0, (2,))])
        assert sent == [("a", tuple(first)), ("b", (Tokens("b", 0, 0, (2,)),))]
        monkeypatch.undo()
