"""The bound on requests in flight, and Retry-After."""

import heapq
from types import SimpleNamespace

import pytest

from common.errors import ErrorCode, RequestError
from gateway.requests.admission import Admission


def refused(admission, count=1, *, max_running=2, now=0.0, in_flight=()):
    with pytest.raises(RequestError) as caught:
        admission.admit(count, max_running=max_running, now=now, in_flight=in_flight)
    return caught.value


def test_running_and_queued_requests_are_admitted_up_to_the_bound():
    admission = Admission(max_queued=1)
    for _ in range(3):
        admission.admit(1, max_running=2, now=0.0)
    error = refused(admission)
    assert error.code is ErrorCode.QUEUE_FULL
    assert admission.num_in_flight == 3
    admission.release(1.0)
    admission.admit(1, max_running=2, now=1.0)


def test_a_batch_is_admitted_whole_or_not_at_all():
    admission = Admission(max_queued=2)
    admission.admit(1, max_running=2, now=0.0)
    assert refused(admission, 4).code is ErrorCode.QUEUE_FULL
    assert admission.num_in_flight == 1
    admission.admit(3, max_running=2, now=0.0)


def test_retry_after_follows_the_recent_rate():
    admission = Admission(max_queued=8)
    admission.admit(10, max_running=2, now=0.0)
    for i in range(4):  # one every two seconds
        admission.release(2.0 * (i + 1))
    admission.admit(4, max_running=2, now=8.0)
    assert refused(admission, 1, now=8.0).retry_after_s == 2.0
    assert refused(admission, 3, now=8.0).retry_after_s == 8.0  # the earlier promise comes first
    assert (
        refused(admission, 1, now=10.5).retry_after_s == 11.0
    )  # the first promise has expired; three come before: 4 x 10.5 / 4


def test_a_client_that_returns_after_its_retry_after_finds_room():
    """200 requests arrive together at a service that ends ten a second and has room for fifty."""
    admission = Admission(max_queued=42)
    comings = [(0.1 * number, 1, number) for number in range(80)]  # as many as it serves, which establishes the rate
    comings += [(8.0, 1, number) for number in range(80, 280)]
    times_refused = dict.fromkeys(range(280), 0)
    while comings:
        now, is_client, number = heapq.heappop(comings)
        if not is_client:
            admission.release(now)
        else:
            try:
                admission.admit(1, max_running=8, now=now)
            except RequestError as error:
                times_refused[number] += 1
                heapq.heappush(comings, (now + error.retry_after_s, 1, number))
                continue
        if admission.num_in_flight == 1 or (not is_client and admission.num_in_flight):
            heapq.heappush(comings, (now + 0.1, 0, 0))
    refused_once_or_more = [count for count in times_refused.values() if count]
    assert len(refused_once_or_more) >= 150
    assert max(refused_once_or_more) <= 2
    assert sum(count == 1 for count in refused_once_or_more) > 0.8 * len(refused_once_or_more)


def test_idle_time_does_not_make_the_rate_look_low():
    admission = Admission(max_queued=0)
    for start in (0.0, 1000.0):
        admission.admit(2, max_running=2, now=start)
        for end in (start + 3.0, start + 3.0):
            admission.release(end)
    admission.admit(2, max_running=2, now=5000.0)
    assert refused(admission, 1, now=5000.0).retry_after_s == 2.0  # four in six busy seconds: one in 1.5


def test_before_the_first_end_retry_after_is_estimated_from_progress():
    admission = Admission(max_queued=0)
    request = SimpleNamespace(expected_output=7)
    stream = SimpleNamespace(ids=[1, 2], request=request, first_at=0.0, last_at=0.5)  # five tokens left, 0.5 s each
    admission.admit(2, max_running=2, now=0.0)
    assert refused(admission, 1, now=0.0, in_flight=[stream]).retry_after_s == 3.0
    assert refused(admission, 1, now=1.0, in_flight=[stream]).retry_after_s == 5.0  # an earlier promise comes first
    admission.release(4.0)
    admission.admit(1, max_running=2, now=4.0)
    assert refused(admission, 1, now=4.0).retry_after_s == 8.0  # the rate is known, one in 4 s, and one promise is open


def test_without_any_data_retry_after_is_the_time_waited_so_far():
    admission = Admission(max_queued=0)
    admission.admit(2, max_running=2, now=10.0)
    assert refused(admission, 1, now=10.0).retry_after_s == 1.0
    assert refused(admission, 1, now=17.5).retry_after_s == 8.0
    assert refused(admission, 1, now=500.0).retry_after_s == 60.0
