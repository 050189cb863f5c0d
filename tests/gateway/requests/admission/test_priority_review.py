"""A priority function is asked again about requests that wait, at a bounded rate."""

from common.config.scheduling import SchedulingOptions
from common.plugins import PriorityFunction
from common.sampling_params import SamplingParams
from gateway.requests.admission.priority import PriorityResolver
from gateway.requests.admission.priority_review import MAX_CALLS, PriorityReview
from gateway.requests.input.generate_request import GenerateRequest
from gateway.requests.output_processor import OutputStream


class Requests:
    """Stands in for the dispatcher: the outputs in flight, and the changes that were asked for."""

    def __init__(self, count):
        self.flights = []
        self.changed = {}
        self.arrive(count, 0.0)

    def arrive(self, count, at):
        for i in range(len(self.flights), len(self.flights) + count):
            request = GenerateRequest(f"r{i}", f"r{i}", (1,), SamplingParams(max_new_tokens=4))
            self.flights.append(OutputStream(request, 0, None, lambda stream: None, at))

    def streams(self):
        return iter(self.flights)

    @property
    def num_in_flight(self):
        return len(self.flights)

    def change_priority(self, rid, priority):
        self.changed[rid] = priority


def review(requests, function):
    options = SchedulingOptions(enable_priority_scheduling=True)
    return PriorityReview(PriorityResolver(options, PriorityFunction(function, "mine:function")), requests)


def test_the_function_sees_how_long_a_request_has_waited_and_the_load():
    seen = []

    def function(facts):
        seen.append(facts)
        return int(facts.waited_s)

    requests = Requests(3)
    requests.flights[2].ids.append(5)  # it has a token
    reviews = review(requests, function)
    reviews.tick(0.5)
    assert not seen
    reviews.tick(2.5)
    assert [(facts.waited_s, facts.num_waiting, facts.num_in_flight) for facts in seen] == [(2.5, 2, 3)] * 2
    assert requests.changed == {"r0": 2, "r1": 2}
    reviews.tick(3.0)
    assert len(seen) == 2  # each once a second


def test_the_questions_are_bounded_and_requests_take_turns():
    asked = []
    requests = Requests(MAX_CALLS + 10)
    reviews = review(requests, lambda facts: asked.append(facts))
    reviews.tick(5.0)
    assert len(asked) == MAX_CALLS
    reviews.tick(5.1)
    assert len(asked) == MAX_CALLS + 10
    assert not requests.changed  # None keeps the priorities


def test_requests_that_arrive_later_do_not_take_the_turns_of_earlier_ones():
    requests = Requests(MAX_CALLS + 44)
    reviews = review(requests, lambda facts: 7)
    reviews.tick(1.5)
    assert len(requests.changed) == MAX_CALLS
    requests.arrive(MAX_CALLS + 44, 1.5)
    reviews.tick(2.5)
    assert requests.changed.keys() >= {f"r{i}" for i in range(MAX_CALLS + 44)}


def test_without_a_function_nothing_is_asked():
    requests = Requests(2)
    PriorityReview(PriorityResolver(SchedulingOptions()), requests).tick(9.0)
    assert not requests.changed
