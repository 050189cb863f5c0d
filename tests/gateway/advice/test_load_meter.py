"""What the gateway measures of its clients: arrivals, sizes, objectives."""

import math
from types import SimpleNamespace

import pytest

from common.wire.messages import ClientLoad
from gateway.advice.load_meter import MIN_SIZES, LoadMeter, Objectives

INF = math.inf


def output(at, num_prompt=100, num_output=10, *, cached=0, first_at=1.0, ttft_s=0.0, itl_s=0.0):
    request = SimpleNamespace(prompt=(1,) * num_prompt, slo_ttft_s=ttft_s, slo_itl_s=itl_s)
    return SimpleNamespace(
        request=request, ids=[1] * num_output, cached_tokens=cached, first_at=first_at, ended_at=at
    )  # fmt: skip


@pytest.fixture
def meter():
    return LoadMeter(10.0, Objectives())


def test_nothing_is_asked_for_before_two_samples(meter):
    assert meter.load(0) == ClientLoad()
    meter.sample(5, 100.0)
    assert meter.load(0) == ClientLoad()


def test_arrivals_are_those_that_ended_and_those_that_are_in_flight(meter):
    meter.sample(2, 0.0)
    meter.ended(output(1.0, 100, 10, cached=40))
    meter.ended(output(2.0, 200, 30, cached=0))
    meter.sample(6, 4.0)  # 6 have arrived since: the two that ended were there already
    assert meter.load(0) == ClientLoad(1.5, 1.5 * 130, 1.5 * (60**2 + 200**2) / 2, 1.5 * 20)


def test_a_request_that_ends_without_a_token_has_arrived_and_has_no_size(meter):
    meter.sample(1, 0.0)
    meter.ended(output(1.0, first_at=0.0, num_output=0))
    meter.sample(1, 2.0)
    assert meter.load(0) == ClientLoad(0.5)


def test_requests_that_wait_count_once_more_within_a_window(meter):
    meter.sample(0, 0.0)
    meter.ended(output(1.0, 100, 10))
    meter.sample(19, 5.0)
    assert meter.load(20) == ClientLoad(4.0 + 2.0, 600.0, 60_000.0, 60.0)


def test_arrivals_before_the_window_no_longer_count(meter):
    for second in range(30):
        meter.sample(min(second, 5) * 10, float(second))  # 10 a second, until 50 are there
    assert meter.seconds == 10.0
    assert meter.load(0).requests == 0.0


def test_a_load_that_grows_counts_by_its_last_seconds_less_what_may_be_chance(meter):
    for second in range(9):
        meter.sample(0, float(second))
    meter.sample(50, 9.0)
    meter.sample(100, 10.0)
    assert meter.load(0).requests == pytest.approx((100 - 10) / 2)  # 100 in two seconds, and 10 a second in ten
    for second in range(11, 13):
        meter.sample(100, float(second))
    assert meter.load(0).requests == pytest.approx(10.0)


def test_sizes_are_those_of_the_window_or_of_the_last_requests_if_there_are_few(meter):
    meter.sample(0, 0.0)
    for _ in range(MIN_SIZES):
        meter.ended(output(1.0, 1_000, 1))
    meter.sample(1, 20.0)
    assert meter.load(0).prompt_tokens / meter.load(0).requests == 1_000
    for _ in range(MIN_SIZES):
        meter.ended(output(21.0, 10, 1))
    meter.sample(1, 21.0)
    assert meter.load(0).prompt_tokens / meter.load(0).requests == 10


def test_objectives_are_the_strictest_that_more_than_a_tenth_of_the_requests_have():
    meter = LoadMeter(10.0, Objectives(itl_s=0.2))
    assert meter.objectives() == Objectives(INF, 0.2)
    for number in range(20):
        meter.ended(output(1.0, ttft_s=0.1 if number < 2 else 0.5 if number < 12 else 0.0, itl_s=0.2))
    assert meter.objectives() == Objectives(0.5, 0.2)
    for _ in range(3):
        meter.ended(output(1.0, ttft_s=0.1, itl_s=0.05))
    assert meter.objectives() == Objectives(0.1, 0.05)
