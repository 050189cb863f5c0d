"""Policies and priority functions of the user, loaded from a module in the path."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.scheduling.waiting_requests import rids

from common.config.scheduling import SchedulingOptions
from common.errors import ConfigError
from common.plugins import RequestFacts, load_policy, load_priority_function
from common.request import Request
from common.sampling_params import SamplingParams
from common.scheduling.policies.factory import make_ordering
from common.scheduling.waiting_queue import WaitingQueue

MODULE = '''
from common.scheduling.policies.base import Policy

class Backwards(Policy):
    """Orders by arrival, latest first; inherits the rest."""
    def order(self, waiting, now):
        return list(waiting)[::-1]

class Whole:
    """Does not inherit and has all methods."""
    seen = []
    def order(self, waiting, now): return sorted(waiting, key=lambda request: request.rid)
    def arrived(self, request): self.seen.append(("arrived", request.rid))
    def left(self, request): self.seen.append(("left", request.rid))
    def served(self, request, *, num_input=0, num_output=0): self.seen.append((num_input, num_output))

class Loses(Policy):
    def order(self, waiting, now): return list(waiting)[1:]

class Doubles(Policy):
    def order(self, waiting, now): return [waiting[0]] * len(waiting)

class Fails(Policy):
    def order(self, waiting, now): raise ZeroDivisionError("one over nothing")
    def arrived(self, request): raise KeyError("unknown")

class Half:
    def order(self, waiting, now): return waiting

class NeedsMore(Policy):
    def __init__(self, what): pass
    def order(self, waiting, now): return waiting

number = 7
by_length = lambda facts: -facts.num_prompt_tokens
nothing = lambda facts: None
half = lambda facts: 0.5
huge = lambda facts: 2**31
def fails(facts): raise ValueError("no")
'''


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "users_own.py").write_text(MODULE)
    (tmp_path / "users_broken.py").write_text("import nothing_of_this_name")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    import sys

    for name in ("users_own", "users_broken"):
        sys.modules.pop(name, None)


def queue_of(spec: str) -> WaitingQueue:
    order = make_ordering(SchedulingOptions(schedule_policy=spec), own_policy=load_policy(spec))
    queue = WaitingQueue(order)
    for rid in ("b", "c", "a"):
        queue[(rid, 0)] = Request(rid, 0, (1, 2), SamplingParams())
    order.served(queue["b", 0], num_input=2)
    del queue["b", 0]
    return queue


def test_a_built_in_policy_is_not_loaded() -> None:
    assert load_policy("lpm") is None
    assert load_priority_function(None) is None


def test_a_users_policy_orders_the_queue() -> None:
    assert rids(queue_of("users_own:Backwards")) == ["a", "c"]


def test_a_policy_need_not_inherit_and_gets_all_calls() -> None:
    import users_own  # type: ignore[import-not-found]

    queue = queue_of("users_own:Whole")
    assert rids(queue) == ["a", "c"]
    assert users_own.Whole.seen == [("arrived", "b"), ("arrived", "c"), ("arrived", "a"), (2, 0), ("left", "b")]


@pytest.mark.parametrize("name", ["Loses", "Doubles", "Fails"])
def test_a_failing_policy_leaves_the_order_of_arrival_and_is_logged_once(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        queue = queue_of(f"users_own:{name}")
        assert rids(queue) == rids(queue) == ["c", "a"]
    assert len(caplog.records) == 1
    assert f"--schedule-policy users_own:{name}" in caplog.text


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("no_such_module:Policy", "cannot be imported: No module named 'no_such_module'.* PYTHONPATH"),
        ("users_broken:Policy", "cannot be imported: No module named 'nothing_of_this_name'"),
        ("users_own:Missing", "users_own has no Missing"),
        ("users_own:number", "is not a class"),
        ("users_own:Half", "lacks arrived, left, served: a policy is a class with order"),
        ("users_own:NeedsMore", "cannot be constructed without arguments: .*what"),
    ],
)
def test_an_invalid_policy_is_refused_with_the_reason(spec: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=f"--schedule-policy {spec}:? .*{complaint}|{complaint}"):
        load_policy(spec)


FACTS = RequestFacts("m", "t", "", None, num_prompt_tokens=12, max_new_tokens=3, expected_output=0, deadline_s=600.0)


def test_a_priority_function_sets_the_priority() -> None:
    function = load_priority_function("users_own:by_length")
    assert function is not None
    assert function(FACTS) == -12


def test_a_function_may_keep_the_priority() -> None:
    function = load_priority_function("users_own:nothing")
    assert function is not None
    assert function(FACTS) is None
    assert function.failures.count == 0


@pytest.mark.parametrize(
    ("name", "what"), [("half", "returned 0.5"), ("huge", "returned 2147483648"), ("fails", "failed")]
)
def test_a_failing_function_keeps_the_priority_and_is_logged_once(
    name: str, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    function = load_priority_function(f"users_own:{name}")
    assert function is not None
    with caplog.at_level(logging.WARNING):
        assert function(FACTS) is None
        assert function(FACTS) is None
    assert function.failures.count == 2
    assert len(caplog.records) == 1
    assert f"--priority-function users_own:{name} {what}" in caplog.text


def test_an_invalid_function_is_refused() -> None:
    with pytest.raises(ConfigError, match="--priority-function users_own:number is not a function"):
        load_priority_function("users_own:number")
