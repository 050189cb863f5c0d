"""Client priorities on one scale, on which higher is more urgent."""

import pytest

from common.config.scheduling import SchedulingOptions
from common.errors import RequestError
from common.request import LOWEST_PRIORITY
from common.sampling_params import SamplingParams
from gateway.requests.admission.priority import PriorityResolver
from gateway.requests.input.generate_request import GenerateRequest


def resolver(**options):
    return PriorityResolver(SchedulingOptions(**options))


def assigned(rules, priority, priority_class):
    request = GenerateRequest("r", "r", (1,), SamplingParams(max_new_tokens=4))
    return rules.assign([request], priority, priority_class)[0]


def refused(act, *given):
    with pytest.raises(RequestError) as caught:
        act(*given)
    return caught.value.param


def test_priorities_are_taken_as_given_and_requests_without_one_come_last():
    rules = resolver(enable_priority_scheduling=True)
    assert (assigned(rules, 7, None).priority, assigned(rules, 7, None).priority_class) == (7, "")
    assert assigned(rules, None, None).priority == LOWEST_PRIORITY


def test_low_values_first_negates_priorities_and_the_default():
    rules = resolver(enable_priority_scheduling=True, schedule_low_priority_values_first=True, default_priority_value=5)
    values = (1, 2, None, 9)
    assert [assigned(rules, value, None).priority for value in values] == [-1, -2, -5, -9]
    assert rules.change(3, None) == (-3, None)
    lowest = resolver(enable_priority_scheduling=True, schedule_low_priority_values_first=True)
    assert assigned(lowest, None, None).priority < assigned(lowest, 2**31 - 1, None).priority


def test_without_priority_scheduling_priorities_are_ignored_or_refused():
    assert assigned(resolver(), 7, None).priority == 0
    strict = PriorityResolver(SchedulingOptions(), is_strict=True)
    assert assigned(strict, None, None).priority == 0
    assert refused(assigned, strict, 0, None) == "priority"
    assert refused(resolver().change, 1, None) == "priority"


def test_the_default_class_is_the_lightest_or_the_configured_one():
    classes = {"priority_classes": ("high:8", "low:1", "mid:3")}
    assert assigned(resolver(**classes), None, None).priority_class == "low"
    assert assigned(resolver(**classes, default_priority_class="mid"), None, None).priority_class == "mid"
    assert assigned(resolver(**classes), None, "high").priority_class == "high"
    assert resolver(**classes).change(None, "high") == (None, "high")
    assert refused(assigned, resolver(**classes), None, "none") == "priority_class"
    assert refused(assigned, resolver(), None, "high") == "priority_class"


def test_a_change_must_change_something():
    assert refused(resolver(enable_priority_scheduling=True).change, None, None) == "priority"
