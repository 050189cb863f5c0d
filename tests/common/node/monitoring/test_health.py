"""``/health`` of a node: 200 while its own loop and engine go on, 503 with the reason when one of them does not."""

import json
import threading

import pytest
import zmq
from support.engine.synchronous_executor import SynchronousExecutor
from support.waiting import until

from common.clock import MonotonicClock
from common.config.node import NodeConfig
from common.discovery.gateway_directory import FixedGateways
from common.node.adapters import NodeAdapters
from common.node.endpoint import ControlEndpoint, listen_mailbox
from common.node.engine_thread import EngineThread
from common.node.event_loop import EventLoop
from common.node.gateways.outbox import Outbox
from common.node.monitoring.health import HealthCheck, stall
from common.node.monitoring.request_stats import RequestStats
from common.node.role import Load
from common.sampling_params import SamplingParams
from common.step_plan import StepPlan, StepResult


class Engine(SynchronousExecutor):
    """An executor whose steps hang until ``may_run``."""

    def __init__(self):
        self.may_run = threading.Event()

    def prepare(self, sampling: SamplingParams) -> None:
        pass

    def run(self, plan: StepPlan) -> StepResult:
        assert self.may_run.wait(60)
        return StepResult(plan.step, ())


class Role:
    """A role with the plans that a test gives it, whose tick hangs while ``may_tick`` is not set."""

    def __init__(self):
        self.outbox, self.stats = Outbox(), RequestStats()
        self.plans = []
        self.may_tick = threading.Event()
        self.may_tick.set()

    def plan(self, now):
        return self.plans.pop() if self.plans else None

    def commit(self, result, now):
        pass

    def tick(self, now):
        assert self.may_tick.wait(60)
        return False

    def files(self):
        return ()

    def load(self):
        return Load(0, 0, 0, 0, 0)

    def counters(self):
        return {}

    gauges = counters

    def pairs(self):
        return ()

    peers = pairs

    def requests(self):
        return {}

    def check(self):
        pass

    def stop(self, reason, now, code):
        pass


@pytest.fixture
def node():
    """A role, an executor and a health check around a real event loop that finds no gateway."""
    role, executor, clock = Role(), Engine(), MonotonicClock()
    context = zmq.Context()
    engine = EngineThread(executor)
    endpoint = ControlEndpoint(context, "n" * 32, listen_mailbox(context, "n" * 32, "127.0.0.1", 0, keys=None))
    loop = EventLoop(
        role, engine, register=lambda: None, gateways=FixedGateways(("127.0.0.1:1",)), orphan_timeout_s=1.0,
        max_running=1, endpoint=endpoint, clock=clock, adapters=NodeAdapters(executor, NodeConfig(), engine.notify),
    )  # fmt: skip
    thread = threading.Thread(target=loop.run)
    thread.start()
    config = NodeConfig(role="decode", name="d0", served_model_name="m", gateway="127.0.0.1:1", health_timeout=2)
    yield role, executor, HealthCheck(config, loop, engine, clock)
    executor.may_run.set()
    role.may_tick.set()
    loop.stop()
    thread.join(60)
    loop.close("the test is over")
    engine.close()
    context.term()


def body_with(check, status):
    """The body of the first answer with this status."""
    answer = until(lambda: found if (found := check.answer()).status == status else None)
    return json.loads(answer.body)


def test_a_node_without_a_gateway_is_healthy_and_says_what_it_waits_for(node):
    _, _, check = node
    body = body_with(check, 200)
    assert (body["status"], body["problem"]) == ("ok", "")
    assert (body["name"], body["role"], body["model"]) == ("d0", "decode", "m")
    assert body["is_registered"] is False
    assert body["waits_for"] == "a connection to the gateway at 127.0.0.1:1"


def test_a_hung_engine_is_reported_until_its_step_ends(node):
    role, executor, check = node
    role.plans.append(StepPlan(1, (), (), ()))
    body = body_with(check, 503)
    assert body["status"] == "stalled"
    assert body["problem"].startswith("the engine has computed one step for ")
    assert body["problem"].endswith("s (--health-timeout 2)")
    executor.may_run.set()
    assert body_with(check, 200)["step_s"] == 0


def test_a_hung_event_loop_is_reported_until_it_turns(node):
    role, _, check = node
    role.may_tick.clear()
    assert body_with(check, 503)["problem"].startswith("the event loop has not turned for ")
    role.may_tick.set()
    assert body_with(check, 200)["problem"] == ""


@pytest.mark.parametrize(
    ("turn_s", "step_s", "expected"),
    [
        (5.0, 5.0, ""),
        (5.1, 0.0, "the event loop has not turned for 5.1 s (--health-timeout 5)"),
        (0.0, 5.1, "the engine has computed one step for 5.1 s (--health-timeout 5)"),
        (7.0, 9.0, "the event loop has not turned for 7.0 s (--health-timeout 5)"),
    ],
)
def test_the_age_of_the_last_turn_and_of_the_step_decide(turn_s, step_s, expected):
    assert stall(turn_s, step_s, 5.0) == expected
