"""Bounded requests in flight, and a Retry-After that comes true."""

import heapq

import pytest

from common.errors import ErrorCode, RequestError
from gateway.requests.admission import Admission


def refused(admission, count=1, *, max_running=2, now=0.0):
    with pytest.raises(RequestError) as caught:
        admission.admit(count, max_running=max_running, now=now)
    return caught.value


def test_what_runs_and_what_may_queue_is_admitted_and_no_more():
    admission = Admission(max_queued=1)
    for _ in range(3):
        admission.admit(1, max_running=2, now=0.0)
    error = refused(admission)
    assert error.code is ErrorCode.QUEUE_FULL
    assert admission.num_in_flight == 3
    admission.release(1.0)
    admission.admit(1, max_running=2, now=1.0)


def test_a_batch_goes_in_whole_or_not_at_all():
    admission = Admission(max_queued=2)
    admission.admit(1, max_running=2, now=0.0)
    assert refused(admission, 4).code is ErrorCode.QUEUE_FULL
    assert admission.num_in_flight == 1
    admission.admit(3, max_running=2, now=0.0)


def test_a_batch_that_can_never_go_in_is_the_clients_fault():
    error = refused(Admission(max_queued=1), 4)
    assert (error.code, error.param, error.retry_after_s) == (ErrorCode.INVALID_REQUEST, "prompt", None)


def test_retry_after_is_the_time_at_the_rate_seen_lately():
    admission = Admission(max_queued=8)
    admission.admit(10, max_running=2, now=0.0)
    for i in range(4):  # one every two seconds
        admission.release(2.0 * (i + 1))
    admission.admit(4, max_running=2, now=8.0)
    assert refused(admission, 1, now=8.0).retry_after_s == 2.0
    assert refused(admission, 3, now=8.0).retry_after_s == 8.0  # the one before comes back sooner
    assert refused(admission, 1, now=10.5).retry_after_s == 11.0  # its time has come; three come before: 4 x 10.5 / 4


def test_who_comes_back_when_told_finds_room():
    """200 come at once to a service that ends ten a second and has room for fifty."""
    admission = Admission(max_queued=42)
    comings = [(0.1 * number, 1, number) for number in range(80)]  # as many as it serves: it is known what it can do
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


def test_until_one_has_ended_it_is_what_those_in_flight_are_expected_to_take():
    admission = Admission(max_queued=0)
    admission.forecast = lambda count: 2.5 * count
    admission.admit(2, max_running=2, now=0.0)
    assert refused(admission, 1, now=0.0).retry_after_s == 3.0
    assert refused(admission, 1, now=1.0).retry_after_s == 5.0  # the one before comes back sooner
    admission.release(4.0)
    admission.admit(1, max_running=2, now=4.0)
    assert refused(admission, 1, now=4.0).retry_after_s == 8.0  # now it is known: one in 4 s; and one is to come


def test_while_nothing_has_ended_it_may_take_as_long_again():
    admission = Admission(max_queued=0)
    admission.admit(2, max_running=2, now=10.0)
    assert refused(admission, 1, now=10.0).retry_after_s == 1.0
    assert refused(admission, 1, now=17.5).retry_after_s == 8.0
    assert refused(admission, 1, now=500.0).retry_after_s == 60.0
