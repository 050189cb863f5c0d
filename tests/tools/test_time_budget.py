"""What a benchmark drops when its time ends."""

from collections.abc import Callable

from scripts.benchmarks.engines.gpu_parts.time_budget import TimeBudget


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def taking(self, seconds: float, problem: str = "") -> Callable[[], str]:
        """Work that takes so long, and cannot be done if there is a problem."""

        def work() -> str:
            self.now += seconds
            return problem

        return work


def make(total_s: float) -> tuple[Clock, TimeBudget, list[str]]:
    clock, lines = Clock(), list[str]()
    return clock, TimeBudget(total_s, clock=lambda: clock.now, say=lines.append), lines


def test_items_run_until_the_next_would_not_end_in_time() -> None:
    clock, budget, lines = make(100.0)
    items = [("a", clock.taking(2)), ("b", clock.taking(3)), ("c", clock.taking(6)), ("d", clock.taking(1))]
    budget.part(items, 11.0, growth=2.0)  # c would take 6 s from 5 s on
    assert budget.dropped == ["c: no time left", "d: no time left"]
    assert (clock.now, lines) == (5.0, ["not measured: c (no time left)", "not measured: d (no time left)"])


def test_what_is_dropped_is_named_with_its_reason() -> None:
    clock, budget, _ = make(100.0)
    items = [("a", clock.taking(4)), ("b", clock.taking(0, "not enough memory")), ("c", clock.taking(4))]
    budget.part([*items, ("d", clock.taking(4))], 9.0)
    assert clock.now == 8.0
    assert budget.dropped == ["b: not enough memory", "d: no time left"]


def test_no_part_outlasts_the_whole_and_what_one_leaves_is_left_for_the_next() -> None:
    clock, budget, _ = make(10.0)
    budget.part([("a", clock.taking(3))], 8.0)
    assert budget.left_s == 7.0
    budget.part([("b", clock.taking(4)), ("c", clock.taking(4))], 50.0)
    assert (clock.now, budget.dropped) == (7.0, ["c: no time left"])
    clock.now = 11.0
    assert budget.left_s == 0.0
    budget.part([("d", clock.taking(1))], 50.0)
    assert budget.dropped == ["c: no time left", "d: no time left"]
