"""The results of ``simulate``, its determinism, and the options that it refuses."""

import contextlib
import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from common.config.cli import parse
from common.errors import ConfigError
from scripts.load_tester.workload.plan import make_plan
from scripts.load_tester.workload.planned_request import PlannedRequest
from scripts.simulator.client import Outcome, PlannedTokens
from scripts.simulator.config import SimulateConfig
from scripts.simulator.main import main, simulate
from scripts.simulator.report import missed_limits, table
from scripts.simulator.simulation import Simulation, rare_collections

ROOT = Path(__file__).resolve().parents[2]


def config(*words: str) -> SimulateConfig:
    return parse(SimulateConfig, words, command="simulate")


def run(*words: str) -> dict[str, Any]:
    found, _ = simulate(config(*words))
    return found


def test_latency_of_a_lone_request_is_the_sum_of_its_parts() -> None:
    found = run(
        *["--num-requests=1", "--input-len=100", "--output-len=11", "--step-cost=10ms", "--prompt-token-cost=1ms"],
        *["--row-cost=2ms", "--context-token-cost=0.1ms", "--message-cost=1ms", "--wire-latency=5ms"],
        *["--wire-bandwidth=1e9", "--kv-bytes-per-token=625152"],
    )
    latency = found["latency_s"]
    # A message, a step of 100 tokens, a message.
    assert latency["ttft"]["max"] == pytest.approx(0.001 + 0.010 + 0.100 + 0.001)
    # Steps of one row with a context of 100, 101, ... 109 tokens; the first also waits for 7 pages of 16 tokens.
    later = [0.010 + 0.002 + 0.0001 * context for context in range(101, 110)]
    wire = 7 * 16 * 625_152 / 1e9 + 0.005
    assert latency["itl"]["min"] == pytest.approx(later[0])
    assert latency["itl"]["max"] == pytest.approx(wire + 0.001 + 0.010 + 0.002 + 0.010)
    assert latency["itl"]["count"] == 10
    assert found["row_steps"] == 10
    assert found["nodes"]["prefill"]["prompt_tokens"] == 100
    assert found["requests"] == {"sent": 1, "measured": 1, "answered": 1, "errors": {}}


def test_idle_nodes_have_no_pages_in_use() -> None:
    for role in ("prefill", "decode"):
        page_s = []
        for rate in ("0.1", "0.01"):
            found = run(
                "--num-requests=3", "--arrival=constant", f"--rate={rate}", "--input-len=9000", "--output-len=4"
            )
            page_s.append(found["nodes"][role]["pages_used"] * found["virtual_s"])
        assert page_s[0] == pytest.approx(page_s[1]) and page_s[0] > 0


def test_a_node_that_starts_during_a_run_is_busy_for_a_share_of_its_own_time() -> None:
    """Prompts of 50 ms come ten times a second; after five of ten seconds another node computes them."""
    settings = config(
        *["--arrival=constant", "--rate=10", "--num-requests=100", "--output-len=2"],
        *["--step-cost=0s", "--prompt-token-cost=0.5ms", "--input-len=100"],
    )
    simulation = Simulation(settings, make_plan(settings))
    cluster = simulation.cluster
    cluster.events.at(5.0, cluster.kill, cluster.of("prefill")[0])
    cluster.events.at(5.0, cluster.start, "prefill")
    assert simulation.run()["nodes"]["prefill"]["busy"]["mean"] == pytest.approx(0.5, abs=0.05)


def test_results_depend_on_options_and_seed_alone() -> None:
    words = ["--rate=20", "--num-requests=60", "--input-len=lognormal:200:1", "--output-len=uniform:2:40", "--decode=2"]
    first, again, other = run(*words), run(*words), run(*words, "--seed=1")
    for found in (first, again, other):
        del found["wall_s"], found["row_steps_per_minute"]
    assert first == again
    assert first["latency_s"] != other["latency_s"]


def test_a_shared_prefix_is_found_in_the_cache() -> None:
    words = ["--rate=5", "--num-requests=40", "--input-len=32", "--output-len=4", "--prefix-len=320"]
    assert run(*words)["cached_share"] == pytest.approx(39 * 320 / (40 * 352), abs=1e-6)
    assert run(*words, "--disable-radix-cache")["cached_share"] == 0.0


def test_a_session_finds_its_own_answers_in_the_cache() -> None:
    found = run("--num-requests=1", "--turns=3", "--input-len=160", "--output-len=33")
    assert found["requests"]["answered"] == 3
    # After the first turn, the decode node has the KV of 160 + 32 tokens, and the prefill node only that of the
    # prompt. The second prompt begins with 193 tokens of the first turn, the third with 193 + 193.
    assert found["nodes"]["decode"]["totals"]["pages_cached"] == 12 + 24


def test_requests_with_a_higher_limit_end_at_the_same_token() -> None:
    exact = run("--num-requests=10", "--rate=5", "--output-len=20")
    loose = run("--num-requests=10", "--rate=5", "--output-len=20", "--max-new-tokens=500")
    assert loose["row_steps"] == exact["row_steps"] + 10  # the end token itself
    assert loose["requests"]["answered"] == 10


def test_a_retracted_request_may_be_computed_again_after_request_0_has_ended() -> None:
    assert list(PlannedTokens(1, 100).answer(0)) == []


def test_a_closed_loop_keeps_its_concurrency() -> None:
    simulation = Simulation(given := config("--concurrency=4", "--num-requests=30"), make_plan(given))
    most = 0

    def look(_: Simulation) -> None:
        nonlocal most
        most = max(most, len(simulation.cluster.gateway.answers))

    simulation.cluster.events.at(0.5, look, simulation)
    found = simulation.run(look)
    assert found["requests"]["answered"] == 30
    assert most <= 4
    assert found["virtual_s"] > 30 / 4 * 31 * 0.005


def test_refused_and_late_requests_are_counted() -> None:
    found = run("--rate=200", "--num-requests=80", "--max-running-requests=2", "--max-queued-requests=4")
    assert set(found["requests"]["errors"]) == {"queue_full"}
    assert found["requests"]["answered"] + found["requests"]["errors"]["queue_full"] == 80
    late = run("--num-requests=4", "--rate=100", "--output-len=400", "--request-timeout=1")
    assert late["requests"]["errors"] == {"deadline_exceeded": 4}


@pytest.mark.parametrize(("num_tokens", "errors"), [(256, {"pool_too_small": 3}), (272, {})])
def test_a_request_that_no_pool_can_hold_is_refused_at_once(num_tokens: int, errors: dict[str, int]) -> None:
    """As by a real gateway. The prompt alone would fit."""
    found = run("--num-requests=3", "--input-len=240", "--output-len=20", f"--max-total-tokens={num_tokens}")
    assert found["requests"]["errors"] == errors


def test_a_session_goes_on_after_a_turn_that_has_failed() -> None:
    """As in the load tester. The second prompt has 100 + 11 + 100 tokens, the third 111 more."""
    words = ["--num-requests=1", "--turns=3", "--input-len=100", "--output-len=11"]
    found = run(*words, "--context-length=200")["requests"]
    assert (found["sent"], found["errors"]) == (3, {"context_length_exceeded": 2})


def test_requests_are_judged_by_their_limits() -> None:
    words = ["--num-requests=20", "--rate=5", "--input-len=100", "--output-len=11", "--starvation-bound=0.001"]
    assert run(*words, "--slo-ttft=1s", "--slo-itl=50ms")["service"] == {
        "good": 20, "share": 1.0, "is_attained": True, "starved": 20,
    }  # fmt: skip
    for flag in ("--slo-ttft=1ms", "--slo-itl=1ms", "--slo-tpot=1ms", "--slo-e2e=20ms"):
        assert run(*words, flag)["service"]["good"] == 0
    # The context holds 100 + 11 tokens and no more.
    assert run(*words, "--context-length=111")["requests"]["answered"] == 20
    assert run(*words, "--context-length=110")["requests"]["errors"] == {"context_length_exceeded": 20}


def test_gaps_are_judged_as_in_the_load_tester() -> None:
    """Of 31 gaps, one takes 60 ms: 30 are less than 99 %."""
    stamps = [*(0.01 * number for number in range(31)), 0.36]
    outcome = Outcome(PlannedRequest(0, 0.0, (), 32), 0.0, stamps, ended_at=0.36)
    assert missed_limits(outcome, {"itl": 0.05}) == ["itl"]
    assert missed_limits(outcome, {"itl": 0.07}) == []


def test_rates_are_those_of_the_measured_part() -> None:
    """Ten requests/s for 20 s, of which the last 10 s are measured; an answer takes less than half a second."""
    found = run("--rate=10", "--arrival=constant", "--duration=20s", "--warmup=10s", "--output-len=11")
    assert found["requests"]["measured"] == 100
    assert found["measured_s"] == pytest.approx(10.0, abs=0.5)
    assert found["throughput"]["requests_per_s"] == pytest.approx(10.0, rel=0.05)
    goodput = next(line for line in table(found) if line.startswith("goodput"))
    assert float(goodput.split()[1]) == pytest.approx(10.0, rel=0.05)


def test_traces_are_read_as_in_the_load_tester(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 500 * i, "input_length": 600, "output_length": 5, "hash_ids": [1, 2 + i % 2]} for i in range(6)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = run(f"--trace={trace}", "--time-scale=2")
    assert found["requests"]["answered"] == 6
    assert found["virtual_s"] == pytest.approx(5.0, abs=0.2)
    # The second prompt finds the first's 512 shared tokens; the others find their whole prompt except the last page.
    assert found["cached_share"] == pytest.approx((512 + 4 * 592) / (6 * 600))


def test_a_mix_names_priority_classes_as_in_the_load_tester() -> None:
    words = ["--rate=200", "--num-requests=60", "--output-len=20", "--max-running-requests=2"]
    words += ["--priority-classes=high:9,low:1", "--mix=chat:class=high;batch:class=low"]
    by_class = run(*words)["classes"]
    assert by_class["chat"]["ttft"]["mean"] < 0.7 * by_class["batch"]["ttft"]["mean"]
    assert run("--num-requests=3", "--mix=chat:class=high")["requests"]["errors"] == {"invalid_request": 3}


def test_a_trace_of_texts_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"prompt": [5, 6, 7], "max_tokens": 2}\n{"prompt": "king", "max_tokens": 2}\n')
    assert main([f"--trace={trace}", "--rate=9"]) == 2
    assert "the simulator needs numbers of tokens" in capsys.readouterr().err


def test_the_table_shows_the_figures() -> None:
    found = run("--num-requests=20", "--rate=10", "--mix=chat:priority=1;batch:output=64", "--decode=2")
    lines = "\n".join(table(found))
    for word in ("row-steps", "20 sent, 20 answered", "time to first token", "end to end", "chat", "batch", "prefill"):
        assert word in lines
    assert [line.split(", busy")[0] for line in lines.splitlines() if ", busy" in line] == [
        "prefill     1 node",
        "decode      2 nodes",
    ]
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--prefill=0"], "--prefill 0 leaves no node to compute prompts"),
        (["--kv-bytes-per-token=300"], "--kv-bytes-per-token must be a multiple of 256"),
        (["--step-cost=fast"], "--step-cost must be seconds"),
        (["--schedule-policy=best"], "--schedule-policy best is unknown"),
        (["--trace-window=1:2"], "--trace-window needs --trace"),
        (["--swa-full-tokens-ratio=auto"], "the simulator knows one pool of pages only"),
        (["--replay=x", "--decode=2"], "remove --decode"),
        (["--kill-every=5"], "--kill-every needs --faults: it has no effect otherwise"),
    ],
)
def test_impossible_options_are_refused_by_name(words: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        config(*words)


def test_a_replay_takes_no_other_option_but_for_its_progress(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--replay=/nowhere", "--no-progress"]) == 2
    assert "--replay: cannot read /nowhere" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--replay=/nowhere", "--rate=3"])
    assert "--replay takes everything from the recording: remove --rate" in capsys.readouterr().err


def test_the_command_prints_a_table_and_writes_its_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    assert main(["--num-requests=5", "--rate=50", f"--json={file}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("goodput") and "5 sent, 5 answered" in lines[1]
    assert max(map(len, lines)) <= 80
    assert json.loads(file.read_text())["requests"]["answered"] == 5
    assert main(["--num-requests=5", "--json=/nowhere/report.json"]) == 2
    assert "--json /nowhere/report.json: there is no such folder" in capsys.readouterr().err
    assert main(["--num-requests=5", "--json=-"]) == 2
    assert "--json - does not write to standard output: name a file, or ./-" in capsys.readouterr().err


def test_a_plan_whose_page_cannot_be_written_is_refused_before_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("scripts.simulator.planning.command.plan_command", lambda config: pytest.fail("it searches"))
    assert main(["--plan", "--slo-ttft=1s", f"--html={tmp_path}"]) == 2
    assert f"--html {tmp_path} is a folder: name a file in it" in capsys.readouterr().err


def test_a_report_does_not_overwrite_its_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"input_length": 9, "output_length": 2}\n')
    assert main([f"--trace={trace}", f"--json={trace}"]) == 2
    assert "--trace and --json name the same file" in capsys.readouterr().err


def test_the_table_is_shown_even_if_the_file_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--num-requests=5", "--rate=50", "--json=/dev/full"]) == 1
    said = capsys.readouterr()
    assert "5 sent, 5 answered" in said.out
    assert said.err == "simulate: cannot write --json /dev/full: No space left on device\n"


SEARCH = [
    "--plan", "--slo-ttft=10s", "--rate=1", "--plan-requests=9", "--plan-windows=3", "--plan-processes=1",
    "--chunked-prefill-size=2048", "--max-running-requests=64", "--local-prefill=auto",
]  # fmt: skip


def test_files_are_written_though_nothing_reads_the_table(tmp_path: Path) -> None:
    plan, single = tmp_path / "plan.json", tmp_path / "single.json"
    for file, words in ((plan, SEARCH), (single, ["--num-requests=2"])):
        reading, writing = os.pipe()
        os.close(reading)
        command = [sys.executable, "-m", "scripts.cli", "simulate", *words, f"--json={file}"]
        done = subprocess.run(command, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True)
        os.close(writing)
        assert (done.returncode, done.stderr) == (0, "")
        assert json.loads(file.read_text())


def test_the_report_is_written_though_the_disk_has_no_room_for_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "single.json"
    with contextlib.suppress(OSError), open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(OSError, match="No space left"):
            main(["--num-requests=2", f"--json={file}"])
    assert json.loads(file.read_text())


def test_a_plan_that_cannot_be_written_is_no_wrong_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    assert main([*SEARCH, "--json=/dev/full", f"--html={page}"]) == 1
    assert capsys.readouterr().err == "simulate: cannot write --json /dev/full: No space left on device\n"
    assert "<html" in page.read_text()


def test_names_in_a_table_have_no_control_characters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    row = {"input_length": 9, "output_length": 2}
    trace.write_text("\n".join(json.dumps({**row, "class": name}) for name in ("a\x1b[2J", "b\nc")))
    assert main([f"--trace={trace}", "--rate=9"]) == 0
    assert "\x1b" not in (out := capsys.readouterr().out) and "b\ufffdc" in out


def test_objects_that_a_process_has_frozen_stay_frozen_after_a_run() -> None:
    gc.freeze()
    with rare_collections():
        pass
    assert gc.get_freeze_count() > 0


def test_ctrl_c_ends_a_run_with_partial_results() -> None:
    words = [sys.executable, "-m", "scripts.cli", "simulate", "--num-requests=100000", "--rate=10"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(words, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not is_caught(signal.SIGTERM, process.pid):  # the handler is installed when the run begins
        time.sleep(0.02)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert out.startswith("stopped before the end")


def is_caught(number: signal.Signals, pid: int) -> bool:
    """Whether the process has its own handler for this signal."""
    (mask,) = re.findall(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(mask, 16) >> number - 1 & 1)


OWN_FUNCTION = """
def short_ones_first(facts):
    return -facts.num_prompt_tokens if facts.priority is None else facts.priority
"""


def test_a_custom_function_sets_priorities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_simulated.py").write_text(OWN_FUNCTION)
    monkeypatch.syspath_prepend(tmp_path)
    words = [
        "--num-requests=40",
        "--rate=1000",
        "--input-len=uniform:10:2000",
        "--output-len=2",
        "--schedule-policy=lof",
    ]
    words += ["--enable-priority-scheduling", "--default-priority-value=0"]
    plain, judged = run(*words), run(*words, "--priority-function=own_simulated:short_ones_first")
    assert judged["latency_s"]["ttft"]["mean"] < 0.8 * plain["latency_s"]["ttft"]["mean"]
