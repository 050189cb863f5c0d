"""How many requests are recovered at once, and how long the others wait."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.requests.attempts.retry_budget import MINIMUM, PERIOD_S, RetryBudget


def test_every_request_in_flight_is_recovered_at_once_and_the_next_ones_wait_in_turn():
    budget = RetryBudget()
    size = 8 + MINIMUM
    assert [budget.take(1.0, num_in_flight=8) for _ in range(size)] == [0.0] * size
    waits = [budget.take(1.0, num_in_flight=8) for _ in range(3)]
    assert waits == [i * PERIOD_S / size for i in (1, 2, 3)]


def test_the_budget_is_whole_again_after_a_period():
    budget = RetryBudget()
    size = 10 + MINIMUM
    for start in (0.0, PERIOD_S, 2 * PERIOD_S):
        assert all(budget.take(start, num_in_flight=10) <= 1e-9 for _ in range(size))
    assert budget.take(2 * PERIOD_S, num_in_flight=10) > 0.0


@given(st.lists(st.floats(0.0, 0.5), min_size=1, max_size=300), st.integers(1, 50))
def test_no_period_has_more_than_two_budgets(gaps, num_in_flight):
    budget, now, begun = RetryBudget(), 0.0, []
    for gap in gaps:
        now += gap
        begun.append(now + budget.take(now, num_in_flight=num_in_flight))
    for start in begun:
        in_period = [at for at in begun if start <= at < start + PERIOD_S]
        assert len(in_period) <= 2 * (num_in_flight + MINIMUM) + 1
