"""How often a decode step can be repeated: until an output ends, or pages run out."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from common.request import Request
from common.sampling_params import SamplingParams
from decode_node.repeated_steps import growth_instants, most_with_pages, num_before_end

EOS = (0,)


def request(*, num_scheduled: int = 5, num_pages: int = 2, **sampling: Any) -> Request:
    made = Request("a", 0, (1,) * 4, SamplingParams(**{"max_new_tokens": 10, **sampling}), output=[7])
    made.num_scheduled, made.pages = num_scheduled, list(range(num_pages))
    return made


def test_an_output_ends_with_its_last_allowed_token() -> None:
    assert num_before_end(request(), [5] * 20, EOS) == 8  # one of ten is there, and the tenth ends it
    assert num_before_end(request(), [5] * 3, EOS) == 3  # no more is known
    assert num_before_end(request(max_new_tokens=2), [5] * 20, EOS) == 0


def test_an_output_ends_with_the_end_token_unless_that_is_ignored_and_with_a_stop_token() -> None:
    assert num_before_end(request(), [5, 5, 0, 5], EOS) == 2
    assert num_before_end(request(ignore_eos=True), [5, 5, 0, 5], EOS) == 4
    assert num_before_end(request(ignore_eos=True, stop_token_ids=(9, 8)), [5, 0, 8, 9], EOS) == 2


def test_a_request_grows_when_its_last_page_is_full() -> None:
    # Pages of 4 tokens: two hold 8, and 5 are scheduled. The next rows take places 5, 6 and 7; the fourth needs a page.
    assert list(growth_instants(request(), 12, 4)) == [4, 8, 12]
    assert list(growth_instants(request(num_scheduled=8), 5, 4)) == [1, 5]
    assert list(growth_instants(request(), 3, 4)) == []


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 3)), min_size=1, max_size=5),
    st.integers(0, 60),
    st.integers(1, 8),
    st.integers(0, 30),
)
def test_pages_suffice_for_as_many_repetitions_and_no_more(
    rows: list[tuple[int, int]], count: int, page_size: int, num_pages: int
) -> None:
    requests = [
        request(num_scheduled=scheduled, num_pages=-(-scheduled // page_size) + more) for scheduled, more in rows
    ]

    def needed(repetitions: int) -> int:
        needs = 0
        for one in requests:
            have = len(one.pages)
            for number in range(repetitions):
                if have * page_size <= one.num_scheduled + number:
                    have, needs = have + 1, needs + 1
        return needs

    most = most_with_pages(requests, count, page_size, num_pages)
    assert 0 <= most <= count
    assert needed(most) <= num_pages
    assert most == count or needed(most + 1) > num_pages
