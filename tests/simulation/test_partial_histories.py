"""Whatever comes, goes and changes around transfers that have part of their pages: one at most lacks any, it gets the
rest although no other transfer ever ends, nobody less urgent is completed before one that could have had its pages, and
every page comes back. Over histories drawn by hypothesis, of one decode node by itself."""

from dataclasses import dataclass, replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.lone_nodes import ON, PAGE
from support.lone_nodes import DecodeNode as Node

from common.cache.page_allocator import Owner
from common.config.scheduling import PriorityRules
from common.request import Request
from decode_node.page_reservation import Reservation

NUM_PAGES = 16
RULES = (PriorityRules(), ON, replace(ON, aging_per_s=1.0))


@dataclass(frozen=True)
class Arrival:
    """One more request; ``first`` is where its prompt begins, so that two may share a beginning."""

    length: int
    new: int
    predicted: int
    priority: int
    is_local: bool
    first: int | None


@dataclass(frozen=True)
class Change:
    """What happens to the one of this number, counted among those that it can happen to."""

    what: str
    number: int


ARRIVALS = st.builds(
    Arrival,
    length=st.one_of(st.integers(1, 8), st.integers(12, 24), st.integers(20, 46)),
    new=st.integers(2, 16),
    predicted=st.sampled_from([0, 1, 4, 8]),
    priority=st.sampled_from([0, 5, 9, 9]),
    is_local=st.sampled_from([False, False, False, True]),
    first=st.sampled_from([None, None, None, 100_000]),
)
#: Those that run when it begins: tokens of the prompt, of the output, and expected of it.
HOLDERS = st.lists(st.tuples(st.integers(4, 28), st.integers(4, 16), st.integers(1, 8)), min_size=1, max_size=3)
CHANGES = st.builds(
    Change,
    what=st.sampled_from(["step", "step", "receive", "end", "retract", "raise", "flush"]),
    number=st.integers(0, 9),
)


class History:
    """A node, and what every request on it must come to."""

    def __init__(self, rules: PriorityRules, slots: int, resume_tokens: int | None) -> None:
        self.node = Node(num_pages=NUM_PAGES, slots=slots, rules=rules, resume_tokens=resume_tokens, max_skip_ahead=2)
        self.line = self.node.scheduler.line
        self.line.can_resume = lambda key: key not in self.node.places.local
        self.asked: dict[str, Request] = {}
        self.given: tuple[Reservation | None, int] = (None, 0)  # to the one that lacks some, and its pages at last

    def arrive(self, one: Arrival) -> None:
        rid = f"r{self.node.num_submitted}"
        request = self.node.submit(rid, one.length, one.priority, new=one.new, is_local=one.is_local, first=one.first)
        request.expected_output = one.predicted
        self.asked[rid] = request

    def hold(self, length: int, new: int, predicted: int) -> None:
        self.arrive(Arrival(length, new, predicted, 0, False, None))
        self.node.grant()
        for request in [r for r in self.node.places.receiving.values() if r is not self.line.partial]:
            self.node.receive(request.rid)
        self.node.step()

    def change(self, change: Change) -> None:
        node = self.node
        if change.what == "step":
            node.step()
        elif change.what == "flush":
            node.cache.clear()
        elif change.what == "receive":
            if whole := [r for r in node.places.receiving.values() if r is not self.line.partial]:
                node.receive(whole[change.number % len(whole)].rid)
        elif change.what == "retract":
            if able := list(node.places.running.values()):
                node.scheduler.giving_way.retract(able[change.number % len(able)], node.now, "for the test")
        elif there := list(node.places.requests.values()):
            request = there[change.number % len(there)]
            if change.what == "raise":
                node.scheduler.reprioritize(request.key, 9, node.now)
            else:
                self.end(request)

    def end(self, request: Request) -> None:
        """Amid its transfer its pages are freed as the receiver does after the fence."""
        reservation = self.line.admission.reservations.get(request.key)
        self.node.scheduler.end(request.key)
        if reservation is not None:
            self.node.books.free(reservation.pages, Owner.GRANT)
        del self.asked[request.rid]

    def grant(self) -> None:
        """Whoever can be given pages gets them; what became of it is proved."""
        node, before = self.node, self.line.partial
        num_available, is_last = self.line.admission.num_available, not node.places.yielding()
        node.grant()
        node.check()
        if before is not None and before is not self.line.partial and not is_last:
            self.assert_nobody_was_passed(before, num_available)  # with nobody left to end, it comes before everybody
        if (partial := self.line.partial) is not None:
            self.assert_grows(partial)

    def assert_nobody_was_passed(self, completed: Request, num_available: int) -> None:
        """It has all of its pages now. So has whoever is more urgent, if there was room then for all that those before
        it, those who hold pages and it itself may say."""
        standing, line, places = self.node.scheduler._order.standing, self.line, self.node.places
        num_left = sum(request.num_left for request in places.holders())
        for other in [*places.retracted.values(), *places.waiting.values()]:
            if standing(other) <= standing(completed) or line.is_computed_here(other) or line.is_full_for(other):
                continue
            prior = [one for one in places.requests.values() if not one.pages and standing(one) >= standing(other)]
            num_tokens = num_left + sum(one.num_tokens + one.num_left + PAGE for one in prior)
            is_pending = line.admission.match(other).pending is not None
            assert is_pending or num_tokens > num_available * PAGE, f"{completed.rid} came before {other.rid}"

    def assert_grows(self, partial: Request) -> None:
        """It has some of its pages, never fewer than before, and lacks one at least."""
        reservation = self.line.admission.reservations[partial.key]
        num_given = len(reservation.pages)
        assert reservation.num_lacking > 0
        before, num_before = self.given  # of an earlier transfer, if it was retracted since
        assert num_given >= (num_before if before is reservation else 1)
        assert partial.pages[reservation.first :] == reservation.pages
        self.given = (reservation, num_given)

    def wait_for_no_other_transfer(self) -> None:
        """Nothing arrives any more: whoever lacks pages gets them from this node's own."""
        while (partial := self.line.partial) is not None:
            for _ in range(200):
                self.node.step()
                self.grant()
                if self.line.partial is not partial:
                    break
            else:
                raise AssertionError(f"{partial.rid} waits for ever: {self.node.places.states}")

    def end_well(self) -> None:
        """Everybody says all it may, and every page comes back."""
        node = self.node
        node.run()
        assert sorted(rid for rid in node.done if rid in self.asked) == sorted(self.asked)
        assert all(len(request.output) == request.sampling.max_new_tokens for request in self.asked.values())
        assert node.books.num_free + node.cache.num_pages == NUM_PAGES


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    holders=HOLDERS,
    large=st.integers(36, 58),
    events=st.lists(st.one_of(ARRIVALS, CHANGES), max_size=40),
    rules=st.sampled_from(RULES),
    slots=st.integers(2, 4),
    resume_tokens=st.sampled_from([None, 4]),
)
def test_whatever_happens_around_it_the_one_that_lacks_pages_gets_them_and_every_page_comes_back(
    holders: list[tuple[int, int, int]],
    large: int,
    events: list[Arrival | Change],
    rules: PriorityRules,
    slots: int,
    resume_tokens: int | None,
) -> None:
    history = History(rules, slots, resume_tokens)
    for holder in holders:
        history.hold(*holder)
    history.arrive(Arrival(large, 4, 2, 0, False, None))
    history.grant()
    for event in events:
        if isinstance(event, Arrival):
            history.arrive(event)
        else:
            history.change(event)
        history.grant()
    history.wait_for_no_other_transfer()
    history.end_well()
