"""Every event of a request is counted once, with the right number of seconds or tokens."""

from hypothesis import given
from hypothesis import strategies as st

from common.metrics.distribution import Distribution
from common.node.monitoring.request_stats import RequestStats, StepStats
from common.request import Request
from common.sampling_params import SamplingParams


def request(rid: str = "r", *, arrived_at: float = 1.0, admitted_at: float = 3.0, max_new: int = 8) -> Request:
    sampling = SamplingParams(max_new_tokens=max_new)
    return Request(rid, 0, (1, 2, 3), sampling, arrived_at=arrived_at, admitted_at=admitted_at)


def observed(values: Distribution) -> tuple[int, float]:
    """The number of values and their sum."""
    return sum(values.counts), values.sum


def test_the_stages_of_a_request_whose_prompt_was_computed_here_add_up():
    stats, one = RequestStats(), request()
    for at in (7.0, 7.5, 8.5):  # three tokens
        one.output.append(5)
        stats.sampled([one], at)
    stats.finished(one, "length", 8.5)
    assert observed(stats.queue) == (1, 2.0)
    assert observed(stats.prefill) == (1, 4.0)
    assert observed(stats.time_to_first_token) == (1, 6.0)
    assert observed(stats.inter_token) == (2, 1.5)
    assert observed(stats.decode) == (1, 1.5)
    assert observed(stats.end_to_end) == (1, 7.5)
    assert stats.queue.sum + stats.prefill.sum + stats.decode.sum == stats.end_to_end.sum
    assert [observed(each) for each in (stats.prompt_tokens, stats.output_tokens, stats.max_tokens)] == [
        (1, 3.0),
        (1, 3.0),
        (1, 8.0),
    ]
    assert stats.ends == {"stop": 0, "length": 1, "abort": 0, "error": 0}


def test_a_prompt_from_a_prefill_node_counts_no_first_token_and_its_first_gap_begins_at_the_handoff():
    stats, one = RequestStats(), request()
    stats.handed_off(one, 6.0)
    stats.sampled([one], 6.25)
    stats.finished(one, "stop", 6.25)
    assert observed(stats.time_to_first_token) == observed(stats.queue) == observed(stats.prefill) == (0, 0.0)
    assert observed(stats.inter_token) == (1, 0.25)
    assert observed(stats.decode) == (1, 0.25)


def test_pages_that_are_received_again_do_not_move_the_first_token():
    stats, one = RequestStats(), request()
    stats.handed_off(one, 6.0)
    stats.sampled([one], 7.0)
    stats.handed_off(one, 9.0)  # it was retracted in between
    stats.sampled([one], 10.0)
    stats.finished(one, "stop", 10.0)
    assert observed(stats.inter_token) == (2, 4.0)
    assert observed(stats.decode) == (1, 4.0)


def test_a_request_that_was_left_out_of_a_step_has_a_longer_gap():
    stats, always, paused = RequestStats(), request("a"), request("b")
    for one in (always, paused):
        stats.handed_off(one, 5.0)
    stats.sampled([always, paused], 6.0)
    stats.sampled([always], 7.0)
    stats.sampled([always, paused], 9.0)
    assert observed(stats.inter_token) == (5, 1.0 + 1.0 + 1.0 + 2.0 + 3.0)


@given(
    st.lists(
        st.tuples(st.integers(1, 4).map(lambda sixteenths: sixteenths / 16), st.sets(st.integers(0, 4), min_size=1)),
        max_size=20,
    )
)
def test_gaps_are_those_between_the_tokens_of_each_request_for_any_batches(steps):
    stats, now = RequestStats(), 100.0
    requests = [request(str(number)) for number in range(5)]
    last, gaps = {}, []
    for seconds, batch in steps:
        now += seconds
        gaps += [now - last[number] for number in batch if number in last]
        last.update(dict.fromkeys(batch, now))
        stats.sampled([requests[number] for number in sorted(batch)], now)
    expected = Distribution(stats.inter_token.bounds)
    for gap in gaps:
        expected.add(gap)
    assert stats.inter_token.counts == expected.counts
    assert stats.inter_token.sum == expected.sum
    assert sum(stats.time_to_first_token.counts) == len(last)


def test_aborts_and_errors_are_counted_without_latencies():
    stats = RequestStats()
    stats.ended("abort")
    stats.ended("error")
    assert stats.ends == {"stop": 0, "length": 0, "abort": 1, "error": 1}
    assert observed(stats.end_to_end) == (0, 0.0)


def test_a_step_counts_its_seconds_rows_and_tokens():
    steps = StepStats()
    steps.add(0.003, 5, 260, num_prompt_tokens=256)
    steps.add(0.3, 1, 1, num_prompt_tokens=0)
    assert observed(steps.seconds) == (2, 0.303)
    assert observed(steps.rows) == (2, 6.0)
    assert observed(steps.tokens) == (2, 261.0)
    assert steps.tokens.counts[0] == 1  # up to 1
    assert steps.tokens.counts[steps.tokens.bounds.index(512.0)] == 1
