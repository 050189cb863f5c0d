"""What a client says about urgency, turned into one scale: higher is more urgent."""

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


def test_priorities_count_as_they_are_and_those_who_name_none_come_last():
    rules = claims(enable_priority_scheduling=True)
    assert rules.claim("t", 7, None) == RequestPriority("t", 7, "", is_named=True)
    assert rules.claim("", None, None).priority == LOWEST_PRIORITY


def test_low_values_first_turns_them_round_the_default_too():
    rules = claims(enable_priority_scheduling=True, schedule_low_priority_values_first=True, default_priority_value=5)
    values = (1, 2, None, 9)
    assert [rules.claim("", value, None).priority for value in values] == [-1, -2, -5, -9]
    assert rules.change(3, None) == (-3, None)
    lowest = claims(enable_priority_scheduling=True, schedule_low_priority_values_first=True)
    assert lowest.claim("", None, None).priority < lowest.claim("", 2**31 - 1, None).priority


def test_with_priorities_off_they_count_nothing_or_are_refused():
    assert claims().claim("", 7, None).priority == 0
    strict = claims(abort_on_priority_when_disabled=True)
    assert strict.claim("", None, None).priority == 0
    assert refused(strict.claim, "", 0, None) == "priority"
    assert refused(claims().change, 1, None) == "priority"


def test_classes_are_known_by_name_and_the_default_is_the_lightest_or_the_one_named():
    classes = {"priority_classes": ("high:8", "low:1", "mid:3")}
    assert claims(**classes).claim("", None, None).priority_class == "low"
    assert claims(**classes, default_priority_class="mid").claim("", None, None).priority_class == "mid"
    assert claims(**classes).claim("", None, "high").priority_class == "high"
    assert claims(**classes).change(None, "high") == (None, "high")
    assert refused(claims(**classes).claim, "", None, "none") == "priority_class"
    assert refused(claims().claim, "", None, "high") == "priority_class"


def test_a_change_must_change_something():
    assert refused(claims(enable_priority_scheduling=True).change, None, None) == "priority"
