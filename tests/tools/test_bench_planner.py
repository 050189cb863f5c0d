"""``bench planner``: its figures, its marks, and the load that both sides get."""

import argparse
import hashlib
import json
from pathlib import Path

import msgspec
import pytest

from scripts.benchmarks.virtual_time import planner
from scripts.load_tester.config import LoadtestConfig
from scripts.load_tester.workload.plan import make_plan
from scripts.simulator.config import SimulateConfig
from scripts.simulator.hardware.node_model import Profile


@pytest.mark.parametrize(
    ("name", "live", "simulated", "is_missed"),
    [
        ("ttft_p50", [100.0], 116.0, True),
        ("ttft_p50", [100.0], 86.0, False),
        ("ttft_p50", [50.0, 100.0, 190.0], 116.0, True),  # the range of live runs counts for 99th percentiles alone
        ("goodput", [4.0], 3.3, True),
        ("itl_p99", [100.0], 124.0, False),
        ("itl_p99", [100.0], 74.0, True),
        ("itl_p99", [80.0, 100.0, 140.0], 159.0, False),  # they differ by 60
        ("itl_p99", [80.0, 100.0, 140.0], 161.0, True),
    ],
)
def test_a_figure_misses_the_mark(name: str, live: list[float], simulated: float, is_missed: bool) -> None:
    assert planner.is_missed(name, live, simulated) == is_missed


def test_latencies_count_from_the_due_instant_and_leave_out_failures() -> None:
    run = planner.Run(
        [planner.Served(1.0, [1.5, 1.7, 1.8], {}), planner.Served(2.0, (), {}), planner.Served(3.0, [3.1], {})],
        9.0,
        2.0,
    )
    found = planner.figures_of(run)
    assert found["ttft_p50"] == pytest.approx(300.0)  # between 500 and 100
    assert found["itl_p50"] == pytest.approx(150.0)
    assert found["goodput"] == 2.0


def short_profile(folder: Path) -> Path:
    file = folder / "profile.json"
    file.write_bytes(msgspec.json.encode(Profile("m", {"step_s": 0.007}, 131_072, 16_384)))
    return file


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    planner.add_options(parser)
    return parser.parse_args(words)


def mooncake_trace(file: Path) -> Path:
    """Write four requests, a second apart."""
    rows = [
        {"timestamp": 1_000 * number, "input_length": length, "output_length": 100, "hash_ids": [number]}
        for number, length in enumerate([90_000, 1_000, 3_000, 5_000])
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def test_a_trace_is_scaled_to_the_means_of_the_requests_that_are_replayed(tmp_path: Path) -> None:
    trace = mooncake_trace(tmp_path / "trace.jsonl")
    given = options("--num-requests=2", "--input-mean=100", "--output-mean=10")
    load = {**planner.load_of(f"{trace}@1:", given), "rate": "4", "num_requests": 2}
    live, simulated = make_plan(LoadtestConfig(**load)), make_plan(SimulateConfig(**load))
    requests = [session[0] for session in live.sessions]
    assert [(one.num_input, one.num_output) for one in requests] == [(50, 10), (150, 10)]
    assert requests == [session[0] for session in simulated.sessions]


def test_without_a_trace_both_sides_draw_the_same_requests() -> None:
    load = {**planner.load_of("", options()), "rate": "4", "num_requests": 300}
    live, simulated = make_plan(LoadtestConfig(**load)), make_plan(SimulateConfig(**load))
    requests = [session[0] for session in live.sessions]
    assert requests == [session[0] for session in simulated.sessions]
    assert sum(one.num_input for one in requests) / 300 == pytest.approx(160, rel=0.15)
    assert sum(one.num_output for one in requests) / 300 == pytest.approx(12, rel=0.15)


def test_predictions_for_a_trace_are_of_loads_that_both_sides_accept(tmp_path: Path) -> None:
    trace = mooncake_trace(tmp_path / "trace.jsonl")
    given = options(f"--trace={trace}", "--loads=0.5", "--num-requests=4", "--capacity-requests=4", "--input-mean=20")
    for one in planner.predictions_of(planner.Deployment(1, 1, short_profile(tmp_path)), given):
        assert len(make_plan(LoadtestConfig(**one.load)).sessions) == len(one.simulated.requests) == 4


def test_predictions_are_of_shares_of_the_simulated_capacity_and_have_a_hash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "predictions.jsonl"
    given = options("--loads=0.5", "--num-requests=20", "--capacity-requests=20")
    capacity, half = planner.predictions_of(planner.Deployment(1, 2, short_profile(tmp_path)), given)
    assert (capacity.name, half.name) == ("1+2 drawn capacity", "1+2 drawn 50%")
    assert float(half.load["rate"]) == pytest.approx(capacity.simulated.requests_per_s / 2, rel=1e-4)
    planner.write_down([capacity, half], file)
    assert [json.loads(line)["name"] for line in file.read_text().splitlines()] == [capacity.name, half.name]
    assert hashlib.sha256(file.read_bytes()).hexdigest() in capsys.readouterr().out
