"""``simulate --plan``: windows of a load, the plan of a small trace, its reports, and refused options."""

import json
import math
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from common.config.cli import parse
from common.errors import ConfigError
from scripts.load_tester.workload.plan import make_plan
from scripts.simulator.config import SimulateConfig
from scripts.simulator.costs import Costs
from scripts.simulator.hardware.node_model import NodeModel
from scripts.simulator.main import main
from scripts.simulator.planning import command, estimate
from scripts.simulator.planning.command import choices_of, make_service_plan
from scripts.simulator.planning.deployment import Deployment, Settings
from scripts.simulator.planning.estimate import LoadSize, Objective, RequestSize
from scripts.simulator.planning.evaluation import Evaluator, deployed, run_window
from scripts.simulator.planning.planner import PlanResult
from scripts.simulator.planning.report import deployment_words
from scripts.simulator.planning.search import Goal
from scripts.simulator.planning.verdict import WindowResult
from scripts.simulator.planning.windows import scaled, seconds_of, trace_of, windows_of

ROOT = Path(__file__).resolve().parents[3]


def config(*words: str) -> SimulateConfig:
    return parse(SimulateConfig, words, command="simulate")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """120 requests in a minute: 500 to 900 tokens in, 5 out."""
    file = tmp_path / "trace.jsonl"
    rows = [{"at": number * 0.5, "input_length": 500 + 100 * (number % 5), "output_length": 5} for number in range(120)]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def test_windows_of_a_trace_are_spread_over_it(trace: Path) -> None:
    windows = windows_of(config("--plan", f"--trace={trace}", "--slo-ttft=1"), num_windows=4, num_requests=80)
    plans = [make_plan(window) for window in windows]
    assert [plan.num_requests for plan in plans] == [20] * 4
    assert [window.window[0] for window in windows] == pytest.approx([0.0, 16.5, 33.0, 50.0])
    assert windows[0].warmup_s == pytest.approx(0.5 * 3.5)
    assert not windows[0].plan
    faster = make_plan(scaled(windows[1], 4.0))
    assert faster.num_requests == 20
    assert faster.seconds == pytest.approx((plans[1].seconds or 0.0) / 4)


def test_a_short_trace_is_divided_into_windows(trace: Path) -> None:
    windows = windows_of(config("--plan", f"--trace={trace}", "--slo-ttft=1"), num_windows=3, num_requests=9_000)
    assert [make_plan(window).num_requests for window in windows] == [40, 40, 40]


def test_every_window_of_a_trace_with_gaps_counts_requests(tmp_path: Path) -> None:
    """Bursts of 20 requests within a second, 100 s apart: the gap belongs to a window, but is no warm-up."""
    file = tmp_path / "trace.jsonl"
    rows = [{"at": 100.0 * (n // 20) + n % 20 / 20, "input_length": 500, "output_length": 5} for n in range(60)]
    file.write_text("\n".join(map(json.dumps, rows)))
    windows = windows_of(config("--plan", f"--trace={file}", "--slo-ttft=1"), num_windows=3, num_requests=60)
    assert [window.warmup_s for window in windows] == pytest.approx([0.05 * 3.5] * 3)
    assert [seconds_of(window, 20) for window in windows[:2]] == pytest.approx([100.0] * 2)
    assert all(run_window(deployed(window, Deployment(1, 1)), 0.9).num_expected == 16 for window in windows)


def test_a_gap_within_a_window_is_no_warmup(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    instants = [number * 0.1 for number in range(19)] + [1_000.0]
    file.write_text("\n".join(json.dumps({"at": at, "input_length": 500, "output_length": 5}) for at in instants))
    (window,) = windows_of(config("--plan", f"--trace={file}", "--slo-ttft=1"), num_windows=1, num_requests=20)
    assert run_window(deployed(window, Deployment(1, 1)), 0.9).num_expected == 16


def test_no_window_exceeds_the_part_of_the_trace_that_is_asked_for(tmp_path: Path) -> None:
    """100 requests a second; one second more would be as many requests as two windows have."""
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(json.dumps({"at": n / 100, "input_length": 9, "output_length": 2}) for n in range(999)))
    asked = ["--plan", f"--trace={file}", "--slo-ttft=1", "--trace-window=0:3"]
    windows = windows_of(config(*asked), num_windows=3, num_requests=150)
    assert [make_plan(window).num_requests for window in windows] == [50] * 3
    assert windows[-1].window[1] == pytest.approx(3.0)
    assert [seconds_of(window, 50) for window in windows] == pytest.approx([0.5] * 3)


def test_a_load_is_as_fast_as_its_requests_arrive(trace: Path) -> None:
    """Small windows have one more gap than lies between their requests."""
    for words in ([f"--trace={trace}"], [f"--trace={trace}", "--rate=2"], ["--rate=2"]):
        windows = windows_of(config("--plan", *words, "--slo-ttft=1"), num_windows=6, num_requests=12)
        plans = [make_plan(window) for window in windows]
        assert LoadSize.of(plans, sum(seconds_of(window, 2) for window in windows), {}).requests_per_s == pytest.approx(
            2
        )


def test_each_turn_of_a_session_is_a_request_of_the_load() -> None:
    """Sessions come at 2/s, each with 4 requests: 50 new prompt tokens after the turns before, and 2 output tokens."""
    words = "--plan --rate=2 --turns=4 --input-len=50 --output-len=2 --slo-ttft=1 --plan-windows=3 --plan-requests=9"
    result, _ = make_service_plan(config(*words.split(), "--plan-processes=1"))
    assert result.load.requests_per_s == pytest.approx(8.0)
    assert result.load.output_tokens_per_s == pytest.approx(16.0)
    assert result.load.input_tokens_per_s == pytest.approx(2 * (50 + 102 + 154 + 206))


MIX = "chat:share=1,input=200,output=20; batch:share=9,input=30000,output=20,slo-ttft=30s,slo-itl=2s"


def test_each_class_of_requests_is_held_to_its_own_objectives() -> None:
    """Prompts of 30,000 tokens take 1.5 s, which only the other class may not."""
    given = config("--plan", f"--mix={MIX}", "--slo-ttft=500ms", "--slo-itl=60ms", "--rate=2")
    plans = [make_plan(window) for window in windows_of(given, num_windows=3, num_requests=300)]
    load = LoadSize.of(plans, 150.0, given.slos)
    assert {(one.num_input, one.ttft_s, one.itl_s) for one in load.requests} == {(200, 0.5, 0.06), (30_000, 30.0, 2.0)}
    assert estimate.share_within_ttft(load, Costs(0.005, 50e-6, 20e-6, 0.0), 8_192) == 1.0
    assert load.objective(0.99) == Objective(0.5, 0.06)
    assert load.objective(0.5) == Objective(30.0, 2.0)


def test_a_limit_for_the_whole_answer_asks_for_the_nodes_that_take_most_of_it() -> None:
    """Prompts of 4,000 tokens queue at one node; outputs of 10 tokens are soon decoded."""
    load = ["--rate=10", "--mix=all:share=1,input=4000,output=10", "--num-requests=60", "--slo-e2e=600ms"]
    window = config(*load).without_plan()
    found = run_window(deployed(window, Deployment(1, 1)), 0.9)
    assert found.num_late > 0
    assert found.num_slow == 0


def test_a_rate_sets_the_pace_of_the_whole_trace(trace: Path) -> None:
    windows = windows_of(
        config("--plan", f"--trace={trace}", "--rate=20", "--slo-ttft=1"), num_windows=3, num_requests=60
    )
    assert [make_plan(window).seconds for window in windows] == pytest.approx([0.95] * 3)


def test_a_drawn_load_has_a_window_for_each_seed() -> None:
    windows = windows_of(config("--plan", "--rate=10", "--slo-ttft=1"), num_windows=3, num_requests=60)
    assert [window.seed for window in windows] == [0, 1, 2]
    plans = [make_plan(window) for window in windows]
    assert [plan.num_requests for plan in plans] == [20] * 3
    assert scaled(windows[0], 2.0).rate == "20.0"


def test_a_trace_without_timestamps_comes_at_a_drawn_pace(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"input_length": 9, "output_length": 2}\n' * 90)
    windows = windows_of(config("--plan", f"--trace={file}", "--slo-ttft=1"), num_windows=3, num_requests=90)
    slow, fast = (make_plan(scaled(windows[0], factor)) for factor in (1.0, 2.0))
    assert fast.seconds == pytest.approx((slow.seconds or 0.0) / 2)


def test_windows_of_a_trace_without_timestamps_are_spread_over_it_too(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(json.dumps({"input_length": 1 + number, "output_length": 2}) for number in range(90)))
    options = config("--plan", f"--trace={file}", "--slo-ttft=1")
    for part, firsts in (None, [0, 35, 70]), ("10:", [10, 40, 70]):
        windows = windows_of(replace(options, trace_window=part), num_windows=3, num_requests=60)
        lengths = [[one.num_input - 1 for (one,) in make_plan(window).sessions] for window in windows]
        assert lengths == [list(range(first, first + 20)) for first in firsts]


def test_estimates_follow_from_tokens_and_costs() -> None:
    load = LoadSize((RequestSize(1_000, 500, 10, ttft_s=0.53),) * 19 + (RequestSize(1_000, 500, 10, 0.52),), 10.0)
    node = NodeModel(Costs(0.01, 0.001, 0.001, 0.0), 256, 20_000, 1, 1.0)
    assert estimate.prefill_s(load.requests[0], node.costs, 300) == pytest.approx(2 * 0.01 + 0.5)
    assert estimate.prefill_s(load.requests[0], node.costs, -1) == pytest.approx(0.01 + 0.5)  # the whole prompt at once
    assert estimate.share_within_ttft(load, node.costs, 300) == 0.95
    assert load.objective(0.95) == Objective(0.53, math.inf)
    assert load.objective(0.96) == Objective(0.52, math.inf)
    assert estimate.prefill_nodes(load, node, 300) == 2  # 10.4 s of work in 10 s, busy for 70 %
    assert estimate.largest_batch(load, node, 0.03, 256) == 14  # 10 ms + 14 ms are 80 % of the objective
    assert estimate.largest_batch(load, node, 0.03, 8) == 8
    assert estimate.largest_batch(load, node, 1.0, 256) == 19  # as many contexts of 1,005 tokens as the pool holds
    assert estimate.largest_batch(load, node, 0.013, 256) == 0


def test_no_chunk_is_smaller_than_a_page() -> None:
    load = LoadSize((RequestSize(1_000, 0, 10),) * 20, 10.0)
    node = NodeModel(Costs(0.01, 0.001, 0.001, 0.0), 256, 20_000, 1, 1.0)
    assert estimate.colocated_chunk(load, node, 0.02) == 128  # too slow, as all are
    assert estimate.colocated_chunk(load, node, 0.02, 256) == 256
    assert estimate.colocated_chunk(load, node, 0.02, 16_384) == 16_384
    for page_size, chunks in ((16, (8_192, 2_048)), (4_096, (8_192,)), (16_384, (16_384,))):
        assert choices_of(config("--plan", "--slo-ttft=1", f"--page-size={page_size}")).chunks == chunks


COSTS = ["--step-cost=5ms", "--prompt-token-cost=0.2ms", "--row-cost=1ms", "--context-token-cost=0"]
GOALS = ["--slo-ttft=400ms", "--slo-itl=60ms", "--plan-processes=1", "--plan-windows=3", "--plan-requests=60"]


def test_a_hopeless_window_ends_early(trace: Path) -> None:
    window = windows_of(config("--plan", f"--trace={trace}", *COSTS, *GOALS), num_windows=3, num_requests=120)[0]
    fine = run_window(deployed(window, Deployment(1, 1)), 0.9)
    assert (fine.num_expected, fine.num_judged, fine.num_good, fine.is_whole) == (32, 32, 32, True)
    assert 0.1 < fine.ttft_p99_s < 0.4
    flooded = run_window(deployed(scaled(window, 50.0), Deployment(1, 1)), 0.9)
    assert flooded.num_good < flooded.num_judged
    assert flooded.num_late > 0


def test_all_turns_of_the_sessions_that_begin_after_the_warm_up_count() -> None:
    """Ten requests/s, 20 sessions, warm-up of 0.4 s: four sessions begin at 0, 0.1, 0.2 and 0.3 s."""
    load = ["--rate=10", "--arrival=constant", "--turns=3", "--input-len=100", "--output-len=2"]
    window = windows_of(config("--plan", *load, *COSTS, *GOALS), num_windows=3, num_requests=60)[0]
    fine = run_window(deployed(window, Deployment(1, 1)), 0.9)
    assert (fine.num_expected, fine.num_judged, fine.num_good, fine.is_whole) == (48, 48, 48, True)


def test_a_deployment_is_simulated_once(trace: Path) -> None:
    windows = windows_of(config("--plan", f"--trace={trace}", *COSTS, *GOALS), num_windows=3, num_requests=30)
    seen: list[float] = []
    with Evaluator(windows, Goal(), on_result=lambda deployment, factor, verdict: seen.append(factor)) as evaluate:
        first = evaluate(Deployment(1, 1), 1.0)
        assert evaluate(Deployment(1, 1), 1.0) is first
        evaluate(Deployment(1, 1), 2.0)
    assert seen == [1.0, 2.0]


@pytest.mark.parametrize("num_processes", [1, 4])
def test_a_verdict_ends_with_the_window_that_makes_it_hopeless(
    num_processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = windows_of(config("--plan", "--rate=10", *GOALS), num_windows=6, num_requests=60)
    num_good = [70, 60, 100, 100, 100, 100]
    evaluate = Evaluator(windows, Goal(), num_processes=num_processes)
    monkeypatch.setattr(evaluate, "_run", lambda found: [WindowResult(100, 100, num_good[one.seed]) for one in found])
    verdict = evaluate(Deployment(1, 1), 1.0)
    assert (verdict.num_windows, verdict.share) == (2, 0.65)  # 70 of 600 miss, and 60 may


@pytest.mark.slow
def test_processes_find_what_one_process_finds(trace: Path) -> None:
    windows = windows_of(config("--plan", f"--trace={trace}", *COSTS, *GOALS), num_windows=3, num_requests=30)
    with Evaluator(windows, Goal()) as alone, Evaluator(windows, Goal(), num_processes=2) as together:
        assert alone(Deployment(1, 1), 3.0) == together(Deployment(1, 1), 3.0)


def test_ctrl_c_in_a_terminal_does_not_reach_the_processes_of_a_plan_even_while_they_import() -> None:
    windows = windows_of(config("--plan", "--rate=10", *GOALS), num_windows=3, num_requests=30)
    with Evaluator(windows, Goal(), num_processes=2) as evaluate:
        evaluate(Deployment(1, 1), 1.0)
        children = [one for one in psutil.Process().children() if "spawn_main" in " ".join(one.cmdline())]
        found = [Path(f"/proc/{child.pid}/status").read_text() for child in children]
    masks = [int(mask, 16) for text in found for mask in re.findall(r"SigBlk:\s*(\w+)", text)]
    assert len(masks) == 2 and all(mask >> signal.SIGINT - 1 & 1 for mask in masks)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_plan_that_is_stopped_ends_its_processes_in_the_middle_of_a_window(number: int, status: int) -> None:
    words = ["--plan", "--slo-ttft=1", "--rate=10", "--plan-requests=300000", "--plan-windows=3", "--plan-processes=2"]
    with subprocess.Popen([sys.executable, "-m", "scripts.cli", "simulate", *words], cwd=ROOT) as process:
        while len(found := simulating(process.pid)) < 2:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(60) == status
    _, alive = psutil.wait_procs(found, 60)
    assert not alive


def simulating(pid: int) -> list[psutil.Process]:
    """The processes of a plan that have computed for a while, and so are in a window."""
    children = psutil.Process(pid).children()
    return [child for child in children if child.cpu_times().user > 3.0]


@pytest.mark.slow
def test_the_command_prints_a_plan_and_writes_it(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written, page = tmp_path / "plan.json", tmp_path / "plan.html"
    fixed = ["--chunked-prefill-size=2048", "--max-running-requests=64", "--local-prefill=auto", "--price-per-hour=2"]
    words = ["--plan", f"--trace={trace}", "--rate=12", *COSTS, *GOALS, "--plan-requests=24", *fixed]
    assert main([*words, f"--json={written}", f"--html={page}"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    for name in (
        "objective",
        "load",
        "plan",
        "holds",
        "cost",
        "instead",
        "colocated",
        "reserve",
        "next node",
        "run it",
    ):
        assert re.search(rf"^{name} ", shown, re.M), name
    found = json.loads(written.read_text())
    plan = found["plan"]
    # 12 requests/s x 700 tokens x 0.2 ms are 1.7 nodes' work of prompts alone.
    assert found["separate"]["prefill"] >= 2
    assert found["colocated"]["decode"] >= 2
    assert plan["devices"] == min(found["separate"]["devices"], found["colocated"]["devices"])
    assert plan["verdict"]["share"] >= 0.9 and plan["verdict"]["confidence"] >= 0.8
    assert plan["price_per_hour"] == 2.0 * plan["devices"]
    tokens_per_hour = (found["load"]["input_tokens_per_s"] + found["load"]["output_tokens_per_s"]) * 3600
    assert plan["price_per_million_tokens"] == pytest.approx(plan["price_per_hour"] / tokens_per_hour * 1e6)
    assert {0.25, 0.5, 1.0, 2.0} <= {row["factor"] for row in found["loads"]}
    assert found["capacities"][0]["factor"] >= 1.0
    text = page.read_text()
    assert "Devices by load" in text and "Good requests by load" in text and "<script" not in text


def test_nothing_holds_an_impossible_objective(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"--trace={trace}", *COSTS, "--plan-windows=3", "--plan-processes=1"]
    assert main(["--plan", *words, "--slo-ttft=10ms"]) == 1
    assert "prompts take longer than --slo-ttft or --slo-e2e even alone" in capsys.readouterr().out.replace(
        "\n            ", " "
    )
    for flag in ("--slo-itl", "--slo-tpot"):
        assert main(["--plan", *words, f"{flag}=5ms"]) == 1
        reason = "a decode step takes longer than --slo-itl or --slo-tpot even with one request"
        assert reason in capsys.readouterr().out.replace("\n            ", " ")


def test_windows_of_a_single_burst_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--plan", "--arrival=burst", "--burst-size=99", *GOALS]) == 2
    assert "--plan needs requests at different instants of a window" in capsys.readouterr().err


class SearchBegins(Exception):
    pass


def test_requests_that_no_context_or_pool_holds_are_refused_before_the_search(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fifth of the requests has 900 tokens and an output of 5."""
    monkeypatch.setattr(command, "Planner", Mock(side_effect=SearchBegins))
    words = ["--plan", f"--trace={trace}", *GOALS]
    assert main([*words, "--context-length=904"]) == 2
    assert "12 of 60 requests are longer than the context of 904 tokens" in capsys.readouterr().err
    assert main([*words, "--max-total-tokens=904"]) == 2
    assert "12 of 60 requests are longer than a pool of 904 tokens" in capsys.readouterr().err
    with pytest.raises(SearchBegins):
        main([*words, "--context-length=905"])


def test_requests_of_a_class_that_does_not_exist_are_refused_before_the_search(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--plan", "--rate=2", "--mix=a:class=gold;b:share=1", "--plan-processes=1", *GOALS]
    assert main(words) == 2
    found = capsys.readouterr().err
    assert re.search(r"--plan: \d+ of \d+ requests are refused: priority_class: 'gold' is not a priority class", found)


def test_a_trace_is_read_once_for_all_windows(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = windows_of(config("--plan", f"--trace={trace}", "--slo-ttft=1"), num_windows=3, num_requests=60)
    monkeypatch.setattr(Path, "open", None)
    plans = [make_plan(window, trace_of(window)) for window in windows]
    assert [len(plan.notes) for plan in plans] == [len(plans[0].notes)] * 3


def test_a_model_that_needs_several_devices_is_planned_with_as_many() -> None:
    given = config("--plan", "--hardware=h200", "--model=llama-3.1-70b", "--slo-ttft=2s", "--rate=2")
    assert choices_of(given).prefill_tps == (2, 4, 8)
    window = windows_of(given, num_windows=3, num_requests=30)[0]
    found = deployed(window, Deployment(1, 2, Settings(4, 8)))
    assert [one.num_devices for one in found.node_models.values()] == [4, 8]
    with pytest.raises(ConfigError, match="fits at no tensor parallelism up to 8; choose hardware with more"):
        config("--plan", "--hardware=cpu", "--model=llama-3.1-70b", "--slo-ttft=2s")


def test_the_devices_of_a_calibrated_node_are_counted_and_paid_for() -> None:
    node = NodeModel(Costs(), 256, 20_000, num_devices=2, price_per_hour=7.0)
    result = PlanResult(LoadSize((RequestSize(1, 0, 1),), 1.0), None, None, nodes={1: node})
    assert deployment_words(result, Deployment(2, 1)) == "2 prefill + 1 decode nodes, 6 devices, 21.00 $/h"


def test_flags_of_a_deployment_give_it() -> None:
    colocated = Deployment(0, 3, Settings(1, 2, 512, 64, "always"))
    base = config("--hardware=h100", "--model=llama-3.1-8b")
    words = [word for flag in colocated.flags() for word in flag.split()]
    assert config("--hardware=h100", "--model=llama-3.1-8b", *words) == deployed(base, colocated)
    separate = Deployment(2, 3, Settings(4, 1, 2_048, 64, "auto"))
    words = [word for flag in separate.flags() for word in flag.split()]
    assert config("--hardware=h100", "--model=llama-3.1-8b", *words) == deployed(base, separate)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--plan"], "--plan needs objectives"),
        (["--plan-windows=5"], "--plan-windows needs --plan"),
        (["--html=x.html"], "--html needs --plan"),
        (["--plan", "--slo-ttft=1", "--prefill=3"], "--prefill has no effect with --plan"),
        (["--plan", "--slo-ttft=1", "--duration=9"], "--duration has no effect with --plan"),
    ],
)
def test_options_without_effect_are_refused(words: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        config(*words)
