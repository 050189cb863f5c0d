"""When nodes change their roles by themselves: tables by hand, and rules that hold for all loads."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.gateway.fake_nodes import make_register

from common.config.shared import Role
from common.wire.messages import Heartbeat
from gateway.workers.auto_roles import (
    BACKLOG_S,
    HOUR_S,
    REVERSAL_S,
    SHORT_SHARE,
    SPARE_SHARE,
    WINDOW_S,
    AutoRoles,
    NodeLoad,
    RoleDecision,
    load_of,
)
from gateway.workers.registry import Registry, Worker
from gateway.workers.role_changes import RoleChanges
from gateway.workers.routing.router import Router

TOKENS_PER_S = 1_000.0  # that a busy prefill node computes


class Nodes:
    """Nodes under a load that the test sets, and the decisions about them.

    Attributes:
        busy: share of time that each prefill node computes; ``waiting_s``: seconds of prompts that wait at each.
        held: share of each decode node that requests hold.
        decisions: instant and decision, in order.
    """

    def __init__(self, prefill: int, decode: int, *, max_per_hour: int = 1_000) -> None:
        self.roles: dict[str, Role] = {f"n{i}": "prefill" if i < prefill else "decode" for i in range(prefill + decode)}
        self.busy, self.waiting_s, self.held = 0.0, 0.0, 0.0
        self.fixed: set[str] = set()
        self.decisions: list[tuple[float, RoleDecision]] = []
        self._auto = AutoRoles(max_per_hour)
        self._busy_s: dict[str, float] = dict.fromkeys(self.roles, 0.0)
        self.now = 0.0

    def of(self, role: Role) -> int:
        return list(self.roles.values()).count(role)

    def loads(self) -> Iterator[NodeLoad]:
        for name, role in self.roles.items():
            is_prefill, busy_s = role == "prefill", self._busy_s[name]
            yield NodeLoad(
                f"{name}-{role}", role, self.now, name in self.fixed, busy_s, busy_s * TOKENS_PER_S,
                self.waiting_s * TOKENS_PER_S if is_prefill else 0.0, 0.0 if is_prefill else self.held, int(name[1:]),
            )  # fmt: skip

    def run(self, seconds: float, *, tick_s: float = 1.0, before: Callable[[], None] = lambda: None) -> None:
        """Let time pass; every decision is carried out at once."""
        until = self.now + seconds
        while self.now < until:
            self.now += tick_s
            before()
            for name, role in self.roles.items():
                self._busy_s[name] += self.busy * tick_s if role == "prefill" else 0.0
            decision = self._auto.decide(list(self.loads()), self.now)
            if decision is not None:
                self.decisions.append((self.now, decision))
                self.roles[decision.incarnation.split("-")[0]] = decision.role


FULL = SHORT_SHARE + 0.05


@pytest.mark.parametrize(
    ("prefill", "decode", "busy", "waiting_s", "held", "expected"),
    [
        (1, 2, FULL, 2.0, 0.3, "prefill"),  # prompts wait, and one decode node would be 60 % full
        (1, 2, FULL, 2.0, 0.4, None),  # it would be 80 % full
        (1, 4, FULL, 2.0, 0.5, "prefill"),  # three would be 67 % full
        (1, 1, FULL, 2.0, 0.0, None),  # the last decode node
        (1, 2, FULL, 0.5, 0.3, None),  # busy, but prompts wait for half a second only
        (1, 2, 0.8, 2.0, 0.3, None),  # prompts wait for something else than the prefill node
        (2, 1, 0.3, 0.0, FULL, "decode"),
        (2, 1, 0.4, 0.0, FULL, None),  # the other prefill node would be 80 % busy
        (1, 1, 0.0, 0.0, FULL, None),  # the last prefill node
        (2, 1, 0.3, 0.0, 0.85, None),
        (2, 2, FULL, 9.0, FULL, None),  # both are short
        (2, 2, 0.1, 0.0, 0.1, None),  # neither is
    ],
)
def test_a_node_changes_if_one_role_is_short_and_the_other_can_spare_it(
    prefill: int, decode: int, busy: float, waiting_s: float, held: float, expected: Role | None
) -> None:
    nodes = Nodes(prefill, decode)
    nodes.busy, nodes.waiting_s, nodes.held = busy, waiting_s, held
    nodes.run(WINDOW_S + 1)
    assert [decision.role for _, decision in nodes.decisions] == ([] if expected is None else [expected])


def test_an_imbalance_must_have_lasted() -> None:
    nodes = Nodes(1, 2)
    nodes.busy = 1.0
    nodes.run(WINDOW_S * 0.4)
    nodes.waiting_s = 60.0
    nodes.run(WINDOW_S * 0.4)
    nodes.busy = nodes.waiting_s = 0.0
    nodes.run(60.0)
    assert not nodes.decisions


def test_a_node_that_joins_begins_a_new_window() -> None:
    nodes = Nodes(1, 2)
    nodes.busy, nodes.waiting_s = 1.0, 9.0
    nodes.run(WINDOW_S - 1)
    nodes.roles["n3"], nodes._busy_s["n3"] = "decode", 0.0
    nodes.run(WINDOW_S)
    assert not nodes.decisions
    nodes.run(2)
    assert len(nodes.decisions) == 1


def test_the_node_with_the_fewest_requests_that_may_change_is_chosen() -> None:
    nodes = Nodes(1, 3)
    nodes.busy, nodes.waiting_s = 1.0, 9.0
    nodes.fixed = {"n1"}
    nodes.run(WINDOW_S + 1)
    [(_, decision)] = nodes.decisions
    assert decision.incarnation == "n2-decode"
    assert decision.reason == "9.0 s of prompts wait, prefill nodes 100% busy, decode nodes 0% full"


def test_the_opposite_change_waits() -> None:
    nodes = Nodes(2, 2)
    nodes.busy, nodes.waiting_s = 1.0, 9.0
    nodes.run(WINDOW_S + 1)
    nodes.busy, nodes.waiting_s, nodes.held = 0.1, 0.0, 1.0
    nodes.run(HOUR_S)
    (first, _), (second, decision), *_ = nodes.decisions
    assert decision.role == "decode"
    assert REVERSAL_S <= second - first <= REVERSAL_S + WINDOW_S


def test_the_changes_of_an_hour_are_bounded() -> None:
    nodes = Nodes(1, 9, max_per_hour=3)
    nodes.busy, nodes.waiting_s = 1.0, 9.0
    nodes.run(HOUR_S)
    assert len(nodes.decisions) == 3
    nodes.run(WINDOW_S + 1)
    assert len(nodes.decisions) == 4


shares = st.floats(0.0, 1.0)


@settings(max_examples=examples(60))
@given(
    prefill=st.integers(1, 5),
    decode=st.integers(1, 5),
    max_per_hour=st.integers(1, 6),
    phases=st.lists(st.tuples(shares, st.floats(0.0, 20.0), shares, st.integers(20, 1_500)), min_size=1, max_size=12),
)
def test_whatever_the_load_a_node_of_each_role_stays_and_no_hour_has_too_many_changes(
    prefill: int, decode: int, max_per_hour: int, phases: list[tuple[float, float, float, int]]
) -> None:
    nodes = Nodes(prefill, decode, max_per_hour=max_per_hour)
    for nodes.busy, nodes.waiting_s, nodes.held, seconds in phases:
        nodes.run(seconds, tick_s=5.0)
        assert nodes.of("prefill") and nodes.of("decode")
    instants = [at for at, _ in nodes.decisions]
    assert all(sum(at - HOUR_S < other <= at for other in instants) <= max_per_hour for at in instants)
    for (at, one), (later, other) in zip(nodes.decisions, nodes.decisions[1:], strict=False):
        assert later - at >= (WINDOW_S if one.role == other.role else REVERSAL_S)


@pytest.mark.slow
@settings(max_examples=examples(100))
@given(
    prefill=st.integers(1, 6),
    decode=st.integers(1, 6),
    prefill_work=st.floats(0.0, 8.0),
    decode_work=st.floats(0.0, 8.0),
)
def test_under_a_constant_load_nodes_never_change_back(
    prefill: int, decode: int, prefill_work: float, decode_work: float
) -> None:
    """The load is as much as so many nodes of each role can do; a queue is long where it is more."""
    nodes = Nodes(prefill, decode)

    def share_out() -> None:
        demand = prefill_work / nodes.of("prefill")
        nodes.busy, nodes.waiting_s = min(demand, 1.0), 10 * BACKLOG_S if demand > SHORT_SHARE else 0.0
        nodes.held = min(decode_work / nodes.of("decode"), 1.0)

    nodes.run(3 * HOUR_S, tick_s=5.0, before=share_out)
    assert len({decision.role for _, decision in nodes.decisions}) <= 1
    assert len(nodes.decisions) < prefill + decode
    if nodes.decisions:  # the role that gave nodes is not short itself
        given_by = "decode" if nodes.decisions[0][1].role == "prefill" else "prefill"
        work = decode_work if given_by == "decode" else prefill_work
        assert work / nodes.of(given_by) < SPARE_SHARE + 1e-9


def beat(num_running: int, num_free_pages: int, gauges: dict[str, float], **counters: float) -> Heartbeat:
    return Heartbeat(3, num_running, num_free_pages, 0, 0, counters, gauges)


def test_a_decode_node_is_full_by_slots_or_pages_of_requests_whose_prompts_have_arrived() -> None:
    node = Worker("d" * 16, make_register("decode", "d", max_running=10, num_pages=100), 1, 7.0)
    gauges = {
        "evictable_pages": 20.0, "granted_pages": 30.0, "transfers_by_receiving_by_shm": 2.0,
        "transfers_by_waiting_for_connection_by_none": 1.0, "transfers_by_quarantined_by_shm": 5.0,
    }  # fmt: skip
    node.heartbeat = beat(7, 40, gauges, busy_seconds=2.5)
    found = load_of(node, Router())
    assert found.held_share == pytest.approx(0.4)  # (7 - 3) of 10 slots; (100 - 40 - 20 - 30) of 100 pages are fewer
    node.heartbeat = beat(7, 0, gauges, busy_seconds=2.5)
    assert load_of(node, Router()).held_share == pytest.approx(0.5)
    assert (found.busy_s, found.at, found.num_requests, found.waiting_tokens) == (2.5, 7.0, 10, 0.0)


def test_a_prefill_node_has_what_the_router_has_sent_it() -> None:
    prefill = Worker("p" * 16, make_register("prefill", "p", fixed_role="it records"), 1, 7.0)
    decode = Worker("d" * 16, make_register("decode", "d"), 1, 7.0)
    router = Router()
    assert router.choose([prefill], [decode], tuple(range(100)), num_new=5) is not None
    prefill.heartbeat = beat(1, 64, {}, busy_seconds=1.5, prompt_tokens_computed=900.0)
    found = load_of(prefill, router)
    assert (found.waiting_tokens, found.computed_tokens, found.held_share) == (100, 900, 0.0)
    assert found.is_fixed


def test_the_last_node_of_its_role_in_a_revision_is_not_given() -> None:
    registry, router, seen = Registry(num_token_ids=320), Router(), []
    for name, weights in (("old", "w1"), ("new-0", "w2"), ("new-1", "w2")):
        registry.register(name.rjust(16), make_register("prefill", name, weight_version=weights), 0.0)
    auto = SimpleNamespace(decide=lambda loads, now: seen.extend(loads))
    pool = SimpleNamespace(auto_roles=auto, registry=registry, router=router)
    RoleChanges([pool], None, None).tick(1.0)
    assert {load.incarnation.strip(): load.is_fixed for load in seen} == {"old": True, "new-0": False, "new-1": False}
