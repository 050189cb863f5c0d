"""Client priorities on one scale, on which higher is more urgent."""

import pytest

from common.config.scheduling import SchedulingOptions
from common.errors import RequestError
from common.request import LOWEST_PRIORITY
from gateway.requests.priority import PriorityResolver, RequestPriority


def claims(**options):
    return PriorityResolver(SchedulingOptions(**options))


def refused(act, *given):
    with pytest.raises(RequestError) as caught:
        act(*given)
    return caught.value.param


def test_priorities_are_taken_as_given_and_requests_without_one_come_last():
    rules = claims(enable_priority_scheduling=True)
    assert rules.resolve(7, None) == RequestPriority(7, "", is_named=True)
    assert rules.resolve(None, None).priority == LOWEST_PRIORITY


def test_low_values_first_negates_priorities_and_the_default():
    rules = claims(enable_priority_scheduling=True, schedule_low_priority_values_first=True, default_priority_value=5)
    values = (1, 2, None, 9)
    assert [rules.resolve(value, None).priority for value in values] == [-1, -2, -5, -9]
    assert rules.change(3, None) == (-3, None)
    lowest = claims(enable_priority_scheduling=True, schedule_low_priority_values_first=True)
    assert lowest.resolve(None, None).priority < lowest.resolve(2**31 - 1, None).priority


def test_without_priority_scheduling_priorities_are_ignored_or_refused():
    assert claims().resolve(7, None).priority == 0
    strict = claims(abort_on_priority_when_disabled=True)
    assert strict.resolve(None, None).priority == 0
    assert refused(strict.resolve, 0, None) == "priority"
    assert refused(claims().change, 1, None) == "priority"


def test_the_default_class_is_the_lightest_or_the_configured_one():
    classes = {"priority_classes": ("high:8", "low:1", "mid:3")}
    assert claims(**classes).resolve(None, None).priority_class == "low"
    assert claims(**classes, default_priority_class="mid").resolve(None, None).priority_class == "mid"
    assert claims(**classes).resolve(None, "high").priority_class == "high"
    assert claims(**classes).change(None, "high") == (None, "high")
    assert refused(claims(**classes).resolve, None, "none") == "priority_class"
    assert refused(claims().resolve, None, "high") == "priority_class"


def test_a_change_must_change_something():
    assert refused(claims(enable_priority_scheduling=True).change, None, None) == "priority"
