"""Bursts of clients that heed Retry-After, in virtual time: work ends soon, and absent clients delay no one."""

from hypothesis import given, settings
from hypothesis import strategies as st
from support.gateway.burst_simulation import Server

from gateway.requests.admission.admission import Admission

#: The instants of Retry-After are whole seconds, and a first burst finds nothing measured.
ROUNDING_S = 2.0


def server(*, rows=8, max_queued=42, rate=14.3, seed=0):
    return Server(Admission(max_queued), rows=rows, service_s=rows / rate, seed=seed)


def best_s(burst, count):
    """The least time in which a number of requests can end."""
    return count / burst.rate + 1.5 * burst.service_s


def test_a_cold_burst_that_returns_is_done_almost_as_soon_as_possible():
    burst = server()
    burst.burst(0.0, range(200))
    burst.run()
    assert burst.ended_at <= 1.5 * best_s(burst, 200)
    assert max(burst.times_refused.values()) <= 3


def test_retry_after_is_no_longer_than_the_work():
    burst = server(rate=105.0, max_queued=120)  # 200 requests take 1.9 s
    burst.burst(0.0, range(200))
    burst.run()
    assert burst.ended_at <= 1.9 + ROUNDING_S
    assert max(burst.waits) <= 2.0


def test_a_burst_after_clients_that_never_return_does_not_wait_for_them():
    burst = server()
    burst.burst(0.0, range(20))  # something is measured
    burst.burst(5.0, range(100, 600), returning=0.0)
    burst.burst(12.0, range(1000, 1100))  # all are served, but the last was told to come at 40 s
    burst.run()
    assert burst.ended_at - 12.0 <= 1.5 * best_s(burst, 100)


def test_a_burst_beside_clients_that_never_return_does_not_wait_for_them():
    burst = server()
    burst.burst(0.0, range(20))
    burst.burst(5.0, range(100, 600), returning=0.0)
    burst.burst(7.0, range(1000, 1100))  # the server is still busy
    burst.run()
    assert burst.ended_at - 7.0 <= 2.0 * best_s(burst, 100)


def test_a_burst_of_which_a_half_returns_takes_no_longer_than_if_all_did():
    burst = server()
    burst.burst(0.0, range(20))
    burst.burst(5.0, range(100, 400), returning=0.5)
    burst.run()
    assert burst.ended_at - 5.0 <= best_s(burst, 300) + ROUNDING_S


def test_most_clients_are_refused_once_at_most():
    burst = server()
    burst.burst(0.0, range(20))
    burst.burst(5.0, range(100, 300))
    burst.run()
    refused = [count for count in burst.times_refused.values() if count]
    assert len(refused) >= 150
    assert max(refused) <= 3
    assert sum(count == 1 for count in refused) > 0.7 * len(refused)


@settings(max_examples=100, deadline=None)
@given(
    rows=st.integers(1, 64),
    service_s=st.floats(0.05, 5.0),
    seconds_queued=st.floats(2.0, 20.0),
    count=st.integers(1, 600),
    is_warm=st.booleans(),
    spread_s=st.sampled_from((0.0, 0.5, 3.0)),
    seed=st.integers(0, 2**16),
)
def test_every_burst_that_returns_is_done_within_one_and_a_half_times_the_best(
    rows, service_s, seconds_queued, count, is_warm, spread_s, seed
):
    """The queue holds two seconds of work at least: clients come at whole seconds."""
    rate = rows / service_s
    burst = server(rows=rows, max_queued=int(seconds_queued * rate) + 1, rate=rate, seed=seed)
    begin = 0.0
    if is_warm:
        burst.burst(0.0, range(10_000, 10_000 + 2 * rows))
        begin = 5.0 * service_s
    burst.burst(begin, range(count), spread_s=spread_s)
    burst.run()
    assert burst.ended_at - begin <= 1.5 * best_s(burst, count) + spread_s + ROUNDING_S
