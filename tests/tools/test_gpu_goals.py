"""Which goals of the CUDA path a run of ``bench gpu`` has reached."""

import pytest

from scripts.benchmarks.engines.gpu_parts.goals import goals


def test_a_goal_has_the_worst_ratio_of_what_was_measured() -> None:
    figures = {
        "limits, memory GB/s": 3000.0,
        "8b, decode batch 1 of 1024, ms": 5.0,
        "8b, decode batch 1 of 1024, of limit": 0.9,
        "8b, decode batch 64 of 8192, of limit": 0.82,
        "8b, decode batch 256 of 1024, of limit": 0.1,  # beyond the goal's batch sizes
        "8b, decode batch 1 of 8192, ms": 6.0,
        "8b, prefill 8192, of limit": 0.6,
        "8b, prefill 512, of limit": 0.2,
        "8b, without graphs, batch 1, us with overlap": 9000.0,
        "8b, with graphs, batch 1, us with overlap": 5100.0,
        "8b, attention, decode batch 1 of 1024, auto, ms": 1.0,
        "8b, attention, decode batch 1 of 1024, sdpa, ms": 0.9,
        "8b, attention, decode batch 1 of 1024, flash-attn, ms": 0.8,
        "8b, attention, prompt of 512, auto, ms": 4.0,
        "8b, attention, prompt of 512, sdpa, ms": 3.0,
        "8b, attention, prompt of 2048, auto, ms": 4.0,  # with nothing to compare it with
    }
    found = [(goal.worst, goal.least, goal.where) for goal in goals(figures)]
    assert found == [
        (0.82, 0.80, "8b, decode batch 64 of 8192"),
        (0.6, 0.65, "8b, prefill 8192"),
        (pytest.approx(5000 / 5100), 0.97, "8b, batch 1"),
        (0.9, 0.85, "8b, attention, decode batch 1 of 1024"),
        (0.75, 0.65, "8b, attention, prompt of 512"),
    ]
    lines = [goal.line for goal in goals(figures)]
    assert lines[0].startswith("goal reached: decode steps, of what memory allows: 82.0% of at least 80% (8b, ")
    assert lines[1].startswith("goal missed: ")


def test_a_goal_of_which_nothing_was_measured_is_left_out() -> None:
    assert list(goals({"limits, memory GB/s": 3000.0})) == []
