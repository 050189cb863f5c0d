"""Expired requests are returned once, in order; ended requests never."""

from hypothesis import given
from hypothesis import strategies as st

from common.request import Request
from common.sampling_params import SamplingParams
from common.scheduling.deadlines import Deadlines

SAMPLING = SamplingParams(max_new_tokens=1)


def request(rid: str, deadline_at: float) -> Request:
    return Request(rid, 0, (1,), SAMPLING, deadline_at=deadline_at)


class Known:
    def __init__(self) -> None:
        self.requests: dict[tuple[str, int], Request] = {}
        self.deadlines = Deadlines(self.requests)

    def add(self, one: Request) -> None:
        self.requests[one.key] = one
        self.deadlines.add(one)

    def passed(self, now: float) -> list[str]:
        return [one.rid for one in self.deadlines.expired(now)]


def test_each_expired_request_is_returned_once_earliest_first() -> None:
    known = Known()
    for rid, at in (("a", 3.0), ("b", 1.0), ("c", 2.0), ("d", float("inf"))):
        known.add(request(rid, at))
    assert known.passed(0.9) == []
    assert known.passed(2.0) == ["b", "c"]
    assert known.passed(1e9) == ["a"]


def test_an_ended_request_is_not_returned_and_its_key_may_be_added_again() -> None:
    known = Known()
    known.add(request("a", 1.0))
    del known.requests["a", 0]
    known.add(request("a", 5.0))
    assert known.passed(2.0) == []
    assert known.passed(5.0) == ["a"]


def test_entries_of_ended_requests_are_removed_before_their_deadlines() -> None:
    known = Known()
    for number in range(1_000):
        known.add(request(str(number), 600.0))
        if number >= 10:
            del known.requests[str(number - 10), 0]
    assert len(known.deadlines._heap) <= 100


@given(
    steps=st.lists(
        st.one_of(st.integers(0, 30), st.tuples(st.integers(0, 5), st.floats(0.0, 30.0))), min_size=1, max_size=150
    )
)
def test_the_result_equals_a_search_through_all_requests(steps: list[int | tuple[int, float]]) -> None:
    """An integer asks at that instant, and expired requests end; a pair ends one of six requests and adds it again."""
    known = Known()
    for step in steps:
        if isinstance(step, int):
            due = sorted(one.rid for one in known.requests.values() if one.deadline_at <= step)
            assert sorted(known.passed(step)) == due
            for rid in due:
                del known.requests[rid, 0]
        else:
            known.requests.pop((str(step[0]), 0), None)
            known.add(request(str(step[0]), step[1]))
