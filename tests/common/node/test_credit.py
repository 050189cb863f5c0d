"""The shares of gateways in what a node runs at once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.examples import examples

from common.node.gateways.credit import Credit, divide

ROOM = 8
NAMES = ("a", "b", "c")


@pytest.mark.parametrize(
    ("demands", "shares"),
    [
        ({"a": 100}, {"a": 8}),
        ({"a": 100, "b": 100}, {"a": 4, "b": 4}),
        ({"a": 100, "b": 2}, {"a": 6, "b": 2}),
        ({"a": 0, "b": 0}, {"a": 4, "b": 4}),
        ({"a": 3, "b": 0}, {"a": 6, "b": 2}),
        ({"a": 9, "b": 9, "c": 9}, {"a": 2, "b": 3, "c": 3}),
    ],
)
def test_small_demands_are_met_and_the_rest_is_equal(demands, shares):
    assert divide(ROOM, demands) == shares


@given(st.integers(0, 300), st.dictionaries(st.text(max_size=2), st.integers(0, 400), min_size=1, max_size=5))
def test_all_room_is_divided_and_no_more(room, demands):
    shares = divide(room, demands)
    assert sum(shares.values()) == room
    assert min(shares.values()) >= min(room // len(demands), *demands.values(), 0)


def test_a_gateway_that_joins_gets_its_share_once_the_other_has_acknowledged_less():
    credit = Credit(ROOM)
    credit.join("a")
    assert credit.offer("a", {}) == 8
    credit.acknowledge("a", demand=20)
    credit.join("b")
    assert credit.offer("b", {"a": 8}) == 0
    assert credit.offer("a", {"a": 8}) == 8, "no other gateway wants anything"
    credit.acknowledge("a", demand=20)
    credit.acknowledge("b", demand=20)
    assert credit.offer("a", {"a": 8}) == 4
    assert credit.offer("b", {"a": 8}) == 0, "the other one may not know it yet"
    credit.acknowledge("a", demand=20)
    assert credit.offer("b", {"a": 6}) == 2, "six of its requests still run"
    assert credit.offer("b", {"a": 4}) == 4


def test_requests_of_a_gateway_that_has_left_take_room_until_they_end():
    credit = Credit(ROOM)
    credit.join("a")
    credit.join("b")
    credit.offer("a", {})
    credit.leave("a")
    assert credit.offer("b", {"a": 3}) == 5
    assert credit.offer("b", {}) == 8


class CreditMachine(RuleBasedStateMachine):
    """Gateways send up to the share that they know, over channels with delay: the node never has more than its room."""

    def __init__(self):
        super().__init__()
        self.credit = Credit(ROOM)
        self.shares = {}  # as the gateways know them
        self.told = {}  # heartbeats under way
        self.acks = {}  # requests and acknowledgements under way, in order
        self.here = dict.fromkeys(NAMES, 0)

    @rule(name=st.sampled_from(NAMES))
    def join(self, name):
        if name not in self.shares:
            self.credit.join(name)
            self.shares[name], self.told[name], self.acks[name] = 0, [], []

    @rule(name=st.sampled_from(NAMES))
    def beat(self, name):
        if name in self.shares:
            self.told[name].append(self.credit.offer(name, dict(self.here)))

    @rule(name=st.sampled_from(NAMES), demand=st.integers(0, 20))
    def hear(self, name, demand):
        """A gateway receives a heartbeat, answers it, and sends as many requests as it may."""
        if self.told.get(name):
            self.shares[name] = self.told[name].pop(0)
            self.acks[name].append(demand)
            under_way = self.acks[name].count("request")
            self.acks[name] += ["request"] * max(0, self.shares[name] - self.here[name] - under_way)

    @rule(name=st.sampled_from(NAMES))
    def arrive(self, name):
        if self.acks.get(name):
            arrived = self.acks[name].pop(0)
            if arrived == "request":
                self.here[name] += 1
            else:
                self.credit.acknowledge(name, arrived)

    @rule(name=st.sampled_from(NAMES))
    def end(self, name):
        self.here[name] = max(0, self.here[name] - 1)

    @invariant()
    def the_node_is_never_overbooked(self):
        self.credit.check()
        assert sum(self.here.values()) <= ROOM


TestCreditMachine = CreditMachine.TestCase
TestCreditMachine.settings = settings(max_examples=examples(100), stateful_step_count=60)
