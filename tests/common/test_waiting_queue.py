"""The line that is kept sorted is the one that sorting would give, whatever happens to who is in it."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.lone_nodes import DecodeNode

from common.cache.page_allocator import Owner, PageAllocator
from common.cache.radix_cache import RadixCache
from common.config.scheduling import POLICIES, PriorityRules, SchedulingOptions
from common.request import Request
from common.sampling_params import SamplingParams
from common.scheduling import sorted_line
from common.scheduling.ordering import RequestOrdering
from common.scheduling.policies.base import FirstComeFirstServed, LongestOutputFirst
from common.scheduling.policies.factory import make_order
from common.scheduling.waiting_queue import WaitingQueue

PAGE = 2
RULES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "priorities": {"enable_priority_scheduling": True, "default_priority_value": 0},
    "ageing": {"enable_priority_scheduling": True, "default_priority_value": 0, "priority_aging_per_second": 1.0},
    "classes": {"priority_classes": ("a:3", "b:1")},
    "both": {"priority_classes": ("a:3", "b:1"), "enable_priority_scheduling": True},
}
SORTED_ANEW = {"lpm", "dfs-weight", "random", "hrrn", "adaptive"}
CASES = [(policy, rules) for policy in POLICIES for rules in RULES if policy not in SORTED_ANEW]


class Waiting:
    """A queue, the cache that it watches, and what happens to both."""

    def __init__(self, policy: str, rules: str) -> None:
        self.books = PageAllocator(64)
        self.cache = RadixCache(self.books, PAGE)
        self.order = make_order(SchedulingOptions(schedule_policy=policy, **RULES[rules]), self.cache)
        self.queue = WaitingQueue(self.order, self.cache)
        self.begun: list[Request] = []
        self.now = 0.0
        self.num_made = 0

    def come(self, data: Any) -> None:
        draw = lambda *values: data.draw(st.sampled_from(values))  # noqa: E731
        self.num_made += 1
        prompt = (draw(1, 2),) * draw(1, 2, 5, 9)
        request = Request(
            f"r{self.num_made}", 0, prompt, SamplingParams(max_new_tokens=draw(4, 9)), priority=draw(0, 0, 3),
            priority_class=draw("a", "b", ""), tenant=draw("x", "y", "z"), arrived_at=self.now - draw(0, 0, 2.5),
            deadline_at=draw(float("inf"), self.now + 1, self.now + 3),
        )  # fmt: skip
        self.queue[request.key] = request

    def pick(self, data: Any) -> Request | None:
        return data.draw(st.sampled_from(list(self.queue.values()))) if self.queue else None

    def happen(self, data: Any) -> None:
        what, request = data.draw(st.sampled_from(["come"] * 4 + ["leave", "change", "again", "cached", "late"])), None
        if what == "come":
            self.come(data)
        elif what == "cached":
            pages = self.books.alloc(4, Owner.REQUEST) if self.books.num_free >= 4 else None
            if pages is None:
                self.cache.evict(60)
                return
            inserted = self.cache.insert((data.draw(st.sampled_from([1, 2])),) * 8, pages)
            self.books.free(pages[: inserted.first_adopted], Owner.REQUEST)
        elif what == "late":
            self.now += data.draw(st.sampled_from([0.5, 2.0]))
        elif (request := self.pick(data)) is None:
            return
        elif what == "leave":
            del self.queue[request.key]
            request.inherited_priority = data.draw(st.sampled_from([-(2**31), 3]))
            self.begun.append(request)
            self.order.admitted(request, num_input=len(request.prompt))
        elif what == "again":
            del self.queue[request.key]
            self.queue.put_first(request)
        else:
            self.queue.change(request, data.draw(st.sampled_from([0, 5])), data.draw(st.sampled_from(["a", "b", None])))

    def agree(self) -> None:
        for begun in ([], self.begun):
            sorted_anew = list(self.order.merge(begun, list(self.queue.values()), self.now))
            assert list(self.queue.line(begun, self.now)) == sorted_anew
        some = list(self.queue.values())[::2]
        got = [request for request in self.queue.line(self.begun, self.now, some) if request.key in self.queue]
        assert [r for r in got if r in some] == [r for r in sorted_anew if r in some]
        self.queue.check()


@pytest.mark.parametrize(("policy", "rules"), CASES)
@given(data=st.data())
@settings(max_examples=12)
def test_the_line_is_the_one_that_sorting_would_give(policy: str, rules: str, data: Any) -> None:
    if policy != "fcfs" and rules == "ageing":
        return
    waiting = Waiting(policy, rules)
    for _ in range(data.draw(st.integers(1, 14))):
        waiting.happen(data)
        if data.draw(st.booleans()):
            waiting.agree()
    waiting.agree()
    assert waiting.order.is_ranked or (policy == "fair" and rules != "nothing")


def test_whoever_is_let_in_while_the_line_is_walked_along_is_not_missed_and_nobody_else_is() -> None:
    for rules in ("nothing", "classes"):
        waiting = Waiting("fcfs", rules)
        requests = [
            Request(f"r{i}", 0, (1,) * 4, SamplingParams(max_new_tokens=4), priority_class="ab"[i % 2])
            for i in range(9)
        ]
        for request in requests:
            waiting.queue[request.key] = request
        expected = list(waiting.order.merge([], requests, 0.0))
        walked = []
        for request in waiting.queue.line([], 0.0):
            walked.append(request)
            if len(walked) % 3:
                waiting.order.admitted(request, num_input=4)  # what is charged meanwhile counts from the next time on
                del waiting.queue[request.key]
        assert walked == expected
        waiting.queue.check()


def test_a_policy_of_ones_own_that_inherits_a_rank_but_orders_otherwise_is_asked() -> None:
    class NewestFirst(FirstComeFirstServed):
        def order(self, waiting: Sequence[Request], now: float) -> Sequence[Request]:
            return list(reversed(waiting))

    class LongestPromptFirst(LongestOutputFirst):
        def rank(self, request: Request) -> float:
            return -len(request.prompt)

    requests = [Request(f"r{i}", 0, (1,) * (i + 1), SamplingParams(max_new_tokens=4)) for i in range(3)]
    for policy, is_ranked in ((NewestFirst(), False), (LongestPromptFirst(), True)):
        order = RequestOrdering(policy)
        assert order.is_ranked is is_ranked
        queue = WaitingQueue(order)
        for request in requests:
            queue[request.key] = request
        assert list(queue.line([], 0.0)) == requests[::-1]


RUNNING = 6


@pytest.mark.parametrize("is_mixed_with_local", [False, True])
@pytest.mark.parametrize(
    ("policy", "rules"),
    [
        ("fcfs", PriorityRules()),
        ("edf", PriorityRules(is_enabled=True)),
        ("fair", PriorityRules()),
        ("short-first", PriorityRules(class_weights={"a": 2.0, "b": 1.0}, default_class="b")),
    ],
)
def test_a_step_of_a_decode_node_looks_at_few_of_those_that_wait(
    policy: str, rules: PriorityRules, is_mixed_with_local: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are: nobody is placed anew, and the line is walked along only to who cannot pass."""
    looked_at = 0
    walk, place = sorted_line._walk, RequestOrdering.place

    def counting_walk(entries: Any) -> Iterator[Any]:
        nonlocal looked_at
        for entry in walk(entries):
            looked_at += 1
            yield entry

    def counting_place(order: RequestOrdering, *args: Any, **named: Any) -> Any:
        nonlocal looked_at
        looked_at += 1
        return place(order, *args, **named)

    node = DecodeNode(num_pages=30, slots=RUNNING, rules=rules, policy=policy)
    for number in range(RUNNING):
        node.run_in(f"running {number}", 12, priority=1, new=100)
    for number in range(600):
        node.submit(f"waiting {number}", 12, priority=number % 3, is_local=is_mixed_with_local and number % 2 == 1)
    monkeypatch.setattr(node.places.waiting, "check", lambda: None)
    monkeypatch.setattr(DecodeNode, "check", lambda node: None)
    node.step()
    node.grant()
    monkeypatch.setattr(sorted_line, "_walk", counting_walk)
    monkeypatch.setattr(RequestOrdering, "place", counting_place)
    for _ in range(8):
        looked_at = 0
        node.step()
        node.grant()
        node.submit(f"late {node.num_submitted}", 12)
        assert 0 < looked_at < 60, "the step looked at too many"
    assert len(node.places.waiting) >= 590
