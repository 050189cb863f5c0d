"""The count that follows the advice, second by second."""

from scripts.cluster_manager.autoscaling import Autoscaler
from scripts.cluster_manager.config import AutoscaleTimes, Bounds


def scaler() -> Autoscaler:
    return Autoscaler(Bounds(1, 8), AutoscaleTimes(up_after_s=10.0, down_after_s=60.0))


def counts(found: Autoscaler, current: int, advice: dict[float, int]) -> dict[float, int]:
    """The count after each piece of advice, which is repeated every second until the next one."""
    seen, instants = {}, list(advice)
    for now, until in zip(instants, [*instants[1:], instants[-1] + 1], strict=True):
        for second in range(int(until - now)):
            current = found.count(current, advice[now], now + second)
            seen.setdefault(now, current)
    return seen


def test_more_are_started_once_they_have_been_advised_long_enough() -> None:
    assert counts(scaler(), 2, {0: 4, 9: 4, 10: 4, 11: 4}) == {0: 2, 9: 2, 10: 4, 11: 4}


def test_only_as_many_start_as_were_advised_all_the_time() -> None:
    assert counts(scaler(), 2, {0: 3, 5: 7, 10: 7}) == {0: 2, 5: 2, 10: 3}


def test_advice_that_comes_and_goes_changes_nothing() -> None:
    assert set(counts(scaler(), 2, {float(now): 2 + now // 5 % 2 for now in range(200)}).values()) == {2}


def test_fewer_remain_only_after_a_longer_time_and_only_as_few_as_were_enough() -> None:
    assert counts(scaler(), 6, {0: 2, 30: 4, 59: 2, 60: 2}) == {0: 6, 30: 6, 59: 6, 60: 4}


def test_a_moment_of_need_begins_the_wait_again() -> None:
    assert counts(scaler(), 6, {0: 2, 59: 6, 60: 2, 119: 2, 120: 2}) == {0: 6, 59: 6, 60: 6, 119: 6, 120: 2}


def test_the_bounds_hold_whatever_is_advised() -> None:
    assert counts(scaler(), 2, {0: 100, 10: 100}) == {0: 2, 10: 8}
    assert counts(scaler(), 2, {0: 0, 60: 0}) == {0: 2, 60: 1}


def test_after_a_change_the_next_one_waits_as_long_again() -> None:
    assert counts(scaler(), 1, {0: 2, 10: 3, 15: 3, 25: 3}) == {0: 1, 10: 2, 15: 2, 25: 3}


def test_a_time_without_advice_begins_the_wait_again() -> None:
    found = scaler()
    assert counts(found, 6, {0: 2, 30: 2}) == {0: 6, 30: 6}
    assert counts(found, 6, {50: 2, 60: 2, 109: 2, 110: 2}) == {50: 6, 60: 6, 109: 6, 110: 2}
