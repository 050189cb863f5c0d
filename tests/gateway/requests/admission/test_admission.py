"""The bound on requests in flight, and what is said to clients that are refused."""

import pytest

from common.errors import ErrorCode, RequestError
from gateway.requests.admission.admission import Admission


def refused(admission, count=1, *, max_running=2, now=0.0, waiting=()):
    with pytest.raises(RequestError) as caught:
        admission.admit(count, max_running=max_running, now=now, waiting=waiting)
    return caught.value


def full_admission():
    """Ten of ten places are taken, two by requests that are served, and four requests have taken 4 s each."""
    admission = Admission(max_queued=8)
    admission.admit(10, max_running=2, now=0.0)
    for number in range(4):
        admission.release(2.0 * (number + 1), served_s=4.0)
    admission.admit(4, max_running=2, now=8.0)
    return admission


def test_running_and_queued_requests_are_admitted_up_to_the_bound():
    admission = Admission(max_queued=1)
    for _ in range(3):
        admission.admit(1, max_running=2, now=0.0)
    error = refused(admission)
    assert error.code is ErrorCode.QUEUE_FULL
    assert admission.num_in_flight == 3
    admission.release(1.0, served_s=1.0)
    admission.admit(1, max_running=2, now=1.0)


def test_a_batch_is_admitted_whole_or_not_at_all():
    admission = Admission(max_queued=2)
    admission.admit(1, max_running=2, now=0.0)
    assert refused(admission, 4).code is ErrorCode.QUEUE_FULL
    assert admission.num_in_flight == 1
    admission.admit(3, max_running=2, now=0.0)


def test_retry_after_follows_the_time_of_service_and_the_number_served_at_once():
    admission = full_admission()
    assert refused(admission, 1, now=8.0, waiting=range(8)).retry_after_s == 2.0  # two at once, for 4 s each
    assert refused(admission, 3, now=8.0, waiting=range(8)).retry_after_s == 8.0  # the earlier promise comes first
    assert refused(admission, 1, now=10.5, waiting=range(8)).retry_after_s == 8.0  # the first promise is due: 4 x 2 s


def test_promises_lapse_once_only_half_as_many_requests_are_in_flight():
    admission = full_admission()
    assert refused(admission, 5, now=8.0, waiting=range(8)).retry_after_s == 10.0
    for _ in range(5):
        admission.release(9.0, served_s=4.0)
    admission.admit(5, max_running=2, now=9.0)
    assert refused(admission, 1, now=9.0, waiting=range(8)).retry_after_s == 2.0


def test_retry_after_grows_while_nothing_ends():
    admission = full_admission()
    assert refused(admission, 1, now=28.0, waiting=range(8)).retry_after_s == 10.0  # nothing for 20 s, with two at once


def test_a_request_that_was_paused_or_recovered_shows_only_that_requests_end():
    admission = full_admission()
    admission.release(28.0, served_s=20.0, is_typical=False)
    admission.admit(1, max_running=2, now=28.0)
    assert refused(admission, 1, now=28.0, waiting=range(8)).retry_after_s == 2.0  # two at once, for 4 s each


def test_an_evicted_or_aborted_request_tells_nothing():
    admission = full_admission()
    admission.release(8.0, served_s=None)
    admission.admit(1, max_running=2, now=8.0)
    assert refused(admission, 1, now=8.0, waiting=range(8)).retry_after_s == 2.0


def test_the_pace_is_known_once_enough_requests_have_ended_and_for_half_a_minute():
    admission = Admission(max_queued=100)
    admission.admit(40, max_running=4, now=0.0)
    for number in range(15):
        admission.release(number / 4, served_s=1.0, num_tokens=10)
    assert admission.pace(4.0, waiting=range(21)) is None
    admission.release(4.0, served_s=1.0, num_tokens=10)
    pace = admission.pace(4.0, waiting=range(20))
    assert pace == (0.25, 1.0, 10.0)
    assert (pace.least_s(5), pace.least_s(1000)) == (0.5, 1.0)
    for _ in range(24):
        admission.release(5.0, served_s=None)
    admission.admit(40, max_running=4, now=34.0)
    assert admission.pace(34.0, waiting=range(36)) == (0.25, 1.0, 10.0)  # all have left and come back
    assert admission.pace(34.5, waiting=range(36)) is None


def test_without_any_data_retry_after_is_the_time_waited_so_far():
    admission = Admission(max_queued=0)
    admission.admit(2, max_running=2, now=10.0)
    assert refused(admission, 1, now=10.0).retry_after_s == 1.0
    assert refused(admission, 1, now=17.5).retry_after_s == 8.0
    assert refused(admission, 1, now=500.0).retry_after_s == 60.0
